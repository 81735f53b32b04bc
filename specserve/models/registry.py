"""Target architectures by their name in ``config.json``, imported on demand."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specserve.models.base import TargetModel

ARCHITECTURES: dict[str, str | type[TargetModel]] = {
    "LlamaForCausalLM": "llama.LlamaModel",
    "MistralForCausalLM": "mistral.MistralModel",
    "Qwen2ForCausalLM": "qwen.Qwen2Model",
    "Qwen2VLForConditionalGeneration": "qwen.Qwen2Model",
    "Qwen2_5_VLForConditionalGeneration": "qwen.Qwen2Model",
    "Qwen3ForCausalLM": "qwen.Qwen3Model",
    "Qwen3VLForConditionalGeneration": "qwen.Qwen3Model",
    "Qwen3MoeForCausalLM": "qwen_moe.Qwen3MoeModel",
    "Qwen3VLMoeForConditionalGeneration": "qwen_moe.Qwen3VLMoeModel",
    "Qwen2MoeForCausalLM": "qwen_moe.Qwen2MoeModel",
    "Qwen3_5ForCausalLM": "qwen3_5.Qwen3_5Model",
    "Qwen3_5ForConditionalGeneration": "qwen3_5.Qwen3_5Model",
    "Qwen3_5MoeForCausalLM": "qwen3_5.Qwen3_5MoeModel",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5.Qwen3_5MoeModel",
    "Qwen3NextForCausalLM": "qwen3_5.Qwen3NextModel",
    "MixtralForCausalLM": "mistral.MixtralModel",
    "MiniMaxM2ForCausalLM": "minimax_m2.MiniMaxM2Model",
    "Glm4MoeForCausalLM": "glm4_moe.Glm4MoeModel",
    "Glm4MoeLiteForCausalLM": "deepseek.Glm4MoeLiteModel",
    "DeepseekV2ForCausalLM": "deepseek.DeepseekV2Model",
    "DeepseekV3ForCausalLM": "deepseek.DeepseekV3Model",
    "MiMoForCausalLM": "qwen.MiMoModel",
    "Gemma2ForCausalLM": "gemma.Gemma2Model",
    "Gemma3ForCausalLM": "gemma.GemmaModel",
    "Gemma3ForConditionalGeneration": "gemma.GemmaModel",
    "Gemma4ForCausalLM": "gemma4.Gemma4Model",
    "Gemma4ForConditionalGeneration": "gemma4.Gemma4Model",
    "Gemma4UnifiedForCausalLM": "gemma4.Gemma4UnifiedModel",
    "Gemma4UnifiedForConditionalGeneration": "gemma4.Gemma4UnifiedModel",
    "SmolLM3ForCausalLM": "llama.SmolLM3Model",
    "Olmo2ForCausalLM": "olmo.OlmoModel",
    "Olmo3ForCausalLM": "olmo.Olmo3Model",
    "Exaone4ForCausalLM": "olmo.Exaone4Model",
    "GraniteForCausalLM": "granite.GraniteModel",
    "Phi3ForCausalLM": "phi3.Phi3Model",
    "NemotronForCausalLM": "ungated.NemotronModel",
    "ArceeForCausalLM": "ungated.ArceeModel",
    "SeedOssForCausalLM": "llama.SeedOssModel",
    "MinistralForCausalLM": "mistral.MinistralModel",
    "Ministral3ForCausalLM": "mistral.Ministral3Model",
    "GlmForCausalLM": "glm.GlmModel",
    "Glm4ForCausalLM": "glm.Glm4Model",
    "Glm4vForConditionalGeneration": "glm.Glm4vModel",
    "CohereForCausalLM": "cohere.CohereModel",
    "Cohere2ForCausalLM": "cohere.Cohere2Model",
    "Ernie4_5ForCausalLM": "ernie.ErnieModel",
    "HeliumForCausalLM": "ernie.HeliumModel",
    "ApertusForCausalLM": "ungated.ApertusModel",
    "StableLmForCausalLM": "stablelm.StableLmModel",
    "Starcoder2ForCausalLM": "ungated.Starcoder2Model",
    "CwmForCausalLM": "llama.CwmModel",
    "GptOssForCausalLM": "gpt_oss.GptOssModel",
}


TEXT_PARTS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""Text parts of the architectures in ``AROUND``, by their ``model_type``."""
AROUND = tuple(
    f"{name}ForConditionalGeneration"
    for name in ("Idefics3", "InternVL", "KimiK25", "Llava", "Mistral3", "SmolVLM")
)


def text_part(architecture: Any, model_type: Any, source: Path) -> Any:
    """Return the architecture of the text part, which may be the whole. Raises ValueError for an unknown one."""
    if architecture not in AROUND:
        return architecture
    if model_type not in TEXT_PARTS:
        known = ", ".join(TEXT_PARTS)
        raise ValueError(
            f"{source}: text_config of model_type {model_type!r} is not supported in {architecture}; known: {known}"
        )
    return TEXT_PARTS[model_type]


def register(architecture: str, model: type[TargetModel]) -> None:
    """Serve checkpoints whose ``architectures`` contain this name."""
    assert architecture not in ARCHITECTURES, f"two models are called {architecture}"
    ARCHITECTURES[architecture] = model


def model_class(architecture: Any, source: Path) -> type[TargetModel]:
    """Return the model class of an architecture. Raises ValueError naming the file if there is none."""
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join((*ARCHITECTURES, *AROUND))
        raise ValueError(f"{source}: architecture {architecture} is not supported; known: {known}")
    found = ARCHITECTURES[architecture]
    if isinstance(found, str):
        module, _, name = found.partition(".")
        found = getattr(import_module(f"specserve.models.{module}"), name)
    assert not isinstance(found, str)
    return found
