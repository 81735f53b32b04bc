"""REDRAFTER: files of TensorRT-LLM load, and what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines import Checkpoints
from tests.reference.models import load_checkpoint, save_checkpoint
from tests.reference.redrafter import make_redrafter
from tests.speculation.methods import Change, check_alike, check_broken

METHOD = "REDRAFTER"


def test_names_of_tensorrt(
    random_models: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same drafts, the first level's too."""
    target = random_models.target
    draft = make_redrafter(tmp_path / "draft", target, exit_dim=40)
    state, config = load_checkpoint(draft)
    names = {"lm_head.0.linear": "layers.0.linear", "lm_head.1.linear": "layers.1.linear"}
    names["lm_head.2"] = "lm_head"
    parts = [(*name.rpartition("."), tensor) for name, tensor in state.items()]
    state = {f"drafter.{names.get(module, module)}.{part}": tensor for module, _, part, tensor in parts}
    state |= {"base_model.lm_head.weight": torch.ones(2), "drafter.more": torch.ones(2)}
    config = {
        "redrafter_num_layers": 2,
        "redrafter_hidden_size": config["hidden_size"],
        "redrafter_exit_dim": 40,
        "redrafter_is_rnn": True,
        "redrafter_num_beams": 5,
        "redrafter_draft_len_per_beam": 5,
    }
    renamed = save_checkpoint(tmp_path / "renamed", state, config, safetensors=True)
    (renamed / "model.safetensors").rename(renamed / "rank0.safetensors")
    with caplog.at_level("INFO", "specserve"):
        check_alike(METHOD, target, draft, renamed)
    for words in (
        "draft of 2 blocks of 40 channels after a recurrent network",
        "redrafter_num_beams is not used",
        "draft tensors that are not read: drafter.more",
    ):
        assert words in caplog.text
    assert "base_model" not in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, c: s.pop("rnn_u.bias"), r"has no tensor rnn_u\.bias: expected in"),
        (
            lambda s, c: s.pop("lm_head.1.linear.weight"),
            r"holds no ReDrafter: expected lm_head\.1\.weight or drafter",
        ),
        (lambda s, c: c.update(num_draft_layers=3), r"config\.json: num_draft_layers must be 2, found 3"),
        (lambda s, c: c.update(exit_dim=32), r"config\.json: exit_dim must be 64, found 32"),
        (lambda s, c: c.update(rnn=False), r"config\.json: rnn must be true, found false"),
        (
            lambda s, c: s.update({"lm_head.2.weight": torch.ones(60, 64)}),
            r"tensor lm_head\.2\.weight has shape \[60, 64\], expected \[64, 64\]",
        ),
    ],
    ids=range(6),
)
def test_broken_files(change: Change, words: str, agreeing: Checkpoints, tmp_path: Path) -> None:
    check_broken(agreeing, METHOD, change, words, tmp_path)
