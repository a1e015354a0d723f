"""A worker process: functions and items in through stdin, results out through a pipe of its own.

Started by `engine.process` as `python -m mla_bench.serve FD`, with the environment of its target and both
outputs in a file, so that nothing a compiler prints reaches a terminal and a crash's last lines can be told.
"""

import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
from typing import BinaryIO


def main(replies: BinaryIO) -> None:
    """Answers each (function, item) on stdin with ("returned", result) or ("raised", exception)."""
    tasks: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, tasks), daemon=True).start()
    while True:
        function, item = tasks.get()
        # Emptied of what earlier items wrote.
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        try:
            reply = "returned", function(item)
        except BaseException as error:  # noqa: BLE001 - the parent's to judge
            reply = "raised", error
        replies.write(pickle.dumps(reply))
        replies.flush()


def _receive(source: BinaryIO, tasks: queue.SimpleQueue) -> None:
    """Queues what arrives; when the parent is gone, however it went, so is this process, busy or not."""
    try:
        while True:
            tasks.put(pickle.load(source))
    except EOFError:
        shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)  # the parent made it for this worker
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(os.fdopen(int(sys.argv[1]), "wb"))
