"""Start the server: ``python -m specserve.launch``. Exit codes: 0 stopped, 1 the engine failed, 2 a user's mistake, 130
interrupted before serving.

The engine's process imports this module again, so it imports little; the rest is imported while the model loads.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from specserve.config import Settings, load_settings, resolve_paths, unused
from specserve.config.notes import log_notes
from specserve.config.sources import exit_code
from specserve.logs import adopt_loggers, configure_logging
from specserve.process.worker import Build, Built, build_scheduler
from specserve.version import __version__, commit

log = logging.getLogger("specserve.launch")


def noted(build: Build, notes: Sequence[str], settings: Settings) -> Built:
    """Build an engine, and put ``notes`` on earlier choices before its own."""
    built = build(settings)
    return built._replace(notes=[*notes, *built.notes])


def main(argv: Sequence[str] | None = None, build: Build = build_scheduler) -> int:
    """Run a server until it is stopped; return the exit code. ``build`` runs in the engine's process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the server installs its own handler
    arguments = sys.argv[1:] if argv is None else argv
    if "--version" in arguments:
        known = commit()
        print(f"specserve {__version__}" + (f" ({known[:9]})" if known else ""))
        return 0
    return exit_code(lambda: _serve(arguments, build))


def _serve(arguments: Sequence[str], build: Build) -> int:
    given = load_settings(arguments)
    configure_logging(given.log_level, given.log_format)
    # Once, for both processes: a wrong path is reported at once, and both read the same revision.
    local, notes = resolve_paths(given)
    notes = unused(arguments) | notes
    adopt_loggers()
    log_notes(log, notes)
    from specserve.server.run import run_server

    return run_server(local, partial(noted, build, [*notes]))


def end(code: int) -> NoReturn:
    """Exit after ``main`` without waiting for threads that still tokenize or load, as the interpreter would: they can't
    be stopped and their results are not needed."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    gc.unfreeze()  # extensions would report the objects that the server froze as leaked
    sys.exit(code)


if __name__ == "__main__":
    end(main())
