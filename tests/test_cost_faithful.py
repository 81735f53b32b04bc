"""The bundled family inside a wider shape: the same function, texts and acceptance."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.cost_faithful import USELESS, Family, Maker, Sizes, layer_order
from specserve import LLM, SamplingParams
from specserve.outputs import RequestOutput
from tests.engines import shaped
from tests.reference import eagle, llama
from tests.reference.models import Checkpoint

pytestmark = pytest.mark.slow

SMALL = Family()
SHAPE = Sizes(
    hidden=512, inner=1024, layers=14, heads=16, kv_heads=4, head_dim=64, vocab=5000, draft_vocab=3200
)
VOCAB, DRAFT_VOCAB = 4096, 3072  # of the bundled model
TOKENS = [17, 300, 4000, 12, 999, 2048, 5, 77]
CHAIN = shaped(3, 1, 4)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Family:
    maker = Maker(SMALL, SHAPE, torch.float64, torch.device("cpu"))
    return maker.run(tmp_path_factory.mktemp("wide"))


def checkpoint(path: Path) -> Checkpoint:
    """In several files or one."""
    state: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        state |= load_file(file)
    return state, json.loads((path / "config.json").read_text())


@cache
def target_logits(family: Family) -> llama.LlamaOutput:
    return llama.forward(*checkpoint(family.target), TOKENS)


def draft_rows(family: Family, name: str) -> list[Tensor]:
    """Logits after the root and after one and two drafted tokens, over the draft's vocabulary."""
    target_state, target_config = checkpoint(family.target)
    draft = eagle.make_draft(
        *checkpoint(getattr(family, name)),
        target_state["model.embed_tokens.weight"],
        target_state["lm_head.weight"],
    )
    out = llama.forward(target_state, target_config, TOKENS)
    features = eagle.features_of(draft, out)
    rows = partial(eagle.draft_logits, draft, [*TOKENS, 55], features)
    return [rows(path) for path in ([], [8], [8, 1500])]


def assert_equal_and_unused_far_below(wide_logits: Tensor, small_logits: Tensor) -> None:
    used = small_logits.shape[-1]
    largest = small_logits.abs().max()
    assert (wide_logits[..., :used] - small_logits).abs().max() < 1e-8 * largest
    assert wide_logits[..., used:].max() < small_logits.min() - 100


def test_target_computes_the_same(wide: Family) -> None:
    assert_equal_and_unused_far_below(target_logits(wide).logits, target_logits(SMALL).logits)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_drafts_compute_the_same(wide: Family, name: str) -> None:
    for wide_V, small_V in zip(draft_rows(wide, name), draft_rows(SMALL, name), strict=True):
        assert_equal_and_unused_far_below(wide_V, small_V)


def test_boundaries_after_the_taps_hold_the_same_stream(wide: Family) -> None:
    _, taps = layer_order(10, (2, 5, 7), SHAPE.layers)
    small, large = target_logits(SMALL).streams, target_logits(wide).streams
    for small_tap, tap in zip((2, 5, 7), taps, strict=True):
        torch.testing.assert_close(large[tap][:, :256], small[small_tap], rtol=1e-9, atol=1e-9)
        assert torch.equal(large[tap], large[tap + 1])


def test_transformers_loads_it(wide: Family) -> None:
    from transformers import AutoModelForCausalLM

    logits = [
        AutoModelForCausalLM.from_pretrained(family.target, dtype=torch.float32)(
            torch.tensor([TOKENS])
        ).logits
        for family in (SMALL, wide)
    ]
    torch.testing.assert_close(logits[1][..., :VOCAB], logits[0], rtol=1e-4, atol=1e-3)


@cache
def answers(family: Family, algorithm: str) -> list[RequestOutput]:
    drafts = {"EAGLE": family.eagle, "EAGLE3": family.eagle3}
    speculation = (
        {"speculative_draft_model_path": str(drafts[algorithm]), **CHAIN} if algorithm in drafts else {}
    )
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts: Sequence[str] = ["def add(a, b):\n", "import os\n\n"]
    with LLM(
        str(family.target),
        device="cpu",
        dtype="float32",
        max_total_tokens=512,
        context_length=128,
        max_running_requests=2,
        speculative_algorithm=algorithm,
        **speculation,
    ) as llm:
        return llm.generate(list(prompts), params)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_same_texts_and_acceptance(wide: Family, algorithm: str) -> None:
    plain, small, large = answers(SMALL, "NONE"), answers(SMALL, algorithm), answers(wide, algorithm)
    assert [o.text for o in large] == [o.text for o in plain]
    assert [o.speculation for o in large] == [o.speculation for o in small]
    assert all(o.speculation.accepted for o in large)


def test_the_useless_draft_is_never_right(wide: Family) -> None:
    useless = dataclasses.replace(wide, eagle3=wide.eagle3.parent / USELESS)
    outputs = answers(useless, "EAGLE3")
    assert [o.text for o in outputs] == [o.text for o in answers(SMALL, "NONE")]
    assert all(o.speculation.drafted > 0 == o.speculation.accepted for o in outputs)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="don't fit 12"):
        layer_order(10, (2, 5, 7), 12)
