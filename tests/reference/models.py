"""Random tiny checkpoints on disk: Hugging Face targets, and drafts in the published EAGLE layouts."""

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .llama import LlamaOutput, forward

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
    pickled = path / "pytorch_model.bin"
    return load_tensors(pickled if pickled.exists() else path / "model.safetensors"), config


def load_tensors(file: Path) -> dict[str, Tensor]:
    """A file's tensors, read again only if it changed: slow references ask for them at every token."""
    stat = file.stat()
    kept = _tensors(file, stat.st_mtime_ns, stat.st_size)
    return {name: tensor.clone() for name, tensor in kept.items()}


@lru_cache(maxsize=8)
def _tensors(file: Path, *_: int) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return tensors


def run_target(path: Path, tokens: Sequence[int]) -> LlamaOutput:
    """What a target computes for a text, kept: the slow reading of a draft asks for the same at each node."""
    written = (path / "model.safetensors").stat().st_mtime_ns
    return _run_target(path, written, tuple(tokens))


@lru_cache(maxsize=1024)
def _run_target(path: Path, _: int, tokens: tuple[int, ...]) -> LlamaOutput:
    return forward(*load_checkpoint(path), tokens)


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
    """A random model of a `family` of transformers, as it saves one. `branch_scale` < 1 shrinks what the layers add to
    the residual stream, which brings the model closer to a table token -> next token (see `agree` below).
    `old_config` writes rope_theta, rope_scaling and torch_dtype as transformers 4 did. `extra` goes to the config."""
    config: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_act": "silu",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "rms_norm_eps": eps,
        "rope_parameters": {"rope_type": "default", **(rope_scaling or {}), "rope_theta": rope_theta},
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
        **({"attention_bias": bias} if family in ("Llama", "Qwen3") else {}),
        **extra,
    }
    if family.startswith("Qwen"):
        config |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28}
        config["layer_types"] = ["full_attention"] * layers
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            return 1 + 0.2 * noise
        if name.startswith("lm_head"):
            return head_std * noise
        return std * (branch_scale if "o_proj" in name or "down_proj" in name else 1) * noise

    state = {name: draw(name, shape).to(dtype) for name, shape in parameters(config).items()}
    save_checkpoint(path, state, config, safetensors=True)
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": eos, "_from_model_config": True})
    )
    if old_config:
        rewrite_config_in_old_form(path, rope_theta, rope_scaling)
    return path


def parameters(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters, in the order of transformers."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
    family, bias = config["model_type"], config.get("attention_bias")
    inputs, mlp = bias or family == "qwen2", config.get("mlp_bias")
    matrices = [
        ("self_attn.q_proj", queries, hidden, inputs),
        ("self_attn.k_proj", keys, hidden, inputs),
        ("self_attn.v_proj", keys, hidden, inputs),
        ("self_attn.o_proj", hidden, queries, bias),
        ("mlp.gate_proj", inner, hidden, mlp),
        ("mlp.up_proj", inner, hidden, mlp),
        ("mlp.down_proj", hidden, inner, mlp),
    ]
    layer: dict[str, tuple[int, ...]] = {}
    for name, rows, columns, has_bias in matrices:
        layer[f"{name}.weight"] = (rows, columns)
        if has_bias:
            layer[f"{name}.bias"] = (rows,)
        if name == "self_attn.o_proj" and family in ("qwen3", "gemma3_text"):
            layer |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (head_dim,))
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += [f"{name}_feedforward_layernorm" for name in ("pre", "post") if family == "gemma3_text"]
    layer |= dict.fromkeys([f"{name}.weight" for name in norms], (hidden,))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    return (
        shapes
        if config["tie_word_embeddings"]
        else shapes | {"lm_head.weight": (config["vocab_size"], hidden)}
    )


def make_mistral(path: Path, *, sliding_window: int | None = None, **options: Any) -> Path:
    return make_llama(path, family="Mistral", sliding_window=sliding_window, **options)


def make_qwen2(path: Path, **options: Any) -> Path:
    """With biases on q, k and v, as all of them."""
    return make_llama(path, family="Qwen2", **options)


def make_qwen3(path: Path, **options: Any) -> Path:
    return make_llama(path, family="Qwen3", **options)


def make_gemma3(
    path: Path, *, sliding_window: int = 16, rope_scaling: dict[str, Any] | None = None, **options: Any
) -> Path:
    """Two layers with a window, one without; `rope_scaling` is of that one. Norms are stored minus 1."""
    options = {"layers": 3, "rope_theta": 1e6, "tied": True, "head_dim": 8, **options}
    full = {"rope_type": "default", **(rope_scaling or {}), "rope_theta": options["rope_theta"]}
    extra = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 12,
        "sliding_window": sliding_window,
        "layer_types": [f"{kind}_attention" for _, kind in zip(range(options["layers"]), cycle(PATTERN))],
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    state, config = load_checkpoint(make_llama(path, family="Gemma3", **options, **extra))
    del config["hidden_act"]
    state = {name: tensor - 1 if "norm." in name else tensor for name, tensor in state.items()}
    return save_checkpoint(path, state, config, safetensors=True)


PATTERN = ("sliding", "sliding", "full")


def make_qwen3_moe(path: Path, *, experts: int = 6, inner: int = 24, shared: int = 0, **options: Any) -> Path:
    """A Qwen3 whose layers but the first have experts, of which a token goes through two, and through one for all that
    is ``shared`` times as wide."""
    state, config = load_checkpoint(make_qwen3(path, **options))
    draws, hidden = Draws(5), config["hidden_size"]
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for layer in range(1, config["num_hidden_layers"]):
        module = f"model.layers.{layer}.mlp"
        scale = state[f"{module}.down_proj.weight"].std().item()
        for name in sizes:
            del state[f"{module}.{name}.weight"]
        state[f"{module}.gate.weight"] = draws.matrix(experts, hidden, 1.0)
        for expert, (name, shape) in product(range(experts), sizes.items()):
            std = scale if name == "down_proj" else 0.2
            state[f"{module}.experts.{expert}.{name}.weight"] = draws.matrix(*shape, std)
        if shared:
            state[f"{module}.shared_expert_gate.weight"] = draws.matrix(1, hidden, 1.0)
            config["shared_expert_intermediate_size"] = shared * inner
        for name, (outputs, inputs) in sizes.items() if shared else ():
            shape = (outputs, shared * inputs) if name == "down_proj" else (shared * outputs, inputs)
            state[f"{module}.shared_expert.{name}.weight"] = draws.matrix(*shape, 0.1)
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "mlp_only_layers": [0]}
    config |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": inner}
    return save_checkpoint(path, state, config | {"norm_topk_prob": True}, safetensors=True)


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


def change_config(path: Path, **fields: Any) -> Path:
    """Give a checkpoint's config.json other fields."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return path


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


def make_qwen3_5(path: Path, *, state_size: int = 8, **options: Any) -> Path:
    """Two gated delta nets, which remember for long, and between them attention with a gate, as in the layer that
    drafts, from the token alone. Norms but the delta nets' are stored minus 1."""
    state, config = load_checkpoint(make_qwen3(path, **{"layers": 3, "head_dim": 16, **options}))
    keys, values, size, hidden, draws = 2, 4, state_size, config["hidden_size"], Draws(6)
    config |= {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **{f"linear_num_{name}_heads": count for name, count in (("key", keys), ("value", values))},
        **{f"linear_{name}_head_dim": size for name in ("key", "value")},
    }
    config["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    scale = state["model.layers.0.self_attn.o_proj.weight"].std().item()
    for layer in (0, 2):
        module = f"model.layers.{layer}.linear_attn"
        for name in [name for name in state if name.startswith(f"model.layers.{layer}.self_attn.")]:
            del state[name]
        rows = {"qkv": (2 * keys + values) * size, "z": values * size, "b": values, "a": values}
        for name, count in rows.items():
            state[f"{module}.in_proj_{name}.weight"] = draws.matrix(count, hidden, 0.2)
        state[f"{module}.conv1d.weight"] = draws.matrix(rows["qkv"], 4, 0.5)[:, None]
        state[f"{module}.A_log"], state[f"{module}.dt_bias"] = draws.matrix(2, values, 0.5) - 3
        state[f"{module}.norm.weight"] = 1 + draws.matrix(1, size, 0.2)[0]
        state[f"{module}.out_proj.weight"] = draws.matrix(hidden, values * size, scale)
    queries = state["model.layers.1.self_attn.q_proj.weight"]
    gates = draws.matrix(*queries.shape, 0.2)
    pairs = [each.unflatten(0, (-1, config["head_dim"])) for each in (queries, gates)]
    state["model.layers.1.self_attn.q_proj.weight"] = torch.stack(pairs, 1).flatten(0, 2)
    state = {
        name: tensor - 1 if "norm." in name and "linear_attn" not in name else tensor
        for name, tensor in state.items()
    }
    attention = {name: tensor for name, tensor in state.items() if name.startswith("model.layers.1.")}
    state |= {name.replace("model.layers.1.", "mtp.layers.0."): each for name, each in attention.items()}
    state |= {f"mtp.pre_fc_norm_{name}.weight": torch.zeros(hidden) for name in ("embedding", "hidden")}
    state |= {"mtp.fc.weight": torch.eye(hidden, 2 * hidden), "mtp.norm.weight": state["model.norm.weight"]}
    return save_checkpoint(path, state, config | {"mtp_num_hidden_layers": 1}, safetensors=True)
