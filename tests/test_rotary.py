"""cos and sin of every kind of rotary embedding equal transformers'; unsupported kinds are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specserve.layers.rotary import RopeConfig, rope_table
from specserve.models.checkpoint import building
from specserve.models.config import rope_config
from tests.reference.doubles import float32_means_float64

POSITIONS = 600
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LENGTH = "original_max_position_embeddings"
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear 2": {"rope_type": "linear", "factor": 2.0},
    "linear 2.5": {"rope_type": "linear", "factor": 2.5},
    "llama3 8": {**LLAMA3, "factor": 8.0, LENGTH: 8192},
    "llama3 32": {**LLAMA3, "factor": 32.0, LENGTH: 8192},
    "llama3 of a short length": {**LLAMA3, "factor": 8.0, LENGTH: 64},
    "yarn 4": {**YARN, LENGTH: 32768},
    "yarn 40, deepseek": {**YARN, "factor": 40.0, LENGTH: 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, two mscales": {**YARN, LENGTH: 4096, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn, one mscale": {**YARN, LENGTH: 4096, "mscale": 0.707},
    "yarn, attention factor": {**YARN, LENGTH: 4096, "attention_factor": 0.9, "mscale": 2.0},
    "yarn, betas": {**YARN, LENGTH: 2048, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not truncated": {**YARN, LENGTH: 2048, "truncate": False},
    "yarn, ends beyond the head": {**YARN, LENGTH: 10**9},
    "yarn, equal ends": {**YARN, LENGTH: 6},
    "yarn below 1": {**YARN, "factor": 0.5, LENGTH: 2048},
    "yarn of the model's own length": YARN,
}
SIZES = [(64, 10000.0), (128, 500000.0)]


def their_config(scaling: dict[str, Any], head_dim: int, theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters={**scaling, "rope_theta": theta},
        max_position_embeddings=4096,
    )


@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_against_transformers(kind: str, head_dim: int, theta: float) -> None:
    config = their_config(KINDS[kind], head_dim, theta)
    with float32_means_float64():
        positions = torch.arange(POSITIONS)[None]
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float64), positions)
    rope = RopeConfig.from_dict(config.to_dict())
    assert rope.theta == theta
    with building(torch.float64, torch.device("cpu")):
        cos_PD, sin_PD = rope_table(rope, head_dim, POSITIONS).unbind(1)
    sin_PD[:, : head_dim // 2] *= -1
    torch.testing.assert_close(cos_PD, cos[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(sin_PD, sin[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", list(KINDS))
def test_both_spellings_agree(kind: str) -> None:
    new = {"rope_parameters": {**KINDS[kind], "rope_theta": 5e5}, "max_position_embeddings": 4096}
    scaling = dict(KINDS[kind])
    scaling["type"] = scaling.pop("rope_type")
    old = {"rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 4096}
    assert RopeConfig.from_dict(old) == RopeConfig.from_dict(new)


BESIDE: list[tuple[dict[str, Any], float, str]] = [
    ({**YARN, LENGTH: 64}, 10000.0, "yarn"),
    ({"type": "linear", "factor": 2.0}, 10000.0, "linear"),
    ({**YARN, LENGTH: 64, "rope_theta": 3e5}, 3e5, "yarn"),
    ({}, 1e6, "default"),
]


@pytest.mark.parametrize(("scaling", "theta", "kind"), BESIDE, ids=str)
def test_a_scaling_stands_for_rope_parameters(
    scaling: dict[str, Any], theta: float, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers, base and all; said where that is another base than was written."""
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 4096}
    theirs = LlamaConfig.from_dict({**config, "rope_scaling": dict(scaling)}).rope_parameters
    assert (theirs["rope_theta"], theirs["rope_type"]) == (theta, kind)
    caplog.clear()
    rope = rope_config({**config, "rope_scaling": scaling}, Path("config.json"))
    assert (rope.theta, rope.kind) == (theta, kind)
    warned = [f"rope_theta is {theta:g}, not 1e+06" in record.message for record in caplog.records]
    assert warned == [True] * (theta != 1e6)


def test_a_length_beside_the_scaling_goes_before_that_in_it() -> None:
    found = RopeConfig.from_dict({LENGTH: 100, "rope_scaling": {**YARN, LENGTH: 200}})
    assert found.original_max_position_embeddings == 100


def test_a_factor_from_lengths() -> None:
    config = {"max_position_embeddings": 800, "rope_scaling": {"type": "yarn", "factor": None, LENGTH: 200}}
    assert RopeConfig.from_dict(config).factor == 4


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "type 'dynamic' is not supported; known: default,",
    ),
    ({"rope_parameters": {"rope_type": "ntk"}}, "'ntk' is not supported; known: .*llama3, yarn"),
    ({"rope_scaling": {"type": "longrope"}}, "longrope: short_factor must be a list of positive numbers"),
    ({"rope_scaling": {"type": "linear"}}, "type linear needs factor"),
    ({"rope_scaling": {"type": "yarn"}, "max_position_embeddings": 9}, "type yarn needs factor"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "llama3 needs low_freq_factor, high_freq_factor"),
    ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor must be a positive number, found '4'"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a positive number, found 0"),
    (
        {
            "rope_scaling": {"type": "yarn"},
            "original_max_position_embeddings": "x",
            "max_position_embeddings": 8,
        },
        "original_max_position_embeddings must be a positive number, found 'x'",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        r"\(full_attention\) are not supported",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
]


@pytest.mark.parametrize(("config", "words"), BAD)
def test_what_is_not_supported_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"model/config.json: .*{words}"):
        rope_config(config, Path("model/config.json"))
