"""Published ``config.json`` files, with the fields that they lack: read as transformers reads them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.shapes import SHAPES, write_shape
from specserve.layers.linear import PLAIN
from specserve.layers.rotary import NO_ROPE, inverse_frequencies
from specserve.models.read_config import load_model_config

LINEAR = {"factor": 8.0, "rope_type": "linear"}
OLMO_YARN = {
    "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
    "original_max_position_embeddings": 8192, "rope_type": "yarn",
}  # fmt: skip


def gemma(**text: Any) -> dict[str, Any]:
    text = {"model_type": "gemma3_text", "rope_scaling": LINEAR, "sliding_window": 1024, **text}
    names = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    return {**names, "eos_token_id": [1, 106], "text_config": text, "torch_dtype": "bfloat16"}


def gemma4(architecture: str = "Gemma4", **text: Any) -> dict[str, Any]:
    kind = {"Gemma4": "gemma4", "Gemma4Unified": "gemma4_unified"}[architecture]
    names = {"architectures": [f"{architecture}ForConditionalGeneration"], "model_type": kind}
    if (layers := text["num_hidden_layers"]) % 5 == 0 and text.get("num_kv_shared_layers"):
        text = {"layer_types": [*["sliding_attention"] * 4, "full_attention"] * (layers // 5), **text}
    return {**names, "text_config": {"model_type": f"{kind}_text", **text}}


PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma 3 1b": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "gemma 3 4b": gemma(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    "gemma 3 27b": gemma(
        head_dim=128, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_hidden_layers=62,
        num_key_value_heads=16, query_pre_attn_scalar=168,
    ),
    "gemma 4 e2b": gemma4(
        hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_key_value_heads=1,
        num_kv_shared_layers=20, use_double_wide_mlp=True, final_logit_softcapping=30.0,
    ),
    "gemma 4 12b": gemma4(
        "Gemma4Unified", hidden_size=3840, intermediate_size=15360, num_attention_heads=16, num_hidden_layers=48,
        num_key_value_heads=8, num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=30.0,
    ),
    "gemma 4 31b": gemma4(
        hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_hidden_layers=60,
        num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=1024,
        hidden_size_per_layer_input=0, max_position_embeddings=262144, use_bidirectional_attention="vision",
    ),
    "gemma 4, another last layer": gemma4(
        num_hidden_layers=8, layer_types=["sliding_attention"] * 8, global_head_dim=256,
    ),
    "gemma 4 26b": gemma4(
        hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_hidden_layers=30, num_key_value_heads=8,
        num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=1024, hidden_size_per_layer_input=0,
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
        max_position_embeddings=262144,
    ),
    "glm 4.5 air": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "partial_rotary_factor": 0.5, "intermediate_size": 10944,
        "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408,
        "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 1000000, "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "minimax m2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 1536, "max_position_embeddings": 196608, "model_type": "minimax_m2",
        "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
        "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
        "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
        "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
        "vocab_size": 200064,
    },
    "mixtral, few fields": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 64,
    },
    "smollm3 3b": {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
        "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
        "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, "num_attention_heads": 16,
        "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False, "vocab_size": 128256,
    },
    "smollm3, all defaults": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 2048,
        "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36, "vocab_size": 128256,
    },
    "olmo 2 7b": {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
    },
    "olmo 3 7b": {
        "architectures": ["Olmo3ForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "max_position_embeddings": 65536,
        "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06, "rope_scaling": OLMO_YARN, "rope_theta": 500000, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 100278,
    },
    "olmo 3, few fields": {
        "architectures": ["Olmo3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 100278,
    },
}  # fmt: skip
PUBLISHED |= SHAPES
R1 = {**SHAPES["deepseek-r1-6-layers"], "num_hidden_layers": 61, "n_routed_experts": 256}
del R1["quantization_config"]
KIMI_ROPE = {
    "type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
KIMI = {
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "vocab_size": 163840, "rope_theta": 50000.0,
    "max_position_embeddings": 131072, "rope_scaling": KIMI_ROPE,
}  # fmt: skip
PUBLISHED |= {"deepseek-r1": R1, "kimi-k2": {**R1, **KIMI}}
PUBLISHED |= {
    "gemma 3 1b, one rope named": {
        **PUBLISHED["gemma 3 1b"],
        "rope_parameters": {"full_attention": {"rope_type": "default"}},
        "rope_scaling": LINEAR,
    },
    "olmo 3, one rope named": {
        **PUBLISHED["olmo 3, few fields"],
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}},
    },
    "gemma 3 1b, no window": {**PUBLISHED["gemma 3 1b"], "sliding_window": None},
}
PUBLISHED |= {
    f"{name}, written by transformers 5": {**PUBLISHED[name], "rewritten": True}
    for name in (
        "gemma 3 1b",
        "gemma-3-12b",
        "gemma 4 e2b",
        "gemma 4 12b",
        "gemma 4 31b",
        "olmo 3 7b",
        "minimax m2",
    )
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    fields = dict(PUBLISHED[name])
    rewritten = fields.pop("rewritten", False)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    theirs: Any = transformers.AutoConfig.from_pretrained(tmp_path)
    if rewritten:
        theirs.save_pretrained(tmp_path)
    ours, theirs = load_model_config(tmp_path, random=""), theirs.get_text_config()
    family = import_module(f"transformers.models.{theirs.model_type.removesuffix('_text')}")
    modeling = import_module(f"{family.__name__}.modeling_{family.__name__.rpartition('.')[2]}")
    (rotary,) = (
        each
        for key, each in vars(modeling).items()
        if key.endswith("RotaryEmbedding") and "Vision" not in key
    )
    table = rotary(theirs)
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
    rotates = getattr(theirs, "no_rope_layers", [1] * theirs.num_hidden_layers)
    assert len(ours.layers) == theirs.num_hidden_layers
    sharing = getattr(theirs, "kv_sharing_modes", [None] * theirs.num_hidden_layers)
    for number, (layer, kind, turns) in enumerate(zip(ours.layers, kinds, rotates, strict=True)):
        own = theirs.per_layer_config[number] if hasattr(theirs, "kv_sharing_modes") else theirs
        sizes = (
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.hidden_size,
            layer.intermediate_size,
        )
        head_dim = getattr(own, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        heads = theirs.num_attention_heads, own.num_key_value_heads, head_dim
        reads = sharing[number] == "reuse"
        wider = 2 if reads and theirs.use_double_wide_mlp else 1
        inner = getattr(theirs, "intermediate_size", layer.intermediate_size)  # some have experts alone
        assert sizes == (*heads, theirs.hidden_size, wider * inner)
        kept = [n for n, mode in enumerate(sharing) if mode == "store" and kinds[n] == kind]
        assert layer.reads == (kept[0] if reads else None)
        assert layer.v_proj == (kind != "full_attention" or not getattr(theirs, "attention_k_eq_v", False))
        assert layer.rms_norm_eps == theirs.rms_norm_eps
        assert layer.softmax.window == (theirs.sliding_window if kind == "sliding_attention" else None)
        if layer.latent is not None:
            with torch.device("meta"):
                attention = next(each for key, each in vars(modeling).items() if key.endswith("Attention"))
                assert layer.softmax.scale == pytest.approx(attention(theirs, number).scaling)
        else:
            scalar = getattr(
                theirs, "query_pre_attn_scalar", 1 if "gemma4" in theirs.model_type else head_dim
            )
            assert (layer.softmax.scale or layer.head_dim**-0.5) == scalar**-0.5
        rope, prefix = ours.ropes[layer.rope], f"{kind}_" if hasattr(table, f"{kind}_inv_freq") else ""
        assert (rope == NO_ROPE) == (not turns)
        if turns:
            expected = getattr(table, f"{prefix}inv_freq").double()
            turned = 2 * len(expected)
            torch.testing.assert_close(inverse_frequencies(rope, turned), expected, rtol=1e-6, atol=0)
            part = rope.partial_rotary_factor if rope.kind != "proportional" else 1
            assert turned == part * head_dim
            assert rope.scale == pytest.approx(getattr(table, f"{prefix}attention_scaling"))
    assert ours.vocab_size == theirs.vocab_size
    assert ours.logit_cap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.longest_context[0] == ours.max_position_embeddings == theirs.max_position_embeddings


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_benchmarks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their first layers: tens of thousands of experts would be looked at one by one."""
    monkeypatch.setitem(SHAPES, name, SHAPES[name] | {"num_hidden_layers": 8})
    write_shape(name, tmp_path, fp8="quantization_config" not in SHAPES[name])
    target = load_model_config(tmp_path / "target", random="")
    draft = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert target.weights != PLAIN
    assert draft["hidden_size"] == target.draft_layer.hidden_size
    assert draft["vocab_size"] == target.vocab_size >= draft["draft_vocab_size"]


def test_a_scaling_that_is_added_reaches_further(tmp_path: Path) -> None:
    added = {**PUBLISHED["smollm3 3b"], "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(added))
    assert load_model_config(tmp_path).longest_context == (131072, "linear rope scaling")


def test_a_scaling_next_to_the_ropes_of_kinds_is_of_whole_attention(tmp_path: Path) -> None:
    kinds = {kind: {"rope_theta": 5e5} for kind in ("full_attention", "sliding_attention")}
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    added = {**PUBLISHED["olmo 3, few fields"], "rope_parameters": kinds, "rope_scaling": yarn}
    (tmp_path / "config.json").write_text(json.dumps(added))
    assert [(rope.theta, rope.kind) for rope in load_model_config(tmp_path).ropes] == [
        (5e5, "yarn"),
        (5e5, "default"),
    ]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("glm 4.5 air", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; expected sigmoid"),
    ("minimax m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; expected sigmoid"),
    (
        "minimax m2",
        {"shared_intermediate_size": 8},
        "shared_intermediate_size 8 is not supported; expected 0",
    ),
    ("minimax m2", {"num_local_experts": None}, "num_local_experts must be a positive integer, found None"),
    ("minimax m2", {"rotary_dim": "x"}, "rotary_dim must be a positive integer or null, found 'x'"),
    ("deepseek-r1", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; expected noaux_tc"),
    ("deepseek-r1", {"rope_interleave": False}, "rope_interleave False is not supported; expected True"),
    ("deepseek-r1", {"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, found 0"),
    (
        "deepseek-v2-lite",
        {"topk_method": "noaux_tc"},
        "topk_method 'noaux_tc' is not supported; expected greedy or group_limited_greedy",
    ),
    (
        "glm-4.7-flash",
        {"mlp_layer_types": ["sparse"]},
        r"mlp_layer_types must name dense or sparse for each of 47 layers, found \['sparse'\]",
    ),
    (
        "glm-4.7-flash",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor 0.5 is not supported; expected 1",
    ),
    ("deepseek-r1", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, found 1"),
    (
        "gemma 3 1b",
        {"sliding_window_pattern": None},
        "sliding_window_pattern must be a positive number, found None",
    ),
    (
        "gemma 3 1b",
        {"sliding_window_pattern": 0},
        "sliding_window_pattern must be a positive number, found 0",
    ),
    (
        "gemma 3 1b",
        {"query_pre_attn_scalar": "x"},
        "query_pre_attn_scalar must be a positive number, found 'x'",
    ),
    ("gemma 3 1b", {"layer_types": 3}, "layer_types must name .*, found 3"),
    ("gemma 3 1b", {"layer_types": [{}] * 26}, "layer_types must name .* for each of 26 layers, found"),
    (
        "olmo 3 7b",
        {"layer_types": ["chunked_attention"] * 32},
        "layer_types must name .*, found .'chunked_attention'",
    ),
    (
        "olmo 3 7b",
        {"rope_parameters": {"sliding_attention": "default"}},
        "sliding_attention must be an object or null, found 'default'",
    ),
    (
        "smollm3 3b",
        {"no_rope_layers": [1, 0]},
        "no_rope_layers must be 1 or 0 for each of 36 layers, found .1, 0.",
    ),
    (
        "smollm3 3b",
        {"no_rope_layer_interval": 0},
        "no_rope_layer_interval must be a positive number, found 0",
    ),
]


@pytest.mark.parametrize(("name", "fields", "words"), BAD)
def test_fields_that_are_not_supported_are_named(
    name: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name], **fields}))
    with pytest.raises(ValueError, match=rf"config\.json: {words}"):
        load_model_config(tmp_path)
