"""``python -m specserve.check``: its report and exit code for matching and mismatching pairs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.shapes import SHAPES
from specserve.config import make_settings
from specserve.config.engine import EngineConfig
from specserve.config.paths import resolve_paths
from specserve.engine.memory import DeviceMemory, count_bytes
from specserve.layers.experts import Experts
from specserve.layers.linear import Linear, QuantizedLinear
from specserve.models.checkpoint import load_target
from specserve.models.gemma import GemmaModel
from specserve.models.read_config import load_model_config
from specserve.process.worker import build_scheduler
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.drafters.deferred import DEFERRED, Deferred
from specserve.tools.check.__main__ import main
from specserve.tools.check.measure import USELESS
from specserve.tools.check.memory import expected_memory, memory_needed
from specserve.tools.check.report import Acceptance, CheckReport, MemoryUse, Perplexity
from tests.engines import Checkpoints, drafting, head_of, held_as_on_a_gpu, make_scheduler
from tests.front.fake_engine import VOCAB
from tests.front.fakes import byte_tokenizer
from tests.ranks import ranks_in_threads
from tests.reference import llama
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.medusa import make_medusa
from tests.reference.models import (
    change_config,
    load_checkpoint,
    make_gemma3,
    make_llama,
    make_mimo,
    make_qwen3_5,
    make_qwen3_moe,
)
from tests.reference.p_eagle import make_p_eagle
from tests.reference.quantized import quantize

TAPS = "eagle_aux_hidden_state_layer_ids"
SMALL = DeviceMemory(2**16, 2**16)
FLAGS = ["--dtype", "float64", "--device", "cpu", "--max-tokens", "12"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    path = tmp_path_factory.mktemp("check")
    target = make_llama(
        path / "target", vocab=VOCAB, eos=256, branch_scale=0.04, rope_theta=5e5, max_positions=4096
    )
    byte_tokenizer().save_pretrained(target)
    eagle = make_eagle(path / "eagle", target, agree=True)
    eagle3 = make_eagle3(path / "eagle3", target, agree=True, draft_vocab=40)
    return Checkpoints(target, eagle, eagle3, {"P_EAGLE": make_p_eagle(path / "p_eagle", target)})


def edit(directory: Path, copy: Path, **fields: Any) -> Path:
    """A copy of a checkpoint whose config.json has other fields."""
    copy.mkdir()
    for file in directory.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return change_config(copy, **fields)


def check(
    capsys: pytest.CaptureFixture[str],
    target: Path,
    draft: Path | None,
    *flags: str,
    algorithm: str = "EAGLE",
) -> tuple[int, Any]:
    """The exit code and the report."""
    drafting = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)]
    argv = ["--model-path", str(target), *FLAGS, *(drafting if draft else []), "--json", *flags]
    code = main(argv)
    return code, json.loads(capsys.readouterr().out)


def test_a_pair_that_fits(pair: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(capsys, pair.target, pair.eagle)
    assert (code, report["exit_code"], report["problems"], report["error"]) == (0, 0, [], None)
    for words in ("context_length = 4096: ", "speculation of (5, 4, 8) ", "draft rotary base 10000"):
        assert any(words in choice for choice in report["choices"]), words
    found = report["acceptance"]
    assert found["tokens_per_step"] == pytest.approx(1 + found["accepted"] / found["steps"])
    assert found["tokens_per_step"] > 2
    assert found["same_texts"] == found["prompts"] == 6
    assert found["by_position"] == sorted(found["by_position"], reverse=True)
    assert 0 < found["by_position"][0] <= 1
    memory = report["memory"]
    assert memory["loaded"]
    assert memory["pool"] == memory["pool_tokens"] * memory["kv_per_token"]
    assert memory["weights"] > memory["draft"] > 0
    rope = next(remark for remark in report["remarks"] if "rotary base" in remark)
    assert (
        "rotary base 10000 (its config has no rope_theta), scaling default; the target's base is 500000"
        in rope
    )
    assert rope.endswith("--speculative-draft-config-override '{\"rope_theta\": 500000}'")
    assert any("max_position_embeddings 2048, the context is 4096" in remark for remark in report["remarks"])


def test_what_a_rounded_weight_takes() -> None:
    """In addition to the weight, a byte a number and a factor for each 128."""
    rounded = QuantizedLinear(Linear(256, 64, bias=False), torch.int8)
    assert count_bytes([rounded], set()) == 256 * 64 * (4 + 1) + 2 * 64 * 4


def test_without_running(pair: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(capsys, pair.target, pair.eagle3, "--no-run", algorithm="EAGLE3")
    assert (code, report["acceptance"]) == (0, None)
    assert report["memory"]["draft"] > 0
    assert any(f"it knows 40 of {VOCAB} tokens" in remark for remark in report["remarks"])


def test_what_rounding_loses(pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the perplexity of the model by itself, whose windows see nothing of each other."""
    file, words = tmp_path / "text", "Rounding loses a little of every number. " * 3
    file.write_text(words)
    flags = ["--no-run", "--perplexity", str(file), "--context-length", "51"]
    _, report = check(capsys, pair.target, None, *flags)
    tokens, scores = list(words.encode()), []
    for start in range(0, len(tokens), 50):
        window = tokens[start : start + 50]
        logits = llama.forward(*load_checkpoint(pair.target), window).logits[:-1].log_softmax(-1)
        scores.append(logits.gather(1, torch.tensor(window[1:])[:, None]))
    plain = float((-torch.cat(scores).mean()).exp())
    expected = {
        "tokens": len(tokens) - 3,
        "window": 50,
        "found": pytest.approx(plain),
        "plain": None,
        "rounds": "",
        "not_compared": "",
    }
    assert report["perplexity"] == expected
    _, report = check(
        capsys, pair.target, pair.eagle, *flags, "--quantization", "int4", "--kv-cache-dtype", "fp8"
    )
    found = report["perplexity"]
    assert found["rounds"] == "--quantization int4 and --kv-cache-dtype fp8_e4m3"
    assert found["plain"] == pytest.approx(plain)
    assert found["found"] != pytest.approx(plain, rel=1e-4)
    assert f"{plain:.4f} without --quantization int4" in CheckReport(perplexity=Perplexity(**found)).text()
    with patch("specserve.tools.check.perplexity.device_memory", return_value=SMALL):
        code, report = check(capsys, pair.target, pair.eagle, *flags, "--quantization", "int4")
    assert (code, report["perplexity"]["plain"]) == (0, None)
    assert report["perplexity"]["found"] == pytest.approx(found["found"], rel=0.1)
    words = "cpu has 0.0 GiB, and the model without --quantization int4 needs 0.0; to compare, score it"
    assert report["perplexity"]["not_compared"].startswith(words)
    assert f"not compared: {words}" in CheckReport(perplexity=Perplexity(**report["perplexity"])).text()
    code, report = check(capsys, pair.target, None, "--no-run", "--perplexity", str(tmp_path / "none"))
    assert (code, report["error"][:13]) == (2, "--perplexity:")


def test_a_draft_beside_copied_text_is_counted(pair: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    _, alone = check(capsys, pair.target, pair.eagle, "--no-run")
    _, merged = check(capsys, pair.target, pair.eagle, "--no-run", algorithm="EAGLE+NGRAM")
    assert merged["memory"]["draft"] == alone["memory"]["draft"] > 0


def test_heads_of_fewer_levels_than_are_measured(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = make_medusa(tmp_path / "heads", pair.target, heads=2, agree=True)
    code, report = check(capsys, pair.target, draft, algorithm="MEDUSA")
    assert (report["error"], report["memory"]["loaded"]) == (None, True)
    assert code == (report["acceptance"]["tokens_per_step"] < USELESS)
    assert any("speculation of (2, 4, 8) " in choice for choice in report["choices"])
    assert any("draft of 2 heads of 1 blocks" in choice for choice in report["choices"])
    assert len(report["acceptance"]["by_position"]) <= 2
    assert report["acceptance"]["same_texts"] == 6
    code, report = check(capsys, pair.target, pair.eagle, algorithm="MEDUSA")
    assert code == 2
    assert "holds no Medusa heads" in report["error"]


def test_a_draft_that_guesses_nothing(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    useless = make_eagle(tmp_path / "useless", pair.target, seed=5)
    (tmp_path / "prompts").write_text("abc\n\nanother one\n")
    code, report = check(capsys, pair.target, useless, "--prompts", str(tmp_path / "prompts"))
    assert code == 1
    assert report["acceptance"]["tokens_per_step"] < USELESS
    assert report["acceptance"]["prompts"] == report["acceptance"]["same_texts"] == 2
    (problem,) = report["problems"]
    assert "drafting only costs time" in problem


def test_mismatches_are_told_before_loading_fails(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taps = {"eagle_aux_hidden_state_layer_ids": [2, 20, 37], "eagle_config": {}}
    draft = edit(pair.eagle3, tmp_path / "bad", vocab_size=64, **taps)
    code, report = check(capsys, pair.target, draft, algorithm="EAGLE3")
    assert code == 2
    assert str(draft) in report["error"]
    assert not report["memory"]["loaded"]
    assert any("made for another tokenizer" in problem for problem in report["problems"])
    assert any("resolve to [2, 20, 37]; expected" in problem for problem in report["problems"])


def test_a_draft_is_looked_at_beside_a_target_that_cannot_be_loaded(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = edit(pair.target, tmp_path / "headless", tie_word_embeddings=False)
    weights = load_file(target / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, target / "model.safetensors")
    draft = edit(pair.eagle3, tmp_path / "draft", vocab_size=64)
    code, report = check(capsys, target, draft, algorithm="EAGLE3")
    assert (code, report["memory"]) == (2, None)
    assert "has no tensor lm_head.weight" in report["error"]
    assert any("made for another tokenizer" in problem for problem in report["problems"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"eagle_config": {TAPS: "2,3"}}, f"{TAPS} must be a list of integers, found '2,3'"),
        ({"eagle_config": None, TAPS: ["a", "b", "c"]}, f"{TAPS} must be a list of integers, found ['a'"),
        ({"eagle_config": [2, 3]}, "eagle_config must be an object, found [2, 3]"),
        ({"rope_scaling": "x"}, "rope_scaling must be an object or null, found 'x'"),
        ({"vocab_size": [1]}, "vocab_size [1] does not fit the target's"),
        ({"target_hidden_size": 7}, "target_hidden_size 7 does not fit the target's"),
        ({"draft_vocab_size": "40"}, "draft_vocab_size 40 does not fit"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
        ({"model": {"vocab_size": 64}}, "vocab_size 64 does not fit"),
    ],
)
def test_odd_drafts_are_problems(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], words: str
) -> None:
    draft = edit(pair.eagle3, tmp_path / "odd", **fields)
    code, report = check(capsys, pair.target, draft, algorithm="EAGLE3")
    assert code == 2
    assert any(words in problem for problem in report["problems"]), report["problems"]


def test_a_draft_is_read_as_loading_reads_it(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"eagle_config": {TAPS: [9, 20, 37]}, "rope_theta": 1e4}
    draft = edit(pair.eagle3, tmp_path / "overridden", **odd)
    override = json.dumps({TAPS: [0, 1, 3], "rope_theta": 5e5})
    flags = ("--no-run", "--speculative-draft-config-override", override)
    code, report = check(capsys, pair.target, draft, *flags, algorithm="EAGLE3")
    assert (code, report["problems"]) == (0, [])
    assert not any("rotary base" in remark for remark in report["remarks"])
    config = json.loads((pair.eagle3 / "config.json").read_text())
    nested = {"vocab_size": 64, "model": {"vocab_size": config["vocab_size"], "rope_theta": 5e5}}
    draft = edit(pair.eagle3, tmp_path / "nested", **nested)
    code, report = check(capsys, pair.target, draft, "--no-run", algorithm="EAGLE3")
    assert (code, report["problems"]) == (0, [])
    assert not any("rotary base" in remark for remark in report["remarks"])
    code, report = check(capsys, pair.target, pair.eagle3, "--no-run", algorithm="EAGLE")
    assert code == 2
    assert any("holds an EAGLE3 head" in problem for problem in report["problems"])


def test_an_unreadable_draft_is_a_problem(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = edit(pair.eagle, tmp_path / "bare")
    (draft / "config.json").unlink()
    code, report = check(capsys, pair.target, draft)
    assert code == 2
    assert any("config.json does not exist" in problem for problem in report["problems"])


def test_a_target_with_problems(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = edit(pair.target, tmp_path / "endless", eos_token_id=VOCAB)
    (target / "generation_config.json").unlink(missing_ok=True)
    tokenizer = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "eos_token": None}))
    code, report = check(capsys, target, None, "--no-run", "--max-total-tokens", "512", "--dtype", "float16")
    assert code == 1
    assert f"end tokens [{VOCAB}] are not among the model's {VOCAB} tokens" in report["problems"]
    assert any("nor its tokenizer has an end token" in problem for problem in report["problems"])
    assert any("pool holds 512 tokens, a context 4096" in problem for problem in report["problems"])
    assert any("served as float16: values over 65504" in remark for remark in report["remarks"])


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE", "EAGLE3", "MTP", "NEXTN", "P_EAGLE"])
def test_expected_memory_is_what_is_loaded(pair: Checkpoints, tmp_path: Path, algorithm: str) -> None:
    """MTP's draft lies in the model's own files; NEXTN's target keeps states; of P_EAGLE's, a rank has half."""
    target = make_mimo(tmp_path, vocab=VOCAB) if algorithm == "MTP" else pair.target
    if algorithm == "NEXTN":
        target = make_qwen3_5(tmp_path, vocab=VOCAB, state_size=16)
    given = {"model_path": str(target), "dtype": "float64", "device": "cpu", "skip_tokenizer_init": True}
    given["kv_cache_dtype"] = "fp8" if algorithm == "EAGLE3" else "auto"
    if "EAGLE" in algorithm:
        given["speculative_draft_model_path"] = str(pair.draft(algorithm))
    ranks = 2 if algorithm == "P_EAGLE" else 1
    given["tensor_parallel_size"] = ranks
    settings, _ = resolve_paths(make_settings(speculative_algorithm=algorithm, **given))
    with ranks_in_threads(torch.float64):
        built = build_scheduler(settings)
    expected, loaded = (
        expected_memory(EngineConfig.of(built.settings, load_model_config(target), cores=1)),
        memory_needed(cast(Scheduler, built.engine)),
    )
    built.engine.close()
    assert (expected.weights, expected.ranks) == (loaded.weights, ranks)
    assert expected.draft == loaded.draft
    assert (expected.draft > 0) == (algorithm != "NONE")
    assert expected.kv_per_token == loaded.kv_per_token
    assert expected.pool_tokens == pytest.approx(loaded.pool_tokens, abs=16)
    assert expected.longest_request == loaded.longest_request
    assert expected.full_contexts == loaded.full_contexts
    assert (expected.states, expected.prefixes) == (loaded.states, loaded.prefixes)
    assert (expected.states > 0) == (expected.prefixes > 0) == (algorithm == "NEXTN")
    if algorithm == "NONE":
        return
    on_gpu = replace(built.settings, max_total_tokens=4096, device="cuda", dtype="bfloat16")
    none, int8, fp8 = (
        expected_memory(
            EngineConfig.of(
                replace(on_gpu, speculative_draft_quantization=each), load_model_config(target), cores=1
            )
        ).draft
        for each in ("none", "int8", "fp8")
    )
    head = head_of(cast(Scheduler, built.engine))
    layers = {each for each in (*head.modules(), head.reader) if isinstance(each, Linear)}
    copies = [
        layer.out_features * (layer.in_features + 4 * ceil(layer.in_features / 128)) for layer in layers
    ]
    assert int8 - none == fp8 - none == sum(copies) > 0


@pytest.mark.parametrize(("algorithm", "tied"), [("EAGLE", False), ("EAGLE3", False), ("EAGLE3", True)])
def test_no_head_copies_a_scaled_embedding(algorithm: str, tied: bool, tmp_path: Path) -> None:
    """EAGLE scales the rows that it reads. EAGLE-3 normalizes them, and may score with the embedding as it is."""
    target = make_gemma3(tmp_path / "target")
    if algorithm == "EAGLE":
        draft = make_eagle(tmp_path / "draft", target)
    else:
        draft = make_eagle3(tmp_path / "draft", target, own_head=not tied)
        change_config(draft, tie_word_embeddings=tied)
    scheduler = make_scheduler(target, **drafting(algorithm, draft))
    model, head = scheduler.runner.context.target, head_of(scheduler)
    assert isinstance(model, GemmaModel)
    embedding, own = model.embed_tokens.weight, [*head.parameters(), *head.buffers()]
    drafter = scheduler.runner.context.drafter
    kept = [vars(part) for part in vars(drafter).values() if isinstance(part, Deferred)]
    own += [each for part in kept for each in part.values() if isinstance(each, torch.Tensor)]
    held = memory_needed(scheduler).draft - sum(each.nbytes for each in own)
    assert held == 0
    assert any(
        each.shape[1:2] == (DEFERRED,) for each in own
    )  # states kept for entries that are stored later
    tokens, features = torch.tensor([3, 5]), torch.zeros(2, embedding.shape[1])
    if algorithm == "EAGLE":
        seen: list[torch.Tensor] = []
        head.fc.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        head.project_kv(tokens, features)
        assert torch.equal(seen[0].chunk(2, 1)[0], embedding[tokens] * embedding.shape[1] ** 0.5)
    if tied:
        assert head.reader.weight is embedding


def test_a_draft_of_several_layers(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What does not fit is told before anything is loaded."""
    code, report = check(capsys, pair.target, pair.others["P_EAGLE"], "--no-run", algorithm="P_EAGLE")
    assert (code, report["problems"]) == (0, [])
    draft = edit(pair.others["P_EAGLE"], tmp_path / "draft", ptd_token_id=VOCAB)
    code, report = check(capsys, pair.target, draft, "--no-run", algorithm="P_EAGLE")
    assert code == 2
    assert any(f"ptd_token_id {VOCAB} is none of the target's" in problem for problem in report["problems"])


def test_a_model_that_does_not_fit(
    pair: Checkpoints, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.tools.check.mismatches.device_memory", lambda _: SMALL)
    monkeypatch.setattr("specserve.tools.check.__main__.load_engine", pytest.fail)  # it would end the process
    code, report = check(capsys, pair.target, pair.eagle, "--no-run")
    assert code == 2
    assert "cpu has 0.0 GiB" in report["error"]


def test_a_plan_for_gpus_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R1 with its first layer of experts alone, of which each of 8 ranks has an eighth in FP8. Where these
    tests run, it could not be loaded."""
    config = {**SHAPES["deepseek-r1-6-layers"], "num_hidden_layers": 4, "n_routed_experts": 256}
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    argv = ["--model-path", str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init", "--json"]
    plan = [*argv, "--context-length", "4096", "--device-memory"]
    assert main([*plan, "16GB", "--tp", "8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "2048 channels of an expert: 256 each" in report["ranks"]
    assert "1 latent in the KV cache: 1 each, 8 have the same" in report["ranks"]
    memory = report["memory"]
    dense, experts = 3 * 3 * 7168 * 18432 / 8, 257 * 3 * 7168 * 2048 / 8
    attention = 4 * (7168 * (1536 + 576) + (1536 * 192 + 512 * 256 * 2 + 7168 * 128) * 128 / 8)
    vocabulary = 2 * 2 * 7168 * 129280 / 8
    router = 2 * 7168 * 256
    assert memory["weights"] == pytest.approx(dense + experts + attention + vocabulary + router, rel=0.005)
    assert memory["whole"] == pytest.approx(4 * 7168 * (1536 + 576) + router, rel=0.05)
    assert memory["pool_tokens"] == pytest.approx((0.85 * 16e9 - memory["weights"]) / 4608, abs=16)
    assert not memory["loaded"]
    assert main([*plan, "16GB", "--tp", "8", "--ep-size", "8"]) == 0
    whole_experts = json.loads(capsys.readouterr().out)
    assert "256 experts: 32 each" in whole_experts["ranks"]
    assert whole_experts["memory"]["whole"] == memory["whole"]
    assert main([*plan, "16GB"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["memory"]["whole"]) == ([], 0)
    assert "cuda has 14.9 GiB, over 30.0 GiB are needed" in found["problems"][0]
    assert main([*plan, "80GB", "--chunked-prefill-size", "128"]) == 0
    graphs = found["memory"]["graphs"] - json.loads(capsys.readouterr().out)["memory"]["graphs"]
    heads = (2048 - 128) * 2 * 128 * (192 + 576 + 512 + 128)  # of the largest captured prompts
    assert heads < graphs < 1.5 * heads
    for more, words in (
        (["8"], "must be a size such as 80GiB or 80GB, found '8'"),
        (["8GiB", "--device", "cpu"], "--device must be auto or cuda, found cpu"),
        (["8GiB", "--perplexity", "text"], "loads nothing, so --perplexity can't be used"),
        (["8GiB", "--tp", "3"], "num_attention_heads must be a multiple of it, found 3 and 128"),
    ):
        assert main([*plan, *more]) == 2
        assert words in json.loads(capsys.readouterr().out)["error"]
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3.5-9b"]))
    assert main([*argv, "--device-memory", "24GB"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert any("; states take" in each and "--max-running-requests" in each for each in found["problems"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model-path", "/no/where"], "--model-path: /no/where does not exist"),
        (["--page-sise", "3"], "--page-sise: unknown flag"),
        (["--max-tokens", "0"], "--max-tokens: must be at least 2, found 0"),
        (["--prompts", "/no/where"], "--prompts: /no/where can't be read"),
    ],
)
def test_what_cannot_be_loaded(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().out


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    report = CheckReport(["device = cpu"], ["a problem"], ["a remark"])
    sizes = 2**34, 2**20, 2**17, 1000, 131072000, 2**20, 17 * 2**30, 2000, 7, 2, 2**30, 2**31, 9
    report.memory = MemoryUse("cuda:0", True, *sizes)
    report.acceptance = Acceptance(6, 100, 500, 200, 3.0, [0.9, 0.5], 5)
    text = report.text()
    for words in (
        "problems\n  a problem", "weights       16.00 GiB, at most 17.00 GiB while",
        "1.00 GiB of them are the same on each rank",
        "1000 tokens of 128.00 KiB", "CUDA graphs   1.00 MiB",
        "2.00 GiB: of all running requests, and of 9 cached prefixes",
        "7 requests as long as the context at a time, one of 2000 tokens",
        "3.00 tokens a step", "or more: 0.90 0.50", "5 of 6 texts", "problems: 1",
    ):  # fmt: skip
        assert words in text
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "--no-run" in printed
    assert "--speculative-algorithm" in printed


def test_the_output_that_a_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "speculation.md").read_text()
    shown = re.search(r"^  [\d.]+ tokens a step over.*?(?=\n```)", text, re.M | re.S)
    assert shown is not None
    assert main(["--device", "cpu", "--dtype", "float32", "--speculative-algorithm", "EAGLE3"]) == 0
    assert shown[0] in capsys.readouterr().out


def test_weights_of_a_quantized_checkpoint_are_read(
    pair: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU too, where shapes are those of dequantized weights."""
    path = quantize(pair.target, tmp_path / "fp8", "fp8 a tensor")
    byte_tokenizer().save_pretrained(path)
    code, report = check(capsys, path, None, "--no-run")
    assert code == 0
    assert "no parameter reads" not in json.dumps(report)


def test_experts_and_what_multiplies_them_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_qwen3_moe(tmp_path / "plain", hidden=64, inner=32, layers=2)
    path = quantize(plain, tmp_path / "nvfp4", "nvfp4")
    report = check(capsys, path, None, "--no-run", "--skip-tokenizer-init")[1]
    choices, said = report["choices"], report["memory"]["experts"]
    assert said == ["experts of 1 layers: 6 experts in float64, multiplied by PyTorch, one after another"]
    weights = (
        "weights: compressed-tensors: NVFP4 with a scale for 16 inputs and one a tensor, inputs as they are; "
    )
    assert any(choice.startswith(weights) for choice in choices)
    with (
        held_as_on_a_gpu(),
        patch("specserve_kernels.runs_triton", lambda found: found[0].dtype == torch.uint8),
    ):
        model = load_target(path, torch.float32, torch.device("cpu"), 8)
        words = {module.words for module in model.modules() if isinstance(module, Experts)}
    by = "multiplied by Triton, all chosen ones at once"
    argv = ["--model-path", str(plain), "--skip-tokenizer-init", "--device-memory", "8GB", "--json"]
    assert main(argv) == 1
    (planned,) = json.loads(capsys.readouterr().out)["memory"]["experts"]
    assert planned == f"experts of 1 layers: 6 experts in bfloat16, {by}"
    assert words == {f"6 experts in floats of 4 bits in groups of 16, {by}"}
