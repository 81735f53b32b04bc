"""Multi-token prediction of DeepSeek's kind, in checkpoints of both: drafts are those of transformers' layer."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from specserve_kernels import FP8, round_inputs

from specserve import SamplingParams
from specserve.layers import norms
from specserve.layers.formats.stored import StoredProjection
from specserve.models.checkpoint import load_target
from tests.engines import (
    Checkpoints,
    Shape,
    answer_all,
    context_of,
    head_of,
    held_as_on_a_gpu,
    not_rounded,
    record_drafts,
)
from tests.reference.glm import HYBRID, make_glm, next_logits
from tests.reference.models import change_config, load_checkpoint, save_checkpoint
from tests.reference.quantized import PROJECTIONS, configure, quantize, write_meant
from tests.speculation.methods import PROMPT, check_accepted, check_drafts, each_with_both, scheduler_of
from tests.test_latent import GROUPS
from tests.test_more_targets import MLA

PARAMS = SamplingParams(temperature=0, max_tokens=12)
SHAPES: list[Shape] = [(3, 1, 4), (3, 2, 7)]
MAKES: dict[str, dict[str, Any]] = {
    "air": {"use_qk_norm": False},
    "groups": {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2},
    "deepseek v3": {"family": "DeepseekV3", **MLA, **GROUPS},
    "glm 4.7 flash": {"family": "Glm4MoeLite", **MLA, "num_key_value_heads": 4},
    "qwen 3.5": {"family": "Qwen3_5", **HYBRID},
    "qwen3 next": {"family": "Qwen3Next", **HYBRID},
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


@pytest.mark.parametrize(
    ("family", "dialect"),
    [
        ("Qwen3_5", "modelopt nvfp4"),
        ("Qwen3_5", "W4A16"),
        ("Qwen3_5Moe", "fp8 blocks"),
        ("Qwen3Next", "nvfp4"),
    ],
)
def test_formats_of_qwen(family: str, dialect: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Text and drafts are those of the numbers that the files mean, which have some parts in 16 bits."""
    sizes = {**HYBRID, "linear_value_head_dim": 8, "moe_intermediate_size": 32}
    sizes["shared_expert_intermediate_size"] = 32
    wide = make_glm(tmp_path / "wide", family=family, agree=True, **sizes)
    names = *PROJECTIONS, "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj"
    target = quantize(wide, tmp_path / "target", dialect, projections=names)
    left = ["lm_head", "mtp.fc", "model.language_model.layers.0.linear_attn.in_proj_b"]
    configure(target, **{"modules_to_not_convert": left} if dialect == "fp8 blocks" else {})
    found = []
    for path in (target, write_meant(target, tmp_path / "meant")):
        scheduler = scheduler_of("NEXTN", path, path, SHAPES[0])
        with record_drafts() as drafts, not_rounded():
            (answer,) = answer_all(scheduler, [(PROMPT, PARAMS)])
        found.append((answer.tokens, [each.nodes(0) for each in drafts]))
        attention = head_of(scheduler).self_attn
        assert isinstance(attention.qkv_proj, StoredProjection) == (path == target)
    assert found[0] == found[1]
    assert "no parameter reads" not in caplog.text


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
def test_whoever_quantizes_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    """Norms and gates, for the next projection and for what reads their result too, or projections alone."""
    sizes = {**HYBRID, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 32}
    wide = make_glm(tmp_path / "wide", family=family, agree=True, **sizes)
    names = *PROJECTIONS, "in_proj_qkv", "in_proj_z", "out_proj"
    target = quantize(wide, tmp_path / "target", "fp8 a tensor", projections=names)
    params, found = replace(PARAMS, logprobs=0), []
    with (
        held_as_on_a_gpu(),
        patch.object(norms, "add_rms_norm_rounded", wraps=norms.add_rms_norm_rounded) as rounded,
    ):
        for change in (nullcontext(), patch.object(StoredProjection, "rounds_to", return_value=None)):
            with change:
                scheduler = scheduler_of("NEXTN", target, target, SHAPES[0], dtype="float32")
                (answer,) = answer_all(scheduler, [(PROMPT, params)])
            found.append((answer.tokens, [each.logprob for each in answer.logprobs]))
    given = {call.args[-1] for call in rounded.call_args_list}
    assert given == {False, True}
    assert found[0] == found[1]


def test_what_is_in_another_format_reads_unquantized_inputs(tmp_path: Path) -> None:
    wide = make_glm(tmp_path / "wide", family="Qwen3_5", **HYBRID)
    names = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
    path = quantize(wide, tmp_path / "target", "fp8 a tensor", projections=names)
    with held_as_on_a_gpu():
        net: Any = load_target(path, torch.float32, torch.device("cpu")).get_submodule("layers.0.linear_attn")
    few, x_TH = net.in_proj_ba, torch.rand(2, net.in_proj_qkvz.inputs)
    few.packed = few.packed._replace(values=few.packed.values.to(torch.int8))
    *_, b_TV, a_TV = net.projected(round_inputs(x_TH, FP8)._replace(given_TI=x_TH))
    assert torch.equal(torch.cat([b_TV, a_TV], 1), few(x_TH))


@pytest.mark.parametrize(
    ("family", "number", "message"),
    [
        ("Glm4Moe", None, "no layer for multi-token prediction, .* says num_nextn_predict_layers 1"),
        (
            "Qwen3_5Moe",
            None,
            "no layer for multi-token prediction, .* says mtp_num_hidden_layers 1: quantized",
        ),
        ("Glm4Moe", 4, "holds layers.3 to layers.4: a target with one of them is expected"),
        ("Qwen3_5", 1, "holds mtp.layers.0 to mtp.layers.1: a target with one of them is expected"),
    ],
)
def test_another_number_of_layers(family: str, number: int | None, message: str, tmp_path: Path) -> None:
    target = make_glm(tmp_path / "target", family=family, **HYBRID if "Qwen" in family else {})
    state, config = load_checkpoint(target)
    first, *_ = (name for name in state if re.match(r"mtp\.layers\.|.*eh_proj", name))
    if number:
        state[re.sub(r"\d+", str(number), first)] = state[first]
    else:
        state = {name: each for name, each in state.items() if not re.match(r"mtp\.|.*eh_proj", name)}
    save_checkpoint(target, state, config, safetensors=True)
    with pytest.raises(ValueError, match=message):
        scheduler_of("NEXTN", target, target, SHAPES[0])


@pytest.mark.parametrize("family", ["Glm4Moe", "Qwen3_5"])
def test_another_number_in_the_config(family: str, tmp_path: Path) -> None:
    target = make_glm(tmp_path / "target", family=family, **HYBRID if "Qwen" in family else {})
    field = "mtp_num_hidden_layers" if "Qwen" in family else "num_nextn_predict_layers"
    for found in (2, "x"):
        change_config(target, **{field: found})
        for load in ("auto", "dummy"):
            with pytest.raises(
                ValueError, match=rf"/config\.json: {field} must be 0 or 1, .* found {found!r}"
            ):
                scheduler_of("NEXTN", target, target, SHAPES[0], load_format=load)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_layer_in_a_file_of_its_own(indexed: bool, tmp_path: Path) -> None:
    """Tools that quantize copy it without naming it in the index."""
    target = make_glm(tmp_path / "target")
    state, _ = load_checkpoint(target)
    own = {name: state.pop(name) for name in list(state) if ".layers.3." in name}
    save_file(own, target / "mtp.safetensors")
    if indexed:
        (target / "model.safetensors").unlink()
        index = {"weight_map": dict.fromkeys(state, "model-1.safetensors")}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(state, target / f"model{'-1' * indexed}.safetensors")
    (answer,) = answer_all(scheduler_of("NEXTN", target, target, SHAPES[0]), [(PROMPT, PARAMS)])
    assert answer.usage.drafted


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
