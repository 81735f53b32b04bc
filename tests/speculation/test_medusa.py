"""MEDUSA: published layouts load, and what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from tests.engines import (
    Checkpoints,
    answer_one,
    context_of,
)
from tests.reference import medusa
from tests.reference.medusa import make_medusa
from tests.reference.models import load_checkpoint
from tests.speculation.methods import PROMPT, check_alike, scheduler_of
from tests.speculation.oracle import SAMPLING


def test_heads_in_the_target_s_own_checkpoint(agreeing: Checkpoints, tmp_path: Path) -> None:
    """Medusa-2: ``medusa_head.*`` beside the model."""
    own = tmp_path / "both"
    state, config = load_checkpoint(agreeing.target)
    heads, _ = medusa.load(agreeing.others["MEDUSA"])
    medusa.save(
        own, state | {f"medusa_head.{name}": t for name, t in heads.items()}, config, "original safetensors"
    )
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=20)
    runs = [
        answer_one(scheduler_of("MEDUSA", own, draft, (4, 1, 5)), PROMPT, params).runs
        for draft in (own, agreeing.others["MEDUSA"])
    ]
    assert runs[0] == runs[1]
    assert max(runs[0]) > 1


def test_one_head_of_scores_for_all(random_models: Checkpoints, tmp_path: Path) -> None:
    """vLLM's ``original_lm_head``: the file's, which need not be the target's."""
    target = random_models.target
    plain = make_medusa(tmp_path / "plain", target, layout="vllm")
    state, config = medusa.load(plain)
    one = {name: tensor for name, tensor in state.items() if "lm_heads" not in name or ".0." in name}
    shared = medusa.save(tmp_path / "shared", one, config | {"original_lm_head": True}, "vllm")
    same = {name: state["lm_heads.0.weight"] if "lm_heads" in name else t for name, t in state.items()}
    repeated = medusa.save(tmp_path / "repeated", same, config, "vllm")
    check_alike("MEDUSA", target, shared, repeated)


def test_what_is_noted(agreeing: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draft = make_medusa(tmp_path / "draft", agreeing.target)
    file = draft / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "medusa_choices": [[0], [0, 0]]}))
    state, _ = medusa.load(draft)
    torch.save(state | {"5.surplus": torch.ones(2)}, draft / "medusa_lm_head.pt")
    with caplog.at_level("INFO", "specserve"):
        scheduler_of("MEDUSA", agreeing.target, draft, (2, 1, 3))
    for words in (
        "draft of 5 heads of 1 blocks, which score by their own output heads",
        "medusa_num_heads is 2 in its config; its tensors say 5",
        f"made for {agreeing.target} (base_model_name_or_path)",
        "medusa_choices is not used: each step's trees are selected by",
        "no parameter reads 5.surplus",
    ):
        assert words in caplog.text


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: s.pop("3.0.linear.bias"),
            r"has no tensor 3\.0\.linear\.bias: expected in medusa_lm_head\.pt",
        ),
        (lambda s: s.pop("3.1.weight"), r"has no tensor 3\.1\.weight: .*of shape \[64, 32\]"),
        (
            lambda s: s.update({"0.1.weight": torch.ones(60, 32)}),
            r"medusa_lm_head\.pt: tensor 0\.1\.weight has shape \[60, 32\], expected \[64, 32\]",
        ),
        (
            lambda s: s.update({"1.0.linear.weight": torch.ones(48, 48)}),
            r"tensor 1\.0\.linear\.weight has shape \[48, 48\], expected \[32, 32\]",
        ),
        (lambda s: s.update({"2.1.weight": torch.ones(64, 32).long()}), r"2\.1\.weight has dtype int64"),
        (
            lambda s: s.update({"token_map": torch.tensor([1, 64])}),
            r"tensor token_map must list different token ids from 0 to 63",
        ),
        (
            lambda s: (s.clear(), s.update({"fc.weight": torch.ones(2, 2)})),
            r"holds no Medusa heads: expected tensors like 0\.0\.linear\.weight or blocks\.0\.layers\.0\.weight, "
            r"found fc\.weight in medusa_lm_head\.pt",
        ),
    ],
    ids=range(7),
)
def test_broken_files(change: Change, words: str, agreeing: Checkpoints, tmp_path: Path) -> None:
    draft = make_medusa(tmp_path / "draft", agreeing.target)
    state, _ = medusa.load(draft)
    change(state)
    torch.save(state, draft / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=words):
        scheduler_of("MEDUSA", agreeing.target, draft, (2, 1, 3))


def test_a_file_that_runs_code_is_refused(agreeing: Checkpoints, tmp_path: Path) -> None:
    draft = make_medusa(tmp_path / "draft", agreeing.target)
    torch.save({"0.0.linear.weight": torch.nn.Linear(2, 2)}, draft / "medusa_lm_head.pt")
    with pytest.raises(
        ValueError, match=r"medusa_lm_head\.pt is not a readable torch checkpoint: it wants to run"
    ):
        scheduler_of("MEDUSA", agreeing.target, draft, (2, 1, 3))


def test_weights_of_8_bits(agreeing: Checkpoints) -> None:
    draft = agreeing.others["MEDUSA"]
    rounding = {"speculative_draft_quantization": "int8"}
    scheduler = scheduler_of("MEDUSA", agreeing.target, draft, (4, 1, 5), **rounding)
    rounded = context_of(scheduler).drafter.heads.lm_heads[0].weight  # type: ignore[attr-defined]
    stored = medusa.load(draft)[0]["0.1.weight"].double()
    assert 0 < (rounded - stored).abs().max() < 0.02 * stored.abs().max()
