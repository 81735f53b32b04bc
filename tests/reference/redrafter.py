"""Apple's ReDrafter from published tensors, recomputed from scratch; and fixtures in the same names.

With n + 1 committed tokens (the last is the root) the head reads the target's state after the final norm of token
n - 1, from which the root was chosen, next to a recurrent state over the root and the drafted tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .hydra import silu
from .llama import State, linear
from .medusa import fitted
from .models import Draws, load_checkpoint, run_target, save_checkpoint


def advance(state: State, config: dict[str, Any], before: Tensor, embedded: Tensor) -> Tensor:
    """The recurrent state after a token."""
    if not config["rnn"]:
        return embedded + before
    return silu(embedded @ state["rnn_w.weight"].to(before.dtype).T + linear(state, "rnn_u", before))


def body(state: State, config: dict[str, Any], x: Tensor) -> Tensor:
    """What the scores read."""
    if config["exit_dim"] != 2 * config["hidden_size"]:
        x = linear(state, "input_proj", x)
    for block in range(config["num_draft_layers"]):
        x = x + silu(linear(state, f"lm_head.{block}.linear", x))
    return x


def next_logits(path: Path, target: Path, committed: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Logits [V] of the token after the root and the drafted ones."""
    weights, _ = load_checkpoint(target)
    state, config = load_checkpoint(path)
    hidden = run_target(target, committed[:-1]).hidden[-1]
    reached = torch.zeros_like(hidden)
    for token in (committed[-1], *drafted):
        reached = advance(
            state, config, reached, weights["model.embed_tokens.weight"][token].to(hidden.dtype)
        )
    scores = state[f"lm_head.{config['num_draft_layers']}.weight"]
    return body(state, config, torch.cat([hidden, reached])) @ scores.to(hidden.dtype).T


def make_redrafter(
    path: Path,
    target: Path,
    *,
    rnn: bool = True,
    layers: int = 2,
    exit_dim: int | None = None,
    agree: bool = False,
    std: float = 0.2,
) -> Path:
    """Float32, as Apple's trainer saves it; `exit_dim` None: twice the target's size. With `agree` the last token
    counts most, and the scores are fitted to what the target says again and again after each token alone."""
    weights, target_config = load_checkpoint(target)
    hidden, vocab = target_config["hidden_size"], target_config["vocab_size"]
    width, draws, found = exit_dim or 2 * hidden, Draws(1), dict[str, Tensor]()
    config = {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "exit_dim": width,
        "num_draft_layers": layers,
        "num_lookback_tokens": -1,
        "rnn": rnn,
        "torch_dtype": "float32",
    }

    def draw(name: str, rows: int, columns: int, bias: bool) -> None:
        found[f"{name}.weight"] = draws.matrix(rows, columns, std)
        if bias:
            found[f"{name}.bias"] = draws.matrix(1, rows, std)[0]

    if width != 2 * hidden:
        draw("input_proj", width, 2 * hidden, True)
    for block in range(layers):
        draw(f"lm_head.{block}.linear", width, width, True)
    draw(f"lm_head.{layers}", vocab, width, False)
    if rnn:
        draw("rnn_u", hidden, hidden, True)
        draw("rnn_w", hidden, hidden, False)
        found["rnn_u.weight"] *= 0.1 if agree else 1
        found["rnn_w.weight"] *= 10 if agree else 1
    if agree:
        runs = [run_target(target, [token]) for token in range(vocab)]
        said = torch.stack([run.logits[-1] for run in runs]).argmax(1)
        after, states = said, torch.stack([run.hidden[-1] for run in runs]).float()
        reached, read, wanted = torch.zeros_like(states), list[Tensor](), list[Tensor]()
        for _ in range(4):
            reached = advance(found, config, reached, weights["model.embed_tokens.weight"][said].float())
            said = after[said]
            read.append(body(found, config, torch.cat([states, reached], 1)))
            wanted.append(said)
        found[f"lm_head.{layers}.weight"] = fitted(torch.cat(read), torch.cat(wanted), vocab)
    return save_checkpoint(path, found, config, safetensors=True)
