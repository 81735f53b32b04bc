"""MEDUSA: both published layouts load, drafts match a slow reference, and no text changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from specserve.config.settings import Settings
from specserve.process.assemble import resolve_engine
from tests.engines import (
    Checkpoints,
    Shape,
    answer_one,
    by_levels,
    context_of,
    make_scheduler,
    priced,
    record_drafts,
)
from tests.reference import medusa
from tests.reference.medusa import make_medusa
from tests.reference.models import load_checkpoint
from tests.speculation.methods import (
    PROMPT,
    check_cached,
    check_drafts,
    check_texts,
    each_with_both,
    in_each_configuration,
    scheduler_of,
)
from tests.speculation.oracle import SAMPLING

SHAPES: list[Shape] = [(4, 1, 5), (3, 3, 9)]
MAKES: dict[str, dict[str, Any]] = {
    "original": {},
    "original, two blocks": {"blocks": 2},
    "original safetensors": {"layout": "original safetensors", "heads": 4},
    "version 2": {"layout": "version 2"},
    "vllm": {"layout": "vllm", "blocks": 2},
    "vllm, truncated": {"layout": "vllm", "draft_vocab": 24},
}


@each_with_both(MAKES, SHAPES)
def test_drafts_are_those_of_the_slow_reading(
    make: str, shape: Shape, sampling: str, random_models: Checkpoints, tmp_path: Path
) -> None:
    """Every candidate of every step, from the first on."""
    target = random_models.target
    draft = make_medusa(tmp_path / "draft", target, **MAKES[make])
    check_drafts(
        scheduler_of("MEDUSA", target, draft, shape, page_size=4),
        shape,
        sampling,
        lambda committed, path: medusa.next_logits(draft, target, committed, len(path)),
    )


@in_each_configuration
def test_every_text_is_that_of_plain_decoding(configuration: dict[str, Any], agreeing: Checkpoints) -> None:
    row = check_texts(agreeing, "MEDUSA", SHAPES[configuration["batch"] > 1], configuration)
    assert row.mean_accepted_length > 1.04, "most are sampled, and heads do not see the root"
    assert (row.preemptions > 0) == (configuration["pool"] == "small")


def test_a_cached_prompt_drafts_as_a_computed_one(random_models: Checkpoints, tmp_path: Path) -> None:
    draft = make_medusa(tmp_path / "draft", random_models.target)
    check_cached(scheduler_of("MEDUSA", random_models.target, draft, (3, 2, 6), page_size=4))


def test_the_controller_goes_no_deeper_than_the_heads(agreeing: Checkpoints, tmp_path: Path) -> None:
    draft = make_medusa(tmp_path / "draft", agreeing.target, heads=2, agree=True)
    settings = {"speculative_algorithm": "MEDUSA", "speculative_draft_model_path": str(draft)}
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=100)
    with priced(by_levels(0.01)):
        answer = answer_one(make_scheduler(agreeing.target, **settings), PROMPT, params)
    assert answer.tokens == answer_one(make_scheduler(agreeing.target), PROMPT, params).tokens
    assert 1 < max(answer.runs) <= 3
    with pytest.raises(
        ValueError, match=r"--speculative-num-steps: the draft .* has at most 2 levels, found 3"
    ):
        scheduler_of("MEDUSA", agreeing.target, draft, (3, 1, 4))


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
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=8)
    same = {name: state["lm_heads.0.weight"] if "lm_heads" in name else t for name, t in state.items()}
    repeated = medusa.save(tmp_path / "repeated", same, config, "vllm")
    trees = []
    for draft in (shared, repeated):
        with record_drafts() as drafts:
            answer_one(scheduler_of("MEDUSA", target, draft, (3, 2, 6)), PROMPT, params)
        trees.append([each.nodes(0) for each in drafts])
    assert trees[0] == trees[1]


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


def test_settings_that_do_not_fit(agreeing: Checkpoints) -> None:
    given = {"model_path": str(agreeing.target), "speculative_algorithm": "MEDUSA"}
    with pytest.raises(
        ValueError, match="--speculative-draft-model-path: needed for --speculative-algorithm MEDUSA"
    ):
        resolve_engine(Settings(**given))
    draft = {"speculative_draft_model_path": str(agreeing.others["MEDUSA"])}
    with pytest.raises(ValueError, match=r"--speculative-token-map can't be used with .*they score"):
        resolve_engine(
            Settings(**given, **draft, speculative_token_map=str(agreeing.others["MEDUSA"] / "config.json"))
        )
    override = {"speculative_draft_config_override": '{"rope_theta": 5}'}
    with pytest.raises(
        ValueError, match="rope_theta is a field of EAGLE and EAGLE3 and MTP and P_EAGLE heads"
    ):
        scheduler_of("MEDUSA", agreeing.target, agreeing.others["MEDUSA"], (2, 1, 3), **override)


def test_weights_of_8_bits(agreeing: Checkpoints) -> None:
    """The same text of a little worse guesses, each step still of several tokens."""
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=30)
    answers = [
        answer_one(
            scheduler_of(
                "MEDUSA",
                agreeing.target,
                agreeing.others["MEDUSA"],
                (4, 1, 5),
                speculative_draft_quantization=kind,
            ),
            PROMPT,
            params,
        )
        for kind in ("none", "int8", "fp8")
    ]
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens
    assert all(max(answer.runs) > 1 for answer in answers)
    heads = context_of(
        scheduler_of(
            "MEDUSA",
            agreeing.target,
            agreeing.others["MEDUSA"],
            (4, 1, 5),
            speculative_draft_quantization="int8",
        )
    ).drafter.heads  # type: ignore[attr-defined]
    stored = medusa.load(agreeing.others["MEDUSA"])[0]["0.1.weight"].double()
    rounded = heads.lm_heads[0].weight
    assert 0 < (rounded - stored).abs().max() < 0.02 * stored.abs().max()
