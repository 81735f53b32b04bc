"""``python -m specserve.train``: train a draft, write it in its published format and report its acceptance."""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specserve.config.sources import exit_code
from specserve.frontend.tokenizer import load_tokenizer
from specserve.models.base import TargetModel
from specserve.models.checkpoint import DTYPES, load_target
from specserve.models.read_config import load_model_config
from specserve.tools.train import export, report
from specserve.tools.train.attend import check_layers
from specserve.tools.train.chat import Encoder
from specserve.tools.train.cli import parse_args
from specserve.tools.train.data import load_sources
from specserve.tools.train.drafts import DRAFTS, OPTIONS
from specserve.tools.train.loop import LoopConfig, TrainingLoop
from specserve.tools.train.optim import build_optimizers
from specserve.tools.train.packing import Documents, Rows, RowSampler, identity, pack
from specserve.tools.train.trainer import Trainer

log = logging.getLogger("specserve.tools.train")
# Share and maximum of a source's documents, if no held-out file is given.
HELDOUT_SHARE, HELDOUT_MOST = 0.02, 512
BATCH_TOKENS, BATCH_TOKENS_CPU = 8192, 2048
# Settings that a resumed run must share with the one that wrote the checkpoint, besides the data.
FIXED = (
    *("algorithm", "max_length", "batch_tokens", "accumulate", "optimizer", "lr", "weight_decay"),
    *("warmup", "schedule", "clip", "seed", "shares"),
    *(option.name for option in OPTIONS),
)

LOOP = (
    *("output", "time_limit", "warmup", "schedule", "clip", "accumulate"),
    *("log_every", "save_every", "compile"),
)
"""Options that configure the loop as they are."""


def load_data(args: argparse.Namespace) -> tuple[dict[str, Documents], dict[str, Documents]]:
    """Return training and held-out documents by source."""
    paths = [*args.data, *(args.heldout or [])]
    encoder = None
    if any(path.suffix != ".npz" for path in paths):
        encoder = Encoder(load_tokenizer(args.model_path))
    train = _sources(args.data, encoder)
    if args.heldout:
        return train, _sources(args.heldout, encoder)
    pairs = {n: docs.split(HELDOUT_SHARE, HELDOUT_MOST, args.seed) for n, docs in train.items()}
    return {n: rest for n, (rest, _) in pairs.items()}, {n: aside for n, (_, aside) in pairs.items()}


def _sources(paths: list[Path], encoder: Encoder | None) -> dict[str, Documents]:
    sources: dict[str, Documents] = {}
    for path in paths:
        for name, documents in load_sources(path, encoder).items():
            sources[name if name not in sources else f"{name}-{len(sources)}"] = documents
    return sources


def make_trainer(
    args: argparse.Namespace, target: TargetModel, train: Mapping[str, Documents]
) -> Trainer[Any]:
    """Return the trainer of a fresh draft, on the target's device."""
    torch.manual_seed(args.seed)
    return DRAFTS[args.algorithm].trainer(args, target, list(train.values()))


def loop_config(args: argparse.Namespace, data: str, rows: int, batch_rows: int, amp: bool) -> LoopConfig:
    """Return the loop's configuration. ``--steps``, else ``--epochs``, else the clock, else 10 epochs end the run.

    ``data`` tells the training data from others.
    """
    epochs = args.epochs or (None if args.time_limit else 10.0)
    steps = args.steps or (math.ceil(rows * epochs / (batch_rows * args.accumulate)) if epochs else None)
    return LoopConfig(
        steps=steps,
        amp=amp,
        settings={"data": data, **{name: getattr(args, name) for name in FIXED}},
        **{name: getattr(args, name) for name in LOOP},
    )


def write_draft(args: argparse.Namespace, trainer: Trainer[Any]) -> None:
    trainer.finish()
    files = DRAFTS[args.algorithm].files(trainer, args)
    export.write(files, args.output, DTYPES[args.export_dtype], args.format)


def write_report(
    loop: TrainingLoop,
    trainer: Trainer[Any],
    rows: Mapping[str, Rows],
    output: Path,
    batch_rows: int,
    flash: bool,
) -> None:
    """Measure, print and save the acceptance on held-out rows. Warn of a draft that is of no use."""
    trainer.eval()
    with loop.autocast():
        results = {
            name: report.measure(trainer.unroll, packed, batch_rows, loop.device, flash)
            for name, packed in rows.items()
        }
    results["all"] = every = report.total(list(results.values()))
    report.save(results, output / "acceptance.json")
    print(report.table(results))
    for doubt in report.doubts(loop.losses(), loop.step, loop.config.warmup, every):
        log.warning(doubt)


def heldout_rows(documents: Documents, length: int, most: int, seed: int) -> Rows:
    packed = pack(documents, length, seed)
    return Rows(packed.tokens[:most], packed.mask[:most], packed.starts[:most])


def prepare(args: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the device, and make the output directory. Raises ValueError if files can't
    be written there, or if there is no model, or one that training does not support."""
    if not args.model_path.is_dir():
        raise ValueError(f"--model-path: {args.model_path} is not a directory")
    check_layers(load_model_config(args.model_path).layers, args.max_length)
    args.device = torch.device(args.device)
    if args.batch_tokens is None:
        args.batch_tokens = BATCH_TOKENS if args.device.type == "cuda" else BATCH_TOKENS_CPU
    if args.output.resolve() == args.model_path.resolve():
        raise ValueError(
            f"--output: {args.output} is also --model-path, whose files the draft's would replace"
        )
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.output) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise ValueError(f"--output: {args.output} can't be written: {error}") from None


def pack_all(
    args: argparse.Namespace, train: Mapping[str, Documents], aside: Mapping[str, Documents]
) -> list[Rows]:
    """Return the rows of each source, and log what it holds."""
    rows = []
    for name, documents in train.items():
        rows.append(pack(documents, args.max_length, args.seed))
        sizes = len(documents), len(documents.tokens), int(documents.mask.sum()), len(rows[-1])
        words = "%s: %d documents, %d tokens (%d learned), %d rows, %d documents held out"
        log.info(words, name, *sizes, len(aside.get(name, [])))
    return rows


def train(args: argparse.Namespace) -> None:
    """Run everything: load data and target, train, export, report."""
    prepare(args)
    device = args.device
    auto = "bfloat16" if device.type == "cuda" else "float32"
    dtype = DTYPES[auto if args.dtype == "auto" else args.dtype]
    half = dtype in (torch.bfloat16, torch.float16)
    flash = device.type == "cuda" and half and not args.dense_attention
    train_documents, heldout = load_data(args)
    rows = pack_all(args, train_documents, heldout)
    target = load_target(args.model_path, dtype, device, args.max_length)
    target.requires_grad_(False)
    trainer = make_trainer(args, target, train_documents)
    batch_rows = max(1, args.batch_tokens // args.max_length)
    data = identity(list(train_documents.values()))
    config = loop_config(args, data, sum(map(len, rows)), batch_rows, half)
    announce(args, config, batch_rows)
    sampler = RowSampler(rows, args.shares, batch_rows, args.seed, device, flash)
    trainer.begin(sampler(0))
    optimizers = build_optimizers(trainer, args.optimizer, args.lr, args.weight_decay)
    loop = TrainingLoop(config, trainer, optimizers, trainer.loss, sampler)
    if args.restart:
        loop.forget()
    loop.run()
    write_draft(args, trainer)
    aside = {n: heldout_rows(d, args.max_length, args.report_rows, args.seed) for n, d in heldout.items()}
    write_report(loop, trainer, aside, args.output, max(1, batch_rows // 2), flash)
    print(f"the draft is in {args.output}")


def announce(args: argparse.Namespace, config: LoopConfig, batch_rows: int) -> None:
    """Log how long the run is, and on a CPU what makes it faster."""
    limits = {f"{config.steps} steps": config.steps, f"{config.time_limit} s": config.time_limit}
    ends = " or ".join(text for text, limit in limits.items() if limit)
    tokens = batch_rows * args.max_length * args.accumulate
    log.info("training ends after %s; a step takes %d tokens", ends, tokens)
    if args.device.type == "cpu":
        sizes = [option.flag for option in DRAFTS[args.algorithm].options if option.sizes]
        options = ", ".join(["--batch-tokens", "--max-length", *sizes])
        log.info("on a CPU a step takes seconds to minutes, less with smaller %s", options)


def main() -> None:
    """Exit with 2 for a user's mistake, 1 for others, 130 if it is interrupted."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_float32_matmul_precision("high")
    try:
        code = exit_code(lambda: train(parse_args()))
    except (OSError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
