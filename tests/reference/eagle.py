"""EAGLE-1/2 and EAGLE-3 drafts from published tensors (formats.md 1.3 and 2.3), recomputed from scratch.

Row i pairs the target's feature of token i with token i + 1 and predicts token i + 2. With n + 1 committed
tokens (the last is the root: sampled, not yet run through the target) there are n features. A drafted token's
row takes the output of the row before it in place of a feature."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .llama import Config, LlamaOutput, State, gated_mlp, linear, rms_norm, self_attention

LAYER = "layers.0."


@dataclass
class Draft:
    """Keys as normalised by plain_keys(). embed [V, h] and head [V or Vd, h] are the ones to be used."""

    state: State
    config: Config
    embed: Tensor
    head: Tensor

    @property
    def is_eagle3(self) -> bool:
        """A q_proj that reads 2h."""
        return self.state[f"{LAYER}self_attn.q_proj.weight"].shape[1] == 2 * self.state["fc.weight"].shape[0]


def plain_keys(state: State) -> dict[str, Tensor]:
    """`model.` stripped; `midlayer.` and `layers.0.` are one."""
    renamed = {}
    for key, tensor in state.items():
        key = key.removeprefix("model.")
        renamed[LAYER + key.removeprefix("midlayer.") if key.startswith("midlayer.") else key] = tensor
    return renamed


def make_draft(state: State, config: Config, target_embed: Tensor, target_head: Tensor) -> Draft:
    """The target's embedding unless the file's has another shape; the target's head if the file has none."""
    state = plain_keys(state)
    own = state.get("embed_tokens.weight")
    embed = target_embed if own is None or own.shape == target_embed.shape else own
    return Draft(state, config, embed, state.get("lm_head.weight", target_head))


def boundaries(config: Config, target_layers: int) -> list[int]:
    """Which residual streams EAGLE-3 reads (2.4): stream L enters layer L, stream N leaves the last."""
    nested = config.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    ids = nested.get(key) or config.get(key)
    if ids is None:
        ids = [2, target_layers // 2, target_layers - 3]
    elif ids[0] == 1:  # a list that starts at 1 names layers by their output
        ids = [layer + 1 for layer in ids]
    assert ids == sorted(set(ids)), f"aux layers {ids} must increase"
    assert ids[0] >= 0
    assert ids[-1] <= target_layers
    return list(ids)


def features_of(draft: Draft, target: LlamaOutput) -> Tensor:
    """What the draft reads of the target, [n, h] (EAGLE-1/2) or [n, 3h] (EAGLE-3)."""
    if not draft.is_eagle3:
        return target.hidden
    chosen = boundaries(draft.config, len(target.streams) - 1)
    return torch.cat([target.streams[layer] for layer in chosen], dim=1)


def eagle1_rows(draft: Draft, tokens: Sequence[int], features: Tensor) -> Tensor:
    """Layer output [n, h] of rows (features[i], tokens[i])."""
    state, eps = draft.state, draft.config["rms_norm_eps"]
    embedded = draft.embed[torch.tensor(list(tokens))].to(features.dtype)
    u = linear(state, "fc", torch.cat([embedded, features], dim=1))
    a = u + self_attention(state, f"{LAYER}self_attn.", draft.config, u)
    normed = rms_norm(a, state[f"{LAYER}post_attention_layernorm.weight"], eps)
    return a + gated_mlp(state, f"{LAYER}mlp.", normed)


def eagle3_rows(draft: Draft, tokens: Sequence[int], hidden: Tensor) -> Tensor:
    """Layer output before the norm, [n, h], of rows (hidden[i], tokens[i]); fc has been applied already."""
    state, eps = draft.state, draft.config["rms_norm_eps"]
    embedded = draft.embed[torch.tensor(list(tokens))].to(hidden.dtype)
    e = rms_norm(embedded, state[f"{LAYER}input_layernorm.weight"], eps)
    n = rms_norm(hidden, state[f"{LAYER}hidden_norm.weight"], eps)
    residual = n if draft.config.get("norm_before_residual") else hidden
    y = residual + self_attention(state, f"{LAYER}self_attn.", draft.config, torch.cat([e, n], dim=1))
    normed = rms_norm(y, state[f"{LAYER}post_attention_layernorm.weight"], eps)
    return y + gated_mlp(state, f"{LAYER}mlp.", normed)


def draft_rows(
    draft: Draft, prefix_tokens: Sequence[int], prefix_features: Tensor, path: Sequence[int]
) -> Tensor:
    """Outputs [n + len(path), h]: every row recomputed each time a drafted token is appended."""
    assert len(prefix_features) == len(prefix_tokens) - 1, "one feature per committed token but the root"
    rows = eagle3_rows if draft.is_eagle3 else eagle1_rows
    hidden = linear(draft.state, "fc", prefix_features) if draft.is_eagle3 else prefix_features
    tokens = list(prefix_tokens[1:])
    output = rows(draft, tokens, hidden)
    for token in path:
        tokens.append(token)
        hidden = torch.cat([hidden, output[-1:]])
        output = rows(draft, tokens, hidden)
    return output


def draft_logits(
    draft: Draft, prefix_tokens: Sequence[int], prefix_features: Tensor, path_tokens: Sequence[int]
) -> Tensor:
    """Logits [V or Vd] of the token that follows prefix_tokens (root last) + path_tokens."""
    output = draft_rows(draft, prefix_tokens, prefix_features, path_tokens)[-1]
    if draft.is_eagle3:
        output = rms_norm(output, draft.state["norm.weight"], draft.config["rms_norm_eps"])
    return draft.head.to(output.dtype) @ output


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
