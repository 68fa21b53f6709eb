"""A copy of a process that has imported what it needs (``tests/warm.py``), for programs that the package starts by
their command: ``python -I -S copied.py SOCKET WORDS``. Signals go to the copy, and the copy ends with this process."""

import json
import os
import signal
import socket
import sys


def main() -> None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(sys.argv[1])
    order = {"words": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}  # noqa: PTH109 (pathlib takes 20 ms to import)
    socket.send_fds(connection, [json.dumps(order).encode()], [0, 1, 2])
    pid = int(connection.recv(100))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    for descriptor in range(3):  # the copy has them
        os.close(descriptor)
    status = int(connection.recv(100))
    if status < 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
