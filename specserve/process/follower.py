"""A rank other than 0: loads its part of the model, then executes the commands that rank 0 sends."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from specserve.engine.commands import decode
from specserve.engine.executor import Executor
from specserve.logs import configure_logging
from specserve.process.assemble import capture_graphs, create_context, set_up_gpu, shape_plan
from specserve.process.followers import Job, Word, put, take
from specserve.process.gpu_peers import GpuPeers
from specserve.process.peers import RankGone, SocketPeers
from specserve.process.spares import is_stopped

_LOOK = 1.0  # seconds between looks at the parent, whose sockets a process that it forked may hold open


def follow(
    control: socket.socket, sockets: Mapping[int, socket.socket], stopped: Callable[[], bool] = lambda: False
) -> int:
    """Execute commands until rank 0 closes ``control``. Return the exit code. ``stopped``: rank 0's process is. What
    waits for one that is stopped, by Ctrl-Z for example, is not late."""
    serves, peers = False, SocketPeers(0, sockets)
    try:
        first = take(control)
        if first is None:
            return 0
        job: Job = pickle.loads(first)
        rank, config, environment = job
        os.environ.update(environment)
        peers = SocketPeers(rank, sockets)
        torch.set_num_threads(config.threads)
        plan, gpu = shape_plan(config), None
        if config.device == "cuda":
            set_up_gpu()
            gpu = GpuPeers(rank, config.tensor_parallel_size, peers)
        ranks = config.place(rank, gpu or peers)
        context = create_context(config, plan, ranks)
        executor = Executor(context, capture_graphs(config, plan, context, ranks))
        if gpu is not None:
            executor.warm_up(config.longest_launch)
        put(control, pickle.dumps(Word()))
        serves = True
        peers.expect_within(config.dist_timeout, stopped)
        while (message := take(control)) is not None:
            executor.run(decode(message))
        return 0
    except (RankGone, TimeoutError, BrokenPipeError):
        return 1  # the rank that ended first has said why
    except Exception as error:
        if isinstance(error, ValueError) and not serves:
            word = Word(str(error), user_error=True)
        else:
            word = Word(f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        with suppress(OSError):  # rank 0 has ended, perhaps for the same reason
            put(control, pickle.dumps(word))
        return 1
    finally:
        control.close()
        peers.close()


def main(control: str, *peers: str) -> int:
    """``control`` and ``peers``: numbers of open sockets, these after their ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging("error")
    parent = os.getppid()
    pairs = (each.split(":") for each in peers)
    sockets = {int(rank): socket.socket(fileno=int(number)) for rank, number in pairs}
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    return follow(socket.socket(fileno=int(control)), sockets, lambda: is_stopped(parent))


def _end_with(parent: int) -> None:
    """End this process when its parent does, also while it loads or waits for a device."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))  # rank 0 waits, and an interpreter with PyTorch takes a second to end
