"""Tokens per step on held-out prompts by drafter, shape and temperature, and coupled against uncoupled drafting.

    python -m benchmarks.acceptance [--temperatures 0 0.7 1.0] [--batch 16] [--weights none int8 fp8 int4]
        [--quantization none fp8 int8 int4] [--output FILE]

A step is one target forward that emitted tokens, without prefill; the bonus token counts. The texts are the same for
every row of a temperature (drafting never changes a token), so the rows compare only drafting. ``--weights``:
quantization of the draft; int4, which no server drafts in, is that of ``--quantization int4``. ``--quantization``:
that of the target, which has its own texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from specserve_kernels import dequantize_packed, pack
from torch import Tensor

from benchmarks.common import load_prompts, run_prompts, write_results
from specserve import LLM
from specserve.config.settings import ROUNDED
from specserve.layers import linear
from specserve.layers.formats.rounded import RoundedLayout
from specserve.outputs import RequestOutput
from specserve.speculation.step import draft_tree

SHAPES = [
    ("EAGLE3", (3, 1, 4)),
    ("EAGLE3", (5, 1, 6)),
    ("EAGLE3", (5, 4, 8)),
    ("EAGLE3", (5, 4, 16)),
    ("EAGLE3", (5, 8, 32)),
    ("EAGLE3", (8, 4, 32)),
    ("EAGLE", (5, 1, 6)),
    ("EAGLE", (5, 4, 16)),
]


@contextmanager
def drafting(coupled: bool) -> Iterator[None]:
    """Uncoupled: candidates are the draft's most likely tokens, as the peers draft, whatever the sampler's noise."""

    def without_noise(context: Any, view: Any, shape: Any, sampling: Any) -> Any:
        return draft_tree(context, view, shape, sampling if coupled else replace(sampling, noise_BDV=None))

    with patch("specserve.speculation.step.draft_tree", without_noise):
        yield


@contextmanager
def rounding(weights: str) -> Iterator[str]:
    """Yield the server's setting for this rounding of the draft's weights. int4 replaces fp8, which does not round
    inputs."""
    if weights != "int4":
        yield weights
        return

    def quantize(weight_OI: Tensor, _: object) -> tuple[Tensor]:
        numbers = RoundedLayout("int4").numbers({"weight": weight_OI}, weight_OI.device)
        return (dequantize_packed(pack(numbers), weight_OI.dtype),)

    with (
        patch.object(linear, "quantize", quantize),
        patch.object(linear, "dequantize", lambda values: values),
    ):
        yield "fp8"


def tokens_per_step(outputs: Sequence[RequestOutput]) -> float:
    """Over all requests together: tokens emitted by steps, divided by steps."""
    steps = sum(o.speculation.steps for o in outputs)
    return (sum(o.speculation.accepted for o in outputs) + steps) / steps


def measure(args: argparse.Namespace) -> None:
    """Print and write each as it comes."""
    rows, figures = load_prompts(), []
    for (algorithm, shape), target, rounded in product(SHAPES, args.quantization, args.weights):
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        settings: dict[str, Any] = dict(zip(names, shape, strict=True)) | {"quantization": target}
        with (
            rounding(rounded) as settings["speculative_draft_quantization"],
            LLM(speculative_algorithm=algorithm, max_running_requests=args.batch, **settings) as llm,
        ):
            for temperature in args.temperatures:
                for coupled in (True, False) if temperature else (True,):
                    with drafting(coupled):
                        outputs = run_prompts(llm, rows, temperature=temperature)
                    figures.append(
                        {
                            "algorithm": algorithm,
                            "shape": shape,
                            "target": target,
                            "weights": rounded,
                            "temperature": temperature,
                            "coupled": coupled,
                            "accepted share": sum(o.speculation.accepted for o in outputs)
                            / sum(o.speculation.drafted for o in outputs),
                            "all": tokens_per_step(outputs),
                            "dialogue": tokens_per_step(
                                [o for o, r in zip(outputs, rows, strict=True) if "messages" in r]
                            ),
                            "code": tokens_per_step(
                                [o for o, r in zip(outputs, rows, strict=True) if "prompt" in r]
                            ),
                        }
                    )
                    print(line(figures[-1]), flush=True)
                    write_results("acceptance", figures, args.output)


def line(row: dict[str, Any]) -> str:
    how = "" if not row["temperature"] else "coupled" if row["coupled"] else "uncoupled"
    return (
        f"{row['algorithm']:7} {row['shape']!s:11} {row['target']:4} {row['weights']:4} t={row['temperature']:<4} "
        f"{how:10}{row['all']:6.2f} {row['dialogue']:9.2f} {row['code']:6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0.7, 1.0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--weights", nargs="+", choices=("none", "int8", "fp8", "int4"), default=["none"])
    parser.add_argument("--quantization", nargs="+", choices=("none", *ROUNDED), default=["none"])
    parser.add_argument("--output", type=Path)
    print(f"{'':53}all  dialogue   code")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
