"""ARCTIC_LSTM: what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines import Checkpoints
from tests.speculation.methods import Change, check_broken

METHOD = "ARCTIC_LSTM"


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
def test_broken_files(change: Change, words: str, agreeing: Checkpoints, tmp_path: Path) -> None:
    check_broken(agreeing, METHOD, change, words, tmp_path)
