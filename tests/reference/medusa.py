"""Medusa's heads from published tensors (formats.md 7.1), recomputed from scratch; and fixtures in the same names.

With n + 1 committed tokens (the last is the root) head i reads the target's state after the final norm of token n - 1,
from which the root was chosen, and predicts the token i + 1 places after the root, whatever comes between."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .llama import State, head_weight
from .models import Draws, load_checkpoint, load_tensors, run_target

LAYOUTS = ("original", "original safetensors", "version 2", "vllm")


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors as stored, and config.json."""
    pickled = path / "medusa_lm_head.pt"
    file = pickled if pickled.exists() else next(path.glob("*.safetensors"))
    return load_tensors(file), json.loads((path / "config.json").read_text())


def head_logits(state: State, head: int, hidden: Tensor, target_head: Tensor, target_vocab: int) -> Tensor:
    """Scores [V] over target ids of a head, -inf for those that it has no row for."""
    vllm = "blocks.0.layers.0.weight" in state
    x, block = hidden, 0
    while (
        name := f"blocks.{head}.layers.{block}" if vllm else f"{head}.{block}.linear"
    ) + ".weight" in state:
        y = x @ state[f"{name}.weight"].to(x.dtype).T
        if f"{name}.bias" in state:
            y = y + state[f"{name}.bias"].to(x.dtype)
        x, block = x + y * torch.sigmoid(y), block + 1
    scores = state.get(f"lm_heads.{head}.weight" if vllm else f"{head}.{block}.weight", target_head)
    logits = x @ scores.to(x.dtype).T
    if "token_map" not in state:
        return logits
    return torch.full((target_vocab,), -torch.inf, dtype=x.dtype).index_copy(0, state["token_map"], logits)


def make_medusa(
    path: Path,
    target: Path,
    *,
    layout: str = "original",
    heads: int = 5,
    blocks: int = 1,
    draft_vocab: int | None = None,
    agree: bool = False,
    seed: int = 1,
    std: float = 0.2,
) -> Path:
    """Float16, as published. All blocks of an original head are one, stored several times. Of vLLM's, blocks differ,
    have no bias, and `draft_vocab` tokens may be scored. With `agree` the scores are fitted to what the target says
    again and again after each token alone."""
    _, target_config = load_checkpoint(target)
    hidden, vocab = target_config["hidden_size"], target_config["vocab_size"]
    draws, vllm, found = Draws(seed), layout == "vllm", dict[str, Tensor]()
    ids = sorted(torch.randperm(vocab, generator=draws.generator)[: draft_vocab or vocab].tolist())
    if agree:
        runs = [run_target(target, [token]) for token in range(vocab)]
        states = torch.stack([run.hidden[-1] for run in runs]).float()
        after = torch.stack([run.logits[-1] for run in runs]).argmax(1)
    said = torch.arange(vocab)
    for head in range(heads):
        weight, bias = draws.matrix(hidden, hidden, std), draws.matrix(1, hidden, std)[0]
        for block in range(blocks):
            if vllm:
                found[f"blocks.{head}.layers.{block}.weight"] = draws.matrix(hidden, hidden, std)
            else:
                found[f"{head}.{block}.linear.weight"], found[f"{head}.{block}.linear.bias"] = weight, bias
        scores = draws.matrix(vocab, hidden, 2 * std)
        if agree:
            said = after[said] if head else after[after]
            read = states
            for block in range(blocks):
                w = found[f"blocks.{head}.layers.{block}.weight"] if vllm else weight
                read = read + torch.nn.functional.silu(read @ w.T + (0 if vllm else bias))
            scores = fitted(read, said, vocab)
        if layout != "version 2":
            found[f"lm_heads.{head}.weight" if vllm else f"{head}.{blocks}.weight"] = scores[ids]
    config: dict[str, Any] = {
        "base_model_name_or_path": str(target),
        "medusa_num_heads": 2,
        "medusa_num_layers": blocks,
    }
    if layout == "version 2":
        config |= {"version": "2", "medusa_num_heads": heads}
    if vllm:
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": hidden,
            "num_heads": heads,
            "num_hidden_layers": blocks,
            "vocab_size": vocab,
            "truncated_vocab_size": draft_vocab,
        }
        if draft_vocab is not None:
            found["token_map"] = torch.tensor(ids)
    return save(
        path, {k: t if t.dtype == torch.int64 else t.half() for k, t in found.items()}, config, layout
    )


def fitted(read: Tensor, said: Tensor, vocab: int) -> Tensor:
    """Scores [V, h] of which, by and large, the best for row i of `read` is said[i]."""
    scores = torch.zeros(vocab, read.shape[1])
    wanted = torch.nn.functional.one_hot(said, vocab).float()
    for _ in range(400):  # gradient descent of the cross entropy
        wrong = torch.softmax(read @ scores.T, dim=1) - wanted
        scores -= 0.3 * wrong.T @ read / read.square().mean() / 8
    return scores


def save(path: Path, state: dict[str, Tensor], config: dict[str, Any], layout: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    if layout == "original":
        torch.save(state, path / "medusa_lm_head.pt")
    else:
        name = "model.safetensors" if layout == "vllm" else "medusa_lm_head.safetensors"
        save_file(
            {k: t.contiguous().clone() for k, t in state.items()}, path / name, metadata={"format": "pt"}
        )
    return path


def next_logits(path: Path, target: Path, committed: Sequence[int], drafted: int) -> Tensor:
    """Logits [V] of the token after the root and `drafted` tokens."""
    state, config = load_checkpoint(target)
    hidden = run_target(target, committed[:-1]).hidden[-1]
    return head_logits(load(path)[0], drafted, hidden, head_weight(state), config["vocab_size"])
