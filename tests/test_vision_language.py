"""Vision-language files: the text part has the numbers of transformers' class, which gets text alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specserve import SamplingParams
from specserve.models.read_config import load_model_config
from specserve.models.registry import ARCHITECTURES, AROUND
from tests.engines import answer_one, make_scheduler
from tests.reference.gemma4 import draw_weights
from tests.reference.models import change_config, load_checkpoint, save_checkpoint
from tests.test_latent import make_deepseek
from tests.test_more_targets import SIZES
from tests.test_targets import check_logits

MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL = {**SMALL, "model_type": "pixtral", "num_hidden_layers": 1}
QWEN: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 16,
}
MISTRAL = {"model_type": "mistral", "sliding_window": None, "head_dim": 8}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "Qwen2VL": ({"rope_parameters": MROPE}, {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}, "visual"),
    "Qwen2_5_VL": ({"rope_parameters": MROPE}, QWEN, "visual"),
    "Qwen3VL": (
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 8},
        {**QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "visual",
    ),
    "Qwen3VLMoe": (
        {
            **{"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 8, "num_experts": 6},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 24},
        },
        {**QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "visual",
    ),
    "Qwen3_5": (
        {"rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.5}, "head_dim": 16},
        {**QWEN, "num_position_embeddings": 16},
        "visual",
    ),
    "Qwen3_5Moe": (
        {
            **{"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}, "head_dim": 16, "num_experts": 6},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
        },
        {**QWEN, "num_position_embeddings": 16},
        "visual",
    ),
    "Mistral3": ({"model_type": "ministral3", "head_dim": 8}, PIXTRAL, "multi_modal_projector, vision_tower"),
    "Llava": (MISTRAL, PIXTRAL, "multi_modal_projector, vision_tower"),
    "Glm4v": ({"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}, {**QWEN, "num_heads": 2}, "visual"),
    "InternVL": ({"model_type": "qwen3", "head_dim": 8}, SMALL, "multi_modal_projector, vision_tower"),
    "Idefics3": ({"model_type": "llama"}, SMALL, "connector, vision_model"),
    "SmolVLM": ({"model_type": "llama"}, SMALL, "connector, vision_model"),
}  # fmt: skip


def make(path: Path, family: str) -> Path:
    text, vision, _ = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(text_config={**SIZES, **text}, vision_config=vision)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    draw_weights(model)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_logits_and_tokens_of_transformers(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = make(tmp_path / "target", family)
    with caplog.at_level(logging.INFO):
        check_logits(target)
    assert f" tensors of {FAMILIES[family][2]}" in caplog.text
    assert "no parameter reads" not in caplog.text


def test_a_published_config_without_text_config(tmp_path: Path) -> None:
    target = make(tmp_path / "target", "Qwen2_5_VL")
    nested, file = load_model_config(target), target / "config.json"
    config = json.loads(file.read_text())
    text = {**config.pop("text_config"), "model_type": "qwen2_5_vl", "rope_parameters": None}
    scaling = {"type": "mrope", "mrope_section": [2, 1, 1]}
    file.write_text(json.dumps({**text, **config, "rope_theta": 1e4, "rope_scaling": scaling}))
    assert load_model_config(target) == nested


def test_quantized_modules_beside_the_text(tmp_path: Path) -> None:
    """Their format may be one that is not supported."""
    target = make(tmp_path / "target", "Qwen3VL")
    tensors = load_file(target / "model.safetensors")
    for name in list(tensors):
        if "language_model.layers." in name and name.endswith("proj.weight"):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.ones(1)
    tensors["model.visual.blocks.0.mlp.linear_fc1.weight_scale"] = torch.ones(16, 4)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    left = ["lm_head", "model.visual.blocks.0.mlp.linear_fc1"]
    change_config(target, quantization_config={"quant_method": "fp8", "modules_to_not_convert": left})
    assert load_model_config(target).weights.words == "fp8: FP8 with a scale a tensor"


def test_every_vision_language_architecture_is_compared() -> None:
    here = {f"{family}ForConditionalGeneration" for family in FAMILIES}
    around = {name for name in (*ARCHITECTURES, *AROUND) if "ForConditionalGeneration" in name}
    assert {name for name in around if not name.startswith(("Gemma", "Kimi"))} == here


def test_kimi_k2_5(tmp_path: Path) -> None:
    """As published: transformers writes other names."""
    flat = make_deepseek(tmp_path / "flat")
    state, text = load_checkpoint(flat)
    named = {f"language_model.{name}": tensor for name, tensor in state.items()}
    named |= dict.fromkeys(
        ("mm_projector.proj.0.weight", "vision_tower.patch_embed.pos_emb.weight"), torch.ones(4)
    )
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
    }
    text |= {"model_type": "kimi_k2", "quantization_config": None}
    target = save_checkpoint(
        tmp_path / "target", named, {**config, "tie_word_embeddings": False}, safetensors=True
    )
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
    found, expected = (answer_one(make_scheduler(path), [3, 9, 14], params) for path in (target, flat))
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


def test_an_unknown_text_part_is_named(tmp_path: Path) -> None:
    target = make(tmp_path / "target", "Llava")
    config = json.loads((target / "config.json").read_text())
    change_config(target, text_config={**config["text_config"], "model_type": "opt"})
    with pytest.raises(ValueError, match="text_config of model_type 'opt' is not supported in Llava"):
        load_model_config(target)
