"""The captured step on a GPU: the texts of plain decoding, no host read, the CPU's acceptance."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch

from benchmarks.common import PROMPTS
from benchmarks.configurations import pairwise
from benchmarks.lossless import Item, Models, first_difference, make_items, read_prompts, tie_gap
from specserve import LLM, SamplingParams, grammar
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL
from specserve.core import Thought
from specserve.engine.graphs import PartedGraph, PromptGraph
from specserve.engine.shapes import candidate_shapes
from specserve.layers import linear
from specserve.layers.formats.stored import StoredProjection
from specserve.messages import Submit
from tests.engines import Checkpoints, check_switching, context_of, drafting, head_of
from tests.front.processes import Server
from tests.matrix import check_matrix
from tests.reference.models import make_llama

pytestmark = pytest.mark.gpu

Shape = tuple[str, int, int, int]
SHAPES: list[Shape] = [
    ("EAGLE3", 3, 1, 4),
    ("EAGLE3", 7, 1, 8),
    ("EAGLE3", 4, 4, 16),
    ("EAGLE3", 6, 8, 64),
    ("EAGLE", 5, 2, 12),
    ("EAGLE3+NGRAM", 3, 1, 12),
    ("EAGLE3+NGRAM", 4, 4, 16),
]
MODELS = Models(BUNDLED_MODEL, BUNDLED_DRAFTS, "float32", "cuda")
TIE = 1e-4


@contextmanager
def engine(shape: Shape | None, **settings: Any) -> Iterator[LLM]:
    if shape is not None:
        settings |= drafting(shape[0], shape=shape[1:])
    given = {"dtype": "float32", "device": "cuda", "max_total_tokens": 40_000, "random_seed": 0, **settings}
    with LLM(None, skip_tokenizer_init=True, **given) as llm:
        yield llm


@pytest.fixture(scope="module")
def items() -> list[Item]:
    """100 requests of every kind of sampling."""
    prompts = [prompt[:64] for prompt in read_prompts(PROMPTS, BUNDLED_MODEL)]
    return make_items(prompts, 100, 32)


def texts(llm: LLM, items: Sequence[Item]) -> list[list[int]]:
    return [o.token_ids for o in llm.generate([i.prompt for i in items], [i.params for i in items])]


@pytest.fixture(scope="module")
def expected(items: list[Item]) -> list[list[int]]:
    with engine(None, max_running_requests=32) as llm:
        return texts(llm, items)


def assert_same(found: list[list[int]], expected: list[list[int]], items: Sequence[Item]) -> None:
    """Equal, but for first differences where the two best perturbed logits tie."""
    for item, ours, theirs in zip(items, found, expected, strict=True):
        if ours != theirs:
            gap = tie_gap(MODELS, item, first_difference(ours, theirs))
            assert gap < TIE, f"{item.sampling}: {ours} against {theirs}, gap {gap}"


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_speculation_changes_no_text(
    shape: Shape, batch: int, items: list[Item], expected: list[list[int]]
) -> None:
    chosen = slice(0, 12) if batch == 1 else slice(0, 100)
    with engine(shape, max_running_requests=batch) as llm:
        assert llm.engine is not None
        assert llm.engine.info.cuda_graphs["count"] > 0
        assert_same(texts(llm, items[chosen]), expected[chosen], items[chosen])
        assert llm.engine.stats().accepted > 0


def held(items: list[Item]) -> list[Item]:
    """Of four requests three are constrained: two by grammars, one by a thought's budget."""
    pattern = grammar.regex(r"([a-z ]{1,12}[,.]){2}[0-9]{1,8}")
    budget = {"thinking_token_budget": 7, "thought": Thought(open="<", close=">", end=[40, 41], begun=True)}
    kinds: list[dict[str, Any]] = [{"grammar": pattern}, budget, {"grammar": grammar.json_object()}, {}]
    return [
        replace(
            item,
            params=msgspec.structs.replace(item.params, **{"ignore_eos": False, "min_tokens": 0, **kind}),
        )
        for item, kind in zip(items, kinds * len(items), strict=False)
    ]


@pytest.mark.parametrize("part", range(8))
def test_every_method_gives_the_bits_of_plain_decoding(part: int, agreeing_32: Checkpoints) -> None:
    """In bfloat16, without a tie that excuses a difference."""
    models = Models(agreeing_32.target, agreeing_32.drafts, "bfloat16", "cuda")
    configurations = pairwise(models.choices)[part::8]
    prompts = [[3 + i, 9, 14 + i, 2, 33, 2, 33, 2, 3 + i, 9] for i in range(30)]
    items = make_items(prompts, 56, 14)
    report = check_matrix(models, items, 8 * len(configurations), configurations)
    drafting = [row for row in report.rows if row.configuration["speculation"] != "off"]
    # With eight short texts, a single row may accept nothing.
    assert fmean(row.mean_accepted_length for row in drafting) > 1.05


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("shape", [None, ("EAGLE3", 3, 1, 4), ("EAGLE3", 4, 4, 16)], ids=str)
def test_masked_steps_are_graphs_and_change_no_text(
    shape: Shape | None, overlap: str, items: list[Item]
) -> None:
    """They are captured in parts when they are first needed; free ones stay whole, in the same batches and after."""
    pytest.importorskip("llguidance")
    chosen = held(items[:48])
    with engine(None, disable_cuda_graph=True, max_running_requests=16) as llm:
        expected = texts(llm, chosen)
    with (
        engine(shape, max_running_requests=16, overlap_schedule=overlap) as llm,
        patch.object(PartedGraph, "settle", autospec=True, side_effect=PartedGraph.settle) as settled,
    ):
        for _ in range(2):
            assert_same(texts(llm, chosen), expected, chosen)
        assert settled.call_count > 20
        assert llm.engine is not None
        assert llm.engine.stats().eager_steps == 0
        before = settled.call_count
        assert_same(texts(llm, chosen[3::4]), expected[3::4], chosen[3::4])
        assert settled.call_count == before


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("shape", [("EAGLE3", 3, 1, 4), ("EAGLE3", 4, 4, 16), ("EAGLE", 5, 2, 12)], ids=str)
def test_a_draft_in_int8_changes_no_text(
    shape: Shape, integers: bool, items: list[Item], expected: list[list[int]]
) -> None:
    """Neither by kernels that convert its weights nor by those that multiply integers, which models in 16 bits take
    and whose texts can't be held against each other as strictly."""
    with (
        patch.object(linear, "multiplies_integers", return_value=integers),
        engine(shape, max_running_requests=32, speculative_draft_quantization="int8") as llm,
    ):
        assert llm.engine is not None
        projection = head_of(llm.engine).mlp.down_proj
        assert isinstance(projection, linear.QuantizedLinear)
        assert (projection.rounds_to(1) == torch.int8) == integers
        assert_same(texts(llm, items), expected, items)
        assert llm.engine.stats().accepted > 0


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_weights_of_few_bits_give_the_same_bits_with_any_draft(kind: str, items: list[Item]) -> None:
    """In bfloat16, without a tie that excuses a difference."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "quantization": kind, "max_running_requests": 32}
    with engine(None, **settings) as llm:
        assert llm.engine is not None
        projection = context_of(llm.engine).target.layers[0].mlp.down_proj
        assert isinstance(projection, StoredProjection)
        assert projection.plain is None
        expected = texts(llm, items)
    for shape in (("EAGLE3", 3, 1, 4), ("EAGLE3", 4, 4, 16)):
        with engine(shape, **settings) as llm:
            assert llm.engine is not None
            assert texts(llm, items) == expected
            assert llm.engine.stats().accepted > 0


@pytest.mark.parametrize("page_size", [16, 64])
def test_an_fp8_cache_gives_the_same_bits_with_any_draft(page_size: int, items: list[Item]) -> None:
    """In bfloat16, for prompts in one chunk and in several, with a preemption and without."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "page_size": page_size}
    with engine(None, **settings, max_running_requests=32) as llm:
        assert llm.engine is not None
        assert {layer.dtype for layer in context_of(llm.engine).pool.layers} == {torch.float8_e4m3fn}
        expected = texts(llm, items)
    several = {"chunked_prefill_size": 16, "max_total_tokens": 960, "max_running_requests": 16}
    for shape, others in ((("EAGLE3", 3, 1, 4), {}), (("EAGLE3", 4, 4, 16), several)):
        with engine(shape, **settings, **others) as llm:
            assert llm.engine is not None
            assert texts(llm, items) == expected
            assert llm.engine.stats().accepted > 0


def test_in_16_bits_a_draft_is_in_int8_and_guesses_as_well(items: list[Item]) -> None:
    lengths = {}
    for rounding in ("none", "auto"):
        settings = {"dtype": "bfloat16", "speculative_draft_quantization": rounding}
        with engine(("EAGLE3", 5, 1, 6), max_running_requests=32, **settings) as llm:
            assert llm.engine is not None
            projection = head_of(llm.engine).mlp.down_proj
            assert (
                isinstance(projection, linear.QuantizedLinear) and projection.rounds_to(1) is not None
            ) == (rounding == "auto")
            texts(llm, items)
            stats = llm.engine.stats()
            lengths[rounding] = stats.accepted / stats.steps
    assert lengths["auto"] == pytest.approx(lengths["none"], rel=0.05)


@pytest.mark.parametrize("shape", [("EAGLE3", 3, 1, 4), ("EAGLE3", 4, 4, 16)], ids=str)
def test_a_prediction_changes_no_text(shape: Shape, items: list[Item], expected: list[list[int]]) -> None:
    """Half of the requests have one: right but for a token. They take fewer steps: at most two more than there must
    be, one for the wrong token and one to find back."""
    params = [item.params for item in items[:40]]
    for index in range(0, 40, 2):
        predicted = expected[index].copy()
        predicted[min(9, len(predicted) - 1)] ^= 1
        params[index] = msgspec.structs.replace(params[index], prediction=predicted)
    steps: list[list[int]] = []
    with engine(shape, max_running_requests=16) as llm:
        for each in ([item.params for item in items[:40]], params):
            found = llm.generate([item.prompt for item in items[:40]], each)
            assert_same([output.token_ids for output in found], expected[:40], items[:40])
            steps.append([output.speculation.steps for output in found[::2]])
    fewest = [ceil((len(text) - 1) / (shape[1] + 1)) for text in expected[:40:2]]
    assert all(taken <= least + 2 for taken, least in zip(steps[1], fewest, strict=True))
    assert sum(steps[1]) < sum(steps[0])


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("shape", [None, ("EAGLE3", 3, 1, 4), ("EAGLE", 3, 2, 6)], ids=str)
def test_short_prompts_are_captured_and_change_no_text(
    shape: Shape | None, overlap: str, items: list[Item]
) -> None:
    """The tails of cached prompts, and prompts that are short themselves."""
    short = [replace(item, prompt=item.prompt[: 1 + index]) for index, item in enumerate(items[:40])]
    with engine(None, disable_cuda_graph=True, max_running_requests=16) as llm:
        expected = texts(llm, short)
    with (
        engine(shape, max_running_requests=16, overlap_schedule=overlap) as llm,
        patch.object(PromptGraph, "replay", autospec=True, side_effect=PromptGraph.replay) as replay,
    ):
        for _ in range(2):
            assert_same(texts(llm, short), expected, short)
        assert replay.call_count > 20


@pytest.mark.parametrize("shape", [None, ("EAGLE3", 3, 1, 4), ("EAGLE", 3, 2, 6)], ids=str)
def test_prompts_of_up_to_512_tokens_are_captured_and_change_no_text(
    shape: Shape | None, items: list[Item]
) -> None:
    """Alone, again after what the cache has of them, and several together."""
    joined = [token for item in items for token in item.prompt]
    lengths = (65, 90, 127, 128, 129, 255, 300, 384, 400, 511, 512)
    long = [
        replace(item, prompt=joined[17 * index :][:length])
        for index, (item, length) in enumerate(zip(items, lengths, strict=False))
    ]
    with engine(None, disable_cuda_graph=True, max_running_requests=16) as llm:
        expected = [texts(llm, [item])[0] for item in long]
    with (
        engine(shape, max_running_requests=16) as llm,
        patch.object(PromptGraph, "replay", autospec=True, side_effect=PromptGraph.replay) as replay,
    ):
        for _ in range(2):
            assert_same([texts(llm, [item])[0] for item in long], expected, long)
        for start in range(0, len(long), 4):
            assert_same(
                texts(llm, long[start : start + 4]), expected[start : start + 4], long[start : start + 4]
            )
        assert {call.args[0].size.longest for call in replay.call_args_list} >= {64, 128, 256, 384, 512}


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_what_a_step_gives_does_not_depend_on_the_shapes_before(overlap: str, items: list[Item]) -> None:
    settings = {"speculative_algorithm": "EAGLE3", "speculative_adaptive": True, "overlap_schedule": overlap}
    with engine(None, max_running_requests=1, **settings) as llm:
        assert check_switching(llm, [item.prompt for item in items[:24]], candidate_shapes(1), 64) > 100


@pytest.mark.parametrize(
    "settings",
    [
        {"disable_cuda_graph": True},
        {"disable_overlap_schedule": True},
        {"attention_backend": "torch"},
        {"page_size": 1},
        {"page_size": 64},
        {"cuda_graph_max_bs": 4},
        {"max_total_tokens": 800},
    ],
    ids=str,
)
def test_no_setting_changes_the_text(
    settings: dict[str, Any], items: list[Item], expected: list[list[int]]
) -> None:
    with engine(("EAGLE3", 4, 4, 16), max_running_requests=16, **settings) as llm:
        assert_same(texts(llm, items[:40]), expected[:40], items[:40])
        assert llm.engine is not None
        assert (llm.engine.stats().preemptions > 0) == ("max_total_tokens" in settings)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("shape", [None, ("EAGLE3", 3, 1, 4), ("EAGLE3", 4, 4, 16)], ids=str)
def test_nothing_waits_for_the_device_but_the_reading_of_results(
    shape: Shape | None, items: list[Item]
) -> None:
    """PyTorch raises at every call that would synchronize; reading a result waits for an event, which it allows. Half
    the requests come in while others run, and each iteration leaves a launch in flight."""
    with engine(shape, max_running_requests=8) as llm:
        scheduler = llm.engine
        assert scheduler is not None
        for index, item in enumerate(items[:4]):
            scheduler.submit(Submit(str(index), list(item.prompt), item.params))
        tokens = 0
        for _ in range(3):
            scheduler.run_once()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for index, item in enumerate(items[4:8]):
                params = msgspec.structs.replace(item.params, prediction=list(item.prompt))
                scheduler.submit(Submit(str(4 + index), list(item.prompt), params))
            while scheduler.has_work:
                tokens += sum(len(message.token_ids) for message in scheduler.run_once())  # type: ignore[union-attr]
                # private: whether a launch is in flight, which no result shows
                assert scheduler._inflight or not any(r.wants_tokens for r in scheduler.running)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert tokens > 100


def test_logprobs_and_aborts_under_overlap(items: list[Item]) -> None:
    """Logprobs are read from the graph's logits while the next step runs; slots of aborted requests are taken anew."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
    prompts = [item.prompt for item in items[:12]]
    found = []
    for shape in (None, ("EAGLE3", 4, 4, 16)):
        with engine(shape, max_running_requests=4) as llm:
            scheduler = llm.engine
            assert scheduler is not None
            for round_ in range(3):
                for index, prompt in enumerate(prompts[:6]):
                    scheduler.submit(Submit(f"{round_}-{index}", list(prompt), params))
                for _ in range(4):
                    scheduler.run_once()
                for index in range(6):
                    scheduler.abort(f"{round_}-{index}")
            found.append(llm.generate(prompts, params))
            assert not scheduler.running
    for plain, drafted in zip(*found, strict=True):
        assert plain.token_ids == drafted.token_ids
        for ours, theirs in zip(drafted.logprobs or [], plain.logprobs or [], strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("shape", [("EAGLE3", 5, 1, 6), ("EAGLE3", 5, 4, 16), ("EAGLE", 5, 4, 16)], ids=str)
def test_accepts_what_the_cpu_accepts(shape: Shape) -> None:
    prompts = read_prompts(PROMPTS, BUNDLED_MODEL)[:16]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    lengths = []
    for device in ("cuda", "cpu"):
        with engine(shape, device=device, max_running_requests=16) as llm:
            usage = [output.speculation for output in llm.generate(prompts, params)]
        lengths.append(sum(u.accepted for u in usage) / sum(u.steps for u in usage))
    assert lengths[0] == pytest.approx(lengths[1], rel=0.01)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--quantization", "fp8"],
        ["--quantization", "int4"],
        ["--quantization", "int8", "--kv-cache-dtype", "fp8_e4m3"],
        ["--quantization", "int4", "--speculative-algorithm", "NGRAM"],
        ["--quantization", "fp8", "--speculative-algorithm", "LOOKAHEAD"],
    ],
    ids=" ".join,
)
def test_a_server_captures_everything(flags: list[str], tmp_path: Path) -> None:
    """In a process of its own, with a head so wide that cuBLAS multiplies few tokens by it, which nothing else may have
    opened by then."""
    target = make_llama(tmp_path / "target", vocab=70_000, hidden=256, heads=4, kv_heads=2)
    common = ["--port", "0", "--dtype", "bfloat16", "--skip-tokenizer-init", "--max-running-requests", "16"]
    server = Server(["-m", "specserve.launch", "--model-path", str(target), *common, *flags])
    try:
        server.wait_ready()
        assert server.get("/health")[0] == 200
        assert "specserve_late_kernels_total 0" in server.get("/metrics")[1]
    finally:
        server.stop()
    text = "".join(server.lines)
    assert not re.search("no CUDA graph|no memory for the CUDA graph|CUDA ended a capture", text), text
