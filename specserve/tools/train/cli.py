"""The command line of draft training."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from specserve.models.checkpoint import DTYPES
from specserve.tools.train.export import FORMATS
from specserve.tools.train.optim import OPTIMIZERS, SCHEDULES

ALGORITHMS = ("EAGLE", "EAGLE3", "DFLASH", "DSPARK", "MEDUSA", "MLP_SPECULATOR")
_BLOCKS = ("DFLASH", "DSPARK")
_LAYERS = ("EAGLE", "EAGLE3", *_BLOCKS)
TAKEN_BY = {
    "ttt_length": ("EAGLE", "EAGLE3"),
    "draft_vocab_size": ("EAGLE3",),
    "draft_intermediate_size": _LAYERS,
    "draft_num_heads": _LAYERS,
    "draft_num_kv_heads": _LAYERS,
    "rope_theta": _LAYERS,
    "aux_layers": ("EAGLE3", *_BLOCKS),
    "feature_weight": ("EAGLE",),
    "ce_weight": ("EAGLE", "DSPARK"),
    "draft_layers": _BLOCKS,
    "block_size": _BLOCKS,
    "anchors": _BLOCKS,
    "mask_token": _BLOCKS,
    "markov_rank": ("DSPARK",),
    "markov_head": ("DSPARK",),
    "medusa_heads": ("MEDUSA",),
    "medusa_layers": ("MEDUSA",),
    "medusa_scores": ("MEDUSA",),
    "mlp_levels": ("MLP_SPECULATOR",),
    "mlp_inner": ("MLP_SPECULATOR",),
}
"""Options that only some algorithms take. All of them determine the draft."""


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Show the default of each option that has one; the texts of the others say what they do without a value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        bare = action.default is None or action.default is False
        return action.help if bare else super()._get_help_string(action)


def positive(text: str) -> int:
    """Parse an integer above 0."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, found {value}")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m specserve.train",
        description="Train a draft for a target model.",
        formatter_class=_HelpFormatter,
    )
    _add_main(parser)
    _add_schedule(parser)
    _add_draft(parser)
    args = parser.parse_args(argv)
    for name, algorithms in TAKEN_BY.items():
        if args.algorithm not in algorithms and getattr(args, name) != parser.get_default(name):
            option, takers = f"--{name.replace('_', '-')}", " and ".join(algorithms)
            parser.error(f"{option} is an option of {takers}; --algorithm is {args.algorithm}")
    return args


def _add_main(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and data")
    group.add_argument("--algorithm", choices=ALGORITHMS, required=True, help="the kind of draft")
    group.add_argument("--model-path", type=Path, required=True, help="the target, a Hugging Face directory")
    group.add_argument(
        "--data", type=Path, nargs="+", required=True, help=".jsonl (messages, conversations or text) or .npz"
    )
    group.add_argument("--heldout", type=Path, nargs="+", help="data for the report (default: 2%% of --data)")
    group.add_argument("--shares", type=float, nargs="+", help="share of each source (default: by size)")
    group.add_argument(
        "--output", type=Path, required=True, help="directory of the draft, checkpoint and log"
    )
    group.add_argument("--format", choices=FORMATS, default="safetensors", help="of the draft's weights")
    group.add_argument(
        "--export-dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the draft's weights",
    )
    group.add_argument("--restart", action="store_true", help="start over even if --output has a checkpoint")
    group.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="such as cuda:1; a GPU is taken if there is one",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="the target's; auto: bfloat16 on a GPU, else float32",
    )
    group.add_argument("--compile", action="store_true", help="torch.compile: faster steps, a slow first one")
    group.add_argument("--dense-attention", action="store_true", help="no flash attention (slower)")
    group.add_argument("--report-rows", type=positive, default=256, help="maximum held-out rows of a source")


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schedule")
    group.add_argument(
        "--epochs", type=float, help="passes over the data (default: 10 without another limit)"
    )
    group.add_argument("--steps", type=positive, help="steps of the run (default: those of --epochs)")
    group.add_argument(
        "--time-limit",
        type=float,
        help="seconds after the first step; the learning rate falls by the clock, so the run ends annealed",
    )
    group.add_argument(
        "--max-length", type=positive, default=2048, help="tokens in a row; longer text is cut"
    )
    group.add_argument(
        "--batch-tokens", type=positive, help="tokens in one forward (default: 8192, on a CPU 2048)"
    )
    group.add_argument("--accumulate", type=positive, default=1, help="batches per step")
    group.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="muon: AdamW for all but the layers' matrices",
    )
    group.add_argument("--lr", type=float, default=1e-4, help="highest learning rate")
    group.add_argument("--weight-decay", type=float, default=0.0, help="of matrices")
    group.add_argument(
        "--warmup",
        type=int,
        help="steps in which the learning rate rises (default: 100, at most a tenth of the run)",
    )
    group.add_argument(
        "--schedule", choices=sorted(SCHEDULES), default="cosine", help="how the learning rate falls"
    )
    group.add_argument("--clip", type=float, default=0.5, help="largest gradient norm")
    group.add_argument("--seed", type=int, default=0, help="of all random choices")
    group.add_argument("--log-every", type=positive, default=10, help="steps between lines of the log")
    group.add_argument("--save-every", type=float, default=300.0, help="seconds between checkpoints")


def _add_draft(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the draft")
    group.add_argument(
        "--ttt-length", type=positive, help="EAGLE: levels trained (default: EAGLE3 7, EAGLE 3)"
    )
    group.add_argument(
        "--ttt-decay", type=float, default=0.8, help="weight of a level relative to the previous one"
    )
    group.add_argument(
        "--draft-vocab-size", type=positive, help="EAGLE3 (default: 32000, at most the target's)"
    )
    group.add_argument("--draft-intermediate-size", type=positive, help="default: the target's")
    group.add_argument("--draft-num-heads", type=positive, help="default: the target's")
    group.add_argument("--draft-num-kv-heads", type=positive, help="default: the target's")
    group.add_argument("--rope-theta", type=float, help="default: the target's, without its scaling")
    group.add_argument(
        "--aux-layers",
        type=int,
        nargs="+",
        help="boundaries; k is the input of layer k (default: EAGLE3 2 N/2 N-3, blocks five from 2 to N-2)",
    )
    group.add_argument("--feature-weight", type=float, default=1.0, help="EAGLE: weight of the feature loss")
    group.add_argument(
        "--ce-weight", type=float, default=0.1, help="EAGLE, DSPARK: weight of the cross-entropy"
    )
    _add_blocks(group)
    group.add_argument("--medusa-heads", type=positive, default=5, help="MEDUSA: tokens that it drafts")
    group.add_argument("--medusa-layers", type=positive, default=1, help="MEDUSA: residual blocks per head")
    group.add_argument(
        "--medusa-scores",
        choices=("own", "target"),
        default="own",
        help="MEDUSA: a copy of the target's head for each head, or the target's own for all (far smaller files)",
    )
    group.add_argument("--mlp-levels", type=positive, default=4, help="MLP_SPECULATOR: tokens that it drafts")
    group.add_argument("--mlp-inner", type=positive, help="MLP_SPECULATOR: channels (default: the target's)")


def _add_blocks(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--draft-layers", type=positive, default=5, help="DFLASH, DSPARK: layers of the draft")
    group.add_argument("--block-size", type=positive, help="tokens of a block (default: DFLASH 16, DSPARK 7)")
    group.add_argument(
        "--anchors", type=positive, help="blocks trained per row (default: an eighth of its tokens)"
    )
    group.add_argument(
        "--mask-token", type=int, help="DFLASH, DSPARK: token id (default: the last one unused by the data)"
    )
    group.add_argument("--markov-rank", type=positive, default=256, help="DSPARK: rank of the Markov head")
    group.add_argument(
        "--markov-head",
        choices=("vanilla", "gated", "rnn"),
        default="vanilla",
        help="DSPARK: kind of Markov head",
    )
