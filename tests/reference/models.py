"""Random tiny checkpoints on disk: Hugging Face targets, and drafts in the published EAGLE layouts."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Published factors; the original length is so short that a tiny head dim has all kinds of frequency."""

YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]


def load_checkpoint(path: Path) -> Checkpoint:
    """(tensors as stored, config.json) of a target or a draft."""
    config = json.loads((path / "config.json").read_text())
    if (path / "pytorch_model.bin").exists():
        state = torch.load(path / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        state = load_file(path / "model.safetensors")
    return dict(state), config


def save_checkpoint(path: Path, state: dict[str, Tensor], config: dict[str, Any], safetensors: bool) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    state = {key: tensor.contiguous().clone() for key, tensor in state.items()}
    if safetensors:
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(state, path / "pytorch_model.bin")
    return path


def make_llama(
    path: Path,
    *,
    vocab: int = 64,
    hidden: int = 32,
    inner: int = 48,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    eps: float = 1e-5,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    max_positions: int = 512,
    tied: bool = False,
    bias: bool = False,
    eos: int | None = None,
    seed: int = 0,
    std: float = 0.2,
    head_std: float = 0.4,
    branch_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    old_config: bool = False,
    family: str = "Llama",
    **extra: Any,
) -> Path:
    """A random model of a `family` of transformers, saved by it. `branch_scale` < 1 shrinks what the layers add to the
    residual stream, which brings the model closer to a table token -> next token (see `agree` below).
    `old_config` writes rope_theta, rope_scaling and torch_dtype as transformers 4 did. `extra` goes to the config."""
    import transformers

    if family in ("Llama", "Qwen3"):
        extra["attention_bias"] = bias
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        rms_norm_eps=eps,
        rope_parameters={"rope_type": "default", **(rope_scaling or {}), "rope_theta": rope_theta},
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
        dtype=dtype,
        **extra,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * noise)
            elif name.startswith("lm_head"):
                weight.copy_(head_std * noise)
            elif "o_proj" in name or "down_proj" in name:
                weight.copy_(std * branch_scale * noise)
            else:
                weight.copy_(std * noise)
    model.to(dtype).save_pretrained(path)
    if old_config:
        rewrite_config_in_old_form(path, rope_theta, rope_scaling)
    return path


def make_mistral(path: Path, *, sliding_window: int | None = None, **options: Any) -> Path:
    return make_llama(path, family="Mistral", sliding_window=sliding_window, **options)


def make_qwen2(path: Path, **options: Any) -> Path:
    """With biases on q, k and v, as all of them."""
    return make_llama(path, family="Qwen2", **options)


def make_qwen3(path: Path, **options: Any) -> Path:
    return make_llama(path, family="Qwen3", **options)


def make_mimo(path: Path, **options: Any) -> Path:
    """A Qwen2 under MiMo's name, with the layer that predicts one token further (formats.md 6.1)."""
    state, config = load_checkpoint(make_qwen2(path, **options))
    state |= {f"model.mtp_layers.0.{key}": tensor for key, tensor in mtp_layer(state, config).items()}
    del config["layer_types"]
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    config |= {"attention_bias": True, "num_nextn_predict_layers": 1}
    return save_checkpoint(path, state, config, safetensors=True)


def mtp_layer(target: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Of the target's shapes and dtype, below `model.mtp_layers.0.`."""
    draws, hidden = Draws(5), config["hidden_size"]
    prefix = "model.layers.0."
    layer = {key.removeprefix(prefix): tensor for key, tensor in target.items() if key.startswith(prefix)}
    layer = {key: draws.matrix(1, tensor.numel(), 0.2).view_as(tensor) for key, tensor in layer.items()}
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm")
    layer |= {f"{name}.weight": draws.norm(hidden) for name in (*norms, "final_layernorm")}
    layer["input_proj.weight"] = draws.matrix(hidden, 2 * hidden, 0.2)
    return {key: tensor.to(target["model.norm.weight"].dtype) for key, tensor in layer.items()}


def rewrite_config_in_old_form(path: Path, rope_theta: float, rope_scaling: dict[str, Any] | None) -> None:
    config = json.loads((path / "config.json").read_text())
    config.pop("rope_parameters", None)
    config.update(rope_theta=rope_theta, rope_scaling=rope_scaling, torch_dtype=config.pop("dtype"))
    (path / "config.json").write_text(json.dumps(config, indent=2))


class Draws:
    """Seeded normal tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, cols: int, std: float) -> Tensor:
        return std * torch.randn(rows, cols, generator=self.generator)

    def like(self, tensor: Tensor, std: float) -> Tensor:
        return self.matrix(tensor.shape[0], tensor.shape[1], std)

    def norm(self, size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self.generator)

    def layer(
        self, width: int, hidden: int, inner: int, heads: int, kv_heads: int, std: float
    ) -> dict[str, Tensor]:
        """The tensors both kinds of draft share; q, k and v read `width`."""
        head_dim = hidden // heads
        return {
            "self_attn.q_proj.weight": self.matrix(heads * head_dim, width, std),
            "self_attn.k_proj.weight": self.matrix(kv_heads * head_dim, width, std),
            "self_attn.v_proj.weight": self.matrix(kv_heads * head_dim, width, std),
            "self_attn.o_proj.weight": self.matrix(hidden, heads * head_dim, std),
            "mlp.gate_proj.weight": self.matrix(inner, hidden, std),
            "mlp.up_proj.weight": self.matrix(inner, hidden, std),
            "mlp.down_proj.weight": self.matrix(hidden, inner, std),
            "post_attention_layernorm.weight": self.norm(hidden),
        }


def draft_config(target: dict[str, Any], inner: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """The fields all published drafts have; no rope_theta, head_dim or rope_scaling."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "intermediate_size": inner,
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": target["vocab_size"],
    }
