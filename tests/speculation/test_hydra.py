"""HYDRA: published files load, drafts match a slow reference, and no text changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines import Checkpoints, Shape
from tests.reference import hydra
from tests.reference.hydra import make_hydra
from tests.reference.models import load_checkpoint, save_checkpoint
from tests.speculation.methods import (
    check_accepted,
    check_cached,
    check_drafts,
    check_texts,
    in_each_configuration,
    scheduler_of,
)

METHOD = "HYDRA"


@pytest.mark.parametrize("sampling", ["greedy", "penalised"])
@pytest.mark.parametrize("shape", [(4, 1, 5), (3, 3, 9)], ids=str)
@pytest.mark.parametrize("blocks", [4, 1])
def test_drafts_are_those_of_the_slow_reading(
    blocks: int, shape: Shape, sampling: str, random_models: Checkpoints, tmp_path: Path
) -> None:
    """Every candidate of every step, from the first on, after a prompt in chunks."""
    target = random_models.target
    draft = make_hydra(tmp_path / "draft", target, blocks=blocks)
    check_drafts(
        scheduler_of(METHOD, target, draft, shape, page_size=4, chunked_prefill_size=4),
        shape,
        sampling,
        lambda committed, path: hydra.next_logits(draft, target, committed, path),
    )


@in_each_configuration
def test_every_text_is_that_of_plain_decoding(configuration: dict[str, Any], agreeing: Checkpoints) -> None:
    row = check_texts(agreeing, METHOD, (4, 3, 9), configuration)
    assert row.mean_accepted_length > 1.1, "most are sampled"


def test_a_draft_that_fits_is_accepted(agreeing: Checkpoints) -> None:
    check_accepted(agreeing, METHOD, (4, 1, 5))


def test_a_cached_prompt_drafts_as_a_computed_one(random_models: Checkpoints, tmp_path: Path) -> None:
    draft = make_hydra(tmp_path / "draft", random_models.target)
    check_cached(scheduler_of(METHOD, random_models.target, draft, (3, 2, 6), page_size=4))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: s.pop("prefix_embeding_layer.norm.weight"),
            r"no Hydra\+\+ heads: it has no prefix_embeding_layer",
        ),
        (lambda s: s.pop("hydra_lm_head.1.1.bias"), r"has no tensor hydra_lm_head\.1\.1\.bias"),
        (
            lambda s: s.update({"hydra_mlp.2.5.linear.weight": torch.ones(32, 32)}),
            r"2\.5\.linear\.weight differs from hydra_mlp\.2\.3",
        ),
        (lambda s: s.update({"hydra_mlp.1.1.linear.weight": torch.ones(32, 32)}), r"expected \[32, 96\]"),
    ],
    ids=range(4),
)
def test_broken_files(
    change: Callable[[dict[str, Tensor]], object], words: str, agreeing: Checkpoints, tmp_path: Path
) -> None:
    state, config = load_checkpoint(agreeing.others[METHOD])
    change(state)
    draft = save_checkpoint(tmp_path / "draft", state, config, safetensors=True)
    with pytest.raises(ValueError, match=words):
        scheduler_of(METHOD, agreeing.target, draft, (2, 1, 3))


def test_no_deeper_than_it_has_heads(agreeing: Checkpoints) -> None:
    with pytest.raises(ValueError, match=r"--speculative-num-steps: .* has at most 4 levels, found 5"):
        agreeing.scheduler(METHOD, (5, 1, 6))
