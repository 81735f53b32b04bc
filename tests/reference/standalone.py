"""A draft that is a separate model: fixtures, and its predictions recomputed from scratch."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .models import load_checkpoint, make_llama, run_target, save_checkpoint


def first_layer(path: Path, target: Path) -> Path:
    """The target without its layers but the first, in float16: of one whose layers add little, a draft that often says
    what it says."""
    state, config = load_checkpoint(target)
    kept = {name: t.half() for name, t in state.items() if ".layers." not in name or ".layers.0." in name}
    return save_checkpoint(path, kept, config | {"num_hidden_layers": 1}, safetensors=True)


def other_model(path: Path, vocab: int = 64) -> Path:
    """Of another geometry and architecture than the target."""
    shape = {"hidden": 24, "inner": 40, "layers": 2, "heads": 6, "kv_heads": 3, "head_dim": 8}
    return make_llama(path, family="Qwen3", seed=7, vocab=vocab, tied=True, **shape)


def make_pard(path: Path, draft: Path, mask: int) -> Path:
    """The same model as PARD publishes its own: its config names a mask token."""
    state, config = load_checkpoint(draft)
    kept = {name: tensor.half() for name, tensor in state.items()}
    return save_checkpoint(path, kept, config | {"pard_token": mask, "spd_type": "pard"}, safetensors=True)


def resized(path: Path, draft: Path, vocab: int) -> Path:
    """The same model with a vocabulary cut to, or padded to, another size; what is padded would be guessed first."""
    state, config = load_checkpoint(draft)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = state[name][:vocab]
        padding = state[name].new_full((vocab - len(rows), rows.shape[1]), 3.0)
        state[name] = torch.cat([rows, padding])
    return save_checkpoint(path, state, config | {"vocab_size": vocab}, safetensors=True)


def next_logits(path: Path, text: Sequence[int], target_vocab: int) -> Tensor:
    """Logits [V] over the target's ids, -inf for those that it has no row for."""
    vocab = json.loads((path / "config.json").read_text())["vocab_size"]
    logits = run_target(path, [min(token, vocab - 1) for token in text]).logits[-1]
    missing = logits.new_full((max(target_vocab - len(logits), 0),), -torch.inf)
    return torch.cat([logits[:target_vocab], missing])
