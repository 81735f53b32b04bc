"""DFlash, DSpark, DFlash2 and Domino from published tensors (formats-drafters.md 7.1 to 7.4), recomputed from scratch;
and fixtures in the same names.

With n + 1 committed tokens (the last is the root, at position n) a block is the root and mask tokens at positions n to
n + B - 1. Each of its rows attends to the whole block and to the text before it, given by `fc` of the target's states.
"""

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .llama import (
    Config,
    State,
    embedding_weight,
    gated_mlp,
    head_weight,
    linear,
    norm,
    rms_norm,
    rope_of,
    rotate,
)
from .medusa import fitted
from .models import Draws, load_checkpoint, run_target, save_checkpoint

DIALECTS = ("z-lab", "DeepSpec", "SpecForge", "speculators")


def flat(config: Config) -> dict[str, Any]:
    return {**config, **config.get("transformer_layer_config", {}), **config.get("dflash_config", {})}


def boundaries(config: Config) -> list[int]:
    if "aux_hidden_state_layer_ids" in config:
        return list(config["aux_hidden_state_layer_ids"])
    return [i + 1 for i in flat(config)["target_layer_ids"]]


def reads_after(config: Config) -> bool:
    """Whether slot k gives the token after it."""
    if "speculators_model_type" in config:
        return bool(config.get("sample_from_anchor", False))
    nested = config.get("dflash_config", {"shift_label": True})
    return bool(nested.get("shift_label")) or nested.get("projector_type") == "dspark"


def attention(state: State, prefix: str, config: Config, past: Tensor, x: Tensor) -> Tensor:
    """Rows of `x` see all of `past` and of each other."""
    heads = config["num_attention_heads"]
    size = state[f"{prefix}q_proj.weight"].shape[0] // heads
    both, (turns, _) = torch.cat([past, x]), rope_of(config, size)
    q, k, v = (
        linear(state, f"{prefix}{name}_proj", both).unflatten(1, (-1, size)).transpose(0, 1) for name in "qkv"
    )
    q = rotate(norm(state, f"{prefix}q_norm", config, q), turns)[:, len(past) :]
    k = rotate(norm(state, f"{prefix}k_norm", config, k), turns)
    k, v = (each.repeat_interleave(heads // len(each), dim=0) for each in (k, v))
    read = torch.softmax(q @ k.mT / math.sqrt(size), dim=-1) @ v
    return linear(state, f"{prefix}o_proj", read.transpose(0, 1).flatten(1))


def block_states(path: Path, target: Path, committed: Sequence[int]) -> Tensor:
    """States [B, h] after the final norm, kept: each node of a tree asks for the same."""
    return _block_states(path, (path / "config.json").stat().st_mtime_ns, target, tuple(committed))


@lru_cache(maxsize=64)
def _block_states(path: Path, _: int, target: Path, committed: tuple[int, ...]) -> Tensor:
    weights, _ = load_checkpoint(target)
    state, config = load_checkpoint(path)
    found = flat(config)
    streams = run_target(target, committed[:-1]).streams
    taps = boundaries(config)
    eps = found["rms_norm_eps"]
    fused = linear(state, "fc", torch.cat([streams[tap] for tap in taps], dim=1))
    past = rms_norm(fused, state["hidden_norm.weight"], eps)
    tokens = [committed[-1]] + [found["mask_token_id"]] * (found["block_size"] - 1)
    x = embedding_weight(weights)[torch.tensor(tokens)].to(past.dtype)
    for layer in range(found["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        normed = rms_norm(x, state[f"{prefix}input_layernorm.weight"], eps)
        read = convolved(state, f"{prefix}attention_conv.", 0, normed, normed)
        out = attention(state, f"{prefix}self_attn.", found, past, read)
        x = x + convolved(state, f"{prefix}attention_conv.", 1, normed, out)
        normed = rms_norm(x, state[f"{prefix}post_attention_layernorm.weight"], eps)
        out = gated_mlp(state, f"{prefix}mlp.", convolved(state, f"{prefix}mlp_conv.", 0, normed, normed))
        x = x + convolved(state, f"{prefix}mlp_conv.", 1, normed, out)
    return rms_norm(x, state["norm.weight"], eps)


def convolved(state: State, prefix: str, side: int, read: Tensor, x: Tensor) -> Tensor:
    """DFlash2's convolution over rows of `x` before (0) or after (1) the sublayer that reads `read`; without it `x`."""
    if f"{prefix}base_kernel" not in state:
        return x
    base = state[f"{prefix}base_kernel"].to(x.dtype)[side]
    taps, hidden = base.shape
    added = linear(state, f"{prefix}kernel_projection", read).view(len(x), 2, taps, -1)[:, side]
    group = hidden // added.shape[2]
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for back in range(min(taps, row + 1)):
            weights = base[back] + added[row, back].repeat_interleave(group)
            out[row] += weights * x[row - back]
    return out


def selected(state: State, config: Config, logits: Tensor, o: Tensor, before: int) -> Tensor:
    """DFlash2's scores: of the likeliest tokens by the one before them, -inf of others."""
    name = "candidate_selector."

    def of(part: str) -> Tensor:
        return state.get(f"{name}{part}", state.get(f"{name}{part}.weight")).to(o.dtype)

    key = of("predecessor_codebook")[before] * (of("hidden_projection") @ o)
    out = torch.full_like(logits, -torch.inf)
    for token in logits.argsort(descending=True)[: flat(config)["selector_top_k"]].tolist():
        out[token] = logits[token] + key @ of("successor_codebook")[token]
    return out


def markov(state: State, states: Sequence[Tensor], before: Sequence[int]) -> Tensor:
    """What is added to the scores of the last of `states`: `before[i]` is the token before what state i scores."""
    dtype, memory = states[0].dtype, torch.zeros_like(states[0][:0])
    for o, token in zip(states, before, strict=True):
        e = state["markov_head.markov_w1.weight"][token].to(dtype)
        read = e
        if "markov_head.gate_proj.weight" in state:
            gate = linear(state, "markov_head.gate_proj", torch.cat([o, e])[None])[0]
            read = torch.sigmoid(gate) * e
        if "markov_head.joint_proj.weight" in state:
            memory = memory if len(memory) else torch.zeros_like(e)
            joint = linear(state, "markov_head.joint_proj", torch.cat([memory, e, o])[None])[0]
            gate, new, out = joint.chunk(3)
            memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(new)
            read = torch.tanh(out)
    return state["markov_head.markov_w2.weight"].to(dtype) @ read


def domino(state: State, embed: Tensor, last: Tensor, before: Sequence[int]) -> Tensor:
    """What is added to the scores of the second or a later proposal, whose state is `last`."""
    memory = torch.zeros(state["prefix_gru.weight_hh_l0"].shape[1], dtype=last.dtype)
    for token in before:
        read = state["prefix_gru.weight_ih_l0"].to(last.dtype) @ embed[token].to(last.dtype)
        kept = state["prefix_gru.weight_hh_l0"].to(last.dtype) @ memory
        (ir, iz, new), (hr, hz, hn) = read.chunk(3), kept.chunk(3)
        update = torch.sigmoid(iz + hz)
        memory = (1 - update) * torch.tanh(new + torch.sigmoid(ir + hr) * hn) + update * memory
    inner = state["embed_proj.0.weight"].to(last.dtype) @ torch.cat([last, memory])
    return state["embed_proj.2.weight"].to(last.dtype) @ (inner * torch.sigmoid(inner))


def next_logits(path: Path, target: Path, committed: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Logits [V] over target ids of the token after the root and the drafted ones."""
    weights, target_config = load_checkpoint(target)
    state, config = load_checkpoint(path)
    rows = block_states(path, target, committed)
    states = [rows[i + (not reads_after(config))] for i in range(len(drafted) + 1)]
    own = "d2t" in state
    logits = (state["lm_head.weight"] if own else head_weight(weights)).to(rows.dtype) @ states[-1]
    if "markov_head.markov_w1.weight" in state:
        logits = logits + markov(state, states, [committed[-1], *drafted])
    if "prefix_gru.weight_ih_l0" in state and drafted:
        logits = logits + domino(state, embedding_weight(weights), states[-1], [committed[-1], *drafted])
    if "candidate_selector.hidden_projection.weight" in state:
        logits = selected(state, config, logits, states[-1], [committed[-1], *drafted][-1])
    if not own:
        return logits
    ids = state["d2t"] + torch.arange(len(logits))
    full = torch.full((target_config["vocab_size"],), -torch.inf, dtype=logits.dtype)
    return full.index_copy(0, ids, logits)


def confidence(path: Path, target: Path, committed: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """The probability that what is drafted after `drafted` is accepted."""
    state, config = load_checkpoint(path)
    read = block_states(path, target, committed)[len(drafted) + (not reads_after(config))]
    if state["confidence_head.proj.weight"].shape[1] > len(read):
        before = [committed[-1], *drafted][-1]
        read = torch.cat([read, state["markov_head.markov_w1.weight"][before].to(read.dtype)])
    return torch.sigmoid(linear(state, "confidence_head.proj", read[None])[0, 0])


def make_block(
    path: Path,
    target: Path,
    *,
    dialect: str = "z-lab",
    block: int = 5,
    layers: int = 2,
    heads: int = 4,
    taps: Sequence[int] = (),
    markov_kind: str | None = None,
    rank: int = 8,
    confident: bool | str = False,
    domino_shift: bool | None = None,
    selected: int | None = None,
    group: int = 4,
    suffix: str = "",
    draft_vocab: int | None = None,
    qk_norm: bool = True,
    agree: bool = False,
    seed: int = 1,
    std: float = 0.2,
) -> Path:
    """Bfloat16, as published. `taps` are boundaries; none: after the target's first and last layer. With `agree` and a
    vanilla Markov head that is fitted to what the target says after each token alone; without one all slots say what
    the target says after the root alone."""
    weights, target_config = load_checkpoint(target)
    hidden, vocab, inner = target_config["hidden_size"], target_config["vocab_size"], 48
    taps = taps or (1, target_config["num_hidden_layers"])
    copies_root = agree and markov_kind is None
    layers, kv_heads = (1, heads) if copies_root else (layers, heads // 2)
    draws, found, size = Draws(seed), dict[str, Tensor](), hidden // heads
    small = 0.02 if agree else 1.0
    found["fc.weight"] = draws.matrix(hidden, len(taps) * hidden, std * small)
    for layer in range(layers):
        parts = draws.layer(hidden, hidden, inner, heads, kv_heads, std)
        parts["input_layernorm.weight"] = draws.norm(hidden)
        if qk_norm:
            parts |= {f"self_attn.{name}_norm.weight": draws.norm(size) for name in "qk"}
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            parts[name] = parts[name] * small
        found |= {f"layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    found |= {f"{name}.weight": draws.norm(hidden) for name in ("hidden_norm", "norm")}
    if copies_root:
        found |= _that_copies(found, weights, embedding_weight(weights)[vocab - 3])
    ids = sorted(torch.randperm(vocab, generator=draws.generator)[: draft_vocab or vocab].tolist())
    if markov_kind is not None:
        found["markov_head.markov_w1.weight"] = w1 = draws.matrix(vocab, rank, 1.0)
        w2 = draws.matrix(vocab, rank, 2 * std)
        if agree:
            after_each = torch.stack([run_target(target, [t]).logits[-1] for t in range(vocab)])
            w2 = fitted(w1, after_each.argmax(1), vocab)
            found["norm.weight"] = 0.1 * found["norm.weight"]
        found["markov_head.markov_w2.weight"] = w2[ids]
        if markov_kind == "gated":
            found["markov_head.gate_proj.weight"] = draws.matrix(rank, hidden + rank, std)
            found["markov_head.gate_proj.bias"] = draws.matrix(1, rank, std)[0]
        if markov_kind == "rnn":
            found["markov_head.joint_proj.weight"] = draws.matrix(3 * rank, 2 * rank + hidden, std)
            found["markov_head.joint_proj.bias"] = draws.matrix(1, 3 * rank, std)[0]
    if domino_shift is not None:
        found["prefix_gru.weight_ih_l0"] = draws.matrix(3 * 16, hidden, 2 * std)
        found["prefix_gru.weight_hh_l0"] = draws.matrix(3 * 16, 16, 2 * std)
        found["embed_proj.0.weight"] = draws.matrix(rank, hidden + 16, 2 * std)
        found["embed_proj.2.weight"] = draws.matrix(vocab, rank, (0.01 if agree else 2) * std)
    if selected is not None:
        plain = torch.zeros(2, 2, hidden).index_fill_(1, torch.tensor(0), 1)
        for name in (f"layers.{i}.{part}_conv." for i in range(layers) for part in ("attention", "mlp")):
            noise = 0.0 if agree else 0.5
            found[f"{name}base_kernel"] = plain + draws.matrix(4, hidden, noise).view(2, 2, hidden)
            found[f"{name}kernel_projection.weight"] = draws.matrix(4 * hidden // group, hidden, noise * std)
        found["candidate_selector.hidden_projection.weight"] = draws.matrix(rank, hidden, small * std)
        for part in ("predecessor", "successor"):
            found[f"candidate_selector.{part}_codebook{suffix}"] = draws.matrix(vocab, rank, 1.0)
    if confident:
        width = hidden + (rank if confident == "markov" else 0)
        found["confidence_head.proj.weight"] = draws.matrix(1, width, std)
        found["confidence_head.proj.bias"] = draws.matrix(1, 1, std)[0]
    if dialect == "DeepSpec":  # frozen copies
        found["embed_tokens.weight"] = embedding_weight(weights)
        found["lm_head.weight"] = head_weight(weights)
    if draft_vocab is not None:
        found["lm_head.weight"] = draws.matrix(vocab, hidden, 2 * std)[ids]
    found = {name: tensor.bfloat16() for name, tensor in found.items()}
    if draft_vocab is not None:
        found["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, torch.tensor(ids), True)
    body = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 40960,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "vocab_size": vocab,
        "layer_types": ["full_attention"] * layers,
    }
    config = _config(dialect, body, block, [tap - 1 for tap in taps], markov_kind, rank)
    if selected is not None:
        sizes = {
            "conv_kernel_size": 2,
            "conv_group_size": group,
            "selector_rank": rank,
            "selector_top_k": selected,
        }
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] |= sizes
    if domino_shift is not None:
        sizes = {"emb_dim": rank, "gru_hidden_dim": 16, "pure_draft_prefix_len": 1}
        config["dflash_config"] |= {"projector_type": "domino", "shift_label": domino_shift, **sizes}
    return save_checkpoint(path, found, config, safetensors=True)


def _that_copies(found: State, target: State, mask: Tensor) -> dict[str, Tensor]:
    """A layer that adds much of the root's embedding to each slot: all see all alike, and neither the text's values nor
    the mask's are more than 0."""
    unit = torch.nn.functional.normalize(mask, dim=0)
    changed = {"self_attn.v_proj.weight": torch.eye(len(mask)) - torch.outer(unit, unit)}
    changed |= {
        "self_attn.o_proj.weight": 1000 * torch.eye(len(mask)),
        "input_layernorm.weight": torch.ones(len(mask)),
    }
    for name in ("self_attn.q_norm.weight", "mlp.down_proj.weight"):
        changed[name] = torch.zeros_like(found[f"layers.0.{name}"])
    outside = {"fc.weight": torch.zeros_like(found["fc.weight"]), "norm.weight": target["model.norm.weight"]}
    return {f"layers.0.{name}": tensor for name, tensor in changed.items()} | outside


def _config(
    dialect: str, body: dict[str, Any], block: int, ids: list[int], kind: str | None, rank: int
) -> dict[str, Any]:
    mask = body["vocab_size"] - 3
    drafts = {"mask_token_id": mask, "target_layer_ids": ids}
    heads = {"markov_rank": rank if kind else 0, "markov_head_type": kind or "vanilla"}
    if dialect == "DeepSpec":
        return {"architectures": ["Qwen3DSparkModel"], **body, "block_size": block, **drafts, **heads}
    if dialect == "SpecForge":
        nested = {**drafts, "block_size": block, **({"projector_type": "dspark", **heads} if kind else {})}
        return {
            "architectures": ["DSparkDraftModel" if kind else "DFlashDraftModel"],
            **body,
            "dflash_config": nested,
        }
    if dialect == "speculators":
        return {
            "architectures": ["DSparkDraftModel" if kind else "DFlashDraftModel"],
            "speculators_model_type": "dspark" if kind else "dflash",
            "block_size": block,
            "mask_token_id": mask,
            "aux_hidden_state_layer_ids": [i + 1 for i in ids],
            "transformer_layer_config": body,
            **(heads if kind else {}),
        }
    return {"architectures": ["DFlashDraftModel"], **body, "block_size": block, "dflash_config": drafts}


def set_fields(path: Path, **fields: Any) -> Path:
    """Write into config.json; None takes a field out."""
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return path
