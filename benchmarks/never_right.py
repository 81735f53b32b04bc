"""The controller's loss when drafts are never right, by method: ``python -m benchmarks.never_right``.

The bundled model with one request at a time. Heads and models have random weights; lookups get text drawn at
temperature 1.6, which never repeats. *Kept* is the share of the steps' time that remains after subtracting the time
lost in drafted steps, compared with the median of the run's plain steps. Both are measured in one run, in the processor
time of one thread, so that other work on the machine matters little. 1 is plain decoding.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import benchmarks.adaptive as adaptive
from benchmarks.common import make_prompts
from specserve.config.paths import BUNDLED_MODEL
from tests.reference.arctic_lstm import make_arctic_lstm
from tests.reference.hydra import make_hydra
from tests.reference.medusa import make_medusa
from tests.reference.mlp_speculator import make_mlp_speculator
from tests.reference.models import make_llama
from tests.reference.p_eagle import make_p_eagle
from tests.reference.redrafter import make_redrafter
from tests.reference.standalone import make_pard

DRAFTS: dict[str, Callable[[Path], Path] | None] = {
    "NGRAM": None,
    "SUFFIX": None,
    "LOOKAHEAD": None,
    "MEDUSA": lambda path: make_medusa(path / "draft", BUNDLED_MODEL),
    "HYDRA": lambda path: make_hydra(path / "draft", BUNDLED_MODEL),
    "MLP_SPECULATOR": lambda path: make_mlp_speculator(path / "draft", BUNDLED_MODEL),
    "ARCTIC_LSTM": lambda path: make_arctic_lstm(path / "draft", BUNDLED_MODEL),
    "REDRAFTER": lambda path: make_redrafter(path / "draft", BUNDLED_MODEL),
    "STANDALONE": lambda path: small_model(path / "draft"),
    "P_EAGLE": lambda path: make_p_eagle(path / "draft", BUNDLED_MODEL),
    "PARD": lambda path: make_pard(path / "draft", small_model(path / "model"), 3),
}


def small_model(path: Path) -> Path:
    return make_llama(path, vocab=4096, hidden=128, inner=256, layers=2, heads=4, kv_heads=2, head_dim=32)


def kept(run: adaptive.Run) -> tuple[float, float]:
    """Seconds of the run's steps, and those among them that drafting lost."""
    plain = median(step.seconds for step in run.steps if step.shape == "off")
    lost = sum(
        step.seconds - step.emitted / step.requests * plain for step in run.steps if step.shape != "off"
    )
    return sum(step.seconds for step in run.steps), lost


def measure(method: str, args: argparse.Namespace, folder: Path) -> None:
    make = DRAFTS[method]
    given: dict[str, Any] = {"speculative_draft_model_path": None if make is None else str(make(folder))}
    prompts, drawn = make_prompts(args, 16), {"temperature": 1.6 if make is None else 0.0}
    endless = adaptive.endless
    with (
        patch.object(adaptive, "endless", lambda *job, **params: endless(*job, **params | drawn)),
        adaptive.adaptive_llm(args, 1, fixed=(), speculative_algorithm=method, **given) as (llm, policies),
    ):
        adaptive.cache_prompts(llm, policies["off"], prompts)
        load = adaptive.Load.of(args, prompts, 1)
        runs = [adaptive.run_load(llm, policies["adaptive"], load, turn) for turn in range(args.repeats + 1)][
            1:
        ]
    seconds, lost = (sum(column) for column in zip(*map(kept, runs), strict=True))
    steps = [step for run in runs for step in run.steps]
    print(f"{method:15} kept {1 - lost / seconds:.3f}  {adaptive.by_shape(steps)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=list(DRAFTS), default=list(DRAFTS))
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    time.perf_counter = time.process_time  # type: ignore[assignment]
    fixed: dict[str, Any] = {"prompts": "heldout", "prompt_tokens": 64, "new_tokens": 200, "requests": 3}
    args = argparse.Namespace(
        model=str(BUNDLED_MODEL), eagle3=None, dtype="auto", repeats=chosen.repeats, **fixed
    )
    for method in chosen.methods:
        with tempfile.TemporaryDirectory() as folder:
            measure(method, args, Path(folder))


if __name__ == "__main__":
    main()
