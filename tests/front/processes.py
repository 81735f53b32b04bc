"""Server processes as users run them, with a fake scheduler."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = (
    "import sys; from specserve import launch; from tests.front import fake_engine;"
    "launch.end(launch.main(sys.argv[2:], getattr(fake_engine, sys.argv[1])))"
)


class Server:
    """A server process; ``lines`` are its log lines."""

    def __init__(self, arguments: list[str]) -> None:
        self.lines: list[str] = []
        self.url = ""
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SPECSERVE_")},
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONWARNINGS": "default",
        }
        self.process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self.lines.extend(iter(lines.readline, ""))

    def wait_ready(self, seconds: float = 180) -> Server:
        done = "ready: http"
        wait(lambda: self.process.poll() is not None or any(done in line for line in self.lines), seconds)
        text = "".join(self.lines)
        found = re.search(r"ready: (http://[^\s\"]+)", text)
        assert found, text
        self.url = found[1]
        return self

    def finish(self) -> int:
        """Return the exit code of a process that ends by itself."""
        code = self.process.wait(60)
        self._reader.join(60)
        assert not self._reader.is_alive(), "the engine is left: it holds the log"
        return code

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.finish()

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text())

    def mapped(self) -> str:
        """The libraries that the process has loaded, on Linux."""
        return Path(f"/proc/{self.process.pid}/maps").read_text()

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def running(self) -> float:
        found = re.search(r"^specserve_running_requests (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0


def wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@contextlib.contextmanager
def running(build: str, model: Path, *flags: str) -> Iterator[Server]:
    server = Server(["-c", RUN, build, "--model-path", str(model), "--port", "0", *flags])
    try:
        yield server
    finally:
        server.stop()
