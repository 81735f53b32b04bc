"""Target architectures by the name that ``config.json`` gives them, imported when asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specserve.models.llama import LlamaModel

ARCHITECTURES = {
    "LlamaForCausalLM": "llama.LlamaModel",
    "MistralForCausalLM": "mistral.MistralModel",
    "Qwen2ForCausalLM": "qwen2.Qwen2Model",
    "Qwen3ForCausalLM": "qwen3.Qwen3Model",
    "MiMoForCausalLM": "mimo.MiMoModel",
}


def model_class(architecture: Any, source: Path) -> type[LlamaModel]:
    """The model of an architecture. Raises ValueError naming the file it stands in when there is none."""
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{source}: architecture {architecture} is not supported; known: {known}")
    module, _, name = ARCHITECTURES[architecture].partition(".")
    found: type[LlamaModel] = getattr(import_module(f"specserve.models.{module}"), name)
    return found
