"""A rank other than 0: loads its part of the model, then executes the commands that rank 0 sends."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from specserve.engine.commands import decode
from specserve.engine.executor import Executor
from specserve.logs import configure_logging
from specserve.process.assemble import create_context, shape_plan
from specserve.process.followers import Job, Word, put, take
from specserve.process.peers import RankGone, SocketPeers

_LOOK = 1.0  # seconds between looks at the parent, whose sockets a process that it forked may hold open


def follow(
    control: socket.socket,
    sockets: Mapping[int, socket.socket],
    alive: Callable[[], bool],
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Execute commands until rank 0 closes ``control``. Return the exit code. ``alive`` and ``stopped``: rank 0's
    process is. What waits for one that is stopped, by Ctrl-Z for example, is not late."""
    serves, peers = False, SocketPeers(0, sockets)
    try:
        first = take(control)
        if first is None:
            return 0
        job: Job = pickle.loads(first)
        rank, config = job
        peers = SocketPeers(rank, sockets)
        torch.set_num_threads(config.threads)
        context = create_context(config, shape_plan(config), config.place(rank, peers))
        executor = Executor(context, {})
        put(control, pickle.dumps(Word()))
        serves = True
        control.settimeout(_LOOK)
        peers.expect_within(config.dist_timeout, stopped)
        while (message := take(control, alive)) is not None:
            executor.run(decode(message))
        return 0
    except (RankGone, TimeoutError, BrokenPipeError):
        return 1  # the rank that ended first has said why
    except Exception as error:
        if isinstance(error, ValueError) and not serves:
            word = Word(str(error), user_error=True)
        else:
            word = Word(f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        put(control, pickle.dumps(word))
        return 1
    finally:
        control.close()
        peers.close()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger; False where that can't be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in "Tt"
    except OSError:
        return False


def main(control: str, *peers: str) -> int:
    """``control`` and ``peers``: numbers of open sockets, these after their ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging("error")
    parent = os.getppid()
    pairs = (each.split(":") for each in peers)
    sockets = {int(rank): socket.socket(fileno=int(number)) for rank, number in pairs}
    end = socket.socket(fileno=int(control))
    return follow(end, sockets, lambda: os.getppid() == parent, lambda: is_stopped(parent))


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))  # rank 0 waits, and an interpreter with PyTorch takes a second to end
