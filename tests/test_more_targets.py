"""Architectures that are made of the same blocks: the numbers and tokens of transformers, with and without drafts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specserve import SamplingParams
from specserve.config import make_settings
from specserve.layers.linear import PLAIN
from specserve.layers.weights import Projection, WeightFormat
from specserve.models.checkpoint import load_target
from specserve.models.read_config import load_model_config
from specserve.models.registry import ARCHITECTURES
from specserve.models.tensor_files import TensorFiles
from specserve.process.assemble import resolve_engine
from tests.engines import answer_all, drafting, make_scheduler
from tests.reference.draft_models import make_eagle3
from tests.reference.gemma4 import LARGE, MIXTURE, SMALL, make_drawn
from tests.reference.gemma4 import SIZES as GEMMA4
from tests.test_targets import BESIDE_VISION, MAKERS, PROMPT, check_logits

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0]}
GROWING = {
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.4,
}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
QUARTER = {**HALF, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
LONG = {**LONGROPE, "rope_theta": 1e4, "partial_rotary_factor": 0.75}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
SHARED = {"shared_expert_intermediate_size": 20}
HYBRID = {
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 6, "rope_parameters": QUARTER},
}
GLM = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
MLA = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": None, "attention_bias": False,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 3, capped": ("Gemma3", {"sliding_window": 9, "head_dim": 8, "final_logit_softcapping": 5.0}),
    "gemma 2": ("Gemma2", {"sliding_window": 9, "head_dim": 8, "attn_logit_softcapping": 0.5}),
    "gemma 4, small": ("Gemma4", {**GEMMA4, **SMALL}),
    "gemma 4, large": ("Gemma4", {**GEMMA4, **LARGE}),
    "gemma 4, experts": ("Gemma4", {**GEMMA4, **MIXTURE}),
    "gemma 4, unified": ("Gemma4Unified", {**GEMMA4, **LARGE, "attention_bias": True}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "phi 3": ("Phi3", {"sliding_window": 9}),
    "phi 4 mini": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 4}),
    "phi 4 mini, short": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 4096}),
    "nemotron": ("Nemotron", {"rope_parameters": HALF}),
    "arcee": ("Arcee", {}),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "ministral": ("Ministral", {"sliding_window": 9, "head_dim": 8}),
    "ministral 3": (
        "Ministral3",
        {"head_dim": 8, "rope_parameters": {**YARN, "rope_type": "yarn", **GROWING}},
    ),
    "glm": ("Glm", {"head_dim": 8}),
    "glm 4": ("Glm4", {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}),
    "command r": ("Cohere", {"logit_scale": 0.8, "attention_bias": True}),
    "command a": ("Cohere2", {"sliding_window": 9, "tie_word_embeddings": False}),
    "ernie 4.5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "helium": ("Helium", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "apertus": ("Apertus", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "starcoder 2": ("Starcoder2", {"sliding_window": 9}),
    "cwm": ("Cwm", {"sliding_window": 9, "head_dim": 16, "bos_token_id": 0}),
    "exaone 4": ("Exaone4", {"sliding_window": 9}),
    "exaone 4 without windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            **MOE,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "qwen2 moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen 3.5": ("Qwen3_5", HYBRID),
    "qwen 3.5 moe": ("Qwen3_5Moe", {**MOE, **HYBRID, "shared_expert_intermediate_size": 48}),
    "qwen3 next": ("Qwen3Next", {**MOE, **HYBRID, **SHARED, "mlp_only_layers": [1]}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "glm 4.5 air": ("Glm4Moe", {**GLM, "attention_bias": True}),
    "glm 4.5, in groups": (
        "Glm4Moe",
        {
            **GLM,
            "use_qk_norm": True,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
        },
    ),
    "deepseek v2 lite": ("DeepseekV2", {**MLA, "q_lora_rank": None}),
    "deepseek v2, in groups": (
        "DeepseekV2",
        {
            **MLA,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "rope_parameters": MSCALE,
        }
        | {"routed_scaling_factor": 4.0},
    ),
    "deepseek v3": (
        "DeepseekV3",
        {**MLA, "n_group": 3, "topk_group": 2, "rope_parameters": MSCALE, "num_key_value_heads": 4},
    ),
    "glm 4.7 flash": ("Glm4MoeLite", {**MLA, "num_key_value_heads": 4}),
    "mixtral with windows": ("Mixtral", {"num_local_experts": 3, "sliding_window": 9}),
    "minimax m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4},
    ),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9, "head_dim": 8}
        | {"rope_parameters": {**YARN, "truncate": False}, "bos_token_id": 0},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3 with windows": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 9}),
    "olmo 2": ("Olmo2", {"attention_bias": True}),
    "olmo 3": ("Olmo3", {"sliding_window": 9}),
    "olmo 3, yarn": ("Olmo3", {"rope_parameters": {"full_attention": YARN}, "tie_word_embeddings": True}),
}


@pytest.fixture(params=list(CONFIGS))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, fields = CONFIGS[request.param]
    return make_drawn(tmp_path / "target", family, **{**SIZES, **fields})


def test_every_architecture_is_compared() -> None:
    here = {f"{family}ForCausalLM" for family, _ in CONFIGS.values()}
    elsewhere = {
        name for name in ARCHITECTURES if re.search("(VL|VLMoe|4v|3_5|3_5Moe)ForConditionalGeneration", name)
    }
    assert {*MAKERS, *BESIDE_VISION, *here, *elsewhere} == {*ARCHITECTURES}


def test_flashinfer_has_no_caps(tmp_path: Path) -> None:
    config = transformers.Gemma2Config(**{**SIZES, "head_dim": 64, "attn_logit_softcapping": 50.0})
    config.architectures = ["Gemma2ForCausalLM"]
    config.save_pretrained(tmp_path)
    settings = {"device": "cuda", "load_format": "dummy", "attention_backend": "flashinfer"}
    with pytest.raises(
        ValueError, match="flashinfer: capped scores are not passed to FlashInfer; use triton"
    ):
        resolve_engine(
            make_settings(model_path=str(tmp_path), skip_tokenizer_init=True, **settings), has_gpu=True
        )


class Asked(WeightFormat):
    """Notes the names that formats are asked for, and has plain weights."""

    def __init__(self) -> None:
        self.names = set[str]()

    def projection(self, name: str, inputs: int, parts: Mapping[str, int], bias: bool) -> Projection:
        self.names |= {f"{name}.{part}.weight".lstrip(".") for part in parts}
        return PLAIN.projection(name, inputs, parts, bias)


def test_the_logits_and_tokens_of_transformers(target: Path) -> None:
    asked = Asked()
    load_target(target, torch.float32, torch.device("cpu"), 64, load_model_config(target).with_weights(asked))
    assert asked.names <= {*TensorFiles(target).names(), "lm_head.weight"}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    draft = make_eagle3(target.parent / "draft", target)
    check_logits(target, count=12)
    settings = {**drafting("EAGLE3", draft, (3, 2, 6)), "chunked_prefill_size": 7, "page_size": 1}
    work = [(PROMPT, params), (PROMPT * 4, SamplingParams(temperature=1.0, seed=3, max_tokens=12))]
    plain = answer_all(make_scheduler(target), work)
    drafted = answer_all(make_scheduler(target, **settings), work)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert all(each.usage.drafted for each in drafted)
