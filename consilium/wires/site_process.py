"""Processes that serve sites: requests come as lines through a socket, answers go back the same way.

The first of them, the stem, serves nobody: it imports what all need and forks a worker whenever it is handed a socket.
Tensors travel as safetensors files named in the request. When the parent dies its end of the socket closes, and a
worker ends at once: a resumed run must never meet a worker of the run before.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading

from consilium.children import WORKER
from consilium.wires.stem import FORKS


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    control = socket.socket(fileno=os.dup(0))
    os.dup2(2, 1)  # whatever a library prints must not get between the answers

    import torch

    torch.set_num_threads(1)
    importlib.import_module("consilium.wires.local_sites")  # what all sites need
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        said, handles, *_ = socket.recv_fds(control, 4096, 2)
        if not said:
            return
        asked = json.loads(said)
        for module in asked["modules"]:
            importlib.import_module(module)
        gc.freeze()  # modules and classes live as long as the process: do not look through them again and again
        _begin(control, asked["number"], *handles)


def _begin(control: socket.socket, number: int, handle: int, log: int) -> None:
    """A worker that answers through `handle`, in a process of its own where this one can be forked."""
    process = os.fork() if FORKS else 0
    if process:
        os.close(handle)
        os.close(log)
        control.sendall(str(process).encode())
        return
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not FORKS:
            control.sendall(str(os.getpid()).encode())
        control.close()
        os.environ[WORKER] = str(number)
        for stream in (0, 1, 2):
            os.dup2(log, stream)
        os.close(log)
        _serve(socket.socket(fileno=handle))
    except BaseException:  # nothing of the stem may run on here
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _serve(connection: socket.socket) -> None:
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(connection, lines), daemon=True).start()
    from consilium import tree
    from consilium.wires.local_sites import LocalRequest, LocalSites

    sites = LocalSites()
    while True:
        connection.sendall((tree.to_text(sites.answer(tree.from_text(lines.get(), LocalRequest))) + "\n").encode())


def _listen(connection: socket.socket, lines: queue.Queue[str]) -> None:
    with contextlib.suppress(OSError), connection.makefile("r", encoding="utf-8") as requests:
        for line in requests:
            lines.put(line)
    os._exit(0)


def _reap(*_: object) -> None:
    """Workers that died leave no trace."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
