"""MLP_SPECULATOR: published files load, drafts match a slow reference, and no text changes."""

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
from tests.engines import Checkpoints, Shape, answer_one, make_scheduler, record_drafts
from tests.reference import mlp_speculator
from tests.reference.mlp_speculator import make_mlp_speculator
from tests.reference.models import load_checkpoint, save_checkpoint
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

METHOD = "MLP_SPECULATOR"
SHAPES: list[Shape] = [(4, 1, 5), (3, 3, 9)]
MAKES: dict[str, dict[str, Any]] = {
    "llama3-8b": {},
    "scaled": {"scale_input": True},
    "llama3-70b": {"tied": True, "scale_input": True},
    "tied, as often as used": {"tied": True, "copies": True, "n_predict": 5},
    "inner as wide as the target": {"inner": 32, "n_predict": 5},
}


@each_with_both(MAKES, SHAPES)
def test_drafts_are_those_of_the_slow_reading(
    make: str, shape: Shape, sampling: str, random_models: Checkpoints, tmp_path: Path
) -> None:
    """Every candidate of every step, from the first on."""
    target = random_models.target
    draft = make_mlp_speculator(tmp_path / "draft", target, **MAKES[make])
    check_drafts(
        scheduler_of(METHOD, target, draft, shape, page_size=4),
        shape,
        sampling,
        lambda committed, path: mlp_speculator.next_logits(draft, target, committed, path),
    )


@in_each_configuration
def test_every_text_is_that_of_plain_decoding(configuration: dict[str, Any], agreeing: Checkpoints) -> None:
    row = check_texts(agreeing, METHOD, SHAPES[configuration["batch"] > 1], configuration)
    assert row.mean_accepted_length > 1.1, "most are sampled"
    assert (row.preemptions > 0) == (configuration["pool"] == "small")


def test_a_draft_that_fits_is_accepted(agreeing: Checkpoints, tmp_path: Path) -> None:
    """It sees the root, so greedy texts of a target that is nearly a table are guessed, tied or not."""
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=60)
    for tied in (False, True):
        draft = make_mlp_speculator(tmp_path / str(tied), agreeing.target, agree=True, tied=tied)
        usage = answer_one(scheduler_of(METHOD, agreeing.target, draft, (4, 1, 5)), PROMPT, params).usage
        assert usage.accepted / usage.steps > 0.35, tied


def test_a_cached_prompt_drafts_as_a_computed_one(random_models: Checkpoints, tmp_path: Path) -> None:
    draft = make_mlp_speculator(tmp_path / "draft", random_models.target)
    check_cached(scheduler_of(METHOD, random_models.target, draft, (3, 2, 6), page_size=4))


def test_the_controller_goes_no_deeper_than_the_levels(agreeing: Checkpoints, tmp_path: Path) -> None:
    draft = make_mlp_speculator(tmp_path / "draft", agreeing.target, n_predict=2, agree=True)
    settings = {"speculative_algorithm": METHOD, "speculative_draft_model_path": str(draft)}
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=100)
    answer = answer_one(make_scheduler(agreeing.target, **settings), PROMPT, params)
    assert answer.tokens == answer_one(make_scheduler(agreeing.target), PROMPT, params).tokens
    assert 1 < max(answer.runs) <= 3
    with pytest.raises(
        ValueError, match=r"--speculative-num-steps: the draft .* has at most 2 levels, found 3"
    ):
        scheduler_of(METHOD, agreeing.target, draft, (3, 1, 4))


def test_names_without_the_prefix(random_models: Checkpoints, tmp_path: Path) -> None:
    target = random_models.target
    named = make_mlp_speculator(tmp_path / "named", target)
    state, config = load_checkpoint(named)
    bare = save_checkpoint(
        tmp_path / "bare",
        {name.removeprefix("speculator."): t for name, t in state.items()},
        config,
        safetensors=False,
    )
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=8)
    trees = []
    for draft in (named, bare):
        with record_drafts() as drafts:
            answer_one(scheduler_of(METHOD, target, draft, (3, 2, 6)), PROMPT, params)
        trees.append([each.nodes(0) for each in drafts])
    assert trees[0] == trees[1]


def test_what_is_noted(agreeing: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draft = make_mlp_speculator(tmp_path / "draft", agreeing.target, tied=True, scale_input=True)
    state, config = load_checkpoint(draft)
    save_checkpoint(
        draft, state | {"speculator.surplus": torch.ones(2)}, config | {"inner_dim": 4096}, safetensors=True
    )
    with caplog.at_level("INFO", "specserve"):
        scheduler_of(METHOD, agreeing.target, draft, (2, 1, 3))
    for words in (
        "draft of 4 levels of 24 channels, which share their weights; its input is normed",
        "inner_dim is 4096 in its config; its tensors say 24",
        "top_k_tokens_per_head is not used: each step's trees are selected by",
        "no parameter reads speculator.surplus",
    ):
        assert words in caplog.text


Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, c: s.pop("speculator.ln.3.bias"), r"has no tensor speculator\.ln\.3\.bias: expected in"),
        (
            lambda s, c: s.update({"speculator.emb.1.weight": torch.ones(60, 24)}),
            r"tensor speculator\.emb\.1\.weight has shape \[60, 24\], expected \[64, 24\]",
        ),
        (
            lambda s, c: s.update({"speculator.proj.0.weight": torch.ones(24, 48)}),
            r"tensor speculator\.proj\.0\.weight has shape \[24, 48\], expected \[24, 32\]",
        ),
        (
            lambda s, c: s.pop("speculator.head.3.weight"),
            r"n_predict must be 3, the number of heads in its files, found 4",
        ),
        (
            lambda s, c: c.pop("n_predict"),
            r"n_predict must be 4, the number of heads in its files, found None",
        ),
        (
            lambda s, c: c.update(n_predict="4"),
            r"config\.json: n_predict must be a positive integer, found '4'",
        ),
        (lambda s, c: c.update(tie_weights=1), r"config\.json: tie_weights must be true or false, found 1"),
        (
            lambda s, c: c.update(tie_weights=True),
            r"tensor speculator\.\w+\.\d\.\w+ differs from speculator\.\w+\.\d\.\w+, expected the same: tie_weights is",
        ),
        (
            lambda s, c: (s.clear(), s.update({"fc.weight": torch.ones(2, 2)})),
            r"holds no MLP speculator: expected speculator\.proj\.0\.weight and .*, found fc\.weight in",
        ),
    ],
    ids=range(9),
)
def test_broken_files(change: Change, words: str, agreeing: Checkpoints, tmp_path: Path) -> None:
    draft = make_mlp_speculator(tmp_path / "draft", agreeing.target)
    state, config = load_checkpoint(draft)
    change(state, config)
    save_checkpoint(draft, state, config, safetensors=True)
    with pytest.raises(ValueError, match=words):
        scheduler_of(METHOD, agreeing.target, draft, (2, 1, 3))


def test_settings_that_do_not_fit(agreeing: Checkpoints) -> None:
    draft = str(agreeing.others[METHOD])
    given = {"model_path": str(agreeing.target), "speculative_algorithm": METHOD}
    with pytest.raises(
        ValueError, match=f"--speculative-draft-model-path: needed for --speculative-algorithm {METHOD}"
    ):
        resolve_engine(Settings(**given))
    given["speculative_draft_model_path"] = draft
    for value, words in {f"{draft}/config.json": "", "dynamic": " dynamic"}.items():
        with pytest.raises(
            ValueError, match=f"--speculative-token-map{words} can't be used with .*they score"
        ):
            resolve_engine(Settings(**given, speculative_token_map=value))
    override = {"speculative_draft_config_override": json.dumps({"rope_theta": 5})}
    with pytest.raises(
        ValueError, match="rope_theta is a field of EAGLE and EAGLE3 and MTP and P_EAGLE heads"
    ):
        scheduler_of(METHOD, agreeing.target, agreeing.others[METHOD], (2, 1, 3), **override)


def test_weights_of_8_bits(agreeing: Checkpoints) -> None:
    """The same text of a little worse guesses, each step still of several tokens."""
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=30)
    answers = [
        answer_one(
            scheduler_of(
                METHOD,
                agreeing.target,
                agreeing.others[METHOD],
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
