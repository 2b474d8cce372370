"""Run a command for at most LIMIT seconds, and end all processes that came from it.

    python within.py LIMIT COMMAND ...

This process adopts orphans, so Ray's and vLLM's daemons end too. At the limit, the command gets
SIGTERM and 20 s to end. The exit code is the command's, or 124 at the limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(limit: str, *command: str) -> int:
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    process = subprocess.Popen(command)
    try:
        return process.wait(float(limit))
    except subprocess.TimeoutExpired:
        print(f"limit of {limit} s", flush=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        return 124
    finally:
        for end in (psutil.Process.terminate, psutil.Process.kill):
            children = psutil.Process().children(recursive=True)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(child)
            psutil.wait_procs(children, 5)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
