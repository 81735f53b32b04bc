"""Check that a pair's texts and logits are the same, bit for bit, in all batches and shapes, with drafts and without.

    python -m benchmarks.cost_faithful --random only --output DIR
    python -m benchmarks.lossless_pair --pair DIR/random [--texts 200] [--alone 48] [--dtype bfloat16]
        [--load-format dummy] [--prompt-tokens 20 300] [--batches 64 8 1] [--draft target]
        [--tensor-parallel-size 2]

The folder of the pair has ``target`` and ``eagle3``, with ``--load-format dummy`` only a ``config.json`` of each, of
any shape; with ``--draft target`` the target's own layer drafts; without ``--random`` that is DIR, with drafts that are
often right (give it ``--prompts heldout``). Plain decoding at the first batch says what is expected. Then plain
decoding, EAGLE-3 with ``SHAPES`` and the controller answer all prompts in each batch, and ``--alone`` of them one by
one. A random draft is hardly ever right, so each shape also runs with predictions: the expected text with every 7th
token wrong. Compared are the token ids and, as exact floats, the log-probability of each token and of the five best,
which are of the raw logits. Best tokens of equal log-probability may come in any order.

One line for each run; ends with 1 if anything differs. Where sums have no fixed order (not bfloat16 on a GPU), only
texts count; use float64 there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.adaptive import longer_contexts
from benchmarks.common import (
    ADAPTIVE,
    SPARE_POSITIONS,
    Drafting,
    eagle3_settings,
    make_prompts,
    tokens_per_step,
    weights_kept,
)
from benchmarks.configurations import SAMPLING
from benchmarks.lossless import first_difference, predicted_text
from benchmarks.results import Figures, keep_rows, options
from specserve import LLM, SamplingParams
from specserve.core import TokenLogprob
from specserve.outputs import RequestOutput

BEST = 5
SHAPES: dict[str, Drafting] = {
    "off": None,
    "(3, 1, 4)": (3, 1, 4),
    "(5, 8, 32)": (5, 8, 32),
    "adaptive": ADAPTIVE,
}


def settings_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The flags of a shape."""
    return {
        "model_path": args.model,
        "dtype": args.dtype,
        "load_format": args.load_format,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "tensor_parallel_size": args.tensor_parallel_size,
        "max_running_requests": args.batches[0],
        "max_total_tokens": args.batches[0] * (args.prompt_tokens[1] + args.new_tokens + SPARE_POSITIONS),
        **eagle3_settings(SHAPES[name], args.pair / args.draft),
    }


def prompts_and_params(args: argparse.Namespace) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of all lengths, and every kind of sampling in each batch."""
    shortest, longest = args.prompt_tokens
    lengths = [shortest + 37 * index % (longest + 1 - shortest) for index in range(args.texts)]
    prompts = make_prompts(args, args.texts, longest)
    kinds = list(SAMPLING.values())
    always: dict[str, Any] = {"max_tokens": args.new_tokens, "ignore_eos": True, "logprobs": BEST}
    params = [
        SamplingParams(seed=2**33 + index, **always, **kinds[index % len(kinds)])
        for index in range(args.texts)
    ]
    return [prompt[-length:] for prompt, length in zip(prompts, lengths, strict=True)], params


def answer(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], size: int
) -> list[RequestOutput]:
    """``size`` requests after ``size``. More than run at once wait, and take the place of those that end."""
    starts = range(0, len(prompts), size)
    return [o for i in starts for o in llm.generate(prompts[i : i + size], params[i : i + size])]


def bits(output: RequestOutput) -> list[tuple[Any, ...]]:
    """What must be equal of each token: its id, its log-probability, those of the best, and the ids of the best that
    are above the last of them."""
    assert output.logprobs is not None
    return [_bits(each) for each in output.logprobs]


def _bits(each: TokenLogprob) -> tuple[Any, ...]:
    values = [value for _, value in each.top]
    return each.token_id, each.logprob, values, {pair for pair in each.top if pair[1] > values[-1]}


def compare(answers: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> dict[str, Any]:
    """Count equal texts, and those with equal logits. Where a text differs, its logits are compared up to there."""
    texts = logits = 0
    differences, largest = [], 0.0
    for number, (ours, theirs) in enumerate(zip(answers, expected, strict=True)):
        same = ours.token_ids == theirs.token_ids
        kept = len(ours.token_ids) if same else first_difference(ours.token_ids, theirs.token_ids)
        pairs = list(zip(bits(ours)[:kept], bits(theirs)[:kept], strict=True))
        equal = all(a == b for a, b in pairs)
        texts, logits = texts + same, logits + (same and equal)
        largest = max([largest, *(abs(a[1] - b[1]) for a, b in pairs)])
        if not same or not equal:
            first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
            differences.append({"request": number, "token": None if same else kept, "logits": first})
    return {
        "texts": len(answers),
        "identical": texts,
        "identical_logits": logits,
        "largest_logprob_difference": largest,
        "mean_accepted_length": tokens_per_step(answers),
        "tokens": sum(len(output.token_ids) for output in answers),
        "differences": differences,
    }


def run_shape(
    llm: LLM,
    name: str,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    expected: Sequence[RequestOutput],
    args: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """All batches, without predictions and then, if the shape drafts, with them."""
    predicted = [
        msgspec.structs.replace(each, prediction=predicted_text(output.token_ids))
        for each, output in zip(params, expected, strict=True)
    ]
    for batch in args.batches:
        count = args.alone if batch == 1 else len(prompts)
        size = count if batch == args.batches[0] else batch
        for prediction in (False, True) if SHAPES[name] else (False,):
            begin = time.perf_counter()
            asked = predicted if prediction else params
            answers = answer(llm, prompts[:count], asked[:count], size)
            row = {"shape": name, "batch": batch, "predicted": prediction}
            yield row | compare(answers, expected[:count]) | {"seconds": time.perf_counter() - begin}


def run_all(args: argparse.Namespace) -> Iterator[Figures]:
    """Every shape; plain decoding is the first, which the others are held against."""
    begin, (prompts, params) = time.perf_counter(), prompts_and_params(args)
    expected: list[RequestOutput] = []
    with weights_kept(), longer_contexts(args.prompt_tokens[1] + args.new_tokens + SPARE_POSITIONS):
        for name in ["off", *(name for name in args.only if name != "off")]:
            with LLM(**settings_of(name, args)) as llm:
                expected = expected or answer(llm, prompts, params, len(prompts))
                for row in run_shape(llm, name, prompts, params, expected, args):
                    yield row | {"at_seconds": time.perf_counter() - begin}


def main() -> None:
    assert __doc__ is not None
    parser = options(__doc__)
    parser.add_argument("--pair", type=Path, required=True, help="folder of target and eagle3")
    parser.add_argument("--draft", choices=("eagle3", "target"), default="eagle3")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--alone", type=int, default=48, help="texts at batch 1")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument(
        "--prompt-tokens", type=int, nargs=2, default=(20, 300), metavar=("SHORTEST", "LONGEST")
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=(64, 8, 1), help="the largest first; default: 64 8 1"
    )
    parser.add_argument("--prompts", choices=("random", "heldout"), default="random")
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    args = parser.parse_args()
    args.model = str(args.pair / "target")
    args.alone = min(args.alone, args.texts)
    rows = keep_rows("lossless_pair", run_all(args), args.output)
    texts, same, logits = (
        sum(row[key] for row in rows) for key in ("texts", "identical", "identical_logits")
    )
    print(f"texts {texts}, identical {same}, with the same logits {logits}")
    ordered = torch.cuda.is_available() and args.dtype == "bfloat16"
    raise SystemExit(0 if texts == same and (texts == logits or not ordered) else 1)


if __name__ == "__main__":
    main()
