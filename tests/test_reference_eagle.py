from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.reference import eagle, llama
from tests.reference.doubles import float32_means_float64
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.models import load_checkpoint, make_llama

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]
PATH = [11, 2, 40]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "target", rope_theta=500000.0)


def load(target: Path, path: Path) -> tuple[eagle.Draft, Tensor]:
    """The draft, and what it reads of the target for all TOKENS but the last."""
    state, config = load_checkpoint(target)
    draft = eagle.make_draft(*load_checkpoint(path), llama.embedding_weight(state), llama.head_weight(state))
    return draft, eagle.features_of(draft, llama.forward(state, config, TOKENS[:-1]))


def published_layer(draft: eagle.Draft) -> tuple[Any, Any]:
    """A transformers decoder layer and rotary embedding that hold the draft's tensors."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

    config = LlamaConfig(
        **{k: v for k, v in draft.config.items() if k not in ("architectures", "torch_dtype")}
    )
    config._attn_implementation = "eager"
    config.attention_bias = "layers.0.self_attn.q_proj.bias" in draft.state
    layer: Any = LlamaDecoderLayer(config, 0)
    if draft.is_eagle3:
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = draft.state[f"layers.0.self_attn.{name}.weight"].shape[0]
            setattr(layer.self_attn, name, nn.Linear(2 * config.hidden_size, rows, bias=False))
        layer.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    else:
        layer.input_layernorm = nn.Identity()
    tensors = {k.removeprefix("layers.0."): v for k, v in draft.state.items() if k.startswith("layers.0.")}
    if config.attention_bias:
        tensors["self_attn.o_proj.bias"] = torch.zeros(config.hidden_size)
    layer.double().load_state_dict({key: tensor.double() for key, tensor in tensors.items()})
    return layer.eval(), LlamaRotaryEmbedding(config)


def published_rows(draft: eagle.Draft, tokens: list[int], hidden: Tensor, fed: int) -> Tensor:
    """Layer outputs by transformers' modules, growing the draft one row at a time after the first `fed`."""
    layer, rotary = published_layer(draft)
    embedded = nn.functional.embedding(torch.tensor(tokens), draft.embed.double())
    fc, bias = draft.state["fc.weight"].double(), draft.state.get("fc.bias")
    hidden = nn.functional.linear(hidden, fc) if draft.is_eagle3 else hidden
    while True:
        n = len(hidden)
        x, e = hidden[None], embedded[None, :n]
        rope = rotary(x, torch.arange(n)[None])
        mask = torch.full((1, 1, n, n), float("-inf")).double().triu(1)
        if draft.is_eagle3:
            both = torch.cat([layer.input_layernorm(e), layer.hidden_norm(x)], dim=-1)
            residual = layer.hidden_norm(x) if draft.config.get("norm_before_residual") else x
            y = residual + layer.self_attn(both, position_embeddings=rope, attention_mask=mask)[0]
            out = y + layer.mlp(layer.post_attention_layernorm(y))
        else:
            u = nn.functional.linear(torch.cat([e, x], dim=-1), fc, None if bias is None else bias.double())
            out = layer(u, position_embeddings=rope, attention_mask=mask)
        rows: Tensor = out[0]
        if n == len(tokens):
            return rows
        assert n >= fed
        hidden = torch.cat([hidden, rows[-1:]])


VARIANTS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle fc bias": {"fc_bias": True},
    "eagle qkv bias": {"qkv_bias": True},
    "eagle theta": {"rope_theta": 500000.0},
    "eagle own heads": {"heads": 2, "kv_heads": 2},
    "eagle3": {},
    "eagle3 truncated": {"draft_vocab": 24},
    "eagle3 norm before residual": {"norm_before_residual": True},
    "eagle3 speculators keys": {"layer_prefix": "layers.0.", "safetensors": True},
    "eagle3 prefixed keys": {"layer_prefix": "model.layers.0."},
    "eagle3 target's head": {"own_head": False},
}


def make(name: str, path: Path, target: Path, **options: Any) -> Path:
    return (make_eagle3 if name.startswith("eagle3") else make_eagle)(path, target, **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_against_transformers_modules(name: str, target: Path, tmp_path: Path) -> None:
    draft, features = load(target, make(name, tmp_path / "draft", target, **VARIANTS[name]))
    with torch.no_grad(), float32_means_float64():
        expected = published_rows(draft, TOKENS[1:] + PATH, features, len(features))
    ours = eagle.draft_rows(draft, TOKENS, features, PATH)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
