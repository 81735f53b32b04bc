"""Experts whose weights are quantized: in the published layouts, or at load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specserve.layers.batch import TokenBatch
from specserve.layers.formats.rounded import RoundedWeights
from specserve.layers.linear import PLAIN
from specserve.models.checkpoint import load_target
from specserve.models.config import ModelConfig
from specserve.models.read_config import load_model_config
from specserve.tools.train.attend import CausalAttend, Packing
from tests.engines import held_as_on_a_gpu, make_scheduler
from tests.reference.models import make_qwen3_moe, save_checkpoint
from tests.reference.quantized import DIALECTS, dequantize, quantize


def logits_of(path: Path, dtype: torch.dtype, config: ModelConfig | None = None) -> Tensor:
    tokens = torch.tensor([3, 9, 27, 17, 5, 40, 1, 2])
    model = load_target(path, dtype, torch.device("cpu"), len(tokens), config)
    packing = Packing(torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens), flash=False)
    with torch.no_grad():
        hidden, _ = model(TokenBatch(tokens, torch.arange(len(tokens)), CausalAttend(packing)))
        return model.logits(hidden).double()


def in_experts(module: str) -> bool:
    return ".experts." in module


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks and groups of inputs are short at the end."""
    return make_qwen3_moe(tmp_path_factory.mktemp("wide"), hidden=192, inner=96, layers=2)


@pytest.mark.parametrize("dialect", [each for each in DIALECTS if "act order" not in each])
def test_the_logits_of_what_quantized_experts_mean(dialect: str, wide: Path, tmp_path: Path) -> None:
    path = quantize(wide, tmp_path / "quantized", dialect, in_experts)
    state, fields = dequantize(path)
    meant = {name: each for name, each in state.items() if not name.endswith("rounded_inputs")}
    expected = logits_of(save_checkpoint(tmp_path / "meant", meant, fields, safetensors=True), torch.float64)
    torch.testing.assert_close(logits_of(path, torch.float64), expected, rtol=0, atol=1e-10)
    with held_as_on_a_gpu():
        torch.testing.assert_close(logits_of(path, torch.float32), expected, rtol=0, atol=1e-3)
    assert (expected - logits_of(wide, torch.float64)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_experts_are_rounded_at_load(kind: str, wide: Path) -> None:
    config = load_model_config(wide).with_weights(RoundedWeights(kind))
    layers = [replace(layer, weights=PLAIN) if layer.experts is None else layer for layer in config.layers]
    config = replace(config, layers=tuple(layers))
    plain, expected = logits_of(wide, torch.float64), logits_of(wide, torch.float64, config)
    assert 1e-3 < (expected - plain).norm() / plain.norm() < 0.5
    with held_as_on_a_gpu():
        found = logits_of(wide, torch.float32, config)
    assert (found - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize(
    ("dialect", "module", "message"),
    [
        ("gptq act order", ".experts.", "experts need inputs in their order, found another one in g_idx"),
        (
            "fp8 blocks",
            ".experts.0.",
            "mlp.experts: all experts must be stored in the same way, found several",
        ),
    ],
)
def test_experts_that_are_stored_in_other_ways_are_refused(
    dialect: str, module: str, message: str, wide: Path, tmp_path: Path
) -> None:
    path = quantize(wide, tmp_path, dialect, lambda each: module in each)
    with pytest.raises(ValueError, match=message):
        make_scheduler(path)
