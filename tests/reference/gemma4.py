"""Random tiny Gemma 4 targets and assistants, made and saved by transformers."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .doubles import float32_means_float64

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 512,
    "sliding_window": 9, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SMALL = {  # E2B and E4B
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}  # fmt: skip
MIXTURE = {  # 26B-A4B
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True,
}  # fmt: skip
LARGE = {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 8.0}  # 31B


def make_gemma4(
    path: Path, *, family: str = "Gemma4", branch_scale: float = 1.0, seed: int = 1, **fields: Any
) -> Path:
    """``branch_scale`` as in ``make_llama``."""
    config = getattr(transformers, f"{family}TextConfig")(**{**SIZES, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    draw_weights(model, branch_scale, seed)
    model.save_pretrained(path)
    return path


@torch.no_grad()
def make_drawn(path: Path, family: str, branch_scale: float = 1.0, **fields: Any) -> Path:
    """A random model of a family of transformers, as it saves one. ``branch_scale``: of what blocks add to the stream,
    so that a draft agrees."""
    text = "Text" if hasattr(transformers, f"{family}TextConfig") else ""
    config = getattr(transformers, f"{family}{text}Config")(**fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    draw_weights(model)
    for name, weight in model.named_parameters():
        weight *= branch_scale if "down_proj" in name or "o_proj" in name else 1
    model.save_pretrained(path)
    return path


@torch.no_grad()
def draw_weights(model: nn.Module, branch_scale: float = 1.0, seed: int = 1) -> None:
    """Norms around 1, of the branches around ``branch_scale``."""
    draws = torch.Generator().manual_seed(seed)
    drawn = ("layer_scalar", "e_score_correction_bias")
    buffers = [(name, each) for name, each in model.named_buffers() if name.endswith(drawn)]
    for name, weight in [*model.named_parameters(), *buffers]:
        noise = 0.2 * torch.randn(weight.shape, generator=draws)
        around_one = "norm" in name or "scalar" in name
        scale = branch_scale if ".post_" in name else 1
        weight.copy_(scale * (1 + noise) if around_one else noise)


def make_assistant(
    path: Path,
    target: Path,
    *,
    hidden: int = 24,
    clusters: tuple[int, int] | None = None,
    agree: bool = False,
    seed: int = 2,
    **fields: Any,
) -> Path:
    """For a target of ``make_gemma4``. ``clusters``: how many, and how many are scored. If it agrees, it is the
    target's embedding and head with little between them."""
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(target)
    of, family = theirs.config, type(theirs).__name__.removesuffix("ForCausalLM")
    hidden = of.hidden_size if agree else hidden
    sizes = {"hidden_size": hidden, "vocab_size": of.vocab_size, "sliding_window": of.sliding_window}
    whole = {name: getattr(of.per_layer_config[-1], name) for name in ("head_dim", "num_key_value_heads")}
    small = {"num_hidden_layers": 3, "layer_types": SIZES["layer_types"][:3], "vocab_size_per_layer_input": 0}
    text = getattr(transformers, f"{family}TextConfig")(
        **{**SIZES, **sizes, **small, "per_layer_config": {2: whole}, **fields}
    )
    config = getattr(transformers, f"{family}AssistantConfig")(
        text_config=text,
        backbone_hidden_size=of.hidden_size,
        use_ordered_embeddings=clusters is not None,
        num_centroids=clusters[0] if clusters else 2048,
        centroid_intermediate_top_k=clusters[1] if clusters else 32,
    )
    model = getattr(transformers, f"{family}AssistantForCausalLM")(config)
    draw_weights(model, 0.04 if agree else 1.0, seed)
    with torch.no_grad():
        if agree:
            model.pre_projection.weight.copy_(torch.eye(hidden, 2 * hidden))
            model.model.norm.weight.copy_(theirs.model.norm.weight)
            model.model.embed_tokens.weight.copy_(theirs.model.embed_tokens.weight)
        if clusters:
            order_V = torch.randperm(of.vocab_size, generator=torch.Generator().manual_seed(seed))
            model.masked_embedding.token_ordering.copy_(order_V)
            rows_CXD = model.lm_head.weight[order_V].view(clusters[0], -1, hidden)
            model.masked_embedding.centroids.weight.copy_(rows_CXD.mean(1))
    model.save_pretrained(path)
    return path


def load(path: Path) -> Any:
    """In true float64."""
    architecture = transformers.AutoConfig.from_pretrained(path).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    )
    with float32_means_float64():
        for module in model.modules():
            if hasattr(module, "embed_scale"):
                module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
            if hasattr(module, "rotary_emb"):
                module.rotary_emb = type(module.rotary_emb)(module.config)
    return model.eval()


_loaded = cache(load)


@cache
def _seen(target: Path, committed: tuple[int, ...]) -> Any:
    return _loaded(target).model(
        torch.tensor([committed[:-1]]), use_cache=False, return_shared_kv_states=True
    )


@cache
def _after(assistant: Path, target: Path, committed: tuple[int, ...], path: tuple[int, ...]) -> Any:
    """The assistant's output; that of the path's beginning is computed once for all that go on from it."""
    seen = _seen(target, committed)
    before = _after(assistant, target, committed, path[:-1]) if path else seen
    token = path[-1] if path else committed[-1]
    embedded = _loaded(target).model.embed_tokens(torch.tensor([[token]]))
    return _loaded(assistant)(
        inputs_embeds=torch.cat([embedded, before.last_hidden_state[:, -1:]], -1),
        position_ids=torch.tensor([[len(committed) - 1]]),
        shared_kv_states=dict(seen.shared_kv_states),
    )


@torch.no_grad()
def next_logits(assistant: Path, target: Path, committed: Sequence[int], path: Sequence[int]) -> Tensor:
    """Of the assistant after committed tokens, the root last, and a path. It is given exactly the entries before the
    root; the class's own ``generate`` gives it those of rejected candidates, too."""
    draft, _ = _loaded(assistant), _loaded(target)
    with float32_means_float64():
        logits: Tensor = _after(assistant, target, tuple(committed), tuple(path)).logits[0, 0]
    if draft.config.use_ordered_embeddings:
        logits = logits.masked_fill(logits == logits.min(), -torch.inf)
    return logits
