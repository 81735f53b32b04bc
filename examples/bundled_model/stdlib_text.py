"""The running Python's standard library, with its tests, as training text: one document a module."""

import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ALWAYS_HELD_OUT = ("textwrap.py", "heapq.py", "json/decoder.py", "fractions.py")
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "lib2to3", "encodings", "pydoc_data", "_pyrepl_data"}
LARGEST = 200_000


class Module(NamedTuple):
    """A source file; `path` is relative to the library and says whether it is held out."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """True for about 3% of the modules, chosen by a hash of the path, and for a few named ones."""
        return self.path in ALWAYS_HELD_OUT or zlib.crc32(self.path.encode()) % 33 == 0


def is_table(data: bytes) -> bool:
    """True for generated tables and encoded data: they compress far better or far worse than code."""
    return not 0.1 < len(zlib.compress(data)) / max(len(data), 1) < 0.5


def modules() -> Iterator[Module]:
    """All usable modules in the order of their paths."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        data = path.read_bytes()
        if not 200 < len(data) <= LARGEST or is_table(data):
            continue
        try:
            text = data.decode("utf-8").replace("\r\n", "\n").replace("\f", "")
        except UnicodeDecodeError:
            continue
        yield Module(relative.as_posix(), text)
