"""The command line of the token map tool."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from specserve.tools.token_map.write import FORMATS

DESCRIPTION = """\
Counts target token ids and writes a map for --speculative-token-map: ids, most frequent first.

What is counted:
  --data FILE.jsonl   JSON lines. {"messages": [...]}: the assistant's turns, found by the model's chat template,
                      end-of-turn tokens included; all messages if it has none or the model has no template.
                      {"conversations": [...]}: the same. {"prompt": "..."} and {"text": "..."}: all of it.
  --data FILE         any other file: plain text, all of it.
  --server URL        every token that a server with --token-statistics has generated since its start.
  --map FILE          an FR-Spec file (.pt, .json, .txt) counts no tokens: its order gives frequency ranks. The token of
                      rank r weighs 1/r; a file weighs as much as all counted tokens together.

Special tokens and end tokens are always in the map; ids that were never counted fill it up, lowest first.
Coverage is the share of the counted tokens that a map contains."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags. A mistake exits with code 2 and names the flag."""
    parser = argparse.ArgumentParser(
        prog="python -m specserve.token_map",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", help="the target: directory or hub id (default: the bundled model)")
    add("--revision", help="revision of a hub model")
    add("--data", type=Path, nargs="+", default=[], metavar="FILE", help="JSON lines or plain text")
    add("--server", nargs="+", default=[], metavar="URL", help="for example http://127.0.0.1:30000")
    add("--api-key", help="API key of the servers")
    add("--map", type=Path, nargs="+", default=[], metavar="FILE", help="FR-Spec files")
    add(
        "--size",
        type=int,
        help="ids in the map (default: a quarter of the vocabulary, at least 1024 or all, at most 32768)",
    )
    add("--output", type=_output, required=True, metavar="FILE", help=f"ends in {', '.join(FORMATS)}")
    args = parser.parse_args(argv)
    if not (args.data or args.server or args.map):
        parser.error("nothing to count: expected one or more of --data, --server and --map")
    return args


def _output(text: str) -> Path:
    path = Path(text)
    if path.suffix not in FORMATS:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(FORMATS)}, found {text}")
    return path
