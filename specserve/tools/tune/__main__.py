"""``python -m specserve.tune``: find the best speculation shape for the server's flags and the user's prompts.

Exit codes: 0 found, 2 a user's mistake, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from specserve.config import Settings, load_settings, resolve_paths, unused
from specserve.config.notes import log_notes
from specserve.config.sources import exit_code, own_options
from specserve.frontend.tokenizer import Tokenizer
from specserve.logs import configure_logging
from specserve.models.read_config import load_model_config
from specserve.tools.tune import report
from specserve.tools.tune.board import Board, pick_overall
from specserve.tools.tune.engine import TuneEngine, Work
from specserve.tools.tune.grid import Grid
from specserve.tools.tune.options import candidates, check_outputs, check_settings, parser, with_room
from specserve.tools.tune.prompts import encode, read_prompts
from specserve.tools.tune.search import Search

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit code."""
    return exit_code(lambda: tune(*own_options(parser(), argv)))


def tune(options: Namespace, flags: Sequence[str]) -> None:
    """Run the search and write its results. Raises ValueError for what can't be tuned."""
    given = load_settings(flags)
    configure_logging("warning")
    log_notes(log, unused(flags))
    if options.plot is not None:
        report.check_plot()
    check_outputs(options)
    check_settings(given)
    local, notes = resolve_paths(given)
    log_notes(log, notes)
    assert local.model_path is not None
    model = load_model_config(Path(local.model_path))
    batches = sorted(set(options.batch_sizes))
    given, local = (with_room(each, model, batches[-1]) for each in (given, local))
    wanted = candidates(local, model, Grid(options.steps, options.topk, options.draft_tokens))
    engine = TuneEngine.load(local, wanted, _work(local, options), batches[-1])
    search = Search(
        bench=engine,
        candidates=[candidate for candidate in wanted if engine.drafts(candidate)],
        batches=batches,
        seconds=60 * options.minutes,
        exhaustive=options.exhaustive,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    _tell(search.run(), given, options)


def _tell(boards: Sequence[Board], given: Settings, options: Namespace) -> None:
    print(report.text(boards))
    report.write_configuration(options.output, given, pick_overall(boards), report.verdict(boards))
    print(f"\n{options.output}: python -m specserve.launch --config {options.output}")
    if options.json is not None:
        report.write(options.json, "--json", json.dumps(report.as_json(boards), indent=1) + "\n")
    if options.plot is not None:
        report.plot(boards, options.plot)


def _work(local: Settings, options: Namespace) -> Work:
    assert local.model_path is not None
    assert local.tokenizer_path is not None
    rows = read_prompts(options.prompts, Path(local.model_path))
    tokenizer = Tokenizer.load(local.tokenizer_path, local.trust_remote_code, local.chat_template)
    return Work(encode(rows, tokenizer), options.max_tokens, options.temperature)


if __name__ == "__main__":
    sys.exit(main())
