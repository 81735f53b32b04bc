"""ARCTIC_LSTM: published files load, drafts match a slow reference, and no text changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines import Checkpoints, Shape
from tests.reference import arctic_lstm
from tests.reference.arctic_lstm import make_arctic_lstm
from tests.reference.models import load_checkpoint, save_checkpoint
from tests.speculation.methods import (
    check_accepted,
    check_drafts,
    check_texts,
    each_with_both,
    in_each_configuration,
    scheduler_of,
)

METHOD = "ARCTIC_LSTM"
MAKES: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {},
    "an embedding a gate": {"tied": False, "scale_input": False, "n_predict": 4},
    "as wide as the target": {"inner": 32},
}


@each_with_both(MAKES, [(3, 1, 4), (3, 3, 9)])
def test_drafts_are_those_of_the_slow_reading(
    make: str, shape: Shape, sampling: str, random_models: Checkpoints, tmp_path: Path
) -> None:
    """Every candidate of every step, from the first on."""
    target = random_models.target
    draft = make_arctic_lstm(tmp_path / "draft", target, **MAKES[make])
    check_drafts(
        scheduler_of(METHOD, target, draft, shape, page_size=4),
        shape,
        sampling,
        lambda committed, path: arctic_lstm.next_logits(draft, target, committed, path),
    )


@in_each_configuration
def test_every_text_is_that_of_plain_decoding(configuration: dict[str, Any], agreeing: Checkpoints) -> None:
    row = check_texts(agreeing, METHOD, (3, 3, 9), configuration)
    assert row.mean_accepted_length > 1.1, "most are sampled"


def test_a_draft_that_fits_is_accepted(agreeing: Checkpoints) -> None:
    check_accepted(agreeing, METHOD, (3, 1, 4))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s, c: c.update(method="sum_rnn"),
            r"method must be sum_lstm, found 'sum_rnn': .* MLP_SPECULATOR",
        ),
        (lambda s, c: s.pop("cell_ln.0.bias"), r"has no tensor cell_ln\.0\.bias"),
        (
            lambda s, c: s.update({"head.2.weight": torch.ones(64, 24)}),
            r"head\.2\.weight differs from head\.0\.weight",
        ),
        (
            lambda s, c: s.update({"cell_emb.0.weight": torch.ones(64, 24)}),
            r"cell_emb\.0\.weight differs from forget",
        ),
        (
            lambda s, c: s.update({"output_proj.0.weight": torch.ones(24, 48)}),
            r"output_proj\.0.* expected \[24, 32\]",
        ),
        (
            lambda s, c: c.update(proj_dim="24.48"),
            r"proj_dim must be 24, as in its tensors, found '24\.48'",
        ),
        (
            lambda s, c: c.update(tie_weights=False),
            r"tie_weights must be true for an LSTM, found False",
        ),
        (lambda s, c: c.pop("n_predict"), r"n_predict"),
        (
            lambda s, c: s.pop("forget_proj.0.weight"),
            r"holds no Arctic LSTM: expected forget_proj\.0\.weight",
        ),
    ],
    ids=range(9),
)
def test_broken_files(
    change: Callable[[dict[str, Tensor], dict[str, Any]], object],
    words: str,
    agreeing: Checkpoints,
    tmp_path: Path,
) -> None:
    state, config = load_checkpoint(agreeing.others[METHOD])
    change(state, config)
    draft = save_checkpoint(tmp_path / "draft", state, config, safetensors=True)
    with pytest.raises(ValueError, match=words):
        scheduler_of(METHOD, agreeing.target, draft, (2, 1, 3))


def test_no_deeper_than_it_was_trained(agreeing: Checkpoints) -> None:
    with pytest.raises(ValueError, match=r"--speculative-num-steps: .* has at most 3 levels, found 4"):
        agreeing.scheduler(METHOD, (4, 1, 5))
