"""MLP_SPECULATOR: published files load, and what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines import Checkpoints
from tests.reference.mlp_speculator import make_mlp_speculator
from tests.reference.models import load_checkpoint, save_checkpoint
from tests.speculation.methods import Change, check_alike, check_broken, scheduler_of

METHOD = "MLP_SPECULATOR"


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
    check_alike(METHOD, target, named, bare)


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
    check_broken(agreeing, METHOD, change, words, tmp_path)
