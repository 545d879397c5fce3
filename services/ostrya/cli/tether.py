"""Runs a command that the kernel kills when its parent ends: `python -I -S tether.py <parent pid> <command...>`.

`ostrya up` starts every child through this file: a small process of its own, so that no code runs between fork and exec
in a process that has threads. The order to kill survives exec; systems other than Linux have no such order.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before the order was given.
        if os.getppid() != parent:
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
