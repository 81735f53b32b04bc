"""Drafts rounded to 8 bits: what is rounded, and that no text depends on it."""

from __future__ import annotations

import pytest
import torch
from specserve_kernels import dequantize, quantize
from torch import Tensor

from specserve.core import SamplingParams
from specserve.layers.linear import FEW_TOKENS, Linear, QuantizedLinear
from specserve.spec.drafters.eagle import EagleDrafter
from tests.engines import Checkpoints, answer_all, context_of, make_scheduler

PROMPTS = [[5, 17, 3, 40, 8], [9, 2, 31, 31, 7, 12]]
SAMPLING = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8)]


def head_of(models: Checkpoints, algorithm: str, quantization: str) -> torch.nn.Module:
    scheduler = models.scheduler(
        algorithm, (3, 1, 4), speculative_draft_quantization=quantization, dtype="bfloat16"
    )
    drafter = context_of(scheduler).drafter
    assert isinstance(drafter, EagleDrafter)
    return drafter._head  # type: ignore[return-value]


def on_the_grid(weight: Tensor) -> bool:
    return torch.equal(dequantize(*quantize(weight, torch.float8_e4m3fn)).to(weight.dtype), weight)


@pytest.mark.parametrize(
    ("algorithm", "left"), [("EAGLE", set[str]()), ("EAGLE3", {"fc"})], ids=["EAGLE", "EAGLE3"]
)
def test_what_the_levels_read_is_rounded(random_models: Checkpoints, algorithm: str, left: set[str]) -> None:
    """EAGLE-3's ``fc``, which reads the target once a step, stays as it is, and so does a head of the target's."""
    plain, rounded = (head_of(random_models, algorithm, each) for each in ("none", "fp8"))
    before = {name: m for name, m in plain.named_modules() if isinstance(m, Linear)}
    after = {name: m for name, m in rounded.named_modules() if isinstance(m, Linear)}
    assert before.keys() == after.keys() >= {"self_attn.qkv_proj", "mlp.down_proj"}
    for name, linear in after.items():
        assert torch.equal(linear.weight, before[name].weight) == (name in left)
        assert on_the_grid(linear.weight) == (name not in left)
    target = head_of(random_models, "EAGLE", "fp8")._lm_head[0]  # type: ignore[index]
    assert not on_the_grid(target.weight)


@pytest.mark.parametrize(("algorithm", "quantization"), [("EAGLE", "int8"), ("EAGLE3", "fp8")])
def test_no_text_depends_on_it(agreeing: Checkpoints, algorithm: str, quantization: str) -> None:
    items = [(prompt, params) for prompt in PROMPTS for params in SAMPLING]
    expected = answer_all(make_scheduler(agreeing.target), items)
    for shape in ((5, 1, 6), (4, 3, 10)):
        scheduler = agreeing.scheduler(algorithm, shape, speculative_draft_quantization=quantization)
        found = answer_all(scheduler, items)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
        assert sum(answer.usage.accepted for answer in found) > 0


@pytest.mark.parametrize(("dtype", "error"), [(torch.int8, 0.3), (torch.float8_e4m3fn, 1.0)])
def test_what_a_gpu_holds(dtype: torch.dtype, error: float) -> None:
    """Small numbers with factors for few tokens, and the weight as it was for many and for keys and values."""
    generator = torch.Generator().manual_seed(0)
    plain = Linear(40, 12)
    plain.weight = torch.nn.Parameter(torch.randn(12, 40, generator=generator))
    quantized = QuantizedLinear(plain, dtype)
    many = torch.randn(FEW_TOKENS + 1, 40, generator=generator)
    x = many[:3]
    assert torch.equal(quantized(many), plain(many))
    for found, expected in zip(quantized.rows_from(8), plain.rows_from(8), strict=True):
        assert torch.equal(found, expected)
    torch.testing.assert_close(quantized(x), plain(x), rtol=0, atol=error)
    assert not torch.equal(quantized(x), plain(x))
    assert {name: tensor.dtype for name, tensor in quantized.named_buffers()} == {
        "weight_OI": dtype,
        "factor_OG": torch.float32,
    }
