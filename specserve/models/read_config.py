"""Read a target model's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specserve.layers.formats import read_format
from specserve.layers.linear import PLAIN
from specserve.layers.weights import WeightFormat
from specserve.methods import own_heads
from specserve.models.config import (
    COUNT,
    NUMBER,
    SIZE,
    TEXT,
    TRUTH,
    ModelConfig,
    check,
    layer_config,
    read_json,
)
from specserve.models.random_tensors import random_format
from specserve.models.registry import model_class, text_part
from specserve.models.special_tokens import end_token
from specserve.models.tensor_files import TensorFiles

_SIDE_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files with a quantization config that ``config.json`` lacks, and their ``quant_method``."""
_FIELDS = "quantization_config", "compression_config", "quantization"  # the last is MLX's
_OUTER = ("architectures", "tie_word_embeddings")
_COUNTS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("decoder_sparse_step", "n_routed_experts"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_COUNTS_OR_NULL = (
    *("max_position_embeddings", "sliding_window", "num_local_experts", "rotary_dim"),
    *("n_group", "topk_group", "q_lora_rank"),
)
_SIZES = (
    *("max_window_layers", "shared_expert_intermediate_size", "first_k_dense_replace", "n_shared_experts"),
    *("global_head_dim", "hidden_size_per_layer_input", "num_kv_shared_layers"),
)
_TRUTHS = (
    *("tie_word_embeddings", "attention_bias", "qkv_bias", "attn_output_gate"),
    *("norm_topk_prob", "use_qk_norm"),
    *("use_sliding_window", "enable_moe_block", "attention_k_eq_v", "use_double_wide_mlp"),
)
_POSITIVE = (
    *("sliding_window_pattern", "no_rope_layer_interval", "query_pre_attn_scalar", "embedding_multiplier"),
    *("attention_multiplier", "residual_multiplier", "logits_scaling", "partial_rotary_factor", "norm_eps"),
    *("routed_scaling_factor", "logit_scale", "layer_norm_eps", "norm_epsilon"),
)


def load_model_config(
    model_path: Path, tokenizer_path: Path | None = None, random: str | None = None
) -> ModelConfig:
    """Read a target model's ``config.json``, and the end tokens that it, ``generation_config.json`` and the tokenizer
    name together. ``tokenizer_path`` None: the model's own. ``random`` as in ``ModelConfig``."""
    path = model_path / "config.json"
    fields = read_json(path)
    text = fields.get("text_config")
    if isinstance(text, dict):  # beside a vision part; what is around both says of the head
        fields = {**fields, **text, **{name: fields[name] for name in _OUTER if name in fields}}
    architectures = fields.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ValueError(f"{path}: architectures must name one architecture, found {architectures!r}")
    architecture = text_part(architectures[0], fields.get("model_type"), path)
    model = model_class(architecture, path)
    fields = {**model.defaults, **fields}
    if fields.get("use_sliding_window") is False:
        fields["sliding_window"] = None
    check(
        fields, path, COUNT, "vocab_size", "num_hidden_layers", *(n for n in _COUNTS if n in model.defaults)
    )
    check(fields, path, COUNT.or_null, *_COUNTS_OR_NULL)
    check(fields, path, NUMBER, *(name for name in _POSITIVE if name in model.defaults))
    check(fields, path, NUMBER.or_null, "final_logit_softcapping", "attn_logit_softcapping")
    check(fields, path, TRUTH, *_TRUTHS, optional=True)
    check(fields, path, SIZE, *(name for name in _SIZES if name in model.defaults))
    for name, accepted in model.only.items():
        if (found := fields.get(name)) not in accepted:
            words = " or ".join(str(each) for each in accepted if each is not None)
            raise ValueError(f"{path}: {name} {found!r} is not supported; expected {words}")
    layer = layer_config(fields, path, model.activations, model.activation_field)
    ends, vocab_size = end_tokens(model_path, tokenizer_path or model_path), fields["vocab_size"]
    ropes = model.read_ropes(fields, path)
    try:
        layers = tuple(model.read_layers(layer, fields))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        layers=layers,
        ropes=ropes,
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_position_embeddings=int(fields.get("max_position_embeddings") or 2048),
        eos_token_ids=tuple(token for token in ends if 0 <= token < vocab_size),
        bos_token_id=fields.get("bos_token_id"),
        dtype=_dtype(fields, path),
        random=random,
        logit_cap=fields.get("final_logit_softcapping"),
        logit_scale=fields.get("logit_scale") or 1 / (fields.get("logits_scaling") or 1),
        embedding_scale=fields.get("embedding_multiplier", 1.0),
        notes=(_end_note(ends, vocab_size),),
    )
    return config.with_weights(_weights(config, fields, path))


def _dtype(fields: Mapping[str, Any], path: Path) -> str | None:
    """Return the dtype under its new or its old name. "auto" says no more than an absent field."""
    names = ("dtype", "torch_dtype")
    check(fields, path, TEXT, *names, optional=True)
    given = [fields[name].removeprefix("torch.") for name in names if fields.get(name) not in (None, "auto")]
    return given[0] if given else None


def _weights(config: ModelConfig, fields: Mapping[str, Any], path: Path) -> WeightFormat:
    """Return the weight format from ``config.json``, or from the file that older tools wrote next to it."""
    given = next(filter(None, map(fields.get, _FIELDS)), None)
    for name, method in _SIDE_FILES.items():
        if not given and path.with_name(name).exists():
            path = path.with_name(name)
            given = {"quant_method": method, **read_json(path)}
    if not given:
        return PLAIN
    try:
        model = model_class(config.architecture, path)
        if config.random is not None:
            own = [config.next_layer] if own_heads(fields)[1] else []  # the draft's layer
            with torch.device("meta"):
                return random_format(given, model(replace(config, layers=(*config.layers, *own)), 1))
        after = f"layers.{config.num_layers}."  # of a layer that drafts, as DeepSeek's files name it
        return read_format(
            given,
            {
                name.replace("mtp.layers.0.", after).replace("mtp.fc.", f"{after}eh_proj."): dtype
                for name, dtype in TensorFiles(path.parent).dtypes().items()
                if not name.startswith(model.beside)
            },
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def end_tokens(model_path: Path, tokenizer_path: Path) -> dict[int, list[str]]:
    """Return the tokens that end an answer, each with the files that say so. Raises ValueError naming a file that is
    unreadable or says something else."""
    found: dict[int, list[str]] = {}
    for file in (model_path / "config.json", model_path / "generation_config.json"):
        fields = read_json(file) if file.exists() else {}
        text = fields.get("text_config")
        eos = fields.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if any(type(token) is not int for token in ids):
            raise ValueError(
                f"{file}: eos_token_id must be a token id, a list of them or null, found {eos!r}"
            )
        for token in dict.fromkeys(ids):
            found.setdefault(token, []).append(file.name)
    if (token := end_token(tokenizer_path)) is not None:
        found.setdefault(token, []).append("the tokenizer")
    return found


def _end_note(ends: Mapping[int, Sequence[str]], vocab_size: int) -> str:
    """Return what is said of end tokens at start."""
    found = [f"{token} ({', '.join(files)})" for token, files in ends.items()]
    outside = [str(token) for token in ends if not 0 <= token < vocab_size]
    more = f"; left out, for the model has {vocab_size} tokens: {', '.join(outside)}" if outside else ""
    return f"end tokens: {', '.join(found) or 'none, so answers end only at their length limit'}{more}"
