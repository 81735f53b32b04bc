"""Multi-token prediction of DeepSeek's kind, in checkpoints of both: drafts are those of transformers' layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specserve import SamplingParams
from specserve.layers.formats.stored import StoredProjection
from tests.engines import Checkpoints, Shape, answer_all, context_of
from tests.reference.glm import make_glm, next_logits
from tests.reference.models import load_checkpoint, save_checkpoint
from tests.reference.quantized import quantize
from tests.speculation.methods import PROMPT, check_accepted, check_drafts, each_with_both, scheduler_of
from tests.test_latent import GROUPS
from tests.test_more_targets import MLA
from tests.test_targets import change_config

PARAMS = SamplingParams(temperature=0, max_tokens=12)
SHAPES: list[Shape] = [(3, 1, 4), (3, 2, 7)]
MAKES: dict[str, dict[str, Any]] = {
    "air": {"use_qk_norm": False},
    "groups": {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2},
    "deepseek v3": {"family": "DeepseekV3", **MLA, **GROUPS},
    "glm 4.7 flash": {"family": "Glm4MoeLite", **MLA, "num_key_value_heads": 4},
}


@each_with_both(MAKES, SHAPES)
def test_drafts_are_those_of_transformers(make: str, shape: Shape, sampling: str, tmp_path: Path) -> None:
    """Every candidate of every step, from the first on."""
    target = make_glm(tmp_path / "target", **MAKES[make])
    scheduler = scheduler_of("EAGLE", target, target, shape, page_size=4)
    check_drafts(scheduler, shape, sampling, lambda *given: next_logits(target, *given))


def test_a_draft_that_fits_is_accepted(tmp_path: Path) -> None:
    target = make_glm(tmp_path / "target", agree=True)
    check_accepted(Checkpoints(target, target, target, {"NEXTN": target}), "NEXTN", SHAPES[0])


def test_a_quantized_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is in the target's format, but for ``eh_proj``."""
    wide = make_glm(tmp_path / "wide", agree=True)
    path = quantize(
        wide, tmp_path / "target", "W4A16", lambda name: name.endswith("_proj") and "eh_" not in name
    )
    (answer,) = answer_all(scheduler_of("NEXTN", path, path, SHAPES[0]), [(PROMPT, PARAMS)])
    assert answer.usage.accepted > answer.usage.steps / 2
    assert "no parameter reads" not in caplog.text


@pytest.mark.parametrize("number", [None, 4])
def test_another_number_of_layers(number: int | None, tmp_path: Path) -> None:
    target = make_glm(tmp_path / "target")
    state, config = load_checkpoint(target)
    name, message = "model.layers.3.eh_proj.weight", "holds layers.0 to layers.3: a draft of one layer"
    if number:
        state[f"model.layers.{number}.eh_proj.weight"] = state[name]
        message = "holds layers.3 to layers.4: a target with one of them is expected"
    else:
        del state[name]
    save_checkpoint(target, state, config, safetensors=True)
    with pytest.raises(ValueError, match=message):
        scheduler_of("NEXTN", target, target, SHAPES[0])


def test_random_weights(tmp_path: Path) -> None:
    """The layer is quantized as those of the target are, shared experts as well."""
    target = make_glm(tmp_path / "target")
    (target / "model.safetensors").unlink()
    change_config(target, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    scheduler = scheduler_of("NEXTN", target, target, SHAPES[0], load_format="dummy")
    (answer,) = answer_all(scheduler, [(PROMPT, PARAMS)])
    assert answer.usage.drafted
    context = context_of(scheduler)
    for mlp in (context.target.layers[-1].mlp, context.drafter.head.mlp):  # type: ignore[attr-defined]
        for part in (mlp.experts, mlp.shared_expert):
            assert isinstance(part.gate_up_proj, StoredProjection)
