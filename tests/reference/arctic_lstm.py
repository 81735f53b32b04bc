"""Snowflake's LSTM speculator from published tensors, recomputed from scratch; and fixtures in the same names.

With n + 1 committed tokens (the last is the root) the state starts as the target's after the final norm of token n - 1,
and the cell as zeros. Level 0 reads the root, level i the i-th drafted token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .medusa import fitted
from .mlp_speculator import normed
from .models import Draws, load_checkpoint, run_target, save_checkpoint

GATES = ("forget", "input", "output", "cell")


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def advance(
    state: dict[str, Tensor], config: dict[str, Any], level: int, before: tuple[Tensor, Tensor], token: Any
) -> tuple[Tensor, Tensor]:
    """State and cell after a level has taken `token` in."""
    hidden, cell = before
    weight = 0.5 ** (0.5 / config["n_predict"])
    scale = ((1 - weight**2) * int(config["emb_dim"]) / 2) ** 0.5 / weight
    if level == 0 and config["scale_input"]:
        hidden = normed(hidden) / 2**0.5

    def of(name: str) -> Tensor:
        return state[name].to(hidden.dtype)

    def norm(x: Tensor, name: str) -> Tensor:
        return gelu(normed(x) * of(f"{name}.0.weight") + of(f"{name}.0.bias"))

    forget, let_in, let_out, new = (
        hidden @ of(f"{gate}_proj.{min(level, 1)}.weight").T + scale * of(f"{gate}_emb.0.weight")[token]
        for gate in GATES
    )
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(let_in) * norm(new, "cell_ln")
    return torch.sigmoid(let_out) * norm(cell, "state_ln"), cell


def next_logits(path: Path, target: Path, committed: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Logits [V] of the token after the root and the drafted ones."""
    state, config = load_checkpoint(path)
    hidden = run_target(target, committed[:-1]).hidden[-1]
    reached = hidden, hidden.new_zeros(int(config["emb_dim"]))
    for level, token in enumerate([committed[-1], *drafted]):
        reached = advance(state, config, level, reached, token)
    return reached[0] @ state["head.0.weight"].to(hidden.dtype).T


def make_arctic_lstm(
    path: Path,
    target: Path,
    *,
    inner: int = 24,
    n_predict: int = 3,
    tied: bool = True,
    scale_input: bool = True,
    agree: bool = False,
    std: float = 0.2,
) -> Path:
    """Float16; a pickled file with what is shared under each of its names, as the trainer writes it. With `agree` the
    head is fitted to what the target says again and again after each token alone."""
    _, target_config = load_checkpoint(target)
    hidden, vocab = target_config["hidden_size"], target_config["vocab_size"]
    draws, found = Draws(1), dict[str, Tensor]()
    for gate in GATES:
        own = found.get("forget_emb.0.weight") if tied else None
        found[f"{gate}_emb.0.weight"] = draws.matrix(vocab, inner, 1.0) if own is None else own
        found[f"{gate}_proj.0.weight"] = draws.matrix(inner, hidden, std / 4 if agree else std)
        found[f"{gate}_proj.1.weight"] = draws.matrix(inner, inner, std / 4 if agree else std)
    for name in ("cell_ln", "state_ln"):
        found[f"{name}.0.weight"] = 1 + draws.matrix(1, inner, std)[0]
        found[f"{name}.0.bias"] = draws.matrix(1, inner, std)[0]
    head = draws.matrix(vocab, inner, 2 * std)
    config = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "method": "sum_lstm",
        "input_hidden_dim": hidden,
        "inner_dim": str(inner),
        "proj_dim": str(inner),
        "emb_dim": str(inner),
        "n_predict": n_predict,
        "n_candidates": n_predict,
        "vocab_size": vocab,
        "top_k_tokens_per_head": [1] * n_predict,
        "tie_weights": True,
        "tie_lstm_embs": tied,
        "scale_input": scale_input,
        "torch_dtype": "bfloat16",
    }
    if agree:
        runs = [run_target(target, [token]) for token in range(vocab)]
        after = torch.stack([run.logits[-1] for run in runs]).argmax(1)
        states = torch.stack([run.hidden[-1] for run in runs]).float()
        reached, said, read, wanted = (states, states.new_zeros(vocab, inner)), after, [], []
        for level in range(n_predict):
            reached, said = advance(found, config, level, reached, said), after[said]
            read.append(reached[0])
            wanted.append(said)
        head = fitted(torch.cat(read), torch.cat(wanted), vocab)
    found |= {f"head.{level}.weight": head for level in range(n_predict)}
    return save_checkpoint(path, {name: t.half() for name, t in found.items()}, config, safetensors=False)
