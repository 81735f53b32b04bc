"""IBM's MLP speculator from published tensors, recomputed from scratch; and fixtures in the same names.

With n + 1 committed tokens (the last is the root) the state starts as the target's after the final norm of token n - 1,
from which the root was chosen. Level 0 reads the root, level i the i-th drafted token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .llama import State
from .medusa import fitted
from .models import Draws, load_checkpoint, run_target, save_checkpoint

EPS = 1e-6


def normed(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def advance(state: State, config: dict[str, Any], level: int, before: Tensor, token: Tensor | int) -> Tensor:
    """The state after a level has taken `token` in."""
    count, inner = config["n_predict"], config["inner_dim"] or config["emb_dim"]
    state_weight = 0.5 ** (0.5 / count)
    embedding_weight = ((1 - state_weight**2) * inner / 2) ** 0.5
    shared = 0 if config["tie_weights"] else level
    later = min(level, 1) if config["tie_weights"] else level

    def of(name: str) -> Tensor:
        return state[f"speculator.{name}"].to(before.dtype)

    if level == 0 and config["scale_input"]:
        before = normed(before) / 2**0.5
    added = of(f"emb.{shared}.weight")[token] * (embedding_weight / state_weight)
    mixed = before @ of(f"proj.{later}.weight").T + added
    x = normed(mixed) * of(f"ln.{shared}.weight") + of(f"ln.{shared}.bias")
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def next_logits(path: Path, target: Path, committed: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Logits [V] of the token after the root and the drafted ones."""
    state, config = load_checkpoint(path)
    reached = run_target(target, committed[:-1]).hidden[-1]
    for level, token in enumerate([committed[-1], *drafted]):
        reached = advance(state, config, level, reached, token)
    head = 0 if config["tie_weights"] else len(drafted)
    return reached @ state[f"speculator.head.{head}.weight"].to(reached.dtype).T


def make_mlp_speculator(
    path: Path,
    target: Path,
    *,
    inner: int = 24,
    n_predict: int = 4,
    tied: bool = False,
    scale_input: bool = False,
    copies: bool = False,
    agree: bool = False,
    seed: int = 1,
    std: float = 0.2,
) -> Path:
    """Float16, as published. `copies`: what is tied is stored once a level. With `agree` the heads are fitted to what
    the target says again and again after each token alone."""
    _, target_config = load_checkpoint(target)
    hidden, vocab = target_config["hidden_size"], target_config["vocab_size"]
    draws, found = Draws(seed), dict[str, Tensor]()
    stages = 1 if tied else n_predict
    for level in range(stages):
        found[f"speculator.emb.{level}.weight"] = draws.matrix(vocab, inner, 1.0)
        found[f"speculator.head.{level}.weight"] = draws.matrix(vocab, inner, 2 * std)
        found[f"speculator.ln.{level}.weight"] = 1 + draws.matrix(1, inner, std)[0]
        found[f"speculator.ln.{level}.bias"] = draws.matrix(1, inner, std)[0]
    for level in range(min(n_predict, 2) if tied else n_predict):
        size = inner if level else hidden
        found[f"speculator.proj.{level}.weight"] = draws.matrix(inner, size, std / 4 if agree else std)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": hidden,
        "inner_dim": inner,
        "n_predict": n_predict,
        "vocab_size": vocab,
        "top_k_tokens_per_head": [4, 3, 2, 2][:n_predict],
        "n_candidates": 5,
        "tie_weights": tied,
        "scale_input": scale_input,
        "torch_dtype": "float16",
    }
    if agree:
        runs = [run_target(target, [token]) for token in range(vocab)]
        after = torch.stack([run.logits[-1] for run in runs]).argmax(1)
        state, said, read = torch.stack([run.hidden[-1] for run in runs]).float(), after, list[Tensor]()
        for level in range(n_predict):
            state = advance(found, config, level, state, said)
            said = after[said]
            read.append(state)
            if not tied:
                found[f"speculator.head.{level}.weight"] = fitted(state, said, vocab)
        if tied:
            wanted = [after[after]]
            for _ in range(n_predict - 1):
                wanted.append(after[wanted[-1]])
            found["speculator.head.0.weight"] = fitted(torch.cat(read), torch.cat(wanted), vocab)
    if copies:
        for level in range(1, n_predict):
            for name in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
                found[f"speculator.{name.format(level)}"] = found[f"speculator.{name.format(0)}"]
            found[f"speculator.proj.{level}.weight"] = found["speculator.proj.1.weight"]
    return save_checkpoint(
        path, {name: tensor.half() for name, tensor in found.items()}, config, safetensors=True
    )
