"""P-EAGLE drafts in their published layouts (formats-drafters.md 7.5), and what they say after a text, recomputed from
scratch.

Row i pairs the target's feature of token i with token i + 1. Rows of unknown tokens follow the last token's: they pair
the fused mask_hidden with the mask token. The last row predicts the token after it."""

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .draft_dialects import AUX, as_speculators, eagle3, speculators_config
from .draft_models import LITTLE, make_eagle3
from .eagle import (
    Draft,
    eagle3_rows,
    features_of,
    fused,
    make_draft,
    target_ids,
    to_target_vocab,
)
from .llama import State, embedding_weight, gated_mlp, head_weight, self_attention
from .models import Draws, load_checkpoint, run_target, save_checkpoint


def make_p_eagle(
    path: Path,
    target: Path,
    *,
    dialect: str = "amazon",
    layers: int = 4,
    taps: Sequence[int] | None = (0, 1, 3),
    draft_vocab: int | None = None,
    mask: int = 61,
    depths: int = 8,
    qk_norm: bool = False,
    agree: bool = False,
    seed: int = 1,
    **fields: Any,
) -> Path:
    """bfloat16. `taps`: inputs of layers, three if `agree`; None: none in the config. `depths`: how many levels a
    speculators file was trained for, which amazon's don't say. `fields` go to the config of EAGLE-3."""
    _, target_config = load_checkpoint(target)
    width, heads = target_config["hidden_size"], 4
    if agree:
        heads = width // (target_config.get("head_dim") or 8)
        plain = path.parent / f"{path.name} of one layer"
        made = make_eagle3(plain, target, draft_vocab=draft_vocab, heads=heads, agree=True, seed=seed)
        state, config = load_checkpoint(made)
        taps = config.pop("eagle_config", {}).get(AUX)
    else:
        state, config = eagle3(
            target, draft_vocab=draft_vocab, states=len(taps or "lmh"), heads=heads, seed=seed, **fields
        )
    draws, first = Draws(seed + 1), {name: tensor for name, tensor in state.items() if "midlayer." in name}
    for number in range(1, layers):
        state |= _plain_layer(draws, first, f"layers.{number}.", width, LITTLE if agree else 0.2)
    size = state["midlayer.self_attn.q_proj.weight"].shape[0] // heads
    if qk_norm:
        for prefix in ("midlayer.", *(f"layers.{number}." for number in range(1, layers))):
            state |= {f"{prefix}self_attn.{name}_norm.weight": draws.norm(size) for name in "qk"}
    embed = embedding_weight(load_checkpoint(target)[0]).float()
    state["embed_tokens.weight"] = embed + draws.like(embed, LITTLE if agree else 0.3)
    state["mask_hidden"] = draws.matrix(1, state["fc.weight"].shape[1], 1.0)[None]
    if draft_vocab is None:  # the identity
        state["d2t"] = torch.zeros(len(embed), dtype=torch.int64)
        state["t2d"] = torch.ones(len(embed), dtype=torch.bool)
    config |= {"num_hidden_layers": layers, "torch_dtype": "bfloat16"}
    if dialect == "amazon":
        config |= {"ptd_token_id": mask, "head_dim": size}
        config |= {} if taps is None else {"eagle_config": {AUX: list(taps)}}
    else:
        config |= {} if taps is None else {AUX: list(taps)}
        state, config = as_speculators((state, config | {"embed_requires_grad": True}), "qwen3")
        algorithm = speculators_config("peagle")
        algorithm["proposal_methods"][0]["speculative_tokens"] = depths
        config |= {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}
        config |= {"speculators_config": algorithm, "mask_token_id": mask}
    kept = {name: t.bfloat16() if t.is_floating_point() else t for name, t in state.items()}
    return save_checkpoint(path, kept, config, safetensors=True)


def _plain_layer(draws: Draws, first: State, prefix: str, width: int, std: float) -> dict[str, Tensor]:
    """Of the first layer's shapes, but it reads `width` numbers, and has no hidden_norm. `std`: of what it adds."""
    found = {}
    for name, tensor in first.items():
        if tensor.dim() == 1:
            made = draws.norm(width)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            made = draws.like(tensor, std)
        else:
            made = draws.matrix(len(tensor), width, 0.2)
        found[name.replace("midlayer.", prefix)] = made
    del found[f"{prefix}hidden_norm.weight"]
    return found


@cache
def _files(target: Path, directory: Path, config: str) -> tuple[Any, Draft]:
    """``config``: what the draft's file says now."""
    files = load_checkpoint(target)
    embed, head = embedding_weight(files[0]), head_weight(files[0])
    return files, make_draft(*load_checkpoint(directory), embed, head, {"use_own_embedding": True})


def next_logits(directory: Path, target: Path, committed: Sequence[int], path: Sequence[int]) -> Tensor:
    """Logits [V] over the target's ids after the committed tokens and a path, whose tokens it does not see."""
    return _next_logits(
        directory, target, (directory / "config.json").read_text(), tuple(committed), len(path)
    )


@lru_cache(maxsize=64)
def _next_logits(directory: Path, target: Path, said: str, committed: tuple[int, ...], masked: int) -> Tensor:
    """The same for all nodes of a level."""
    files, draft = _files(target, directory, said)
    hidden = fused(draft, features_of(draft, run_target(target, committed[:-1])))
    mask = fused(draft, draft.state["mask_hidden"].flatten()[None].to(hidden.dtype))
    names = ("mask_token_id", "pard_token", "ptd_token_id")
    token = next(draft.config[name] for name in names if name in draft.config)
    tokens = [*committed[1:], *[token] * masked]
    x = eagle3_rows(draft, tokens, torch.cat([hidden, *[mask] * masked]))
    number = 1
    while draft.has(f"layers.{number}.input_layernorm"):
        layer, number = f"layers.{number}.", number + 1
        read = draft.norm(f"{layer}input_layernorm", x)
        x = x + self_attention(draft.state, f"{layer}self_attn.", draft.config, read)
        x = x + gated_mlp(draft.state, f"{layer}mlp.", draft.norm(f"{layer}post_attention_layernorm", x))
    logits = draft.head.to(x.dtype) @ draft.norm("norm", x[-1])
    return to_target_vocab(logits, target_ids(draft.state, len(logits)), files[1]["vocab_size"])
