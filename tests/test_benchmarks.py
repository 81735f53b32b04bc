"""The benchmarks: forced acceptance, step times, and that they run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import (
    constrained_speed,
    drafters,
    steps,
    suite,
    tuner,
    weights,
)
from benchmarks.closed_loop import NONE, forced_levels
from benchmarks.common import load_options, open_llm, parse_load, random_prompts, scheduler_of, weights_kept
from benchmarks.cost_faithful import SHAPES, Named, Sizes
from benchmarks.results import ROOT
from benchmarks.shapes import write_shape
from benchmarks.trace import Event, bars, lines, own_times, parts, waterfall_picture
from specserve import SamplingParams
from specserve.config.paths import BUNDLED_MODEL
from specserve.layers.linear import Linear, QuantizedLinear
from specserve.models.read_config import load_model_config
from tests.engines import Checkpoints, answer_all, answer_one, make_scheduler
from tests.reference.draft_models import make_eagle3
from tests.reference.models import make_qwen3_moe

PROMPTS = [[5, 6, 7], [9, 10, 4, 4], [17, 12]]
GREEDY = SamplingParams(temperature=0, max_tokens=1 + 3 * 6, ignore_eos=True)


@pytest.mark.parametrize("shape", [(2, 1, 3), (5, 1, 6), (2, 2, 7)], ids=str)
def test_three_tokens_a_step_are_forced(
    random_models: Checkpoints, agreeing: Checkpoints, shape: tuple[int, int, int]
) -> None:
    """Of drafts that are never right, and of such as are right more often than that."""
    for models in (random_models, agreeing):
        with forced_levels() as force:
            scheduler = models.scheduler("EAGLE3", shape, max_running_requests=3)
            force(2)
            found = answer_all(scheduler, [(prompt, GREEDY) for prompt in PROMPTS])
        assert [answer.runs for answer in found] == [[1] + [3] * 6] * 3


def test_steps_of_all_requests_are_told_from_those_of_fewer() -> None:
    """Three chunks of two prompts take 100 ms each, a step 10 ms and as much again for every request."""

    def generate(
        llm: object, prompts: list[list[int]], new_tokens: int
    ) -> tuple[float, list[SimpleNamespace]]:
        left, seconds = [new_tokens - 1] * len(prompts), 0.0
        for launch in range(3 + new_tokens):
            begun = min(2 + 2 * launch, 6)
            seconds += 0.1 * (launch < 3)
            active = [n for n in range(begun) if left[n]]
            seconds += 0.01 * (1 + len(active)) if active else 0.0
            for n in active:
                left[n] -= 1
        taken = SimpleNamespace(speculation=SimpleNamespace(steps=new_tokens - 1, accepted=0))
        return seconds, [taken] * len(prompts)

    engine = SimpleNamespace(stats=lambda: SimpleNamespace(steps=0))
    llm: Any = SimpleNamespace(engine=engine)
    with patch.object(steps, "generate_timed", generate):
        found = steps.measure(llm, [[1]] * 6, 80, 1)
    assert found["full_ms_per_step"] == pytest.approx(70)
    assert found["ms_per_step"] == pytest.approx((77 * 70 + 2 * 30 + 2 * 50) / 79)


def test_bonus_tokens_stay_the_target_s_own(random_models: Checkpoints) -> None:
    with forced_levels() as force:
        scheduler = random_models.scheduler("EAGLE3", (5, 1, 6))
        force(2)
        tokens = answer_one(scheduler, PROMPTS[0], GREEDY).tokens
    plain = make_scheduler(random_models.target)
    for index in range(0, len(tokens), 3):
        prompt = PROMPTS[0] + tokens[:index]
        expected = answer_one(plain, prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        assert expected.tokens == tokens[index : index + 1]


def test_nothing_is_forced_unless_asked(agreeing: Checkpoints) -> None:
    (expected,) = answer_all(make_scheduler(agreeing.target), [(PROMPTS[0], GREEDY)])
    usual = answer_one(agreeing.scheduler("EAGLE3", (5, 1, 6)), PROMPTS[0], GREEDY)
    with forced_levels() as force:
        scheduler = agreeing.scheduler("EAGLE3", (5, 1, 6))
        force(2)
        answer_one(scheduler, PROMPTS[0], GREEDY)
        force(NONE)
        found = answer_one(scheduler, PROMPTS[0], GREEDY)
    assert found.tokens == usual.tokens == expected.tokens
    assert found.runs == usual.runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("adaptive", ["--batches", "1", "2", "--shapes", "2,1,3", "--requests", "4"]),
        ("changing_load", ["--seconds", "0.05", "--plot", "PICTURE"]),
        ("adaptive long_context", []),
        ("changing_load mixed_batch", ["--seconds", "0.1"]),
        ("constrained_speed", ["--batches", "2", "--shapes", "3,1,4", "--schemas", "bounded"]),
        ("steps single_stream", ["--max-batch", "1", "--shapes", "off", "7,1,8", "--quantization", "int4"]),
    ],
)
def test_it_runs(
    name: str,
    arguments: list[str],
    small_chat: Checkpoints,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, picture = tmp_path / "results.json", tmp_path / "picture.png"
    given = [str(picture) if each == "PICTURE" else each for each in arguments]
    if "int4" not in arguments:  # whose groups are wider than a small model
        given += ["--model", str(small_chat.target), "--eagle3", str(small_chat.eagle3)]
    suite.run_benchmark(name, ["--quick", "--output", str(output), *given])
    record = json.loads(output.read_text())
    assert record["command"].startswith(f"python -m benchmarks.{name} --quick")
    assert record["figures"]
    words = {"constrained_speed": "step_ratio", "steps single_stream": "(7, 1, 8)"}
    assert words.get(name, "adaptive") in capsys.readouterr().out
    assert picture.exists() == ("PICTURE" in arguments)


def test_quick_runs_are_not_among_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["name", "--quick"])
    assert not parse_load(load_options("")).output.is_relative_to(ROOT)


def test_every_result_is_cited() -> None:
    root = Path(__file__).parent.parent
    pages = [root / "README.md", root / "benchmarks/results/LOG.md", *root.glob("docs/**/*.md")]
    text = "".join(page.read_text() for page in [*pages, *root.glob("examples/**/*.md")])
    results = [path.name for path in (root / "benchmarks/results").glob("*.json")]
    assert [name for name in results if f"{name}`" not in text] == []


def test_what_a_device_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a clock on which the device reaches its masks at 2 ms of a step, and has them at 2 or 5."""

    def at(ms: float) -> Any:
        return SimpleNamespace(ms=ms, elapsed_time=lambda end: end.ms - ms)

    steps = [(at(step - 0.5), at(step), at(step + 2), at(step + had)) for step, had in ((10, 2), (20, 5))]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    found = constrained_speed.Watch(0.006, 12, None, [(None, *steps[0][1:]), *steps]).figures()
    assert found == pytest.approx(
        {"mask_us_a_node": 500, "waited": 1 / 3, "waited_us": 3000, "between_us": 500}
    )


def test_weights_are_rounded_once_for_engines_that_share_them() -> None:
    args = load_options(None, quantization=True).parse_args(["--quantization", "int8"])
    found = []
    with weights_kept():
        for args.quantization in ("int8", "int8", "none"):
            with open_llm(args, None, 1) as llm:
                engine: Any = llm.engine
                found.append(engine.runner.context.target)
    assert found[0] is found[1]
    assert found[2] is not found[0]


def test_floors_of_quantized_weights() -> None:
    plain = {kind: steps.step_ms(None, 1, 0, kind) for kind in ("fp8", "int8", "int4")}
    assert plain["fp8"] == plain["int8"] == pytest.approx((6.98 + 2 * 0.525) / 4.23, abs=1e-3)
    assert plain["int4"] == pytest.approx((6.98 * 66 / 128 + 2 * 0.525) / 4.23, abs=1e-3)
    assert steps.step_ms(None, 256, 0, "int4") == pytest.approx(2 * 7.505 * 256 / 790, abs=1e-3)


def test_the_floor_of_any_model_is_what_its_step_reads(agreeing: Checkpoints) -> None:
    def sizes(state: dict[str, torch.Tensor], *but: str) -> dict[str, int]:
        return {name: each.numel() * 4 for name, each in state.items() if name not in ("d2t", "t2d", *but)}

    args = load_options(None).parse_args(["--model", str(agreeing.target), "--eagle3", str(agreeing.eagle3)])
    config = json.loads((agreeing.target / "config.json").read_text())
    unread = [] if config["tie_word_embeddings"] else ["model.embed_tokens.weight"]
    weights = sizes(load_file(agreeing.target / "model.safetensors"), *unread)
    state = torch.load(agreeing.eagle3 / "pytorch_model.bin")
    head, draft_kv = sizes(state), 2 * len(state["midlayer.self_attn.k_proj.weight"]) * 4
    kv = 2 * config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"] * 4
    target_kv = config["num_hidden_layers"] * kv
    on_gpu = patch.object(torch.cuda, "is_available", return_value=True)
    unpacked = patch("specserve.layers.linear.packs", return_value=False)
    with unpacked, open_llm(args, (3, 1, 4), 2) as llm, on_gpu:
        with patch.object(torch.cuda, "get_device_name", return_value="NVIDIA H200"):
            plain, drafted = steps.read_ms(llm, None, 2, 100), steps.read_ms(llm, (3, 1, 4), 2, 100)
        with patch.object(torch.cuda, "get_device_name", return_value="NVIDIA L4"):
            assert steps.read_ms(llm, None, 2, 100) is None
    assert plain == pytest.approx((sum(weights.values()) + 200 * target_kv) / 4.4e9)
    fc, rest = head.pop("fc.weight"), sum(head.values())
    assert drafted == pytest.approx(plain + (fc + 3 * rest + 3 * 200 * draft_kv) / 4.4e9)


def test_the_floor_of_experts_is_those_that_were_read(tmp_path: Path) -> None:
    """About as many as drawn tokens choose, of which the drafts of one request are alike. One for all is no choice."""
    target = make_qwen3_moe(tmp_path / "target", experts=32, shared=1)
    draft = make_eagle3(tmp_path / "eagle3", target)
    args = load_options(None).parse_args(["--model", str(target), "--eagle3", str(draft)])
    prompts = random_prompts(64, 8, 5)
    on_gpu = patch.object(torch.cuda, "is_available", return_value=True)
    card = patch.object(torch.cuda, "get_device_name", return_value="NVIDIA H200")
    with open_llm(args, (3, 1, 4), 8) as llm:
        context = scheduler_of(llm).runner.context
        found, held = weights.Weights.of(context), weights.size_of(context.target)
        read = {count: weights.experts_read(llm, prompts[:count], (3, 1, 4)) for count in (1, 8)}
        with on_gpu, card:
            floors = [steps.read_ms(llm, None, 1, 5, experts) for experts in (None, 2.0, 4.0)]
    layers, each = 2, 3 * 24 * 32 * 4
    assert (found.count, found.chosen, found.experts) == (32, 2, layers * 32 * each)
    assert found.others + found.experts == held - weights.size_of(context.target.embed_tokens)
    assert read[1]
    assert read[8]
    assert 2 <= read[1] <= found.drawn(4) + 1 < read[8] <= found.drawn(32) + 1
    everything, two, four = (floor or 0 for floor in floors)
    assert (everything - two, four - two) == pytest.approx(
        (layers * 30 * each / 4.4e9, layers * 2 * each / 4.4e9)
    )


def test_of_a_weight_with_a_copy_the_copy_is_read() -> None:
    with torch.device("meta"):
        copied = QuantizedLinear(Linear(256, 64, bias=False), torch.int8)
    assert weights.size_of(torch.nn.ModuleList([copied])) == 64 * (256 + 4 * 256 // 128)


def test_what_bytes_allow() -> None:
    """Qwen3-30B-A3B with a head: four tokens read 2.6 times the bytes of one."""
    found = weights.Weights(2_500_000_000, 58_000_000_000, 128, 8, 25_000_000, 200_000_000)
    ratios = [found.read(found.drawn(tokens)) / found.read(8) for tokens in (1, 2, 4, 8)]
    assert ratios == pytest.approx([1, 1.55, 2.56, 4.23], abs=0.01)
    assert found.most_gain([0.0], 1) == 1
    assert found.most_gain([0.72], 1) == pytest.approx(1.081, abs=0.001)
    assert 1.081 < found.most_gain([0.93, 0.849, 0.849, 0.831], 1) < found.most_gain([1.0], 1)
    assert found.most_gain([0.72], 64) > 2


@pytest.mark.parametrize(("name", "same"), [("llama-3.1-8b", True), ("mixtral-8x7b-awq", False)])
def test_whose_floor_it_is(name: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral's layers have the sizes of Llama-3.1-8B's, besides their experts."""
    write_shape(name, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    args: Any = SimpleNamespace(model=str(tmp_path / "target"), load_format="dummy")
    assert steps.applies(args) == same


@pytest.mark.parametrize("error", [RuntimeError("no memory"), SystemExit("no such option")])
def test_a_row_is_written_before_the_next_is_measured(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the suite goes on with what comes after a failure, or after arguments that are refused."""

    def fail(args: Any, shape: Any, batches: Any) -> Any:
        figures = dict.fromkeys(
            ("ms_per_step", "full_ms_per_step", "tokens_per_second", "accepted_length"), 1.0
        )
        yield steps.row(args, shape, 1, figures)
        raise error

    monkeypatch.setattr(steps, "run_shape", fail)
    monkeypatch.setattr(steps, "applies", lambda path: False)
    given = ["--pair", "PAIR", "--only", "steps", "--quantization", "fp8", "int4", "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["suite", *given, "--shapes", "off"])
    with pytest.raises(SystemExit, match="failed"):
        suite.main()
    for kind in ("fp8", "int4"):
        record = json.loads((tmp_path / f"single_stream_{kind}.json").read_text())
        assert [row["quantization"] for row in record["figures"]] == [kind]
        assert record["command"].endswith("--shapes off")
    assert capsys.readouterr().err.count(f"{type(error).__name__}: {error}") == 2


@pytest.mark.slow
def test_steps_of_drafters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random drafts load, and none of theirs is accepted."""
    shape, small = Sizes(320, 768, 13, 8, 2, 64, 4200, 3100), Sizes(64, 128, 1, 2, 1, 32, 4200, 0)
    drafters.make(tmp_path / "random", shape, small, torch.bfloat16)
    names, output = ["off", "FREE", "DSPARK", "STANDALONE", "MEDUSA"], tmp_path / "results.json"
    arguments = ["--quick", "--max-batch", "1", "--dtype", "float32", "--pair", str(tmp_path)]
    arguments += ["--output", str(output)]
    with patch("sys.argv", ["benchmarks.drafters", *arguments, "--only", *names]):
        drafters.main()
    rows = json.loads(output.read_text())["figures"]
    assert [row["drafter"] for row in rows] == names
    assert all(row["accepted_length"] == 1 for row in rows)
    assert [row["ratio_to_free"] is None for row in rows] == [True, False, False, True, True]
    assert capsys.readouterr().out.count("\n") == 1 + len(names)


def test_random_drafts_have_published_sizes() -> None:
    def size(tensors: Named) -> int:
        return sum(tensor.numel() for _, tensor in tensors)

    wide, config = SHAPES["llama-3.1-8b"], load_model_config(BUNDLED_MODEL)
    layers = (wide.layer(config.layers[0]),) * wide.layers
    target = drafters.empty(replace(config, vocab_size=wide.vocab, layers=layers, tie_word_embeddings=False))
    assert size(drafters.tensors_of(target)) == 8_030_261_248  # Llama-3.1-8B
    made = drafters.standalone(target, drafters.LLAMA_1B, torch.bfloat16)
    assert size(made[0]) == 1_235_814_400  # Llama-3.2-1B
    tensors, written = drafters.block(target, torch.bfloat16)
    assert dict(tensors)["fc.weight"].shape == (4096, 5 * 4096)
    assert written["dflash_config"]["target_layer_ids"] == [1, 8, 15, 22, 29]


LAYER = [
    "_add_rms_norm_kernel",
    "nvjet_a",
    "_rotary_store_kv_kernel",
    "_attend_kernel",
    "_linear_kernel",
    "_add_rms_norm_kernel",
    "nvjet_b",
    "_silu_and_mul_kernel",
    "_linear_kernel",
    "_add_rms_norm_kernel",
]
LAYER_PARTS = [
    *("norm", "qkv", "rotary + KV store", "attention", "o"),
    *("norm", "gate, up", "activation", "down", "norm"),
]
STEP = [
    *(
        "_root_kernel",
        "_pair_inputs_kernel",
        *LAYER[1:],
        "nvjet_c",
        "_scan",
        "_finish",
        "_grow_kernel",
        "_pack_kernel",
    ),
    *(
        "vectorized_gather_kernel",
        *LAYER,
        "CatArrayBatchedCopy",
        "_linear_kernel",
        "nvjet_d",
        "splitKreduce_kernel",
    ),
    *("_scan", "_finish", "_accept_kernel", "_pair_inputs_kernel", "nvjet_e", "_rotary_store_kv_kernel"),
    "_advance_kernel",
]


PARTS = [
    *("tree", "draft pairs", *(f"draft {part}" for part in LAYER_PARTS[1:]), "draft head"),
    *(
        "draft sampling",
        "draft sampling",
        "tree",
        "tree",
        "other",
        *LAYER_PARTS,
        "other",
        "fc",
        "head",
        "sum",
    ),
    *("sampling", "sampling", "tree", "store pairs", "store qkv", "store rotary + KV store", "tree"),
]
FOLDED = (STEP, ("_silu_and_mul_kernel",)), (PARTS, ("activation", "draft activation"))


def events(names: list[str], us: float = 10.0, early: float = 4.0) -> list[Event]:
    """Each begins ``early`` before the one before it ends."""
    return [
        Event(name, index * us - early * (index > 0), us + early * (index > 0), 1)
        for index, name in enumerate(names)
    ]


def test_a_kernel_s_time_is_what_it_adds() -> None:
    assert own_times(events(STEP)) == [10.0] * len(STEP)
    apart = [Event("a", 0, 5, 1), Event("b", 1, 2, 1), Event("c", 8, 3, 1)]
    assert own_times(apart) == [5, 0, 3]


def test_the_parts_of_a_step() -> None:
    assert parts(events(STEP)) == PARTS


def test_projections_that_hold_their_activation() -> None:
    """Of few tokens: the gate's is followed by the next projection."""
    step, expected = ([each for each in list_ if each not in without] for list_, without in FOLDED)
    assert parts(events(step)) == expected


def test_bars_add_up_to_the_step(tmp_path: Path) -> None:
    step = events(STEP)
    rows = bars([step, step, step[:5]], 512)
    assert sum(row["us"] for row in rows) == pytest.approx(step[-1].end - step[0].start)
    found = {row["part"]: row for row in rows}
    assert found["o"]["bytes"] == 2 * 4096 * 4096
    assert found["draft o"]["floor_us"] == found["o"]["floor_us"] == pytest.approx(7.93, abs=0.01)
    assert found["draft attention"]["bytes"] == 4 * 8 * 128 * 512
    assert found["norm"]["launches"] == 3
    assert found["gaps"]["us"] == pytest.approx(0)
    assert lines(rows)[-1].startswith("all")
    waterfall_picture([("before", rows), ("after", rows)], tmp_path / "waterfall.png")
    assert (tmp_path / "waterfall.png").stat().st_size > 10_000


def test_a_pick_is_judged_by_the_exhaustive_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def board(batch: int, best: list[int] | None, **ratios: float) -> dict[str, Any]:
        shapes: list[dict[str, Any]] = [{"shape": None, "ratio_to_plain": 1.0}]
        for name, ratio in ratios.items():
            shapes.append({"shape": list(map(int, name[1:].split("_"))), "ratio_to_plain": ratio})
        return {"batch": batch, "best": best, "shapes": shapes}

    tuned = [board(1, [3, 1, 4]), board(8, None)]
    all_ = [board(1, [5, 1, 6], s3_1_4=2.0, s5_1_6=2.1), board(8, [5, 1, 6], s3_1_4=0.9, s5_1_6=0.8)]
    runs = {"tuned": (tuned, (3, 1, 4), 60.0), "exhaustive": (all_, (5, 1, 6), 200.0)}
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(tuner, "tune", lambda given, directory, name: asked.append(given) or runs[name])
    found = tuner.compare(["--a"], 1.0, 2.0, tmp_path)
    assert asked == [["--a", "--minutes", "1.0"], ["--a", "--minutes", "2.0", "--exhaustive"]]
    assert found["share"] == pytest.approx((2.0 / 2.1 * 0.9 / 0.8) ** 0.5)
    small, large = found["batches"]
    assert (small["pick"], small["best"]) == ((3, 1, 4), (5, 1, 6))
    assert small["share"] == pytest.approx(2.0 / 2.1)
    assert (large["pick"], large["best"], large["share"]) == (None, None, 1)
    assert "share 0.952, goal 0.98" in tuner.tuner_lines("code", found)[2]
