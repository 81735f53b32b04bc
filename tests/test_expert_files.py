"""Files of experts: one tensor or many, and quantized, in the published layouts or at load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from specserve_kernels import FP8
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specserve.config import make_settings
from specserve.core import SamplingParams
from specserve.engine.memory import count_bytes
from specserve.layers.batch import TokenBatch
from specserve.layers.decoder import reader_of
from specserve.layers.experts import ExpertsMLP, Router
from specserve.layers.formats.rounded import RoundedWeights
from specserve.layers.linear import PLAIN
from specserve.layers.weights import Place, Projection
from specserve.models.checkpoint import load_target
from specserve.models.config import ModelConfig
from specserve.models.read_config import load_model_config
from specserve.models.tensor_files import TensorFiles
from specserve.process.assemble import resolve_engine
from specserve.tools.check.memory import Allocations, expected_memory, memory_needed
from specserve.tools.train.attend import CausalAttend, Packing
from tests.engines import answer_all, held_as_on_a_gpu, make_scheduler, not_rounded
from tests.reference.gemma4 import make_drawn
from tests.reference.gpt_oss import make_gpt_oss
from tests.reference.models import load_checkpoint, make_qwen3_moe, save_checkpoint
from tests.reference.packed_bits import pack_quantized
from tests.reference.quantized import (
    DIALECTS,
    PROJECTIONS,
    configure,
    dequantize,
    packed_group,
    quantize,
    write_meant,
)
from tests.test_more_targets import MLA, SIZES
from tests.test_published_configs import KIMI
from tests.test_targets import recorded_logits


@pytest.mark.parametrize("safetensors", [True, False])
def test_experts_may_be_one_tensor(safetensors: bool, tmp_path: Path) -> None:
    state, config = load_checkpoint(make_qwen3_moe(tmp_path / "apart"))
    for layer in range(1, config["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([state.pop(f"{experts}.{number}.{part}_proj.weight") for number in range(6)])
            for part in ("gate", "up", "down")
        )
        state |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), f"{experts}.down_proj": down}
    save_checkpoint(tmp_path / "fused", state, config, safetensors=safetensors)
    apart, fused = (TensorFiles(tmp_path / each) for each in ("apart", "fused"))
    assert {*fused.names()} == {*apart.names()}
    for name in fused.names():
        assert fused.header(name) == apart.header(name)
        assert torch.equal(fused[name], apart[name])
    work = [([3, 9, 27, 17], SamplingParams(temperature=0, max_tokens=4))]
    answers = [answer_all(make_scheduler(tmp_path / each), work)[0].tokens for each in ("apart", "fused")]
    assert answers[0] == answers[1]


def check_meant(path: Path, tmp_path: Path) -> Tensor:
    """The logits are those of the numbers that a file means. Returns these."""
    expected = logits_of(write_meant(path, tmp_path / "meant"), torch.float64)
    with not_rounded():
        torch.testing.assert_close(logits_of(path, torch.float64), expected, rtol=0, atol=1e-10)
    return expected


@pytest.mark.parametrize("dialect", ["gptq", "W4A16", "fp8 a tensor"])
def test_routers_and_embeddings_may_be_quantized(dialect: str, tmp_path: Path) -> None:
    plain, names = (
        make_qwen3_moe(tmp_path / "plain", experts=8, layers=2),
        (*PROJECTIONS, "gate", "embed_tokens"),
    )
    path = quantize(plain, tmp_path / "quantized", dialect, projections=names)
    if dialect == "W4A16":
        group = packed_group(128)["config_groups"]["group_0"]
        configure(path, config_groups={"all": {**group, "targets": ["Linear", "Embedding"]}})
    check_meant(path, tmp_path)


def test_a_fused_tensor_must_have_the_shape_of_experts(tmp_path: Path) -> None:
    name = "layers.0.block_sparse_moe.experts.gate_up_proj"
    save_file({f"model.{name}": torch.zeros(2, 6, 4)}, tmp_path / "model.safetensors")
    assert TensorFiles(tmp_path).names()[:2] == [
        f"layers.0.block_sparse_moe.experts.0.{part}.weight" for part in ("w1", "w3")
    ]
    save_file({f"model.{name}": torch.zeros(2, 5, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"gate_up_proj has shape \[2, 5, 4\], expected experts, outputs of w1 and w3"
    ):
        TensorFiles(tmp_path)
    both = {f"model.{name}": torch.zeros(2, 6, 4), f"model.{name[:-12]}0.w3.weight": torch.zeros(3, 4)}
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts.0.w3.weight twice: by itself, and in .*gate_up_proj"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize(
    ("dialect", "joint", "by_inputs"),
    [
        ("modelopt nvfp4", "_", False),
        ("nvfp4", ".", False),
        ("fp8 blocks", "_", False),
        ("fp8 blocks", "_", True),
    ],
)
def test_quantized_experts_may_be_one_tensor(
    dialect: str, joint: str, by_inputs: bool, wide: Path, tmp_path: Path
) -> None:
    """Scales of tensors are for each projection, or for all of an expert, as those of its inputs."""
    path = quantize(wide, tmp_path / "apart", dialect, in_experts)
    state, config = load_checkpoint(path)
    experts, fused = "model.layers.1.mlp.experts", dict(state)
    for kind in {name.rpartition(".")[2] for name in state if name.startswith(f"{experts}.0.")}:
        gate, up, down = (
            torch.stack([fused.pop(f"{experts}.{number}.{part}_proj.{kind}") for number in range(6)])
            for part in ("gate", "up", "down")
        )
        end = "" if kind == "weight" else joint + kind.replace("weight_scale_inv", "scale_inv")
        both = torch.cat([gate, up], 1) if gate.dim() > 1 else torch.stack([gate, up], 1)
        both, down = (both.mT, down.mT) if by_inputs else (both, down)
        fused[f"{experts}.gate_up_proj{end}"] = gate if kind.startswith("input") else both
        fused[f"{experts}.down_proj{end}"] = down
    fused_path = save_checkpoint(tmp_path / "fused", fused, config, safetensors=True)
    assert {*TensorFiles(fused_path).names()} == {*TensorFiles(path).names()}
    assert torch.equal(logits_of(fused_path, torch.float64), logits_of(path, torch.float64))


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
    expected = check_meant(path, tmp_path)
    with held_as_on_a_gpu(), not_rounded():
        torch.testing.assert_close(logits_of(path, torch.float32), expected, rtol=0, atol=1e-3)
    assert (expected - logits_of(wide, torch.float64)).abs().max() > 1e-3


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has an expert as wide as two others that every token goes through."""
    path = tmp_path_factory.mktemp("shared")
    return make_qwen3_moe(path, experts=3, hidden=64, inner=128, layers=2, shared=2)


@pytest.mark.parametrize(
    "dialect", ["fp8 blocks", "fp8 a tensor", "compressed int8", "awq", "gptq", "gptq asymmetric", "nvfp4"]
)
def test_a_shared_expert_is_stored_as_two_more(dialect: str, shared: Path, tmp_path: Path) -> None:
    path = quantize(shared, tmp_path / "quantized", dialect, lambda module: "expert" in module)
    expected = check_meant(path, tmp_path)
    with held_as_on_a_gpu(), not_rounded():
        torch.testing.assert_close(logits_of(path, torch.float32), expected, rtol=0, atol=1e-3)
    rounded = logits_of(path, torch.float32)
    with held_as_on_a_gpu():
        assert (logits_of(path, torch.float32) - rounded).norm() < 1e-3 * rounded.norm()
        model = load_target(path, torch.float32, torch.device("cpu"), 8)
    (mlp,) = (each for each in model.modules() if isinstance(each, ExpertsMLP))
    assert (mlp.gate.routing.shared, mlp.shared_expert_gate is None) == (2, False)
    assert mlp.experts.words.startswith("3 experts and the shared one in ")
    assert (reader := reader_of(mlp)) is mlp.experts.gate_up_proj
    assert reader.rounds_to(1) == (FP8 if dialect.startswith("fp8") else None)
    assert not sum(each.numel() for each in (*mlp.shared_expert.parameters(), *mlp.shared_expert.buffers()))  # type: ignore[union-attr]


def test_memory_of_a_shared_expert_that_is_stored_with_the_others(shared: Path, tmp_path: Path) -> None:
    """Next to them it takes none, nor while they are made."""
    path = quantize(shared, tmp_path / "quantized", "awq", lambda module: "expert" in module)
    settings = make_settings(model_path=str(path), device="cpu", dtype="float32", skip_tokenizer_init=True)
    expected = expected_memory(resolve_engine(settings)[2])
    held = memory_needed(make_scheduler(path, dtype="float32")).weights
    assert expected.weights == held < expected.loading
    with Allocations() as made:
        model = load_target(shared, torch.float32, torch.device("meta"), 8)
    assert made.held >= count_bytes([model], set())
    assert made.peak - made.held < 128 * 64 * 4, "one projection of an expert"


def test_a_shared_expert_that_is_stored_in_another_way_stays_apart(shared: Path, tmp_path: Path) -> None:
    path = quantize(shared, tmp_path / "quantized", "awq", in_experts)
    expected = logits_of(
        save_checkpoint(tmp_path / "meant", *dequantize(path), safetensors=True), torch.float64
    )
    torch.testing.assert_close(logits_of(path, torch.float64), expected, rtol=0, atol=1e-10)
    model = load_target(path, torch.float64, torch.device("cpu"), 8)
    assert [each.routing.shared for each in model.modules() if isinstance(each, Router)] == [0]


def test_a_random_gate_of_a_shared_expert_is_plain(shared: Path, tmp_path: Path) -> None:
    """No format of 4 bits holds its one output."""
    weights = load_model_config(quantize(shared, tmp_path, "gptq"), random="").weights
    assert weights.stores("layers.1.mlp.shared_expert.up_proj")
    assert not weights.stores("layers.1.mlp.shared_expert_gate")


def test_which_weights_can_be_stored_with_others() -> None:
    """Those of the same layout without biases, in pieces of whole groups."""

    def made(inputs: int, outputs: int, layout: str = "int4", bias: bool = False) -> Projection:
        weights = PLAIN if layout == "plain" else RoundedWeights(layout)
        return weights.projection("up", inputs, {"up": outputs}, bias)

    up, down = made(256, 128), made(128, 256)
    assert made(256, 512).fits(Place(up, 4, 0))
    assert [made(512, 256).fits(Place(down, many, 1)) for many in (1, 4, 8)] == [True, True, False]
    assert not any(made(256, 256, kind).fits(Place(up, 2, 0)) for kind in ("int8", "fp8", "plain"))
    for kind in ("int4", "plain"):
        found = [
            made(256, 256, kind, own).fits(Place(made(256, 128, kind, other), 2, 0))
            for own in (False, True)
            for other in (False, True)
        ]
        assert found == [True, False, False, False]


KIMI_LEFT = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]


def test_kimi_k2_with_experts_alone_in_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fields and layout give the text of the numbers that the file means, also held as on a GPU."""
    sizes = {**MLA, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    given = {**SIZES, **sizes, "n_group": 1, "topk_group": 1}
    state, config = load_checkpoint(make_drawn(tmp_path / "drawn", "DeepseekV3", **given))
    del config["rope_parameters"]
    config |= {"model_type": "kimi_k2", **{name: KIMI[name] for name in ("rope_theta", "rope_scaling")}}
    drawn = save_checkpoint(tmp_path / "plain", state, config, safetensors=True)
    monkeypatch.setitem(DIALECTS, "Kimi-K2", (pack_quantized(32), {**packed_group(32), "ignore": KIMI_LEFT}))
    path = quantize(drawn, tmp_path / "quantized", "Kimi-K2", in_experts)
    meant = save_checkpoint(tmp_path / "meant", *dequantize(path), safetensors=True)
    work = [([3, 9, 27, 17], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))]

    def text(files: Path, dtype: str = "float64") -> list[int]:
        return answer_all(make_scheduler(files, dtype=dtype), work)[0].tokens

    assert text(path) == (wanted := text(meant)) != text(drawn)
    with held_as_on_a_gpu():
        assert text(path, "float32") == wanted


def test_the_logits_of_what_mxfp4_means(tmp_path: Path) -> None:
    """Each number by the formula of its format, e2m1 by a power of two, and as transformers converts it."""
    state, config = load_checkpoint(make_gpt_oss(tmp_path / "plain", hidden_size=64, intermediate_size=96))
    generator, meant = torch.Generator().manual_seed(0), dict(state)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        shape = experts, outputs, inputs // 32
        codes = torch.randint(0, 16, (*shape, 16, 2), generator=generator)
        powers = torch.randint(-6, -2, shape, generator=generator)
        blocks, scales = (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8), (powers + 127).to(torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        sign, exponent, half = 1 - 2.0 * (codes // 8), codes // 2 % 4, codes % 2 / 2
        size = torch.where(exponent == 0, half, (1 + half) * 2.0 ** (exponent - 1))
        weight = sign * size * 2.0 ** powers[..., None, None]
        meant[name] = weight.double().reshape(experts, outputs, inputs).mT.contiguous()
        assert torch.equal(meant[name], convert_moe_packed_tensors(blocks, scales).double())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    save_checkpoint(
        tmp_path / "quantized", state, config | {"quantization_config": quantization}, safetensors=True
    )
    save_checkpoint(tmp_path / "meant", meant, config, safetensors=True)
    work = [([3, 9, 27, 17, 5], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))]

    def logits(name: str, dtype: str) -> Tensor:
        with recorded_logits() as found:
            answer_all(make_scheduler(tmp_path / name, dtype=dtype), work)
        return torch.stack(found).double()

    expected = logits("meant", "float64")
    torch.testing.assert_close(logits("quantized", "float64"), expected, rtol=0, atol=1e-10)
    with held_as_on_a_gpu():
        torch.testing.assert_close(logits("quantized", "float32"), expected, rtol=0, atol=1e-3)
    del state["model.layers.1.mlp.experts.down_proj_scales"]
    save_checkpoint(
        tmp_path / "quantized", state, config | {"quantization_config": quantization}, safetensors=True
    )
    with pytest.raises(ValueError, match=r"has no tensor layers\.1\.mlp\.experts\.0\.down_proj\.scales"):
        make_scheduler(tmp_path / "quantized")


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_experts_are_rounded_at_load(kind: str, wide: Path) -> None:
    config = load_model_config(wide).with_weights(RoundedWeights(kind))
    layers = [replace(layer, weights=PLAIN) if layer.experts is None else layer for layer in config.layers]
    config = replace(config, layers=tuple(layers))
    plain, expected = logits_of(wide, torch.float64), logits_of(wide, torch.float64, config)
    assert 1e-3 < (expected - plain).norm() / plain.norm() < 0.5
    with held_as_on_a_gpu():
        found = logits_of(wide, torch.float32, config)
    assert (found - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize(
    ("dialect", "module", "message"),
    [
        ("gptq act order", ".experts.", "experts need inputs in their order, found another one in g_idx"),
        (
            "fp8 blocks",
            ".experts.0.",
            "mlp.experts: all experts must be stored in the same way, found different ones for 0.up_proj and 5.up_proj",
        ),
    ],
)
def test_experts_that_are_stored_in_other_ways_are_refused(
    dialect: str, module: str, message: str, wide: Path, tmp_path: Path
) -> None:
    path = quantize(wide, tmp_path, dialect, lambda each: module in each)
    with pytest.raises(ValueError, match=message):
        make_scheduler(path)


def test_what_other_ranks_read_of_a_draft_is_not_told(tmp_path: Path) -> None:
    names = [f"mtp.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(2)]
    save_file({name: torch.ones(1) for name in (*names, "mtp.odd")}, tmp_path / "model.safetensors")
    notes = list[str]()
    TensorFiles(tmp_path).note_unread(names[:1], notes, "mtp.")
    assert notes == ["draft tensors that are not read: mtp.odd"]
