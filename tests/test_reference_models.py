from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference import llama
from tests.reference.models import load_checkpoint, make_llama


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"branch_scale": 0.04}], ids=str)
def test_greedy_text_varies(options: dict[str, Any], tmp_path: Path) -> None:
    state, config = load_checkpoint(make_llama(tmp_path, **options))
    tokens = [1, 5, 9]
    for _ in range(24):
        logits = llama.forward(state, config, tokens).logits[-1]
        assert torch.isfinite(logits).all()
        assert 0.5 < logits.std() < 20
        tokens.append(int(logits.argmax()))
    assert len(set(tokens[3:])) >= 6
