"""Speed on a CPU as ratios within one run: speculation against plain decoding and ``transformers.generate``.

    python -m benchmarks.cpu_speed [--rounds 3] [--prompts 12]

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
    """The same weights in float32 through ``generate``, a prompt at a time."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=12)
    args = parser.parse_args()
    rows = load_prompts()
    dialogues, code = rows[:50], rows[50:]
    mixed = [row for pair in zip(dialogues, code, strict=True) for row in pair]
    with ExitStack() as stack:
        off = specserve_contestant(stack.enter_context(LLM()))
        chain = specserve_contestant(stack.enter_context(LLM(**CHAIN)))
        single = {"off": off, "chain (5, 1, 6)": chain, "transformers": transformers_contestant()}
        one = race(single, [[row] for row in mixed[: args.prompts]], args.rounds)
        eight = race(
            {"off": off, "chain (5, 1, 6)": chain}, [mixed[i : i + 8] for i in (0, 8, 16)], args.rounds
        )
    on = "chain (5, 1, 6)"
    figures = {
        "tokens_per_second": {"batch 1": one, "batch 8": eight},
        "batch 1: on / off": one[on] / one["off"],
        "batch 8: on / off": eight[on] / eight["off"],
        "batch 1: on / transformers": one[on] / one["transformers"],
        "batch 1: off / transformers": one["off"] / one["transformers"],
        "threads": torch.get_num_threads(),
    }
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(write_results("cpu_speed", figures))


if __name__ == "__main__":
    main()
