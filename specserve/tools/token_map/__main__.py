"""``python -m specserve.token_map``: write a map for ``--speculative-token-map`` from your own text or traffic.

Exit codes: 0 written, 2 a user's mistake, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specserve.config import make_settings, resolve_paths
from specserve.config.notes import log_notes
from specserve.config.sources import exit_code
from specserve.frontend.tokenizer import load_tokenizer
from specserve.models.draft.token_map import read_token_map
from specserve.models.read_config import load_model_config
from specserve.models.special_tokens import special_tokens
from specserve.speculation.dynamic_map import default_size
from specserve.tools.files import check_output
from specserve.tools.token_map.cli import parse_args
from specserve.tools.token_map.count import Counts, count_files, count_server
from specserve.tools.token_map.ranking import Ranking
from specserve.tools.token_map.write import write_map
from specserve.tools.train.chat import Encoder

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the map and print its coverage; return the exit code."""
    args = parse_args(argv)
    return exit_code(lambda: _write(args))


def _write(args: argparse.Namespace) -> None:
    check_output("--output", args.output, {"--data": args.data, "--map": args.map})
    ranking = _ranking(args, model_directory(args.model_path, args.revision))
    size = default_size(len(ranking.counts_V)) if args.size is None else args.size
    write_map(args.output, ranking.best(size))
    print(f"{args.output}: {size} of {len(ranking.counts_V)} ids, {len(ranking.kept)} of them special")
    print(_coverage(ranking, size))


def model_directory(given: str | None, revision: str | None) -> Path:
    """Return a model's directory, the bundled one's for None. Raises ValueError if there is none."""
    settings, notes = resolve_paths(make_settings(model_path=given, revision=revision))
    log_notes(log, notes)
    assert settings.model_path is not None
    return Path(settings.model_path)


def _ranking(args: argparse.Namespace, model_path: Path) -> Ranking:
    config = load_model_config(model_path)
    counts_V: Counts = np.zeros(config.vocab_size, np.int64)
    if args.data:
        counts_V += count_files(args.data, load_encoder(model_path), config.vocab_size)
    for url in args.server:
        counts_V += count_server(url, args.api_key, config.vocab_size)
    ranks = [read_token_map(path, config.vocab_size).tolist() for path in args.map]
    if not ranks and not counts_V.any():
        raise ValueError(f"no token was counted in {', '.join(map(str, [*args.data, *args.server]))}")
    return Ranking(counts_V, ranks, special_tokens(model_path, config))


def load_encoder(model_path: Path) -> Encoder:
    """Load a model's tokenizer. Raises ValueError if there is none."""
    try:
        return Encoder(load_tokenizer(model_path))
    except Exception as error:  # the library raises many types
        raise ValueError(f"--model-path: {model_path} has no tokenizer for --data: {error}") from None


def _coverage(ranking: Ranking, size: int) -> str:
    """Return a line per size: ids, their share of the vocabulary, and the share of counted tokens they cover."""
    vocab_size, total = len(ranking.counts_V), int(ranking.counts_V.sum())
    if not total:
        return "no tokens were counted: ranks alone give no coverage"
    sizes = {size, *(vocab_size // part for part in (32, 16, 8, 4, 2))}
    lines = [
        f"{each:8d} ids {each / vocab_size:8.2%} {ranking.coverage(each):10.2%}{'  <- written' * (each == size)}"
        for each in sorted(sizes)
        if each > len(ranking.kept)
    ]
    return "\n".join([f"coverage of {total} counted tokens:", *lines])


if __name__ == "__main__":
    sys.exit(main())
