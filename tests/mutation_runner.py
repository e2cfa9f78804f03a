"""Runs modules on a patched package, each in a fork of one process that has imported it and torch.

Started by `tests/test_mutations.py`, as a script. A fresh interpreter would spend four seconds on
imports for a probe that takes half of one. In the fork, functions of the patched file get the code
that the patch gives them; see `swap_code`. A job with a "folder" brings a package of its own instead,
and imports that.

One job a line on standard input, {"folder", "file", "text", "module", "arguments", "output",
"timeout"}; one line on standard output when it is done: its exit code, -9 if it took too long. What it
printed is in the file "output".
"""

import contextlib
import gc
import importlib
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
import types
from collections import Counter, defaultdict
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo
import torch.distributed

ROOT = Path(__file__).parents[1]


def import_the_package() -> None:
    """What probes import, so that forks need not; without tests themselves, which pytest rewrites."""
    sys.path.insert(0, str(ROOT))
    importlib.import_module("tests.preloaded")
    for path in sorted((ROOT / "tests").glob("parity*.py")):
        importlib.import_module(f"tests.{path.stem}")
    for path in sorted((ROOT / "minimegatron").glob("*.py")):
        importlib.import_module(f"minimegatron.{path.stem}".removesuffix(".__init__"))
    gc.collect()
    for thing in gc.get_objects():
        if isinstance(thing, types.FunctionType):
            functions_of[thing.__code__.co_filename].append(thing)


functions_of: defaultdict[str, list[types.FunctionType]] = defaultdict(list)
"""By file. A fork that looked through all objects would copy all memory."""


def swap_code(file: str, text: str) -> None:
    """Every function of `file` runs what the text says from now on, whoever holds the function.

    The text may differ from the file within functions alone: what a module does while it is imported
    has been done.
    """
    path = str(ROOT / "minimegatron" / file)
    old, new = (_codes(compile(words, path, "exec")) for words in (Path(path).read_text(), text))
    instead = {(key[0], old[key].co_firstlineno): code for key, code in new.items() if key in old}
    for function in functions_of[path]:
        code = function.__code__
        function.__code__ = instead.get((code.co_qualname, code.co_firstlineno), code)


def _codes(module: types.CodeType) -> dict[tuple[str, int], types.CodeType]:
    """Qualified name, and which of that name it is in the file -> the code of a function or class."""
    found: dict[tuple[str, int], types.CodeType] = {}
    number: Counter[str] = Counter()
    todo = [module]
    while todo:
        code = todo.pop()
        found[code.co_qualname, number[code.co_qualname]] = code
        number[code.co_qualname] += 1
        todo += [one for one in code.co_consts if isinstance(one, types.CodeType)][::-1]
    return found


def forget_the_package() -> None:
    """The next import of it, or of the tests' modules, reads files again."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("minimegatron", "tests"):
            del sys.modules[name]
    sys.path.remove(str(ROOT))


def run(job: dict[str, Any], sockets: str) -> int:
    """In the fork: the module as `python -m` would run it; returns the exit code.

    The fork does not end as Python does, so its sockets go into a folder that its parent removes.
    """
    os.setpgid(0, 0)
    multiprocessing.current_process()._config["tempdir"] = sockets
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    folder = job["folder"] or str(ROOT)
    if job["folder"]:
        forget_the_package()
        sys.path.insert(0, folder)
    elif job["file"]:
        swap_code(job["file"], job["text"])
    gc.freeze()  # what came with the fork is never garbage
    os.chdir(folder)
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
    import_the_package()
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
