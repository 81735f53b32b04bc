"""Gemma 4: the numbers and tokens of transformers, the same text however it is computed, and files that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lossless import make_items
from specserve.attention import ATTENTION
from specserve.kv.spec import HeadKV
from specserve.models.read_config import load_model_config
from specserve.tools.train.attend import check_layers
from tests.matrix import check_drafted, check_texts_of, prompts
from tests.reference.doubles import float32_means_float64
from tests.reference.gemma4 import LARGE, SMALL, make_gemma4
from tests.reference.models import change_config
from tests.test_targets import TOKENS, assert_makes_no_tensor, our_logits, their_model

WINDOW = 8
KINDS = {"small": SMALL, "large": LARGE}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def test_the_text_of_transformers_over_eight_windows(kind: dict[str, Any], tmp_path: Path) -> None:
    """In chunks shorter and longer than a window, and in one."""
    path, (prompt,) = make_gemma4(tmp_path, sliding_window=WINDOW, **kind), prompts([8 * WINDOW])
    check_texts_of(their_model(path, torch.float32), path, prompt, 32, (5, 20, 512))


def test_the_logits_of_transformers_in_float64(kind: dict[str, Any], tmp_path: Path) -> None:
    path = make_gemma4(tmp_path, **kind)
    theirs = their_model(path, torch.float64)
    with torch.no_grad(), float32_means_float64():
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
        for each in theirs.modules():
            if hasattr(each, "embed_scale"):
                each.embed_scale = torch.tensor(each.scalar_embed_scale, dtype=torch.float64)
        expected = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(our_logits(path, torch.float64), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "part"), [("small", slice(6)), ("large", slice(6, None))])
def test_every_text_is_identical(name: str, part: slice, tmp_path: Path) -> None:
    """Prompts before, at and after the ends of windows, in chunks, pages, trees, from the cache and preempted. Each
    kind with all choices, and each pair of choices with one of them."""
    target = make_gemma4(tmp_path / "target", branch_scale=0.04, sliding_window=WINDOW, **KINDS[name])
    items = make_items(prompts([3, WINDOW - 1, WINDOW, WINDOW + 1, 20, 8 * WINDOW]), 6, 12)
    check_drafted(target, items, part)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable_moe_block": True}, "num_experts must be a positive integer, found None"),
    (
        {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 7, "moe_intermediate_size": 8},
        "top_k_experts must be 1 to the number of experts 6, found 7",
    ),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported; expected"),
    ({"num_kv_shared_layers": None}, "num_kv_shared_layers must be an integer of at least 0, found None"),
    (
        {"per_layer_config": {"5": {"num_key_value_heads": 3}}},
        "num_attention_heads 4 is not a multiple of num_global_key_value_heads 3",
    ),
    ({"per_layer_config": [5]}, r"per_layer_config must be an object of objects by layer, found \[5\]"),
    ({"num_kv_shared_layers": 6}, "num_kv_shared_layers 6 leaves no .*_attention layer of its own keys"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_gemma4(tmp_path)
    change_config(path, **fields)
    with pytest.raises(ValueError, match=rf"{path}/config\.json: {message}"):
        load_model_config(path)


def test_flashinfer_lacks_heads_of_512() -> None:
    pytest.importorskip("triton")
    backend = ATTENTION["flashinfer"](16, torch.bfloat16)
    assert backend.unsupported(HeadKV(1, 512, torch.bfloat16))[0].startswith("head size 512: FlashInfer has")
    assert not ATTENTION["triton"](16, torch.bfloat16).unsupported(HeadKV(1, 512, torch.bfloat16))


def test_training_refuses_shared_keys_and_values(tmp_path: Path) -> None:
    layers = load_model_config(make_gemma4(tmp_path, **SMALL)).layers
    with pytest.raises(ValueError, match="--model-path: training does not support layers that share keys"):
        check_layers(layers, 4)


def test_no_tensor_is_made_of_numbers_in_a_pass(kind: dict[str, Any], tmp_path: Path) -> None:
    assert_makes_no_tensor(make_gemma4(tmp_path, **kind))


def test_tensors_of_shared_layers_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Published files hold the keys and values that nothing reads."""
    path = make_gemma4(tmp_path)
    expected = load_model_config(path)
    assert [each.reads for each in expected.layers] == [None] * 6
    change_config(path, num_kv_shared_layers=3)
    our_logits(path, torch.float32)
    assert "no parameter reads" not in caplog.text
    assert [each.reads for each in load_model_config(path).layers] == [None, None, None, 1, 1, 2]
