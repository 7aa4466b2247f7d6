"""A process that serves sites: requests are lines on standard input, answers lines on standard output.

Tensors travel as safetensors files named in the request. When the parent dies its end of the pipe closes, and this
process ends at once: a resumed run must never meet a worker of the run before.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
from typing import IO


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(sys.stdin, lines), daemon=True).start()

    import torch

    torch.set_num_threads(1)
    from consilium import tree
    from consilium.wires.local_sites import LocalRequest, LocalSites

    gc.freeze()  # modules and classes live as long as the process: do not look through them again and again
    sites = LocalSites()
    while True:
        answers.write(tree.to_text(sites.answer(tree.from_text(lines.get(), LocalRequest))) + "\n")
        answers.flush()


def _listen(requests: IO[str], lines: queue.Queue[str]) -> None:
    for line in requests:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
