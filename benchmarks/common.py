"""Shared code of the benchmarks: prompts, options, and engines that are given equal requests."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

import specserve.process.assemble
from benchmarks.results import options
from specserve import LLM, SamplingParams
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL
from specserve.config.settings import ROUNDED
from specserve.config.speculation import SHAPE
from specserve.frontend.tokenizer import Tokenizer
from specserve.methods import carries_draft
from specserve.models.checkpoint import load_target
from specserve.models.config import ModelConfig
from specserve.models.read_config import load_model_config
from specserve.outputs import RequestOutput
from specserve.scheduler.scheduler import Scheduler

ROOT = Path(__file__).parent.parent
PROMPTS = ROOT / "examples" / "bundled_model" / "prompts.jsonl"
CODE_TOKENS = 128  # a code prompt has no natural end
SPARE_POSITIONS = 256  # shapes differ in how far a step may look past the context
LONGEST = 16384  # positions: ``long_context`` goes past what the target was made for
ADAPTIVE: Literal["adaptive"] = "adaptive"
Shape = tuple[int, int, int]  # steps, topk, verified tokens
Drafting = Shape | Literal["adaptive"] | None
"""A fixed shape, the controller's choice, or plain decoding."""


def load_prompts() -> list[dict[str, Any]]:
    """The held-out prompts: ``{"messages"}`` dialogues and ``{"prompt"}`` code prefixes."""
    return [json.loads(line) for line in PROMPTS.read_text().splitlines()]


def encode(tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[int]:
    """The prompt's token ids."""
    return tokenizer.encode_chat(row["messages"]) if "messages" in row else tokenizer.encode(row["prompt"])


def read_prompts(path: Path, model: str | Path) -> list[list[int]]:
    """Token ids of a file of such lines."""
    tokenizer = Tokenizer.load(str(model))
    return [encode(tokenizer, json.loads(line)) for line in path.read_text().splitlines() if line]


def run_prompts(llm: LLM, rows: Sequence[dict[str, Any]], **params: Any) -> list[RequestOutput]:
    """Dialogues to their natural end, code for ``CODE_TOKENS`` tokens; all in one call, seeded by position."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    each = [
        SamplingParams(seed=index, max_tokens=512 if "messages" in row else CODE_TOKENS, **params)
        for index, row in enumerate(rows)
    ]
    return llm.generate([encode(tokenizer, row) for row in rows], each)


def heldout_prompts(model_path: str | Path, count: int, length: int) -> list[list[int]]:
    """Prompts of exactly ``length`` tokens, each another one: the end of joined held-out prompts, so that the answer
    continues the last of them."""
    rows = read_prompts(PROMPTS, model_path)

    def prompt(index: int) -> list[int]:
        ids: list[int] = []
        stride = 1 + index // len(rows)
        while len(ids) < length:
            ids = rows[index % len(rows)] + ids
            index -= stride
        return ids[-length:]

    return [prompt(index) for index in range(count)]


def used_tokens(model_path: str | Path) -> int:
    """Ids below this are those of the held-out prompts; a cost-faithful pair has many more, but no use for them."""
    tokenizer = Tokenizer.load(str(model_path))
    texts = [row.get("prompt") or row["messages"][0]["content"] for row in load_prompts()]
    return 1 + max(max(tokenizer.encode(text)) for text in texts)


def random_prompts(vocab: int, count: int, length: int) -> list[list[int]]:
    """Prompts of random token ids, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


def load_options(description: str | None, quantization: bool = False) -> argparse.ArgumentParser:
    """The options of the benchmarks that load an engine with equal requests; ``quantization`` adds that of the target's
    weights."""
    parser = options(description)
    parser.add_argument("--model", default=str(BUNDLED_MODEL), help="directory of the target")
    parser.add_argument(
        "--eagle3",
        default=str(BUNDLED_DRAFTS["EAGLE3"]),
        help="directory of its EAGLE-3 draft, or its own, whose layer drafts",
    )
    parser.add_argument("--token-map", help="as --speculative-token-map")
    parser.add_argument("--dtype", default="auto")
    if quantization:
        parser.add_argument(
            "--quantization", choices=("none", *ROUNDED), default="none", help="round weights at load"
        )
    parser.add_argument("--prompts", choices=("heldout", "random"), default="heldout")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-batch", type=int, default=256, help="leave larger batches out")
    parser.add_argument(
        "--quick", action="store_true", help="short prompts, small batches, once: does it run?"
    )
    return parser


def parse_load(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """``--quick`` applied. Random weights come without a tokenizer."""
    args = parser.parse_args()
    if getattr(args, "load_format", "auto") == "dummy":
        args.prompts = "random"
    if args.quick:
        args.output = args.output or Path(tempfile.mkdtemp()) / "quick.json"  # not among the results
        small = {"prompt_tokens": 32, "new_tokens": 9, "repeats": 1, "max_batch": 16}
        for name, value in small.items():
            if hasattr(args, name):
                setattr(args, name, min(value, getattr(args, name)))
    return args


def make_prompts(args: argparse.Namespace, count: int, tokens: int | None = None) -> list[list[int]]:
    """Of the kind that ``load_options`` were given, and the length unless ``tokens`` is another."""
    tokens = args.prompt_tokens if tokens is None else tokens
    if args.prompts == "heldout":
        return heldout_prompts(args.model, count, tokens)
    return random_prompts(config_of(args).vocab_size, count, tokens)


def config_of(args: argparse.Namespace) -> ModelConfig:
    """The target's. There may be no files to read a format from."""
    dummy = getattr(args, "load_format", "auto") == "dummy"
    return load_model_config(Path(args.model), random="" if dummy else None)


def parse_shape(text: str) -> Shape | None:
    """``steps,topk,tokens``, or ``off``."""
    if text == "off":
        return None
    steps, topk, tokens = map(int, text.split(","))
    return steps, topk, tokens


def parse_drafting(text: str) -> Drafting:
    """As ``parse_shape``, or ``adaptive``."""
    return ADAPTIVE if text == ADAPTIVE else parse_shape(text)


def shape_settings(drafting: Drafting) -> dict[str, Any]:
    """The flags of a shape or of the controller, none for plain decoding."""
    if drafting == ADAPTIVE:
        return {"speculative_adaptive": True}
    return dict(zip(SHAPE, drafting, strict=True)) if drafting else {}


def eagle3_settings(drafting: Drafting, draft: str | Path) -> dict[str, Any]:
    """The flags of EAGLE-3 with this draft, or of the target's own layer if it is the target; none for plain
    decoding."""
    if drafting is None:
        return {}
    algorithm = "NEXTN" if carries_draft("NEXTN", Path(draft)) else "EAGLE3"
    head = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft)}
    return head | shape_settings(drafting)


def open_llm(args: argparse.Namespace, shape: Shape | None, batch: int, cached: bool = False) -> LLM:
    """Without tokenizer; ``shape`` is of EAGLE-3, None is plain decoding. ``cached``: with a prefix cache."""
    settings = eagle3_settings(shape, args.eagle3)
    if settings:
        settings["speculative_draft_quantization"] = getattr(args, "draft_quantization", "auto")
        settings["speculative_token_map"] = getattr(args, "token_map", None)
    return LLM(
        args.model,
        dtype=args.dtype,
        quantization=getattr(args, "quantization", "none"),
        load_format=getattr(args, "load_format", "auto"),
        skip_tokenizer_init=True,
        disable_radix_cache=not cached,
        tensor_parallel_size=getattr(args, "tensor_parallel_size", 1),
        max_running_requests=batch,
        **settings,
    )


def tokens_per_step(outputs: Sequence[RequestOutput]) -> float:
    """Over all requests together: tokens emitted by steps, bonus included, divided by steps."""
    usage = [output.speculation for output in outputs]
    return 1 + sum(each.accepted for each in usage) / max(sum(each.steps for each in usage), 1)


@contextmanager
def weights_kept() -> Iterator[None]:
    """Targets are loaded, and rounded, once; engines that come one after another share them, unless they have ranks. On
    a CPU they are not packed, because a later draft may take rows of the head."""
    loaded: dict[Any, Any] = {}

    def keep(path: Path, dtype: Any, device: Any, max_positions: int, config: Any, ranks: Any) -> Any:
        if ranks.count > 1:  # which end with an engine
            return load_target(path, dtype, device, max_positions, config, ranks)
        key = path, dtype, device, config.weights
        if key not in loaded:
            positions = max(max_positions + SPARE_POSITIONS, LONGEST)
            loaded[key] = load_target(path, dtype, device, positions, config, ranks)
        return loaded[key]

    assemble = specserve.process.assemble
    with (
        patch.object(assemble, "load_target", keep),
        patch.object(assemble, "pack_linears", lambda target: None),
    ):
        yield


@contextmanager
def drawn(path: Path, rows: int, **subplots: Any) -> Iterator[tuple[Any, Any]]:
    """A figure with ``rows`` axes one above the other, written to ``path`` when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, 1, **subplots)
    yield figure, axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def scheduler_of(llm: LLM) -> Scheduler:
    """The engine, which is in this process."""
    assert isinstance(llm.engine, Scheduler)
    return llm.engine


def generate_timed(llm: LLM, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[RequestOutput]]:
    """Greedy answers of exactly ``new_tokens``, and the seconds that they took."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - start, outputs
