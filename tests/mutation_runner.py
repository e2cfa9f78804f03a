"""Runs modules on patched copies of the package, each in a fork of one process that knows torch.

Started by `tests/test_mutations.py`, as a script. A fresh interpreter would spend four seconds on
imports for a probe that takes half of one. Nothing of minimegatron may be imported here: each job
brings its own.

One job a line on standard input, {"folder", "module", "arguments", "output", "timeout"}; one line on
standard output when it is done: its exit code, -9 if it took too long. What it printed is in the
file "output".
"""

import contextlib
import gc
import json
import multiprocessing
import multiprocessing.util
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing import forkserver
from typing import Any

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo
import torch.distributed


def run(job: dict[str, Any], sockets: str) -> int:
    """In the fork: the module as `python -m` would run it; returns the exit code.

    The fork does not end as Python does, so its sockets go into a folder that its parent removes.
    """
    os.setpgid(0, 0)
    multiprocessing.current_process()._config["tempdir"] = sockets
    gc.freeze()  # what came with the fork is never garbage
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["folder"])
    sys.path.insert(0, job["folder"])
    sys.argv = [job["module"], *job["arguments"]]
    start_forkserver()
    try:
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start_forkserver() -> None:
    """The server that ranks are forked from: itself a fork, which has torch, and no threads yet."""
    spawn = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = _fork_instead
    try:
        forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = spawn


def _fork_instead(_: str, arguments: list[str], passed: list[int]) -> int:
    """For `spawnv_passfds`: runs the program after `-c` in a fork, not in a new interpreter."""
    pid = os.fork()
    if pid == 0:
        try:
            exec(arguments[-1], {})
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def wait(pid: int, timeout: float) -> int:
    """The exit code; whatever the job left behind is killed with it."""
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return code


def main() -> None:
    torch.set_num_threads(1)  # threads of a pool would not survive the fork
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryDirectory(prefix="mutation-") as sockets:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = run(job, sockets)
                    sys.stdout.flush()
                    sys.stderr.flush()
                finally:
                    os._exit(code)
            code = wait(pid, job["timeout"])
        print(code, flush=True)


if __name__ == "__main__":
    main()
