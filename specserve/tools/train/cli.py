"""The command line of draft training."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from specserve.models.checkpoint import DTYPES
from specserve.tools.train.drafts import DRAFTS, OPTIONS, positive
from specserve.tools.train.export import FORMATS
from specserve.tools.train.optim import OPTIMIZERS, SCHEDULES


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Show the default of each option that has one; the texts of the others say what they do without a value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        bare = action.default is None or action.default is False
        return action.help if bare else super()._get_help_string(action)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m specserve.train",
        description="Train a draft for a target model.",
        formatter_class=_HelpFormatter,
    )
    _add_main(parser)
    _add_schedule(parser)
    draft = parser.add_argument_group("the draft")
    for option in OPTIONS:
        draft.add_argument(option.flag, **option.arguments)
    args = parser.parse_args(argv)
    for option in OPTIONS:
        takers = [draft.name for draft in DRAFTS.values() if option in draft.options]
        if args.algorithm not in takers and getattr(args, option.name) != parser.get_default(option.name):
            parser.error(
                f"{option.flag} is an option of {' and '.join(takers)}; --algorithm is {args.algorithm}"
            )
    return args


def _add_main(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model and data").add_argument
    add("--algorithm", choices=DRAFTS, required=True, help="the kind of draft")
    add("--model-path", type=Path, required=True, help="the target, a Hugging Face directory")
    add(
        "--data", type=Path, nargs="+", required=True, help=".jsonl (messages, conversations or text) or .npz"
    )
    add("--heldout", type=Path, nargs="+", help="data for the report (default: 2%% of --data)")
    add("--shares", type=float, nargs="+", help="share of each source (default: by size)")
    add("--output", type=Path, required=True, help="directory of the draft, checkpoint and log")
    add("--format", choices=FORMATS, default="safetensors", help="of the draft's weights")
    add(
        "--export-dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the draft's weights",
    )
    add("--restart", action="store_true", help="start over even if --output has a checkpoint")
    add(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="such as cuda:1; a GPU is taken if there is one",
    )
    add(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="the target's; auto: bfloat16 on a GPU, else float32",
    )
    add("--compile", action="store_true", help="torch.compile: faster steps, a slow first one")
    add("--dense-attention", action="store_true", help="no flash attention (slower)")
    add("--report-rows", type=positive, default=256, help="maximum held-out rows of a source")


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("schedule").add_argument
    add("--epochs", type=float, help="passes over the data (default: 10 without another limit)")
    add("--steps", type=positive, help="steps of the run (default: those of --epochs)")
    add(
        "--time-limit",
        type=float,
        help="seconds after the first step; the learning rate falls by the clock, so the run ends annealed",
    )
    add("--max-length", type=positive, default=2048, help="tokens in a row; longer text is cut")
    batch = "tokens in one forward, in whole rows of --max-length (default: 8192, on a CPU 2048)"
    add("--batch-tokens", type=positive, help=batch)
    add("--accumulate", type=positive, default=1, help="batches per step")
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="muon: AdamW for all but the layers' matrices",
    )
    add("--lr", type=float, default=1e-4, help="highest learning rate")
    add("--weight-decay", type=float, default=0.0, help="of matrices")
    add(
        "--warmup",
        type=int,
        help="steps in which the learning rate rises (default: 100, at most a tenth of the run)",
    )
    add("--schedule", choices=sorted(SCHEDULES), default="cosine", help="how the learning rate falls")
    add("--clip", type=float, default=0.5, help="largest gradient norm")
    add("--seed", type=int, default=0, help="of all random choices")
    add("--log-every", type=positive, default=10, help="steps between lines of the log")
    add("--save-every", type=float, default=300.0, help="seconds between checkpoints")
