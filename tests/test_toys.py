"""Extensions that the package does not know plug in through its registries and change no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks import lossless
from benchmarks.lossless import Models, make_items, reference_texts, run_configuration
from specserve import methods
from specserve.core import SamplingParams
from specserve.layers import weights as formats
from specserve.layers.decoder import DecoderLayer
from specserve.models import registry
from specserve.models.checkpoint import load_target
from specserve.tools.train.__main__ import train
from specserve.tools.train.cli import parse_args
from specserve.tools.train.drafts import DRAFTS
from tests.engines import Checkpoints, answer_all, context_of, drafting, make_scheduler
from tests.toys import recurrent
from tests.toys import weights as scaled
from tests.toys.architecture import NAME, ToyModel, write_toy
from tests.toys.drafter import METHOD
from tests.toys.recurrent import TextStateDrafter
from tests.toys.weights import write_scaled

PROMPTS = [[3 + i, 9, 14 + i, 2, 33, 2, 33, 2, 33] for i in range(6)]


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    """The toys are known while the tests run."""
    names = [*methods.METHOD_NAMES]
    changed = methods.METHODS, formats.FORMATS, registry.ARCHITECTURES  # by ``register``
    with patch.dict(changed[0]), patch.dict(changed[1]), patch.dict(changed[2]), patch.dict(DRAFTS):
        DRAFTS[recurrent.RECORD.name] = recurrent.RECORD
        methods.register(METHOD)
        methods.register(recurrent.METHOD)
        formats.register(scaled.METHOD, scaled.read)
        registry.register(NAME, ToyModel)
        yield
    methods.METHOD_NAMES[:] = names


@pytest.fixture(scope="module")
def plain_texts() -> dict[str, list[list[int]]]:
    """Of plain decoding, by target: each is decoded once."""
    return {}


CONFIGURATIONS: list[dict[str, Any]] = [
    {"batch": 1, "page": 16, "chunk": 512, "pool": "normal", "prefix_cache": True, "overlap": "on"},
    {"batch": 4, "page": 1, "chunk": 16, "pool": "small", "prefix_cache": True, "overlap": "off"},
    {"batch": 4, "page": 16, "chunk": 16, "pool": "normal", "prefix_cache": False, "overlap": "on"},
]


@pytest.fixture(scope="module")
def trained(registered: None, agreeing: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with device state, trained on texts of the target."""
    tmp_path = tmp_path_factory.mktemp("trained")
    work = [
        ([3 + i, 9, 14 + i], SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)) for i in range(24)
    ]
    texts = [answer.tokens for answer in answer_all(make_scheduler(agreeing.target), work)]
    tokens = np.concatenate(texts).astype(np.int32)
    starts = np.arange(0, len(tokens), 28)
    np.savez(tmp_path / "texts.npz", tokens=tokens, mask=np.ones(len(tokens), bool), starts=starts)
    given = {"model-path": agreeing.target, "data": tmp_path / "texts.npz", "output": tmp_path / "draft"}
    options = {"algorithm": "RECURRENT", "max-length": 32, "batch-tokens": 256, "steps": 40, "lr": 0.01}
    flags = [str(part) for name, value in (given | options).items() for part in (f"--{name}", value)]
    with torch.inference_mode(False):
        train(parse_args([*flags, "--device", "cpu", "--export-dtype", "float32"]))
    return tmp_path / "draft"


@pytest.mark.parametrize("configuration", CONFIGURATIONS[:2])
@pytest.mark.parametrize("drafting", [("COPY", 3, 1, 4), ("RECURRENT", 3, 2, 8)], ids=str)
def test_a_toy_drafter_changes_no_text(
    drafting: tuple[str, int, int, int],
    configuration: dict[str, Any],
    trained: Path,
    agreeing: Checkpoints,
    plain_texts: dict[str, list[list[int]]],
) -> None:
    """One without weights, and one with weights and state."""
    models = Models(agreeing.target, {"COPY": agreeing.target, "RECURRENT": trained}, "float64", "cpu")
    items = make_items(PROMPTS, 8, 14)
    expected = plain_texts.get("llama") or plain_texts.setdefault("llama", reference_texts(models, items))
    with patch.dict(lossless.SPECULATION, {"toy": drafting}):
        given = {**configuration, "toggled": drafting[0] == "RECURRENT", "speculation": "toy"}
        row, differences = run_configuration(models, 0, given, items, expected)
    assert (row.identical, differences) == (row.texts, [])
    assert row.texts == len(items)


def test_a_drafter_s_state_follows_the_text(trained: Path, agreeing: Checkpoints) -> None:
    """In slots that others have had, it is that of the text alone, whatever was drafted and rejected."""
    scheduler = make_scheduler(
        agreeing.target,
        max_running_requests=2,
        disable_radix_cache=True,
        chunked_prefill_size=4,
        **drafting("RECURRENT", trained, (3, 2, 8)),
    )
    drafter = context_of(scheduler).drafter
    assert isinstance(drafter, TextStateDrafter)
    for seed, (prompt, temperature) in enumerate(zip(PROMPTS, (0.0, 0.7) * 3, strict=True)):
        params = SamplingParams(temperature=temperature, max_tokens=21, seed=seed, ignore_eos=True)
        (answer,) = answer_all(scheduler, [(prompt, params)])
        state_1H = torch.zeros_like(drafter.state_RH[:1])
        for token in [*prompt, *answer.tokens[:-1]]:
            state_1H = drafter.network(state_1H, torch.tensor([token]))
        assert any(torch.allclose(state_1H, row_1H) for row_1H in drafter.state_RH.split(1))
    assert scheduler.stats().accepted > 0


@pytest.mark.parametrize(
    ("configuration", "write", "speculation"),
    [
        (CONFIGURATIONS[0], write_scaled, "eagle3-tree"),
        (CONFIGURATIONS[1], write_scaled, "copy"),
        (CONFIGURATIONS[1], write_toy, "eagle3-tree"),
        (CONFIGURATIONS[2], write_toy, "copy"),
    ],
)
def test_speculation_changes_no_text_of_a_toy_target(
    speculation: str,
    write: Callable[[Path, Path], Path],
    configuration: dict[str, Any],
    registered: None,
    agreeing: Checkpoints,
    plain_texts: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    target = write(agreeing.target, tmp_path / "toy")
    models = Models(target, {"COPY": target, "EAGLE3": agreeing.eagle3}, "float64", "cpu")
    items = make_items(PROMPTS, 8, 14)
    name = write.__name__
    expected = plain_texts.get(name) or plain_texts.setdefault(name, reference_texts(models, items))
    tree = {"copy": ("COPY", 3, 1, 4), "eagle3-tree": ("EAGLE3", 3, 2, 8)}
    with patch.dict(lossless.SPECULATION, tree):
        given = {**configuration, "toggled": False, "speculation": speculation}
        row, differences = run_configuration(models, 0, given, items, expected)
    assert (row.identical, differences) == (row.texts, [])
    assert row.texts == len(items)


def test_a_toy_weight_format_gives_the_rounded_weights(
    registered: None, agreeing: Checkpoints, tmp_path: Path
) -> None:
    """Every projection is that of the plain checkpoint to float16's rounding, and no other number changed."""
    plain = load_target(agreeing.target, torch.float64, torch.device("cpu"))
    found = load_target(
        write_scaled(agreeing.target, tmp_path / "scaled"), torch.float64, torch.device("cpu")
    )
    x_TH = torch.randn(5, plain.config.hidden_size, dtype=torch.float64)
    for mine, theirs in zip(found.layers, plain.layers, strict=True):
        assert isinstance(mine, DecoderLayer)
        assert isinstance(theirs, DecoderLayer)
        torch.testing.assert_close(
            mine.self_attn.qkv_proj(x_TH), theirs.self_attn.qkv_proj(x_TH), rtol=2e-3, atol=2e-3
        )
        assert not torch.equal(mine.mlp(x_TH, x_TH)[0], theirs.mlp(x_TH, x_TH)[0])
    assert torch.equal(found.logits(x_TH), plain.logits(x_TH))


def test_a_toy_drafter_is_often_right(registered: None, agreeing: Checkpoints) -> None:
    scheduler = make_scheduler(agreeing.target, **drafting("COPY", shape=(3, 1, 4)))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logit_bias={33: 100.0})
    (answer,) = answer_all(scheduler, [(PROMPTS[0], params)])
    assert answer.tokens == [33] * 16
    assert answer.usage.steps <= 7
