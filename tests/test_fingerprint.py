"""``system_fingerprint``: what changes it and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from specserve.config import make_settings
from specserve.config.engine import EngineConfig
from specserve.process.assemble import resolve_engine
from specserve.process.fingerprint import fingerprint
from tests.engines import Checkpoints, make_scheduler


@pytest.fixture
def config(agreeing: Checkpoints) -> EngineConfig:
    return resolve_engine(
        make_settings(model_path=str(agreeing.target), device="cpu", skip_tokenizer_init=True)
    )[2]


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 3))
    for index, tensor in enumerate(made.parameters()):
        tensor.data = torch.linspace(index, 9, tensor.numel()).view_as(tensor)
    return made


def test_it_follows_each_weight(config: EngineConfig) -> None:
    found = fingerprint(model(), config)
    assert found.startswith("fp_")
    assert fingerprint(model(), config) == found
    for name, tensor in model().state_dict().items():
        changed = model()
        flat = changed.state_dict()[name].view(-1)
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(99.0))
        assert fingerprint(changed, config) != found, name
        if tensor.numel() > 1:
            swapped = model()
            row = swapped.state_dict()[name].view(-1, tensor.shape[-1])[0]
            row.copy_(row.flip(0))
            assert fingerprint(swapped, config) != found, name
        if tensor.ndim > 1:
            moved = model()
            moved.state_dict()[name].copy_(tensor.flip(0))
            assert fingerprint(moved, config) != found, name


def test_it_follows_what_rounds(config: EngineConfig) -> None:
    found = fingerprint(model(), config)
    for changed in ({"dtype": "float64"}, {"attention_backend": "triton"}):
        assert fingerprint(model(), replace(config, **changed)) != found
    assert fingerprint(model().double(), config) != found


def test_it_follows_the_configuration(config: EngineConfig) -> None:
    rope = replace(config.model.rope, theta=config.model.rope.theta + 1)
    for changed in (
        {"model": replace(config.model, ropes=(rope,))},
        {"request_defaults": {"temperature": 0.6}},
    ):
        assert fingerprint(model(), replace(config, **changed)) != fingerprint(model(), config)


def test_it_follows_weights_of_few_bits(agreeing: Checkpoints, random_models: Checkpoints) -> None:
    """Which a GPU holds as they are stored."""
    with patch("specserve.layers.formats.stored.on_gpu", lambda _: True):
        found = {
            make_scheduler(target, dtype="float32", quantization=bits).info.system_fingerprint
            for target in (agreeing.target, random_models.target)
            for bits in ("fp8", "int8")
        }
    assert len(found) == 4


def test_drafts_have_no_part(agreeing: Checkpoints, random_models: Checkpoints) -> None:
    """Nor have lengths, nor how the CPU's kernels want the weights."""

    def of(target: Path, **settings: object) -> object:
        return make_scheduler(target, dtype="float32", **settings).info.system_fingerprint

    drafts = agreeing.scheduler("EAGLE3", (2, 2, 4), dtype="float32", context_length=64)
    assert drafts.info.system_fingerprint == of(agreeing.target)
    assert of(random_models.target) != of(agreeing.target)
