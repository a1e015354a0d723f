"""A worker process: functions and items in through stdin, results out through a pipe of its own.

Started by `engine.process` as `python -m mla_bench.serve FD FOLDER`, with the environment of its target and
both outputs in a file, so that nothing a compiler prints reaches a terminal and a crash's last lines can be
told.
"""

import os
import pickle
import select
import shutil
import signal
import sys
from contextlib import suppress
from typing import BinaryIO


def main(tasks: BinaryIO, replies: BinaryIO) -> None:
    """Answers each (function, item) of `tasks` with ("returned", result) or ("raised", exception)."""
    while True:
        try:
            function, item = pickle.load(tasks)
        except EOFError:
            return
        # Emptied of what earlier items wrote.
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        try:
            reply = "returned", function(item)
        except BaseException as error:  # noqa: BLE001 - the parent's to judge
            reply = "raised", error
        replies.write(pickle.dumps(reply))
        replies.flush()


def _guard(replies: int, scratch: str) -> None:
    """Leaves a process that ends this one and its children when the parent is gone, however it went.

    No thread: it would wait for as long as a call into C holds the interpreter. And no child of this
    process: a graph may wait for its own.
    """
    worker = os.getpid()
    if child := os.fork():
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    os.close(replies)
    parent = select.poll()
    parent.register(0, 0)  # its end alone, not what it sends
    parent.poll()
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    fd, folder = int(sys.argv[1]), sys.argv[2]
    _guard(fd, folder)
    # Both are kept from the children that a graph may have: one that reads must not take an item, and one
    # that outlives a crash must not hide it.
    stdin = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(fd, False)
    main(stdin, os.fdopen(fd, "wb"))
