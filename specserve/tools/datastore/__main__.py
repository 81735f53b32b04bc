"""``python -m specserve.datastore``: write a file for ``--speculative-datastore`` from your own text or conversations.

Exit codes: 0 written, 2 a user's mistake, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specserve.config.sources import exit_code
from specserve.models.read_config import load_model_config
from specserve.speculation.datastore import write_chunk
from specserve.tools.files import check_output, replacing
from specserve.tools.token_map.__main__ import load_encoder, model_directory
from specserve.tools.token_map.count import documents

CHUNK = 2**24  # tokens; a lookup searches every chunk, and sorting one takes about 100 bytes per token
ORDERED = 128  # leading tokens by which suffixes are sorted: more than a lookup compares and proposes

DESCRIPTION = """\
Writes a datastore for --speculative-algorithm REST, in the format of its authors.

  --data FILE.jsonl   JSON lines. {"messages": [...]} and {"conversations": [...]}: the assistant's turns, found by the
                      model's chat template. {"prompt": "..."} and {"text": "..."}: all of it.
  --data FILE         any other file: plain text, all of it.

It takes 6 bytes per token, 8 for vocabularies of more than 65,536, and serves models with this tokenizer."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and print its size; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m specserve.datastore",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", help="the target: directory or hub id (default: the bundled model)")
    add("--revision", help="revision of a hub model")
    add("--data", type=Path, nargs="+", required=True, metavar="FILE", help="JSON lines or plain text")
    add("--output", type=Path, required=True, metavar="FILE", help="for example answers.idx")
    args = parser.parse_args(argv)
    return exit_code(lambda: _write(args))


def _write(args: argparse.Namespace) -> None:
    check_output("--output", args.output, {"--data": args.data})
    model = model_directory(args.model_path, args.revision)
    vocab_size = load_model_config(model).vocab_size
    size = write_datastore(args.output, documents(args.data, load_encoder(model)), vocab_size)
    print(f"{args.output}: {size} tokens, {args.output.stat().st_size / 2**20:.1f} MiB")


def write_datastore(path: Path, texts: Iterable[Sequence[int]], vocab_size: int, chunk: int = CHUNK) -> int:
    """Write token sequences one after the other; return the number of tokens.

    Raises ValueError naming ``--data`` or ``--output`` if there are none or the file can't be written.
    """
    size = 0
    with replacing("--output", path) as partial:
        with partial.open("wb") as file:
            for tokens_N in _chunks(texts, chunk):
                ids_N = tokens_N.astype("<u2" if vocab_size <= 2**16 else "<i4")
                file.write(write_chunk(ids_N.tobytes(), suffix_array(tokens_N).astype("<i4").tobytes()))
                size += len(tokens_N)
        if not size:
            raise ValueError("--data: contains no tokens")
    return size


def suffix_array(tokens_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all suffixes sorted by their first ``ORDERED`` tokens, by doubling (Manber and Myers 1993)."""
    rank_N, known = tokens_N, 1
    while True:
        next_N = np.zeros_like(rank_N)
        next_N[:-known] = rank_N[known:] + 1
        key_N = rank_N * (int(rank_N.max()) + 2) + next_N
        order_N = np.argsort(key_N)
        sorted_N = key_N[order_N]
        rank_N = np.empty_like(order_N)
        rank_N[order_N] = np.concatenate(([0], np.cumsum(sorted_N[1:] != sorted_N[:-1])))
        known *= 2
        if known >= ORDERED or rank_N.max() == len(rank_N) - 1:
            return order_N


def _chunks(texts: Iterable[Sequence[int]], size: int) -> Iterator[NDArray[np.int64]]:
    held: list[int] = []
    for text in texts:
        held += text
        while len(held) >= size:
            yield np.array(held[:size], np.int64)
            held = held[size:]
    if held:
        yield np.array(held, np.int64)


if __name__ == "__main__":
    sys.exit(main())
