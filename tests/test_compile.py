"""Kernels compile ahead of time without a GPU, and a launch finds its kernel in the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton")

import torch
from specserve_kernels import FP8, Packed
from specserve_kernels.ops.device import H200, Gpu
from specserve_kernels.ops.experts import experts
from specserve_kernels.ops.experts import streamed as streamed_experts
from specserve_kernels.ops.linear import choose, packed, streamed
from specserve_kernels.reference.experts.experts import ExpertWeights
from specserve_kernels.reference.experts.route import Routes, Tiles
from torch import Tensor

from specserve.compile import main
from specserve.config import make_settings
from specserve.config.engine import EngineConfig
from specserve.engine.kernels import KernelWatch, MissingKernel, Variant
from specserve.process.assemble import resolve_engine
from specserve.process.compile import PROMPT_TOKENS, CompileAhead, CompileJob, list_file, without_kernels
from tests.reference.block import make_block
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.glm import make_glm
from tests.reference.medusa import make_medusa
from tests.reference.mlp_speculator import make_mlp_speculator
from tests.reference.models import load_checkpoint, make_llama, make_mimo, save_checkpoint
from tests.reference.p_eagle import make_p_eagle
from tests.reference.quantized import quantize
from tests.reference.standalone import first_layer
from tests.test_more_targets import MLA

ROOT = Path(__file__).parent.parent

SKETCHES = """
import sys
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from specserve.compile import main

make_ir, add_stages = ASTSource.make_ir, CUDABackend.add_stages

def sketch(self, *args):
    return make_ir(self, *args) if self.name == "_grow_kernel" else None

def add_sketches(self, stages, *args):
    def unless_sketched(stage, binary):
        def compile(module, metadata):
            if module is not None:
                return stage(module, metadata)
            metadata.update(name="", shared=0)
            return b"" if binary else None
        return compile
    add_stages(self, stages, *args)
    for name, stage in stages.items():
        stages[name] = unless_sketched(stage, name == "cubin")

ASTSource.make_ir, CUDABackend.add_stages = sketch, add_sketches
sys.exit(main(sys.argv[1:]))
"""
"""``specserve.compile`` that puts all kernels into the cache, under their keys, and compiles one of them."""


LAUNCHES = """
import collections, json, sys
from dataclasses import replace
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from specserve.config import load_settings
from specserve.engine.kernels import settle_keys
from specserve.process import compile
from specserve.process.assemble import resolve_engine

_, _, config = resolve_engine(replace(load_settings(sys.argv[1:], {}), device="cuda"), has_gpu=True)
found = collections.Counter()
knobs.compilation.listener = lambda cache_hit, **_: found.update([cache_hit])
run = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
driver.set_active(compile.Driver((9, 0)))
settle_keys()
compile.launch_all(config)
print(json.dumps([found[True], found[False]]))
"""
"""Launches as a server does, in an order of its own, and counts what the cache has and lacks."""


# private: launches of prompts of given sizes alone
NOTES = """
import json, sys
from dataclasses import replace
from itertools import product
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from specserve.config import load_settings
from specserve.process import compile
from specserve.process.assemble import resolve_engine

caches, asked = [], []

def note(*, key, fn, **_):
    caches.append(fn.jit_function.device_caches[0][0])
    caches[-1][key] = fn.name  # so that it is noted only once
    asked.append(fn.name)
    return True

run = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
knobs.runtime.jit_cache_hook = note
driver.set_active(compile.Driver((9, 0)))
for flags in json.loads(sys.argv[1]):
    _, _, config = resolve_engine(replace(load_settings(flags, {}), device="cuda"), has_gpu=True)
    compile.launch_all(config)
    print(*set(asked))
    asked.clear()
    plan = compile.shape_plan(config)
    context = compile.create_shapes(config)
    with compile.torch.inference_mode():
        for prompts, start, tokens in product((1, 3, 17, 33, 64, 65, 300), (0, 5), (1, 3, 16, 31, 61)):
            if prompts <= config.max_running_requests and prompts * tokens <= config.longest_launch:
                compile._prefill(context, start, tokens, prompts=prompts)
        for scored in (5, 12, 30, 61):
            if scored < config.longest_launch:
                rows = compile.ScoredTokens(*(compile._integers(scored) for _ in range(2)), 1)
                compile._prefill(context, 0, scored + 1, rows)
        sizes = [each for each in (1, 3, 9, 17, 33, 65) if each <= config.max_running_requests]
        shapes = [shape for size in sizes for shape in plan.candidates(size)]
        for shape in shapes:
            compile.captured_launches(config, [shape], context)[0][0](shape)
    print(*asked)
    asked.clear()
    for cache in caches:
        cache.clear()
"""
"""Launches for each list of flags, compiles nothing, and prints which kernels were asked for, and which besides by
launches of prompts and by steps, a line each."""


def python(cache: Path, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return done.stdout


def test_what_is_launched_was_compiled(tmp_path: Path) -> None:
    target = make_llama(tmp_path / "target", vocab=512, hidden=256, heads=4, kv_heads=2)
    draft = make_eagle3(tmp_path / "eagle3", target, draft_vocab=128)
    flags = ["--model-path", str(target), "--speculative-algorithm", "EAGLE3", "--dtype", "bfloat16"]
    flags += ["--speculative-draft-model-path", str(draft), "--max-running-requests", "1"]
    flags += ["--speculative-num-steps", "2", "--speculative-eagle-topk", "1"]
    flags += ["--speculative-num-draft-tokens", "3", "--skip-tokenizer-init", "--context-length", "64"]
    cache = tmp_path / "cache"
    said = python(cache, "-c", SKETCHES, "--gpu", "h200", "--processes", "1", *flags)
    (listed,) = cache.glob("specserve-*.json")
    variants = [Variant(*each) for each in json.loads(listed.read_text())]
    assert said.startswith(f"{len(variants)} kernels for h200 in ")
    assert {"_attend_kernel", "_prefill_kernel", "_grow_kernel"} <= {variant.kernel for variant in variants}
    compiled = [file.parent for file in cache.rglob("*.cubin") if file.stat().st_size]
    assert compiled
    assert {file.name for path in compiled for file in path.glob("*.cubin")} == {"_grow_kernel.cubin"}
    assert json.loads(python(cache, "-c", LAUNCHES, *flags)) == [len(variants), 0]


MAKES: dict[str, Callable[[Path, Path], Path]] = {
    "EAGLE": make_eagle,
    "MEDUSA": make_medusa,
    "MLP_SPECULATOR": make_mlp_speculator,
    "DSPARK": partial(make_block, dialect="DeepSpec", markov_kind="rnn", confident=True),
    "STANDALONE": first_layer,
    "P_EAGLE": partial(make_p_eagle, head_dim=64),
}


def drafted(path: Path, kind: str) -> list[str]:
    """Flags of a target, and of a draft for it."""
    if kind == "DeepSeek":
        sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_key_value_heads": 4}
        return ["--model-path", str(make_glm(path / "target", family="Glm4MoeLite", **MLA | sizes))]
    if kind == "MiMo":
        target = make_mimo(path / "target", vocab=512, hidden=256, heads=4, kv_heads=2, layers=1)
        return ["--model-path", str(target), "--speculative-algorithm", "NEXTN"]
    vocab = 32768 if kind == "SUFFIX" else 2048  # whose head fills the device
    target = make_llama(path / "target", vocab=vocab, hidden=256, heads=4, kv_heads=2, layers=4)
    if kind == "of 4 bits":
        return ["--model-path", str(quantize(target, path / "quantized", "gptq act order"))]
    if kind not in MAKES:
        return ["--model-path", str(target), "--speculative-algorithm", kind]
    draft = MAKES[kind](path / "draft", target)
    return [
        "--model-path", str(target), "--speculative-algorithm", kind, "--speculative-draft-model-path", str(draft)
    ]  # fmt: skip


@pytest.mark.slow
def test_the_dry_run_of_other_drafts(tmp_path: Path) -> None:
    pairs = [
        ("DeepSeek", ["--max-running-requests", "300", "--context-length", "384"], "_latents_kernel"),
        ("EAGLE", ["--quantization", "fp8"], "_packed_linear_kernel"),
        ("MEDUSA", ["--max-running-requests", "70", "--cuda-graph-max-bs", "2"], "_quantized_linear_kernel"),
        ("MiMo", ["--disable-cuda-graph"], "_grow_kernel"),
        ("DSPARK", [], "_quantized_linear_kernel"),
        ("SUFFIX", [], "_continuation_kernel"),
        ("LOOKAHEAD", [], "_pack_kernel"),
        ("MEDUSA", ["--speculative-draft-quantization", "int8"], "_round_kernel"),
        ("P_EAGLE", [], "_pair_inputs_kernel"),
        ("of 4 bits", [], "_packed_linear_kernel"),
        ("NGRAM", ["--tensor-parallel-size", "2"], "_join_kernel"),
        ("LOOKAHEAD", ["--tensor-parallel-size", "4", "--context-length", "256"], "_sum_kernel"),
    ]
    shared = ["--dtype", "bfloat16", "--max-running-requests", "1", "--skip-tokenizer-init"]
    shared += ["--context-length", "64"]
    flags = [[*drafted(tmp_path / kind, kind), *shared, *more] for kind, more, _ in pairs]
    found = python(tmp_path, "-c", NOTES, json.dumps(flags)).splitlines()
    for (kind, _, kernel), line, late in zip(pairs, found[::2], found[1::2], strict=True):
        assert {"_attend_kernel", "_prefill_kernel", kernel} <= set(line.split()), kind
        assert not late, kind


@pytest.mark.parametrize(("dtype", "step"), [(FP8, 4096), (FP8, 128), (torch.int8, 4096), (torch.uint8, 128)])
@pytest.mark.parametrize("outputs", [1024, 2048, 4096, 5120, 6144, 8192, 28672])
@pytest.mark.parametrize("gated", [False, True])
def test_the_dry_run_multiplies_as_any_prompt_does(
    outputs: int, gated: bool, dtype: torch.dtype, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, scale = (
        torch.empty(outputs, 4096 // (2 if dtype == torch.uint8 else 1), dtype=dtype, device="meta"),
        torch.empty(4096 // step, outputs, 1),
    )
    weight = Packed(values, scale, None, 4096, 128, 128 if dtype == FP8 else 1)

    def launch(tokens: int) -> object:
        few = streamed.block_of(weight, tokens) if tokens <= 16 else None
        if choose.for_packed(weight, tokens, packed.share_of(weight, gated)) == "specialized":
            return few, choose.specialized_config(weight, tokens, packed.share_of(weight, gated), H200)
        converted = weight.bits == 4 and tokens >= packed.CONVERT_FROM
        return few, converted, packed.launch_config(weight, tokens, gated, H200)

    monkeypatch.setattr(choose, "INTERPRETED", False)
    any_prompts = (*range(1, 1025), *range(1040, 8193, 16))  # no tile has fewer
    assert {launch(tokens) for tokens in any_prompts} == {launch(t) for t in (*PROMPT_TOKENS, 8192)}


@pytest.mark.parametrize(("count", "own", "chosen", "size"), [(8, 8, 2, 4096), (128, 32, 8, 2048)])
def test_the_dry_run_runs_experts_as_any_prompt_does(
    count: int, own: int, chosen: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def launch(tokens: int) -> tuple[str, ...]:
        made, pair_TK = [], empty(tokens, chosen)

        def note(*given: Any) -> Any:
            kernel, _, options, outputs = streamed_experts.streamed(*given)
            made.append(f"{options} {outputs}")
            return kernel, (), options, outputs

        monkeypatch.setattr(experts, "streamed", note)
        routes = Routes(pair_TK, pair_TK, Tiles(pair_TK.flatten(), empty(pair_TK.numel() + 1, 3)))
        x_TH = empty(tokens, size, dtype=torch.bfloat16)
        experts.run_experts(x_TH, routes, ExpertWeights(*weights), "silu", None, 0, count)
        return tuple(made)

    values = [empty(own * rows, size // 2, dtype=torch.uint8) for rows in (2 * size, size)]
    weights = [Packed(each, empty(1, 1, 2), None, size, 128, 1, stacked=True) for each in values]
    monkeypatch.setattr(experts, "streams", lambda *_: True)
    monkeypatch.setattr(experts, "overlap", dict)
    with without_kernels():
        assert {launch(tokens) for tokens in range(1, 513)} == {
            launch(tokens) for tokens in PROMPT_TOKENS[:-2]
        }


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's, of this process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def engine_of(path: Path) -> EngineConfig:
    given = make_settings(model_path=str(path), skip_tokenizer_init=True, device="cuda")
    return resolve_engine(given, has_gpu=True)[2]


def test_a_checkpoint_whose_files_decide_otherwise_has_another_list(tmp_path: Path, cache: Path) -> None:
    """Of which a start that finds it skips the dry run."""
    target = make_llama(tmp_path / "target", vocab=64, hidden=256, heads=4, kv_heads=2)
    lists = []
    for number, (ends, change) in enumerate(
        [
            ("", lambda each: each),
            ("norm.weight", lambda each: each + 1),  # decides nothing
            ("scales", Tensor.bfloat16),
            ("g_idx", lambda each: each.flip(0)),
        ]
    ):
        path = quantize(target, tmp_path / str(number), "gptq act order")
        state, config = load_checkpoint(path)
        changed = {
            name: change(each) if ends and name.endswith(ends) else each for name, each in state.items()
        }
        save_checkpoint(path, changed, config, safetensors=True)
        lists.append(list_file(CompileJob(engine_of(path), Gpu((9, 0), H200), 1)))
    same, also, *others = lists
    assert same.parent == cache
    assert same == also
    assert len({same, *others}) == 3


@pytest.mark.usefixtures("cache")
def test_the_compiler_finds_what_this_process_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a program that embeds Python, where it can't be started, goes on without it."""
    config = engine_of(make_llama(tmp_path / "target", vocab=64, hidden=256, heads=4, kv_heads=2))
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.exit('found it')\n")
    monkeypatch.setattr("specserve_kernels.ops.device.this_gpu", lambda: Gpu((9, 0), H200))
    monkeypatch.setattr("triton.knobs.runtime.jit_cache_hook", None)
    monkeypatch.syspath_prepend(tmp_path)
    CompileAhead.begin(config).load()
    assert "kernels could not be compiled in advance: SystemExit: found it" in caplog.text
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert CompileAhead.begin(config).process is None


def test_a_kernel_that_comes_late_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Function:
        module, name = "specserve_kernels.ops.m", "k"

    watch = KernelWatch()
    data = {"specialization_data": "{}"}
    assert not watch(key="a", fn=Function, compile=data, repr="")
    assert watch.late == 0
    watch.serving = True
    assert not watch(key="b", fn=Function, compile=data, repr="")
    assert watch.late == 1
    assert "k was compiled while serving" in caplog.text
    with (
        patch("torch.cuda.is_available", return_value=True),
        patch("torch.cuda.is_current_stream_capturing", return_value=True),
        pytest.raises(MissingKernel),
    ):
        watch(key="c", fn=Function, compile=data, repr="")
    assert len(watch.have) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "h300"], "--gpu: invalid choice: 'h300'"),
        (["--gpu", "h200", "--processes", "0"], "--processes: must be at least 1, found 0"),
        (["--device", "cpu"], "--device cpu: nothing is compiled for a CPU"),
        (["--gpus", "h200"], "--gpus: unknown flag"),
        ([], "--gpu: needed where torch finds none: one of a100, l4"),
    ],
)
def test_mistakes(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with patch("torch.cuda.is_available", return_value=False):
        assert main(flags) == 2
    assert words in capsys.readouterr().err
