"""Random tiny targets with a layer for multi-token prediction of DeepSeek's kind, GLM's and Qwen's, made and saved by
transformers."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_layers import MtpLayer, MtpModel

from .doubles import float32_means_float64
from .gemma4 import draw_weights
from .models import load_checkpoint, save_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "use_qk_norm": True, "attention_bias": True,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
QWEN = {
    "eh_proj": "fc", "shared_head.norm": "norm", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden",
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "num_experts": 6,
    "shared_expert_intermediate_size": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "head_dim": 16,
}  # fmt: skip


@torch.no_grad()
def make_glm(path: Path, *, agree: bool = False, family: str = "Glm4Moe", **fields: Any) -> Path:
    """``agree``: no layer adds much to the token's embedding, so that drafts often say what the target says."""
    count = SIZES["num_hidden_layers"]
    all_fields = {**SIZES, **fields, "num_hidden_layers": count + 1}  # the last is the draft's
    text = "Text" if hasattr(transformers, f"{family}TextConfig") else ""
    config = getattr(transformers, f"{family}{text}Config")(**all_fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    draw_weights(model)
    qwen = family.startswith("Qwen")
    one = 0 if qwen else 1  # of norms' weights; Qwen's are stored minus 1
    for name, weight in model.named_parameters():
        if qwen and "norm" in name and "linear_attn" not in name:
            weight -= 1
        if agree and name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
            weight *= 0.04
    model.save_pretrained(path)
    state, written = load_checkpoint(path)
    hidden, draws = config.hidden_size, torch.Generator().manual_seed(2)
    noise = 0.2 * torch.randn(4, hidden, 2 * hidden, generator=draws)
    last = f"model.layers.{count}."
    own = {
        "eh_proj": torch.eye(hidden, 2 * hidden) if agree else noise[0],
        "shared_head.norm": state["model.norm.weight"] if agree else one + noise[1, 0, :hidden],
        "enorm": one + noise[2, 0, :hidden],
        "hnorm": one + noise[3, 0, :hidden],
    }
    if qwen:
        state = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in state.items()}
        state |= {f"mtp.{name}.weight": own[each] for each, name in QWEN.items()}
        written["mtp_num_hidden_layers"] = 1
    else:
        own["embed_tokens"] = state["model.embed_tokens.weight"]
        own["shared_head.head"] = state["lm_head.weight"]
        state |= {f"{last}{name}.weight": tensor for name, tensor in own.items()}
        written["num_nextn_predict_layers"] = 1
    written["num_hidden_layers"] = count
    for field in ("mlp_layer_types", "layer_types"):
        if field in written:
            written[field].pop()
    return save_checkpoint(path, state, written, safetensors=True)


@cache
def _loaded(path: Path) -> tuple[Any, MtpLayer]:
    """The target, and the layer that drafts."""
    state, config = load_checkpoint(path)
    count = config["num_hidden_layers"]
    more = {"mlp_layer_types": [*config["mlp_layer_types"], "sparse"]} if "mlp_layer_types" in config else {}
    apart = "mtp.fc.weight" in state
    model: Any = (
        getattr(transformers, config["architectures"][0])
        .from_pretrained(
            path,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
            num_hidden_layers=count + (not apart),
            **more,
        )
        .eval()
    )
    with float32_means_float64():
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    if apart:
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
        return model, MtpModel.from_pretrained(model).layers[0].double().eval()
    block, norm = model.model.layers.pop(count), type(model.model.norm)
    draft = MtpLayer(model.config, type(block), norm, count).double().eval()
    draft.mtp_block = block
    assert draft.post_norm is not None
    modules = {"enorm": draft.enorm, "hnorm": draft.hnorm, "eh_proj": draft.eh_proj}
    for name, module in {**modules, "shared_head.norm": draft.post_norm}.items():
        module.weight.data = state[f"model.layers.{count}.{name}.weight"].double()
    return model, draft


@torch.no_grad()
def next_logits(target: Path, committed: Sequence[int], path: Sequence[int]) -> Tensor:
    """Of the draft after committed tokens and a path. Each token is paired with the state before it: the target's, then
    the draft's own."""
    model, draft = _loaded(target)
    tokens = torch.tensor([[*committed[1:], *path]])
    with float32_means_float64():
        states = model.model(torch.tensor([committed[:-1]]), use_cache=False).last_hidden_state
        while True:
            length = states.shape[1]
            embedded, positions = model.model.embed_tokens(tokens[:, :length]), torch.arange(length)[None]
            out = draft(
                embedded,
                states,
                position_embeddings=model.model.rotary_emb(embedded, positions),
                attention_mask=torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[
                    None, None
                ],
                position_ids=positions,
                cache=None,
            )
            if length == tokens.shape[1]:
                logits: Tensor = model.lm_head(out[0, -1])
                return logits
            states = torch.cat([states, out[:, -1:]], 1)
