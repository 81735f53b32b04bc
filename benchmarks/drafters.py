"""Milliseconds a step of every drafter at batches of 1, 16 and 64, next to plain decoding.

    python -m benchmarks.drafters --pair DIR [--only off DSPARK NGRAM] [--controller] [--quick]

DIR is the output of ``python -m benchmarks.cost_faithful --random``; what is missing of DIR/random is made, with drafts
of published sizes. 512 random tokens in, 256 out, greedy, ignoring end tokens. Shapes are fixed and no draft is
accepted, so batches stay full; what drafts gain is not measured here. At batch 1 the median of ``--repeats`` runs, else
one run. The target is loaded once, and kernels are compiled before, on all cores.

``ratio_to_off``: to plain decoding of this batch. ``ratio_to_free``: to ``FREE``, the same step with drafts that cost
nothing: seven constants drafted and eight tokens verified. ``--controller`` leaves the shape to the controller, which
has to find that drafts never help: ``ratio_to_off`` is then what it loses. A row is written as soon as it is measured,
so that a run that is cut keeps its rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from specserve_kernels import Accepted, Pool, Slots, Tree, accept_path
from torch import Tensor, nn

from benchmarks.common import SPARE_POSITIONS, Shape, parse_load, random_prompts, shape_settings, weights_kept
from benchmarks.cost_faithful import RANDOM, SHAPES, Family, Maker, Named, Sizes, scramble, write
from benchmarks.results import Figures, keep_rows, options
from benchmarks.steps import measure
from examples.bundled_model.save_target import target_config
from specserve import LLM
from specserve.engine.memory import return_memory
from specserve.layers.config import LayerConfig
from specserve.methods import METHOD_NAMES, METHODS, DraftSettings, Method, register
from specserve.models.base import TargetModel
from specserve.models.checkpoint import DTYPES, building, file_tensors
from specserve.models.config import ModelConfig
from specserve.models.draft.block import BlockConfig, BlockHead
from specserve.models.draft.block_source import default_ids
from specserve.models.draft.medusa import MedusaHeads
from specserve.models.read_config import load_model_config
from specserve.speculation.context import Context, View
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape
from specserve.tools.train.block import block_config
from tests.toys.drafter import CopyDrafter

LLAMA_1B = Sizes(2048, 8192, 16, 32, 8, 64, 128256, 0)
LAYERS, BLOCK, RANK = 5, 7, 256
HEADS = 5


def make(path: Path, shape: Sizes, small: Sizes, dtype: torch.dtype) -> None:
    """Write what is missing of the pair and its drafts, on the GPU if there is one. ``small``: the draft model's.

    They have random weights, cost what trained ones cost and guess nothing: matrices are normal with a deviation of
    0.02, vectors are ones.

    - ``dspark``: a DSpark draft as DeepSpec publishes them, five layers like the target's, blocks of 7 that all draft,
      a vanilla Markov head of rank 256 and a confidence head that reads it too.
    - ``medusa``: five heads of one block each, with scores of their own.
    - ``standalone``: a tied model of Llama-3.2-1B's shape.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not all((path / name / "config.json").exists() for name in ("target", "eagle3")):
        Maker(Family(), shape, dtype, device).random(path)
    target = load_model_config(path / "target")
    model = empty(target)
    drafts: dict[str, Callable[[], tuple[Named, dict[str, Any]]]] = {
        "dspark": lambda: block(model, dtype),
        "medusa": lambda: medusa(model, dtype),
        "standalone": lambda: standalone(model, small, dtype),
    }
    for name, draft in drafts.items():
        if not (path / name / "config.json").exists():
            tensors, config = draft()
            filled = ((n, torch.empty_like(t, dtype=dtype, device=device)) for n, t in tensors)
            write(scramble(filled), config, path / name)


def empty(config: ModelConfig) -> TargetModel:
    """A model without data."""
    with building(torch.bfloat16, torch.device("meta")):
        return TargetModel(config, 1)


def block(target: TargetModel, dtype: torch.dtype) -> tuple[Named, dict[str, Any]]:
    hidden, layers = target.config.hidden_size, target.config.num_layers
    config = BlockConfig(
        layer=dataclasses.replace(target.config.draft_layer, qk_norm=True),
        num_layers=LAYERS,
        rope=target.config.rope,
        taps=tuple(i + 1 for i in default_ids(layers, LAYERS)),
        block_size=BLOCK,
        mask_id=target.config.vocab_size - 1,
        after=True,
        levels=BLOCK,
        draft_vocab_size=target.config.vocab_size,
        correction="vanilla",
        rank=RANK,
        confidence=hidden + RANK,
    )
    with building(dtype, torch.device("meta")):
        head = BlockHead(config, layers, 1, target)
    return tensors_of(head), block_config(config, target.config, dtype)


def medusa(target: TargetModel, dtype: torch.dtype) -> tuple[Named, dict[str, Any]]:
    """Under the authors' names: head i has its block, then its scores."""
    rows = target.config.vocab_size
    with building(dtype, torch.device("meta")):
        heads = MedusaHeads(target, HEADS, 1, bias=True, scorers=HEADS, rows=rows)

    def named(name: str) -> str:
        kind, head, rest = name.split(".", 2)
        return f"{head}.{rest}" if kind == "heads" else f"{head}.1.{rest}"

    return ((named(n), t) for n, t in tensors_of(heads)), {"medusa_num_heads": HEADS, "medusa_num_layers": 1}


def standalone(target: TargetModel, small: Sizes, dtype: torch.dtype) -> tuple[Named, dict[str, Any]]:
    eps = target.config.draft_layer.rms_norm_eps
    layer = LayerConfig(
        small.hidden, small.inner, small.heads, small.kv_heads, small.head_dim, eps, input_size=small.hidden
    )
    config = dataclasses.replace(
        target.config, vocab_size=small.vocab, layers=(layer,) * small.layers, tie_word_embeddings=True
    )
    named = ((f"model.{name}", tensor) for name, tensor in tensors_of(empty(config)))
    return named, target_config(config, dtype)


def tensors_of(module: nn.Module) -> Named:
    return iter(file_tensors(module).items())


BATCHES = (1, 16, 64)


class FreeDrafter(CopyDrafter):
    """Proposes the root again, whatever the text."""

    name = "FREE"

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        token_BS = view.slots.root_B.long()[:, None].expand(-1, shape.levels)
        score_BS = torch.full_like(token_BS, -1.0, dtype=context.state.sampling.temperature.dtype)
        return Pool.of_text(token_BS, score_BS)


def load_free(_: DraftSettings, target: TargetModel) -> FreeDrafter:
    return FreeDrafter(target.config.vocab_size)


@contextmanager
def free_offered() -> Iterator[None]:
    """``FREE`` is a method."""
    method = Method("FREE", load_free, copies="all")
    register(method)
    try:
        yield
    finally:
        METHOD_NAMES.remove(method.name)
        del METHODS[method.name]


@contextmanager
def none_accepted() -> Iterator[None]:
    """Engines built inside, their captured steps included, accept no draft, at the cost of two small launches a
    step."""

    def patched(tree: Tree, chosen_T: Tensor, slots: Slots) -> Accepted:
        if tree.levels:
            tree = dataclasses.replace(tree, token_T=tree.token_T.masked_fill(tree.local_T > 0, -1))
        return accept_path(tree, chosen_T, slots)

    with patch("specserve.speculation.step.accept_path", patched):
        yield


class Case(NamedTuple):
    """``shape`` None: the method's own. ``draft``: its folder."""

    method: str
    shape: Shape | None = (7, 1, 8)
    draft: str | None = None
    batches: Sequence[int] = BATCHES


CASES = {
    "off": Case("NONE", None, batches=(1, 8, 16, 64)),  # 8: as many tokens as a chain of 7 at batch 1
    "FREE": Case("FREE"),
    "DSPARK": Case("DSPARK", draft="dspark"),
    "NGRAM": Case("NGRAM"),
    "STANDALONE": Case("STANDALONE", (4, 1, 5), "standalone"),
    "EAGLE3": Case("EAGLE3", draft="eagle3"),
    "MEDUSA": Case("MEDUSA", (5, 1, 6), "medusa"),
    "EAGLE3+NGRAM": Case("EAGLE3+NGRAM", draft="eagle3"),
    "LOOKAHEAD": Case("LOOKAHEAD", None),
}


def settings_of(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"speculative_algorithm": case.method}
    if case.method != "NONE":
        settings["speculative_adaptive"] = args.controller
    if case.shape is not None and not args.controller:
        settings |= shape_settings(case.shape)
    if case.draft is not None:
        settings["speculative_draft_model_path"] = str(args.pair / RANDOM / case.draft)
    largest = max(sizes_of(case, args))
    return settings | {
        "model_path": args.model,
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "max_running_requests": largest,
        "max_total_tokens": largest * (args.prompt_tokens + args.new_tokens + SPARE_POSITIONS),
    }


def sizes_of(case: Case, args: argparse.Namespace) -> list[int]:
    return [size for size in case.batches if size <= args.max_batch]


@contextmanager
def for_timing(sizes: Sequence[int]) -> Iterator[None]:
    """Steps of other batches are padded to these, so that few are captured, and no draft is accepted."""
    buckets = patch("specserve.process.assemble.batch_buckets", lambda _: tuple(sizes))
    with buckets, none_accepted(), free_offered():
        yield


def run_case(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    case = CASES[name]
    sizes = sizes_of(case, args)
    prompts = random_prompts(load_model_config(Path(args.model)).vocab_size, max(sizes), args.prompt_tokens)
    with for_timing(sizes), LLM(**settings_of(case, args)) as llm:
        for size in sizes:
            figures = measure(llm, prompts[:size], args.new_tokens, args.repeats if size == 1 else 1)
            shape = "controller" if args.controller and case.method != "NONE" else case.shape
            yield {"drafter": name, "shape": shape, "batch": size, **figures}


def compared(row: Figures, rows: Sequence[Figures]) -> Figures:
    """The row with its ratios to what was measured before it."""
    ms = {(each["drafter"], each["batch"]): each["ms_per_step"] for each in (*rows, row)}
    same_shape = CASES[row["drafter"]].shape == CASES["FREE"].shape
    over = {
        "off": ms.get(("off", row["batch"])),
        "free": ms.get(("FREE", row["batch"])) if same_shape else None,
    }
    return row | {f"ratio_to_{name}": each and row["ms_per_step"] / each for name, each in over.items()}


def measure_all(args: argparse.Namespace, failed: list[str]) -> Iterator[Figures]:
    """The rows of all cases. Those that fail are added to ``failed``: the others are still worth their rows."""
    begin, rows = time.perf_counter(), list[Figures]()
    for name in args.only:
        try:
            for row in run_case(name, args):
                rows.append(compared(row, rows) | {"at_seconds": time.perf_counter() - begin})
                yield rows[-1]
        except Exception:
            traceback.print_exc()
            failed.append(name)
        return_memory()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="of what is made")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--controller", action="store_true", help="instead of each case's shape")
    parser.add_argument("--max-batch", type=int, default=64, help="leave larger batches out")
    parser.add_argument("--quick", action="store_true", help="short prompts, small batches: does it run?")
    args = parse_load(parser)
    make(args.pair / RANDOM, SHAPES[args.shape], LLAMA_1B, DTYPES[args.dtype])
    return_memory()
    args.model = str(args.pair / RANDOM / "target")
    failed: list[str] = []
    with weights_kept():
        keep_rows("drafters", measure_all(args, failed), args.output)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
