"""EAGLE-1/2, EAGLE-3 and MiMo's MTP drafts from published tensors (formats.md 1.3, 2.3 and 6.1), recomputed from
scratch, in every dialect of these sections.

Row i pairs the target's feature of token i with token i + 1 and predicts token i + 2. With n + 1 committed tokens (the
last is the root: sampled, not yet run through the target) there are n features. A drafted token's row uses the output
of the row before it in place of a feature."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .llama import Config, LlamaOutput, State, gated_mlp, linear, rms_norm, self_attention

LAYER = "layers.0."
AUX = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Draft:
    """A draft. Keys as normalised by plain_keys(), config by plain_config(). embed [V, h] and head [V or Vd, h] are
    those in use."""

    state: State
    config: Config
    embed: Tensor
    head: Tensor

    @property
    def is_mtp(self) -> bool:
        return f"{LAYER}input_proj.weight" in self.state

    @property
    def is_eagle3(self) -> bool:
        """A q_proj that reads 2h."""
        reads = self.state[f"{LAYER}self_attn.q_proj.weight"].shape[1]
        return not self.is_mtp and reads == 2 * self.state[f"{LAYER}self_attn.o_proj.weight"].shape[0]

    @property
    def from_speculators(self) -> bool:
        return "speculators_model_type" in self.config

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.state[f"{name}.weight"], self.config["rms_norm_eps"])

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self.state


def plain_keys(state: State) -> dict[str, Tensor]:
    """`model.` stripped; `midlayer.`, `transformer.` and `layers.0.` are one. Of a target with an MTP layer, that."""
    bare = {key.removeprefix("model."): tensor for key, tensor in state.items()}
    mtp = {key.removeprefix("mtp_layers.0."): t for key, t in bare.items() if key.startswith("mtp_layers.0.")}
    if mtp:
        return {f"{LAYER}{key}": tensor for key, tensor in mtp.items()}
    renamed = {}
    for key, tensor in bare.items():
        for old, new in (("midlayer.", LAYER), ("transformer.", LAYER), ("fusion_fc.", "fc.")):
            key = new + key.removeprefix(old) if key.startswith(old) else key
        renamed[key] = tensor
    return renamed


def plain_config(config: Config, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Flat, with the fields of `overrides` in it. An override's aux layers are boundaries."""
    inner = config.get("transformer_layer_config") or config.get("model") or {}
    flat = {**config, **inner, **overrides}
    if {"rope_theta", "rope_scaling"} & set(overrides):
        flat.pop("rope_parameters", None)
    if AUX in overrides:
        flat["boundaries"] = overrides[AUX]
    return flat


def make_draft(
    state: State,
    config: Config,
    target_embed: Tensor,
    target_head: Tensor,
    overrides: Mapping[str, Any] | None = None,
) -> Draft:
    """The target's embedding unless the file's has another shape or was trained; the target's head if the file has
    none."""
    state, config = plain_keys(state), plain_config(config, overrides or {})
    own = state.get("embed_tokens.weight")
    trained = config.get("use_own_embedding", config.get("embed_requires_grad", False))
    embed = target_embed if own is None or (own.shape == target_embed.shape and not trained) else own
    fallback = embed if config.get("tie_word_embeddings") and own is not None else target_head
    return Draft(state, config, embed, state.get("lm_head.weight", fallback))


def setting(config: Config, name: str, default: Any = None) -> Any:
    """A field of 2.2 that may be nested."""
    nested = (config.get("eagle_config") or {}).get(name)
    return config.get(name, default) if nested is None else nested


def boundaries(config: Config, target_layers: int) -> list[int]:
    """Which residual streams EAGLE-3 reads (2.4): stream L enters layer L, stream N leaves the last."""
    ids = config.get("boundaries")
    if ids is None:
        ids = setting(config, AUX)
        if ids is None:
            ids = [2, target_layers // 2, target_layers - 3]
        elif ids[0] == 1 and "speculators_model_type" not in config:
            ids = [layer + 1 for layer in ids]  # a list that starts at 1 names layers by their output
    assert ids == sorted(set(ids)), f"aux layers {ids} must increase"
    assert ids[0] >= 0
    assert ids[-1] <= target_layers
    return list(ids)


def features_of(draft: Draft, target: LlamaOutput) -> Tensor:
    """What the draft reads of the target: [n, h], for EAGLE-3 [n, 3h]."""
    if draft.is_mtp:
        return target.streams[-1] if mtp_side(draft) == "pre" else target.hidden
    if not draft.is_eagle3 or not setting(draft.config, "use_aux_hidden_state", True):
        return target.hidden
    chosen = boundaries(draft.config, len(target.streams) - 1)
    return torch.cat([target.streams[layer] for layer in chosen], dim=1)


def mtp_side(draft: Draft) -> str:
    """Which state of the target MTP reads (6.1): after the final norm for FastMTP, before it for MiMo."""
    return str(draft.config.get("mtp_hidden", "post" if "num_speculative_steps" in draft.config else "pre"))


def fused(draft: Draft, features: Tensor) -> Tensor:
    """EAGLE-3's hidden of target-fed rows."""
    if draft.has("input_norm"):
        features = draft.norm("input_norm", features)
    if draft.has("fc_norm.0"):
        width = draft.state["fc_norm.0.weight"].shape[0]
        parts = features.split(width, dim=1)
        features = torch.cat([draft.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=1)
    single = not setting(draft.config, "use_aux_hidden_state", True)
    return features if single else linear(draft.state, "fc", features)


def embedded(draft: Draft, tokens: Sequence[int], like: Tensor) -> Tensor:
    return draft.embed[torch.tensor(list(tokens))].to(like.dtype)


def layer_after(draft: Draft, residual: Tensor, read: Tensor) -> Tensor:
    """residual + attention(read), then the MLP."""
    state = draft.state
    y = residual + self_attention(state, f"{LAYER}self_attn.", draft.config, read)
    return y + gated_mlp(state, f"{LAYER}mlp.", draft.norm(f"{LAYER}post_attention_layernorm", y))


def eagle1_rows(draft: Draft, tokens: Sequence[int], features: Tensor) -> Tensor:
    """Layer output [n, h] of rows (features[i], tokens[i]). The norms are those of 1.5."""
    e, f = embedded(draft, tokens, features), features
    optional = draft.from_speculators or draft.config.get("add_para_norm")
    if optional and draft.has("embedding_layernorm"):
        e = draft.norm("embedding_layernorm", e)
    if optional and draft.has("hidden_states_layernorm"):
        f = draft.norm("hidden_states_layernorm", f)
    u = linear(draft.state, "fc", torch.cat([e, f], dim=1))
    normed = draft.from_speculators and draft.has(f"{LAYER}input_layernorm")
    return layer_after(draft, u, draft.norm(f"{LAYER}input_layernorm", u) if normed else u)


def eagle3_rows(draft: Draft, tokens: Sequence[int], hidden: Tensor) -> Tensor:
    """Layer output before the norm, [n, h], of rows (hidden[i], tokens[i]); fc has been applied already."""
    e = draft.norm(f"{LAYER}input_layernorm", embedded(draft, tokens, hidden))
    n = draft.norm(f"{LAYER}hidden_norm", hidden)
    residual = n if draft.config.get("norm_before_residual") else hidden
    return layer_after(draft, residual, torch.cat([e, n], dim=1))


def mtp_rows(draft: Draft, tokens: Sequence[int], hidden: Tensor) -> Tensor:
    """Layer output before final_layernorm. The hidden half comes first."""
    e = draft.norm(f"{LAYER}token_layernorm", embedded(draft, tokens, hidden))
    n = draft.norm(f"{LAYER}hidden_layernorm", hidden)
    u = linear(draft.state, f"{LAYER}input_proj", torch.cat([n, e], dim=1))
    return layer_after(draft, u, draft.norm(f"{LAYER}input_layernorm", u))


def head_input(draft: Draft, output: Tensor) -> Tensor:
    """What the head reads of a layer's output."""
    if draft.is_mtp:
        return draft.norm(f"{LAYER}final_layernorm", output)
    if not draft.is_eagle3:
        normed = draft.from_speculators and draft.has("pre_lm_head_layernorm")
        return draft.norm("pre_lm_head_layernorm", output) if normed else output
    if not draft.from_speculators and draft.config.get("norm_output") is False:
        return output  # SpecForge's meaning of the field
    return draft.norm("norm", output)


def recycled(draft: Draft, output: Tensor) -> Tensor:
    """What the next row takes in place of a feature."""
    default = "pre"
    if draft.is_mtp:
        default = mtp_side(draft)
    elif draft.is_eagle3 and draft.from_speculators and draft.config.get("norm_output"):
        default = "post"  # speculators' meaning of the field
    side = draft.config.get("recycled_hidden", default)
    return head_input(draft, output) if side == "post" else output


def draft_rows(
    draft: Draft, prefix_tokens: Sequence[int], prefix_features: Tensor, path: Sequence[int]
) -> Tensor:
    """Outputs [n + len(path), h]: every row recomputed each time a drafted token is appended."""
    assert len(prefix_features) == len(prefix_tokens) - 1, "one feature per committed token but the root"
    rows = mtp_rows if draft.is_mtp else eagle3_rows if draft.is_eagle3 else eagle1_rows
    hidden = fused(draft, prefix_features) if draft.is_eagle3 else prefix_features
    tokens = list(prefix_tokens[1:])
    output = rows(draft, tokens, hidden)
    for token in path:
        tokens.append(token)
        hidden = torch.cat([hidden, recycled(draft, output[-1:])])
        output = rows(draft, tokens, hidden)
    return output


def draft_logits(
    draft: Draft, prefix_tokens: Sequence[int], prefix_features: Tensor, path_tokens: Sequence[int]
) -> Tensor:
    """Logits [V or Vd] of the token that follows prefix_tokens (root last) + path_tokens."""
    output = draft_rows(draft, prefix_tokens, prefix_features, path_tokens)[-1]
    return draft.head.to(output.dtype) @ head_input(draft, output)


def target_ids(state: Mapping[str, Tensor], draft_vocab: int) -> list[int]:
    """d2t holds offsets; without it the draft speaks the target's ids."""
    offsets = state["d2t"].tolist() if "d2t" in state else [0] * draft_vocab
    return [draft_id + offset for draft_id, offset in enumerate(offsets)]


def to_target_vocab(logits: Tensor, ids: Sequence[int], vocab: int) -> Tensor:
    """Draft logits [Vd] at their target ids in a [V] of -inf."""
    full = torch.full((vocab,), -math.inf, dtype=logits.dtype)
    for value, token in zip(logits, ids, strict=True):
        full[token] = value
    return full


def target_vocab_logits(
    draft: Draft, prefix_tokens: Sequence[int], prefix_features: Tensor, path_tokens: Sequence[int]
) -> Tensor:
    """draft_logits over target ids [V]."""
    logits = draft_logits(draft, prefix_tokens, prefix_features, path_tokens)
    return to_target_vocab(logits, target_ids(draft.state, len(logits)), len(draft.embed))
