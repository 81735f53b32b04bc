"""Speed on a CPU as ratios within one run: speculation against plain decoding and ``transformers.generate``, or plain
decoding in several dtypes against each other.

    python -m benchmarks.cpu_speed [--rounds 3] [--prompts 12]
    python -m benchmarks.cpu_speed --dtypes float32 bfloat16 [--model-path MODEL] [--threads 1]

Half of the held-out prompts are dialogues, half code; greedy. The contestants take turns, prompt by prompt at batch 1
and batch by batch at batch 8, so that other load on the machine affects all alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from benchmarks.common import CODE_TOKENS, load_prompts, run_prompts, write_results
from specserve import LLM
from specserve.config.paths import BUNDLED_MODEL

CHAIN = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 6,
}
Rows = Sequence[dict[str, Any]]
Contestant = Callable[[Rows], int]


def specserve_contestant(llm: LLM) -> Contestant:
    return lambda rows: sum(len(o.token_ids) for o in run_prompts(llm, rows, temperature=0))


def transformers_contestant() -> Contestant:
    """The bundled model in float32 through ``generate``, a prompt at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)

    @torch.inference_mode()
    def run(rows: Rows) -> int:
        tokens = 0
        for row in rows:
            if "messages" in row:
                text = tokenizer.apply_chat_template(
                    row["messages"], add_generation_prompt=True, tokenize=False
                )
                ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
            else:
                ids = tokenizer(row["prompt"], return_tensors="pt")
            most = 512 if "messages" in row else CODE_TOKENS
            out = model.generate(
                input_ids=ids["input_ids"],
                attention_mask=torch.ones_like(ids["input_ids"]),
                max_new_tokens=most,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
            tokens += out.shape[1] - ids["input_ids"].shape[1]
        return tokens

    return run


def race(contestants: dict[str, Contestant], batches: Sequence[Rows], rounds: int) -> dict[str, float]:
    """Tokens a second of each: over all batches, each batch's time the median of its rounds."""
    seconds: dict[str, float] = dict.fromkeys(contestants, 0.0)
    tokens: dict[str, int] = dict.fromkeys(contestants, 0)
    for run in contestants.values():
        run(batches[0])
    for batch in batches:
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, run in contestants.items():
                start = time.perf_counter()
                count = run(batch)
                times[name].append(time.perf_counter() - start)
        for name in contestants:
            seconds[name] += median(times[name])
            tokens[name] += count
    return {name: tokens[name] / seconds[name] for name in contestants}


def race_dtypes(args: argparse.Namespace, mixed: Rows) -> dict[str, Any]:
    """Plain decoding in each dtype, one and eight requests at a time; ratios to the first dtype, and how many texts
    are those of a request that runs alone."""
    given = {"model_path": args.model_path, "cpu_threads": args.threads, "disable_radix_cache": True}
    with ExitStack() as stack:
        llms = {dtype: stack.enter_context(LLM(dtype=dtype, **given)) for dtype in args.dtypes}
        contestants = {dtype: specserve_contestant(llm) for dtype, llm in llms.items()}
        batches = [mixed[i : i + 8] for i in range(0, args.prompts - 7, 8)]
        one = race(contestants, [[row] for row in mixed[: args.prompts]], args.rounds)
        eight = race(contestants, batches, args.rounds)
        same = {
            dtype: f"{sum(_same(llm, each) for each in batches)}/{8 * len(batches)}"
            for dtype, llm in llms.items()
        }
    ratios = {
        f"{name}: {dtype} / {args.dtypes[0]}": speeds[dtype] / speeds[args.dtypes[0]]
        for name, speeds in {"batch 1": one, "batch 8": eight}.items()
        for dtype in args.dtypes[1:]
    }
    return {"tokens_per_second": {"batch 1": one, "batch 8": eight}, **ratios, "same alone": same}


def _same(llm: LLM, batch: Rows) -> int:
    """How many requests of a batch get the text that they get alone. All are seeded alike: greedy."""
    together = run_prompts(llm, batch, temperature=0)
    alone = [run_prompts(llm, [row], temperature=0)[0] for row in batch]
    return sum(a.token_ids == b.token_ids for a, b in zip(together, alone, strict=True))


def race_drafts(args: argparse.Namespace, mixed: Rows) -> dict[str, Any]:
    """A chain against plain decoding and transformers."""
    on = "chain (5, 1, 6)"
    with ExitStack() as stack:
        off = specserve_contestant(stack.enter_context(LLM(cpu_threads=args.threads)))
        chain = specserve_contestant(stack.enter_context(LLM(cpu_threads=args.threads, **CHAIN)))
        single = {"off": off, on: chain, "transformers": transformers_contestant()}
        one = race(single, [[row] for row in mixed[: args.prompts]], args.rounds)
        eight = race({"off": off, on: chain}, [mixed[i : i + 8] for i in (0, 8, 16)], args.rounds)
    return {
        "tokens_per_second": {"batch 1": one, "batch 8": eight},
        "batch 1: on / off": one[on] / one["off"],
        "batch 8: on / off": eight[on] / eight["off"],
        "batch 1: on / transformers": one[on] / one["transformers"],
        "batch 1: off / transformers": one["off"] / one["transformers"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--dtypes", nargs="+", help="race these in place of drafts")
    parser.add_argument("--model-path", default=str(BUNDLED_MODEL), help="with --dtypes")
    parser.add_argument("--threads", type=int, help="default: the number that makes a step fastest")
    args = parser.parse_args()
    rows = load_prompts()
    mixed = [row for pair in zip(rows[:50], rows[50:], strict=True) for row in pair]
    figures = (race_dtypes if args.dtypes else race_drafts)(args, mixed)
    figures["threads"] = torch.get_num_threads()
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(write_results("cpu_dtypes" if args.dtypes else "cpu_speed", figures))


if __name__ == "__main__":
    main()
