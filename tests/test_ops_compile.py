"""Every Triton kernel compiles for an H200, on a machine without a GPU.

The other tests run kernels in Triton's interpreter, which accepts code that its compiler refuses, such as a variable
whose shape changes in a loop. Here ``tests/compiled_launches.py``, in its own process, launches them as the engine
does: prefill and steps of all forms, and operations with other settings and of Llama-3.1-8B's sizes. ``-s`` shows the
kernels that take more shared memory than a program has on an A10, L4 or RTX 4090.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.compiled_launches import ADA_SHARED, Compiler, running_products, waits_first
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.models import make_llama

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
OPS = ROOT / "kernels" / "specserve_kernels" / "ops"
H200_SHARED = 232_448  # most bytes of shared memory of a program
UNPIPELINED = {
    "linear.specialized._specialized_kernel",  # whose loads are in another loop than its products
    "recurrent.delta_rule._delta_kernel",  # which reads few entries
    "recurrent.delta_rule._fold_kernel",  # which seldom has any
    "recurrent.delta_steps._steps_kernel",  # which asks for all at once
}
PROMPTS = {
    "attention.prefill._prefill_kernel",
    "attention.latent_nodes._latents_kernel",
}  # which do not wait for these
GIVEN = {"gl.warp_specialize", "gl.associative_scan"}  # what takes functions

Compiled = dict[str, Any]


def kernels() -> list[str]:
    """``room.file.function`` of all that Triton compiles and no other such function calls or gives away."""
    named, called = [], set()
    for file in sorted(OPS.rglob("*.py")):
        module = ".".join(file.relative_to(OPS).with_suffix("").parts)
        for node in ast.parse(file.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not {"triton.jit", "gluon.jit"} & set(
                map(_name, node.decorator_list)
            ):
                continue
            named.append(f"{module}.{node.name}")
            called |= {
                _name(name)
                for inner in ast.walk(node)
                if isinstance(inner, ast.Call)
                for name in (ast.walk(inner) if _name(inner) in GIVEN else [inner])
                if isinstance(name, (ast.Call, ast.Name))
            }
    return [name for name in named if name.rsplit(".", 1)[1] not in called]


def _name(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    path = tmp_path_factory.mktemp("compiled")
    target = make_llama(path / "target", vocab=4096, hidden=512, heads=4, kv_heads=1)  # heads of 128
    drafts = [
        make_eagle(path / "eagle", target),
        make_eagle3(path / "eagle3", target, draft_vocab=3000),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(path / "cache"), "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "tests.compiled_launches", str(target), *map(str, drafts)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(everywhere: list[Compiled]) -> list[Compiled]:
    """For an H200."""
    return [each for each in everywhere if each["capability"] == 90]


def test_large_blocks_fit_smaller_gpus(everywhere: list[Compiled]) -> None:
    sizes = [each["shared"] for each in everywhere if each["capability"] == 89]
    assert len(sizes) == 16
    assert max(sizes) <= ADA_SHARED


def test_all_compile(compiled: list[Compiled]) -> None:
    errors = [f"{each['kernel']} {each['variant']}\n{each['error']}" for each in compiled if each["error"]]
    assert not errors, "\n\n".join(errors)
    assert {each["kernel"] for each in compiled} == set(kernels()), "all, and nothing unknown"
    sized = [each for each in compiled if each["shared"] is not None]
    assert {each["kernel"] for each in sized} == set(kernels()), "of each, a launch gets shared memory"
    for each in sized:
        text = f"{each['kernel']} {each['variant']}: {each['shared']} bytes of shared memory"
        assert each["shared"] <= H200_SHARED, text
        if each["shared"] > ADA_SHARED:
            print(text)


def test_nothing_is_touched_before_the_wait(compiled: list[Compiled]) -> None:
    """Of overlapping launches; see ``specserve_kernels.ops.pdl``."""
    made = [each for each in compiled if each["shared"] is not None]
    assert {each["kernel"] for each in made if each["waits"] is None} == {"attention.prefill._prefill_kernel"}
    assert not [each["kernel"] for each in made if each["waits"] is False]


def test_loops_of_products_are_pipelined(compiled: list[Compiled]) -> None:
    """Else what they read next does not come while they multiply; Triton gives that up in silence."""
    made = [each for each in compiled if each["copied"] and each["kernel"] not in UNPIPELINED]
    assert not [f"{each['kernel']} {each['variant']}" for each in made if not all(each["copied"])]
    assert "attention.prefill._prefill_kernel" in {each["kernel"] for each in made}
    attention = [each["copied"] for each in made if each["kernel"] == "attention.attention._attend_kernel"]
    assert attention
    assert all(copied[0] == 2 for copied in attention), "keys and values; pages come by registers"
    assert {copied[1] for copied in attention if copied[1:]} == {4, 5}, "of paths their places, too"


def test_attention_adds_keys_in_their_order(compiled: list[Compiled]) -> None:
    """Of what is loaded in 8 bits, too, for which Triton would have each thread take four that lie together."""
    made = [each for each in compiled if each["kernel"].startswith("attention.") and each["neighbours"]]
    assert {tuple(each["neighbours"]) for each in made if "float32" not in each["variant"]} == {(2,)}
    rounded = {each["kernel"] for each in made if "float8_e4m3fn" in each["variant"]}
    assert rounded == {"attention.prefill._prefill_kernel", "attention.attention._attend_kernel"}


@pytest.mark.parametrize("room", ["experts.", "recurrent."])
def test_products_add_inputs_in_their_order(compiled: list[Compiled], room: str) -> None:
    """So that tiles of all sizes give the same bits."""
    made = [each for each in compiled if each["kernel"].startswith(room) and each["neighbours"]]
    assert {tuple(each["neighbours"]) for each in made if "bfloat16" in each["variant"]} == {(2,)}


def test_products_end_before_their_registers_are_overwritten(compiled: list[Compiled]) -> None:
    """Of weights that are converted. Attention's run until the next turn's first wait, after which their numbers are
    computed anew."""
    rooms = ("linear.", "experts.")
    made = [each for each in compiled if each["kernel"].startswith(rooms) and each["running"] is not None]
    assert not [f"{each['kernel']} {each['variant']}" for each in made if each["running"]]
    wide = [each for each in made if "'O': 28672" in each["variant"] and "'BITS': 4" in each["variant"]]
    assert wide


def test_products_that_run_on_are_found() -> None:
    """Of a step's two products the first is awaited, in a loop within another."""
    product = (
        "%p = ttng.warp_group_dot %a, %b, %c {isAsync = true} : tensor<64x16xbf16> * !ttg.memdesc<16x8xbf16>"
    )
    wait = "%w = ttng.warp_group_dot_wait %p {pendings = 0 : i32} : tensor<64x8xf32>"
    loop = ["  scf.for %i = %x to %y {", "    %s = scf.for %j = %x to %y {", "    } loc(#l)", "  } loc(#l)"]
    ttgir = [*loop[:2], product, wait, product, loop[2], wait, loop[3]]
    assert running_products("\n".join(ttgir)) == 1
    assert running_products("\n".join([*loop[:2], product, product, wait, *loop[2:]])) == 0
    of_shared = product.replace(": tensor<", ": !ttg.memdesc<")
    assert running_products("\n".join([*loop[:2], of_shared, *loop[2:]])) == 0


def test_nothing_is_read_early_that_the_launch_before_writes(compiled: list[Compiled]) -> None:
    """Of what steps and prefill launch, in their order."""
    assert not [(each["kernel"], each["hasty"]) for each in compiled if each["hasty"]]


def test_what_is_read_too_early_is_found() -> None:
    compiler, kernel = Compiler(), SimpleNamespace
    grow = kernel(__name__="_grow_kernel", params=[kernel(name="length_ptr"), kernel(name="tokens_ptr")])
    other = kernel(__name__="_other", params=[kernel(name="x"), kernel(name="y")])
    host, rows, rest = torch.zeros(8), torch.zeros(3, 8), torch.zeros(8)
    assert compiler._hasty(grow, (host, rest)) is None
    assert compiler._hasty(other, (rest, (3, rows))) is None
    assert compiler._hasty(grow, (rows[1, 6:], rest)) == "length_ptr"
    assert compiler._hasty(grow, (rows[1], rest)) is None
    assert compiler._hasty(grow, (host, rest)) is None
    own = [kernel(name="x_ptr"), kernel(name="weight_ptr")]
    ahead, made = kernel(__name__="_linear_ahead_kernel", params=own), torch.zeros(8)
    assert compiler._hasty(other, (rest, made)) is None
    assert compiler._hasty(ahead, (host, host)) is None
    assert compiler._hasty(grow, (made, rest)) == "length_ptr"
    assert compiler._hasty(grow, (made, rest)) is None


def test_code_that_reads_too_early_is_found() -> None:
    wait, load = 'asm "griddepcontrol.wait ;"', 'asm "@$3 ld.global.b16 { $0 }, [ $2 ];"'
    assert waits_first(f"{wait}\n{load}")
    assert not waits_first(f"{load}\n{wait}")
    assert not waits_first(f"%1 = load i32, ptr addrspace(1) %0\n{wait}")
    assert waits_first(f'asm "@$3 ld.global.cg.b32 {{ $0 }}, [ $2 ];"\n{wait}\n{load}')
    assert not waits_first(f'asm "st.global.cg.b32 [ $0 ], {{ $1 }};"\n{wait}\n{load}')
    assert waits_first(load) is None
    wait, load = "tt.grid_dependency_wait loc(#loc48)", "%x_9 = tt.load %x_8, %x : tensor<128x!tt.ptr<bf16>>"
    settled = load.replace(" : ", " {cachePolicy = #tt.cache_policy<cache_modifier = cg>} : ")
    assert waits_first(f"{settled}\n{wait}\n{load}")
    for early in (load, "tt.store %3, %7, %x", "%k = ttg.async_copy_global_to_local %k_ptrs, %at"):
        assert not waits_first(f"{early}\n{wait}")
    wait = 'asm "griddepcontrol.wait ;"'
    copies = [
        f'asm "cp.async.bulk.tensor.2d.shared::cta.global [$1], [$2];"(i1 %9, ptr nonnull %{i}, i32 0)'
        for i in (0, 5)
    ]
    assert not waits_first(f"{copies[0]}\n{wait}", 1)
    assert waits_first(f"{copies[1]}\n{wait}\n{copies[0]}", 1)
    assert not waits_first(f"{copies[1]}\n{wait}\n{copies[0]}")
    assert waits_first(f"{wait}\n{load}\n{copies[1]}\n{wait}\n{copies[0]}", 2)
    assert not waits_first(f"{wait}\n{load}\n{copies[1]}\n{copies[0]}\n{wait}", 2), "inputs come too early"
    assert not waits_first(f"{copies[1]}\n{wait}\n{copies[0]}\n{load}", 2), "a group does not wait"
