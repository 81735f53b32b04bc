"""Run nginx with the shipped configuration as a child process."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

SHIPPED = Path(__file__).parent.parent / "examples" / "docker"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def write_configuration(directory: Path, listen: int, replicas: Sequence[int]) -> Path:
    """The shipped nginx.conf next to files that say other addresses: those of 127.0.0.1 with these ports."""
    shutil.copy(SHIPPED / "nginx.conf", directory)
    (directory / "listen.conf").write_text((SHIPPED / "listen.conf").read_text().replace("8080", str(listen)))
    lines = (SHIPPED / "replicas.conf").read_text().splitlines()
    servers = [line for line in lines if line.startswith("server ")]
    parameters = servers[0].split(maxsplit=2)[2]
    (directory / "replicas.conf").write_text(
        "".join(f"server 127.0.0.1:{port} {parameters}\n" for port in replicas)
    )
    return directory / "nginx.conf"


@contextlib.contextmanager
def nginx(directory: Path, replicas: Sequence[int]) -> Iterator[str]:
    """Run nginx in ``directory`` before the replicas' ports of 127.0.0.1. Gives its address; its log is
    ``directory / "log"``."""
    port = free_port()
    configuration = write_configuration(directory, port, replicas)
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            ["nginx", "-e", "stderr", "-p", f"{directory}/", "-c", str(configuration)], stdout=log, stderr=log
        )
        try:
            _wait(process, port, directory / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(500):
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"nginx does not listen: {log.read_text()}")
