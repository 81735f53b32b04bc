"""The door: ``python -m specserve.launch``. Exit codes: 0 stopped, 1 the engine failed, 2 a user's mistake,
130 interrupted before serving.

Imported again by the engine's process, so it imports little; the rest comes while the engine loads its model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from specserve.config import load_settings, resolve_paths
from specserve.logs import configure_logging
from specserve.scheduler.process import Build, build_scheduler


def main(argv: Sequence[str] | None = None, build: Build = build_scheduler) -> int:
    """Runs a server until it is stopped. Returns the exit code. ``build`` runs in the engine's process."""
    try:
        given = load_settings(sys.argv[1:] if argv is None else argv)
        configure_logging(given.log_level)
        resolve_paths(given)  # here too, so that a wrong path is told at once
        from specserve.server.run import run_server

        return run_server(given, build)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
