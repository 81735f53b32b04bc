"""Layers that keep a state: the text of transformers over many blocks, and the same text however it is computed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from specserve_kernels import Left, dispatch

from benchmarks.configurations import CHOICES, pairwise
from benchmarks.lossless import Models, make_items
from specserve import SamplingParams
from specserve.attention.recurrent import StatePass
from specserve.config import make_settings
from specserve.kv import states
from specserve.models.read_config import load_model_config
from specserve.process.assemble import resolve_engine
from specserve.scheduler import points
from tests.engines import answer_all, drafting, make_scheduler
from tests.matrix import check_matrix, check_texts_of, prompts
from tests.reference.block import make_block
from tests.reference.draft_models import make_eagle3
from tests.reference.models import make_qwen3_5
from tests.speculation.methods import scheduler_of


def test_the_text_of_transformers_over_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, which end within blocks, and in one."""
    monkeypatch.setattr(states, "BLOCK", 8)
    path, (prompt,) = make_qwen3_5(tmp_path), prompts([25])
    theirs: Any = transformers.Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32)
    check_texts_of(theirs, path, prompt, 24, (11, 512))


@pytest.mark.parametrize(
    ("device", "dtype", "count"),
    [("cpu", "float64", 6), pytest.param("cuda", "bfloat16", 2, marks=pytest.mark.gpu)],
)
def test_every_text_is_identical(
    device: str, dtype: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, pages and trees across ends of blocks, from cached prefixes, and preempted; on a GPU, where each
    configuration compiles kernels, in two."""
    monkeypatch.setattr(states, "BLOCK", 16)
    monkeypatch.setattr(points, "LAUNCH_COST", 4)
    target = make_qwen3_5(tmp_path / "target", branch_scale=0.04, head_dim=32, state_size=16)
    models = Models(target, {"EAGLE": target}, dtype, device)  # its own layer drafts
    (text,) = prompts([40])
    items = make_items([text[:length] for length in (3, 15, 16, 17, 31, 40)], 6, 20)
    choices = {**CHOICES, "speculation": ["EAGLE chain", "EAGLE tree", "NGRAM tree"], "batch": [4, 1]}
    report = check_matrix(models, items, 6, pairwise(choices)[::2][:count])
    assert max(row.mean_accepted_length for row in report.rows) > 1.5
    assert report.preemptions > 1
    assert sum(row.cached_tokens > 0 for row in report.rows) > count // 4


def test_drafts_of_other_kinds(tmp_path: Path) -> None:
    """EAGLE-3 and DFlash read states between delta nets, and trees have up to 64 nodes; in blocks as they are."""
    target = make_qwen3_5(tmp_path / "target", branch_scale=0.04)
    sampled = SamplingParams(temperature=0.8, seed=4, max_tokens=40, ignore_eos=True)
    work = [(prompt, sampled) for prompt in prompts([3, 40])]
    expected = [each.tokens for each in answer_all(make_scheduler(target), work)]
    for method, draft, shape in (
        ("EAGLE3", make_eagle3(tmp_path / "eagle3", target, agree=True), (3, 2, 8)),
        ("DFLASH", make_block(tmp_path / "dflash", target, agree=True), (3, 2, 8)),
        ("NEXTN", target, (6, 8, 64)),
    ):
        answers = answer_all(scheduler_of(method, target, draft, shape), work)
        assert [each.tokens for each in answers] == expected
        assert sum(each.usage.accepted for each in answers) > 4


@pytest.mark.parametrize("rows", [1, 2])
def test_what_kernels_keep_of_accepted_tokens(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as the reference keeps, of a single request too, where texts end, and after."""
    pytest.importorskip("triton")
    monkeypatch.setattr(states, "BLOCK", 16)
    index_BS, first_B1 = torch.arange(3).repeat(rows, 1), torch.arange(rows)[:, None]
    live_BS, draws = index_BS <= first_B1 + 1, torch.Generator().manual_seed(0)
    accepted: Any = SimpleNamespace(
        count_B=live_BS.sum(1), path_BS=(3 * first_B1 + index_BS).where(live_BS, 0)
    )
    runs: Any = SimpleNamespace(rows_B=first_B1[:, 0].flip(0), length_B=torch.full((rows,), 39))
    layer, cpu = states.DeltaState(1, 2, 16, 8, 4), torch.device("cpu")
    tables = [states.States([layer], rows + 1, torch.float32, cpu, page_size=8) for _ in range(2)]
    left = Left(*(torch.randn(each.shape, generator=draws) for each in tables[0].room(1, 3 * rows)))
    token_T = torch.arange(3 * rows) + 50
    for each in tables:
        each.ends_RX[0, 0], each.ends_RX[1:, 7] = 40, 51
        for length in (39, 41):
            runs.length_B.fill_(length)
            StatePass(each, runs, left, token_T=token_T).commit(accepted)
        monkeypatch.setattr(dispatch, "runs_triton", lambda _: True)
    assert all(torch.equal(each.ends_RX[:, 0], tables[0].ends_RX[:, 0]) for each in tables)
    assert tables[0].ends_RX[:rows, 0].tolist() == [40, 40][:rows]
    for expected, found in zip(*(each.rings for each in tables), strict=True):
        assert torch.equal(found[:, :-1], expected[:, :-1])  # the last row is padding's
        written = {
            index % found.shape[2] for index in found[0, 0].flatten(1).any(1).nonzero().flatten().tolist()
        }
        assert len(written) == 1


def test_states_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change texts, but drafts do not."""
    monkeypatch.setattr(states, "BLOCK", 8)
    path, (prompt,) = make_qwen3_5(tmp_path), prompts([25])
    shape = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    given = {"mamba_ssm_dtype": "bfloat16", "dtype": "float64"}
    work = [(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0))]
    (drafted,) = answer_all(make_scheduler(path, speculative_algorithm="NGRAM", **shape, **given), work)
    (plain,), (wide,) = (
        answer_all(make_scheduler(path, **each), work) for each in (given, {"dtype": "float64"})
    )
    assert drafted.tokens == plain.tokens
    assert drafted.usage.drafted
    assert [each.logprob for each in plain.logprobs] != [each.logprob for each in wide.logprobs]


def test_what_states_do_not_allow(tmp_path: Path) -> None:
    target, steps = make_qwen3_5(tmp_path), states.BLOCK
    shape = {"speculative_num_steps": steps, "speculative_eagle_topk": 1}
    shape["speculative_num_draft_tokens"] = steps + 1
    given = make_settings(
        model_path=str(target), skip_tokenizer_init=True, speculative_algorithm="NGRAM", **shape
    )
    _, notes, config = resolve_engine(given)
    assert config.shape == (steps - 1, 1, steps)
    words = f"Qwen3_5ForCausalLM verifies at most {steps - 1} levels, {steps} were given"
    assert f"speculation of {config.shape} (steps, topk, tokens): {words}" in notes
    window = {f"speculative_lookahead_{name}": 1 for name in ("window", "guesses")}
    with pytest.raises(
        ValueError, match=f"--speculative-lookahead-ngram, .*: .* at most {steps - 1} levels, found"
    ):
        make_scheduler(
            target, speculative_algorithm="LOOKAHEAD", speculative_lookahead_ngram=steps + 1, **window
        )
    with pytest.raises(ValueError, match="keeps states: a Qwen3_5ForCausalLM can only be a target"):
        make_scheduler(target, **drafting("STANDALONE", target))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("linear_num_key_heads", 0, "a positive integer, found 0"),
        ("full_attention_interval", 0, "a positive integer, found 0"),
        ("attn_output_gate", "no", "true or false, found 'no'"),
        ("rope_parameters", {"partial_rotary_factor": 0}, "a positive number, found 0"),
        ("layer_types", [["full_attention"]] * 3, "linear_attention or full_attention for each of 3 layers, found"),
        ("layer_types", ["linear_attention"] * 3, "full_attention once at least, found"),
    ],
)  # fmt: skip
def test_fields_that_are_not_supported(name: str, value: Any, words: str, tmp_path: Path) -> None:
    config = make_qwen3_5(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), name: value}))
    field = next(iter(value)) if isinstance(value, dict) else name
    with pytest.raises(ValueError, match=f"{field} must (be|name) {words}"):
        load_model_config(tmp_path)
