"""HYDRA: with and without a layer, and what does not fit is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import Checkpoints, context_of
from tests.reference.hydra import make_hydra
from tests.speculation.methods import (
    Change,
    check_accepted,
    check_broken,
    check_cached,
    check_texts,
    in_each_configuration,
    scheduler_of,
)

METHOD = "HYDRA"


@pytest.fixture(scope="module")
def both(agreeing: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Checkpoints]:
    """Hydra++ and Hydra."""
    plain = make_hydra(tmp_path_factory.mktemp("hydra"), agreeing.target, layered=False, agree=True)
    return {True: agreeing, False: replace(agreeing, others={METHOD: plain})}


@in_each_configuration
def test_no_text_changes_without_the_layer(
    configuration: dict[str, Any], both: dict[bool, Checkpoints]
) -> None:
    row = check_texts(both[False], METHOD, (4, 3, 9), configuration)
    assert row.mean_accepted_length > 1.1, "most are sampled"


def test_drafts_are_accepted_without_the_layer(both: dict[bool, Checkpoints]) -> None:
    check_accepted(both[False], METHOD, (4, 1, 5))


def test_only_the_layer_has_a_cache(both: dict[bool, Checkpoints]) -> None:
    layers = {
        kind: len(context_of(models.scheduler(METHOD, (2, 1, 3))).drafter.kv) for kind, models in both.items()
    }
    assert layers == {True: 1, False: 0}


def test_a_cached_prompt_without_the_layer(random_models: Checkpoints, tmp_path: Path) -> None:
    draft = make_hydra(tmp_path / "draft", random_models.target, layered=False)
    check_cached(scheduler_of(METHOD, random_models.target, draft, (3, 2, 6), page_size=4))


@pytest.mark.parametrize(
    ("layered", "change", "words"),
    [
        (
            True,
            lambda s, c: s.pop("prefix_embeding_layer.norm.weight"),
            r"has no tensor prefix_embeding_layer\.norm",
        ),
        (True, lambda s, c: s.pop("hydra_lm_head.1.1.bias"), r"has no tensor hydra_lm_head\.1\.1\.bias"),
        (
            True,
            lambda s, c: s.update({"hydra_mlp.2.5.linear.weight": torch.ones(32, 32)}),
            r"2\.5\.linear\.weight differs from hydra_mlp\.2\.3",
        ),
        (
            True,
            lambda s, c: s.update({"hydra_mlp.1.1.linear.weight": torch.ones(32, 32)}),
            r"expected \[32, 96\]",
        ),
        (False, lambda s, c: s.pop("hydra_lm_head.2.bias"), r"has no tensor hydra_lm_head\.2\.bias"),
        (
            False,
            lambda s, c: (s.clear(), s.update(fc=torch.ones(2))),
            r"no Hydra heads: expected .* found fc in",
        ),
        (
            False,
            lambda s, c: c.update(hydra_head_arch="eagle-attn"),
            'hydra_head_arch must be "mlp", found "eagle',
        ),
        (False, lambda s, c: c.update(grounded_heads=False), "grounded_heads must be true, found false"),
        (True, lambda s, c: c.update(hidden_state_offset=1), "hidden_state_offset must be 0, found 1"),
    ],
    ids=range(9),
)
def test_broken_files(
    layered: bool, change: Change, words: str, both: dict[bool, Checkpoints], tmp_path: Path
) -> None:
    check_broken(both[layered], METHOD, change, words, tmp_path)
