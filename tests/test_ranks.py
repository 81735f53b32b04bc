"""Parts of weights, and models on ranks that are threads."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from specserve_kernels import Parts, add_rms_norm, dequantize_numbers
from torch import Tensor

from specserve.layers import norms
from specserve.layers.batch import TokenBatch
from specserve.layers.formats.rounded import DTYPES, RoundedLayout, RoundedWeights
from specserve.layers.ranks import ONE, Ranks, Share, summed
from specserve.layers.weights import Projection
from specserve.models.base import TargetModel
from specserve.models.checkpoint import load_target
from specserve.models.read_config import load_model_config
from specserve.process.gpu_peers import cards, environment
from specserve.process.peers import SocketPeers
from tests.engines import held_as_on_a_gpu, not_rounded
from tests.fixtures import Quantized
from tests.ranks import on_ranks
from tests.reference.glm import HYBRID, make_glm
from tests.reference.models import load_checkpoint, make_qwen3_moe, save_checkpoint
from tests.reference.quantized import DIALECTS, dequantize, quantize
from tests.test_more_targets import CONFIGS, SIZES
from tests.test_targets import DenseAttend
from tests.test_weight_formats import CPU, TOKENS

ALIKE = (
    "phi 4 mini",
    "phi 4 mini, short",
    "gemma 4, unified",
    "exaone 4 without windows",
    "mixtral with windows",
)
ELSEWHERE = (
    "smollm3 with",
    "gpt-oss",
    "deepseek",
    "glm 4.7",
    "qwen 3.5",
    "qwen3 next",
)  # some in ``test_tensor_parallel``
FAMILIES = [name for name in CONFIGS if name not in ALIKE and not name.startswith(ELSEWHERE)]
UNCUT = ("gptq act order", "gptq act order of each", "W4A16 act order")


def dummy(path: Path, family: str, **changes: Any) -> Path:
    name, fields = CONFIGS[family]
    text = "Text" if hasattr(transformers, f"{name}TextConfig") else ""
    config = getattr(transformers, f"{name}{text}Config")(**{**SIZES, **fields, **changes})
    (path / "config.json").write_text(
        json.dumps({**config.to_dict(), "architectures": [f"{name}ForCausalLM"]})
    )
    return path


def load(path: Path, ranks: Ranks = ONE, random: str | None = None) -> TargetModel:
    config = load_model_config(path, random=random)
    return load_target(path, torch.float64, CPU, len(TOKENS), config, ranks)


@pytest.fixture(autouse=True)
def float64() -> Any:
    """The default dtype belongs to the process, and threads that load at a time would set it for each other."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def logits(path: Path, ranks: Ranks, filed: bool = False) -> Tensor:
    """Of a model with random weights, unless they are ``filed``."""
    model, tokens = load(path, ranks, None if filed else ""), torch.tensor(TOKENS)
    with torch.no_grad():
        hidden, _ = model(TokenBatch(tokens, torch.arange(len(tokens)), DenseAttend()))
        return model.logits(hidden)


@pytest.fixture
def left_to_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are made where they are read, as on GPUs."""
    exchange = pytest.importorskip("specserve_kernels.ops.ranks.exchange", exc_type=ImportError)
    monkeypatch.setattr(SocketPeers, "sum_for_norm", lambda peers, part_TH: Parts(part_TH, peers))
    monkeypatch.setattr(exchange, "sum_parts", lambda part_TH, peers: peers.sum(part_TH))
    monkeypatch.setattr(norms, "add_rms_norm", lambda x_TH, *rest: add_rms_norm(summed(x_TH), *rest))


@pytest.mark.usefixtures("left_to_norms")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_on_two_ranks(family: str, tmp_path: Path) -> None:
    path = dummy(tmp_path, family)
    expected = logits(path, ONE)
    one, other = on_ranks(2, lambda ranks: logits(path, ranks))
    assert torch.equal(one, other)
    torch.testing.assert_close(one, expected, rtol=0, atol=1e-10)
    assert expected.std() > 0.01


@pytest.mark.parametrize(("family", "count"), [("gpt-oss", 4), ("glm 4.5, in groups", 2), ("qwen 3 moe", 2)])
def test_whole_experts_on_two_groups_of_ranks(
    family: str, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With biases, of one rank of a group; in groups, next to shared ones; and from files."""
    if filed := family == "qwen 3 moe":
        path = make_qwen3_moe(tmp_path / "model")
    else:
        path = dummy(tmp_path, family, **({"num_local_experts": 4} if family == "gpt-oss" else {}))
    expected = logits(path, ONE, filed)
    for found in on_ranks(count, lambda ranks: logits(path, ranks, filed), experts=2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert "no parameter reads" not in caplog.text
    (config,) = {
        each.experts for each in load_model_config(path).on(Ranks(1, 2, experts=2)).layers if each.experts
    }
    assert config is not None
    whole = config.routing.experts
    assert config.numbers == range(whole // 2, whole)


def joined(whole: Projection, parts: list[Projection]) -> Tensor:
    """The rows of all ranks in the order of the whole's."""
    rows = [part.rows(None)[0] for part in parts]
    if rows[0].shape[1] < whole.rows(None)[0].shape[1]:
        return torch.cat(rows, 1)
    found = []
    each = [weight.split([*map(int, part.parts.values())]) for weight, part in zip(rows, parts, strict=True)]
    for index, outputs in enumerate(whole.parts.values()):
        pieces = [split[index] for split in each]
        count = outputs // len(pieces[0])  # fewer than ranks if they are repeated
        found += pieces[:: len(pieces) // count]
    return torch.cat(found)


@pytest.mark.parametrize("random", [None, ""], ids=["from files", "random"])
@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name not in UNCUT])
def test_parts_of_every_weight_format(dialect: str, random: str | None, dialects: Quantized) -> None:
    path = dialects(dialect)
    whole = load(path, random=random)
    parts = [load(path, Ranks(rank, 2), random) for rank in range(2)]
    for layer in range(2):
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            one, *others = (each.get_submodule(f"layers.{layer}.{name}") for each in (whole, *parts))
            assert torch.equal(one.rows(None)[0], joined(one, others)), name
    assert sum(len(each.embed_tokens.weight) for each in parts) == len(whole.embed_tokens.weight)


@pytest.fixture(scope="module")
def by_head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Next, in whose delta nets blocks of 128 outputs have several heads, or a head's."""
    sizes = {f"linear_{name}_head_dim": request.param for name in ("key", "value")}
    sizes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "hidden_size": 192, "head_dim": 64}
    sizes |= {"num_experts": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    return make_glm(tmp_path_factory.mktemp("by head"), family="Qwen3Next", **HYBRID | sizes)


def numbers_of(net: Any, name: str) -> Tensor:
    """A projection's weight, and its bias behind it."""
    weight_OI, bias_O = net.get_submodule(name).rows(None)
    return (weight_OI if bias_O is None else torch.cat([weight_OI, bias_O[:, None]], 1)).double()


@pytest.mark.parametrize(
    ("dialect", "by_head"),
    [*((name, 32) for name in ("plain", *(f"to {kind}" for kind in DTYPES), *DIALECTS)), ("fp8 blocks", 128)],
    indirect=["by_head"],
)
def test_outputs_that_files_have_by_key_head(dialect: str, by_head: Path, tmp_path: Path) -> None:
    """Are held part by part, with all that belongs to them: one process's, each of two ranks', and random ones. Blocks
    stay whole if they can."""
    path, kind, net = by_head, dialect.removeprefix("to "), "layers.1.linear_attn"
    if dialect in DIALECTS:
        path = quantize(by_head, tmp_path, dialect, projections=("in_proj_qkvz", "in_proj_ba"))
        state, fields = load_checkpoint(path)
        biases = {name: torch.rand(len(each)).half() for name, each in state.items() if "ba.bias" in name}
        save_checkpoint(path, {**state, **biases}, fields, safetensors=True)
    state, fields = dequantize(path) if dialect in DIALECTS else load_checkpoint(path)
    config, size = load_model_config(path), fields["linear_key_head_dim"]
    config = config.with_weights(RoundedWeights(kind)) if kind in DTYPES else config
    configs = [config, replace(config, random="")]
    wholes, *ranks = (
        [load_target(path, torch.float64, CPU, 9, each, rank).get_submodule(net) for each in configs]
        for rank in (ONE, Ranks(0, 2), Ranks(1, 2))
    )
    with held_as_on_a_gpu():
        held: Any = load_target(path, torch.float32, CPU, 9, config).get_submodule(net)
    for name, sizes in (("in_proj_qkvz", (size, size, 2 * size, 2 * size)), ("in_proj_ba", (2, 2))):
        filed = state[f"model.{net}.{name}.weight"].double()
        if kind in DTYPES:
            filed = dequantize_numbers(RoundedLayout(kind).numbers({"weight": filed}, CPU), torch.float64)
        if (bias := state.get(f"model.{net}.{name}.bias")) is not None:
            filed = torch.cat([filed, bias[:, None]], 1)
        parts = filed.unflatten(0, (4, -1)).split(sizes, 1)
        expected = torch.cat([part.flatten(0, 1) for part in parts])
        for found in (wholes[0], held):
            numbers = numbers_of(found, name)[:, : expected.shape[1]]  # or zeros as bias
            torch.testing.assert_close(numbers, expected, rtol=1e-6, atol=0)
        for whole, *both in zip(wholes, *ranks, strict=True):
            pieces = [part.chunk(2) for part in numbers_of(whole, name).split([4 * rows for rows in sizes])]
            for rank, found in enumerate(both):
                assert torch.equal(numbers_of(found, name), torch.cat([each[rank] for each in pieces]))
    if "blocks" in dialect:
        assert held.in_proj_qkvz.packed.rows == (128 if size == 128 else 1)


@pytest.mark.parametrize("dialect", ["awq", "gptq", "W4A16 asymmetric", "mxfp4", "fp8 blocks"])
def test_quantized_targets_on_two_ranks(dialect: str, dialects: Quantized) -> None:
    """With FP8 each rank rounds its own activations, which changes logits by a sixteenth of their spread."""
    expected = logits(dialects(dialect), ONE, filed=True)
    one, other = on_ranks(2, lambda ranks: logits(dialects(dialect), ranks, filed=True))
    assert torch.equal(one, other)
    most = 0.1 * float(expected.std()) if "fp8" in dialect else 1e-10
    assert (one - expected).square().mean().sqrt() < most


def test_blocks_of_experts_are_shared_out_unevenly(tmp_path: Path) -> None:
    for inner in (96, 80):
        plain = make_qwen3_moe(tmp_path / f"of {inner}", inner=inner)
        path = quantize(plain, tmp_path / str(inner), "fp8 blocks", lambda module: ".experts." in module)
        with not_rounded():
            expected = logits(path, ONE, filed=True)
            if inner == 96:
                for found in on_ranks(2, lambda ranks, path=path: logits(path, ranks, True)):
                    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    named = (
        r"1\.mlp\.experts\.0\.down_proj, \S+, \S+, 3 more: --tensor-parallel-size: .* of 32 inputs, found 40"
    )
    with pytest.raises(ValueError, match=named):
        load(path, Ranks(1, 2))
    rounded = load_model_config(plain).with_weights(RoundedWeights("int4"))
    with pytest.raises(
        ValueError, match=r"0\.self_attn\.o_proj: --tensor-parallel-size: .* of 128 inputs, found 16"
    ):
        load_target(plain, torch.float64, CPU, len(TOKENS), rounded, Ranks(1, 2))


@pytest.mark.parametrize("dialect", UNCUT)
def test_inputs_in_another_order_are_refused(dialect: str, dialects: Quantized) -> None:
    with pytest.raises(ValueError, match="o_proj: --tensor-parallel-size must be 1: inputs that g_idx puts"):
        load(dialects(dialect), Ranks(1, 2))


def test_fewer_kv_heads_than_ranks_are_repeated(tmp_path: Path) -> None:
    path = dummy(tmp_path, "seed-oss", vocab_size=301)
    expected = logits(path, ONE)
    for found in on_ranks(4, lambda ranks: logits(path, ranks)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    heads = [Ranks(rank, 4).share(2, "heads", repeat=True) for rank in range(4)]
    assert [each.ranges for each in heads if isinstance(each, Share)] == [
        ((n // 2, n // 2 + 1),) for n in range(4)
    ]


def test_groups_are_shared_out_unevenly() -> None:
    parts = [Ranks(rank, 2).share(320 + 32, "inner", unit=32) for rank in range(2)]
    assert [each.ranges for each in parts if isinstance(each, Share)] == [((0, 160),), ((160, 352),)]


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("arcee", {}, "num_attention_heads must be a multiple of it, found 3 and 4"),
        ("arcee", {"hidden_size": 36, "num_attention_heads": 6}, "or divide it, found 3 and 2"),
        (
            "arcee",
            {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 40},
            "intermediate_size",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_named(
    family: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"--tensor-parallel-size.*{problem}"):
        load(dummy(tmp_path, family, **changes), Ranks(0, 3), "")


def test_sums_are_added_in_the_order_of_ranks() -> None:
    """In float32, and rounded once; of more numbers than fit a socket's buffer, each alone has the same sum."""
    parts = torch.randn(4, 3, 50_001, dtype=torch.float32).bfloat16()
    found = on_ranks(4, lambda ranks: (ranks.sum(parts[ranks.rank]), ranks.sum(parts[ranks.rank, 1, 7:8])))
    first, second, third, last = parts.float()
    expected = (((first + second) + third) + last).bfloat16()
    assert all(torch.equal(every, expected) for every, _ in found)
    assert all(torch.equal(alone, expected[1, 7:8]) for _, alone in found)
    assert on_ranks(3, lambda ranks: ranks.least(5 - ranks.rank)) == [3, 3, 3]


def test_open_files_are_exchanged(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> dict[int, str]:
        path = tmp_path / str(ranks.rank)
        path.write_text(f"of {ranks.rank}")
        assert isinstance(ranks.peers, SocketPeers)
        with path.open() as own:
            files = ranks.peers.exchange_files(own.fileno())
        found = {}
        for rank, file in files.items():
            found[rank] = os.pread(file, 9, 0).decode()
            os.close(file)
        return found

    every = {rank: f"of {rank}" for rank in range(3)}
    assert on_ranks(3, work) == [{n: text for n, text in every.items() if n != rank} for rank in every]


@pytest.mark.parametrize(("given", "current"), [("4,5,6", 1), (None, 2)])
def test_every_rank_sees_its_own_gpu_first(
    given: str | None, current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's is the current one."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.current_device", lambda: current)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    found = [environment(cards(3), rank)["CUDA_VISIBLE_DEVICES"] for rank in range(3)]
    assert found == (["5,6,4", "6,5,4", "4,5,6"] if given else ["2,0,1", "0,2,1", "1,2,0"])
    with pytest.raises(
        ValueError, match="--tensor-parallel-size: expected at most 3, the number of GPUs, found 4"
    ):
        cards(4)
    monkeypatch.setenv("RANKS_SHARE_GPU", "1")
    assert cards(4) == found[0].split(",")[:1] * 4
