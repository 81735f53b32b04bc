"""HYDRA: both kinds are accepted and change no text, and what does not fit is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines import Checkpoints, context_of
from tests.reference.hydra import make_hydra
from tests.reference.models import load_checkpoint, save_checkpoint
from tests.speculation.methods import (
    check_accepted,
    check_cached,
    check_texts,
    in_each_configuration,
    scheduler_of,
)

METHOD = "HYDRA"
in_each_kind = pytest.mark.parametrize("layered", [True, False], ids=["Hydra++", "Hydra"])


@pytest.fixture(scope="module")
def both(agreeing: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Checkpoints]:
    """Hydra++ and Hydra."""
    plain = make_hydra(tmp_path_factory.mktemp("hydra"), agreeing.target, layered=False, agree=True)
    return {True: agreeing, False: replace(agreeing, others={METHOD: plain})}


@in_each_configuration
@in_each_kind
def test_every_text_is_that_of_plain_decoding(
    layered: bool, configuration: dict[str, Any], both: dict[bool, Checkpoints]
) -> None:
    row = check_texts(both[layered], METHOD, (4, 3, 9), configuration)
    assert row.mean_accepted_length > 1.1, "most are sampled"


@in_each_kind
def test_a_draft_that_fits_is_accepted(layered: bool, both: dict[bool, Checkpoints]) -> None:
    check_accepted(both[layered], METHOD, (4, 1, 5))


def test_only_the_layer_has_a_cache(both: dict[bool, Checkpoints]) -> None:
    layers = {
        kind: len(context_of(models.scheduler(METHOD, (2, 1, 3))).drafter.kv) for kind, models in both.items()
    }
    assert layers == {True: 1, False: 0}


@in_each_kind
def test_a_cached_prompt_drafts_as_a_computed_one(
    layered: bool, random_models: Checkpoints, tmp_path: Path
) -> None:
    draft = make_hydra(tmp_path / "draft", random_models.target, layered=layered)
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
    layered: bool,
    change: Callable[[dict[str, Tensor], dict[str, Any]], object],
    words: str,
    both: dict[bool, Checkpoints],
    tmp_path: Path,
) -> None:
    state, config = load_checkpoint(both[layered].others[METHOD])
    change(state, config)
    draft = save_checkpoint(tmp_path / "draft", state, config, safetensors=True)
    with pytest.raises(ValueError, match=words):
        scheduler_of(METHOD, both[layered].target, draft, (2, 1, 3))
