"""Hydra and Hydra++ from published tensors, recomputed from scratch; and fixtures in the same names.

With n + 1 committed tokens (the last is the root) the layer of Hydra++ reads the target's states after the final norm
of the first n. Level i reads its last state (or the target's), the root's embedding and those of the i drafted
tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .llama import forward, linear
from .medusa import fitted
from .models import Draws, load_checkpoint, run_target, save_checkpoint

LAYER = "prefix_embeding_layer."
BLOCKS = {True: ("1", "3", "5", "7"), False: ("0", "1", "2", "3")}
"""With the layer every other entry is dropout."""


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def body(state: Mapping[str, Tensor], head: int, x: Tensor) -> Tensor:
    blocks = BLOCKS[f"{LAYER}norm.weight" in state]
    first = f"hydra_mlp.{head}.{blocks[0]}"
    s = linear(state, f"{first}.res_connection", x) + silu(linear(state, f"{first}.linear", x))
    for number in blocks[1:]:
        if f"hydra_mlp.{head}.{number}.linear.weight" in state:
            s = s + silu(linear(state, f"hydra_mlp.{head}.{number}.linear", s))
    return s


def prefix(state: Mapping[str, Tensor], target_config: Mapping[str, Any], hidden: Tensor) -> Tensor:
    """What the heads read after each of the target's states [n, h]: these, or what the layer gives: a model of one
    layer whose embeddings they are."""
    if f"{LAYER}norm.weight" not in state:
        return hidden
    model = {f"model.{name.removeprefix(LAYER)}": t for name, t in state.items() if name.startswith(LAYER)}
    model |= {"model.embed_tokens.weight": hidden, "lm_head.weight": torch.zeros(1, hidden.shape[1])}
    return forward(model, {**target_config, "num_hidden_layers": 1}, range(len(hidden))).hidden


def next_logits(path: Path, target: Path, committed: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Logits [V] of the token after the root and the drafted ones."""
    weights, target_config = load_checkpoint(target)
    state, _ = load_checkpoint(path)
    hidden = run_target(target, committed[:-1]).hidden
    embedding = weights["model.embed_tokens.weight"].to(hidden.dtype)
    x = torch.cat([prefix(state, target_config, hidden)[-1], *embedding[[committed[-1], *drafted]]])
    scores = f"hydra_lm_head.{len(drafted)}"
    scores += "" if f"{scores}.weight" in state else ".1"
    return linear(state, scores, body(state, len(drafted), x))


def make_hydra(
    path: Path,
    target: Path,
    *,
    heads: int = 4,
    blocks: int = 4,
    layered: bool = True,
    agree: bool = False,
    std: float = 0.1,
) -> Path:
    """Float16, as published; the layer of Hydra++ is drawn in the shapes of the target's first. With `agree` the heads
    read the tokens alone, and the scores are fitted to what the target says again and again after each of these."""
    weights, target_config = load_checkpoint(target)
    hidden, vocab = target_config["hidden_size"], target_config["vocab_size"]
    draws, found, numbers = Draws(1), dict[str, Tensor](), BLOCKS[layered]

    def vector(size: int) -> Tensor:
        return draws.matrix(1, size, std)[0]

    for name, tensor in weights.items():
        if layered and name.startswith("model.layers.0."):
            drawn = draws.matrix(*tensor.shape, std) if tensor.dim() == 2 else vector(len(tensor))
            found[LAYER + name.removeprefix("model.")] = drawn + ("norm" in name)
    scores = [f"hydra_lm_head.{head}{'.1' if layered else ''}" for head in range(heads)]
    if layered:
        found[f"{LAYER}norm.weight"] = 1 + vector(hidden)
        found[f"{LAYER}embed_tokens.weight"] = torch.zeros(vocab, hidden)
    for head in range(heads):
        mlp = f"hydra_mlp.{head}"
        first = f"{mlp}.{numbers[0]}"
        for part in ("linear", "res_connection"):
            found[f"{first}.{part}.weight"] = draws.matrix(hidden, (head + 2) * hidden, std)
            found[f"{first}.{part}.weight"][:, :hidden] *= not agree
            found[f"{first}.{part}.bias"] = vector(hidden)
        weight, bias = draws.matrix(hidden, hidden, std), vector(hidden)
        for number in numbers[1:blocks]:
            found |= {f"{mlp}.{number}.linear.weight": weight, f"{mlp}.{number}.linear.bias": bias}
        found[f"{scores[head]}.weight"] = draws.matrix(vocab, hidden, 4 * std)
        found[f"{scores[head]}.bias"] = vector(vocab)
    if agree:
        runs = [run_target(target, [token]) for token in range(vocab)]
        after = torch.stack([run.logits[-1] for run in runs]).argmax(1)
        states = torch.stack([prefix(found, target_config, run.hidden)[-1] for run in runs]).float()
        embedding, said = weights["model.embed_tokens.weight"].float(), after
        for head in range(heads):
            states, said = torch.cat([states, embedding[said]], 1), after[said]
            found[f"{scores[head]}.weight"] = fitted(body(found, head, states), said, vocab)
            found[f"{scores[head]}.bias"] = torch.zeros(vocab)
    config = {
        "hydra_num_heads": heads,
        "hydra_num_layers": blocks,
        "hydra_head_arch": "prefix-mlp" if layered else "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    return save_checkpoint(path, {name: t.half() for name, t in found.items()}, config, safetensors=False)
