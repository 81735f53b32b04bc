"""Cost and benefit of truncated draft vocabularies: the full head, a static and a dynamic token map, on two domains.

    python -m benchmarks.dynamic_map [--parts 8 4] [--batch 4] [--model DIR --draft DIR --size 16384]

The domains are the held-out dialogues and the held-out code. For each, the static map is counted on the full head's
answers of the other domain. The dynamic map starts from it, first answers other prompts of the domain, and is then
measured. ``best`` is a static map counted on the measured answers themselves: no static map of its size covers more.
Texts are the same in every row. The other prompts come from the running Python's library and the generators of the
bundled model's dialogues.

``--parts``: the divisors of the vocabulary's size that give the map's. A pair as wide as a large model with the bundled
tokenizer (benchmarks/cost_faithful.py) uses only 4096 ids: there ``--size`` sets the number of rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import load_prompts, run_prompts, scheduler_of, shape_settings, tokens_per_step
from benchmarks.results import Figures, keep_rows, options
from examples.bundled_model.generators.common import Sampler
from examples.bundled_model.make_prompts import SINGLE, all_code_prompts, one_turn, open_dialogue
from specserve import LLM
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL
from specserve.models.read_config import load_model_config
from specserve.models.special_tokens import special_tokens
from specserve.outputs import RequestOutput
from specserve.tools.token_map.ranking import Ranking
from specserve.tools.token_map.write import write_map

Rows = list[dict[str, Any]]
FLAG = "speculative_token_map"
MOST_CODE = 210  # prompts; some Pythons come without modules and have fewer


def measured_prompts() -> dict[str, Rows]:
    rows = load_prompts()
    return {
        "dialogue": [row for row in rows if "messages" in row],
        "code": [row for row in rows if "prompt" in row],
    }


def traffic_prompts(measured: dict[str, Rows]) -> dict[str, Rows]:
    """Others of the same domains."""
    sampler = Sampler("traffic", heldout=True)
    dialogue: Rows = [
        {"messages": open_dialogue(one_turn(make, sampler))}
        for make, count in SINGLE
        for _ in range(4 * count)
    ]
    code: Rows = [*islice(all_code_prompts(), MOST_CODE)]
    made = {"dialogue": dialogue, "code": code}
    return {name: [row for row in rows if row not in measured[name]] for name, rows in made.items()}


def open_llm(args: argparse.Namespace, **settings: Any) -> LLM:
    return LLM(
        args.model,
        dtype=args.dtype,
        max_running_requests=args.batch,
        disable_radix_cache=True,
        speculative_algorithm=args.algorithm,
        speculative_draft_model_path=args.draft or str(BUNDLED_DRAFTS[args.algorithm]),
        **shape_settings(args.shape),
        **settings,
    )


def measure(llm: LLM, rows: Rows) -> tuple[dict[str, Any], list[RequestOutput]]:
    """Greedy. Mean tokens a step, bonus included, and answers' tokens a second, prefill included."""
    start = time.perf_counter()
    outputs = run_prompts(llm, rows, temperature=0)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.token_ids) for output in outputs)
    figures = {
        "tokens_per_step": round(tokens_per_step(outputs), 3),
        "tokens_per_second": round(tokens / seconds, 1),
    }
    return figures, outputs


class Bench:
    """One model and draft; ``answers`` are the full head's, by domain."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self._folder = folder
        self.prompts = measured_prompts()
        self._traffic = traffic_prompts(self.prompts)
        self._config = load_model_config(Path(args.model))
        self._kept = special_tokens(Path(args.model), self._config)
        self.full, self._answers = self._measure_full()

    def _measure_full(self) -> tuple[dict[str, dict[str, Any]], dict[str, list[RequestOutput]]]:
        full, answers = {}, {}
        with open_llm(self.args) as llm:
            for name, rows in self.prompts.items():
                measure(llm, rows[:8])
                full[name], answers[name] = measure(llm, rows)
        return full, answers

    def ranking(self, domain: str) -> Ranking:
        """Of the answers of a domain."""
        tokens = [token for output in self._answers[domain] for token in output.token_ids]
        return Ranking(np.bincount(tokens, minlength=self._config.vocab_size), [], self._kept)

    def static(self, home: str, domain: str, size: int) -> dict[str, Any]:
        """Counted on ``home``, measured on ``domain``."""
        path = self._write(home, size)
        with open_llm(self.args, **{FLAG: path}) as llm:
            measure(llm, self.prompts[domain][:8])
            figures, _ = measure(llm, self.prompts[domain])
        return self._with_share(figures, domain, self.ranking(domain).share(self.ranking(home).best(size)))

    def dynamic(self, home: str, domain: str, size: int) -> dict[str, Any]:
        settings = {
            FLAG: "dynamic",
            f"{FLAG}_size": size,
            f"{FLAG}_interval": self.args.interval,
            f"{FLAG}_start": self._write(home, size),
        }
        with open_llm(self.args, **settings) as llm:
            dynamic = scheduler_of(llm).runner.context.drafter.dynamic_map
            assert dynamic is not None
            before, _ = measure(llm, self._traffic[domain])
            figures, _ = measure(llm, self.prompts[domain])
            figures |= {"refreshes": dynamic.refreshes, "while_adapting": before}
            return self._with_share(figures, domain, dynamic.coverage or 0.0)

    def _with_share(self, figures: dict[str, Any], domain: str, share: float) -> dict[str, Any]:
        full = self.full[domain]["tokens_per_step"]
        return {
            **figures,
            "of_full": round(figures["tokens_per_step"] / full, 4),
            "coverage": round(share, 4),
        }

    def _write(self, home: str, size: int) -> str:
        path = self._folder / f"{home}-{size}.pt"
        write_map(path, self.ranking(home).best(size))
        return str(path)


def run(args: argparse.Namespace) -> Iterator[Figures]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        vocab_size = load_model_config(Path(args.model)).vocab_size
        sizes = [args.size] if args.size else [vocab_size // part for part in args.parts]
        for domain, home in (("code", "dialogue"), ("dialogue", "code")):
            yield {"domain": domain, "map": "full", **bench.full[domain]}
            for size in sizes:
                common = {"domain": domain, "size": size}
                yield {**common, "map": "static", **bench.static(home, domain, size)}
                yield {**common, "map": "best", **bench.static(domain, domain, size)}
                yield {**common, "map": "dynamic", **bench.dynamic(home, domain, size)}


def main() -> None:
    parser = options(__doc__)
    add = parser.add_argument
    add("--model", default=str(BUNDLED_MODEL), help="directory of the target")
    add("--draft", help="directory of its draft (default: the bundled one)")
    add("--algorithm", choices=("EAGLE", "NEXTN", "MTP"), default="EAGLE", help="one that takes a static map")
    add("--dtype", default="auto")
    add("--shape", type=int, nargs=3, default=(5, 1, 6), help="steps, topk, tokens")
    add("--batch", type=int, default=4)
    add("--parts", type=int, nargs="+", default=(8, 4))
    add("--size", type=int, help="rows, instead of --parts")
    add("--interval", type=int, default=8, help="steps between looks")
    args = parser.parse_args()
    keep_rows("dynamic_map", run(args), args.output)


if __name__ == "__main__":
    main()
