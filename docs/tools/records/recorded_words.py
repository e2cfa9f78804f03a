"""Runs commands whose output the pages quote, and keeps what was printed.

Called by: all that records runs. Calls: torchrun. Names of machines and folders are
replaced; progress bars are left out. Nothing else is changed.
"""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from source.places import RECORDS, ROOT, TOOLS, python_path, write

BAR = re.compile(r"step/s|\d+/\d+ \[")
LOG_HEAD = re.compile(r"^[WEI]\d{4} [\d:.]+ \d+ \S+\] ")


def keep(name: str, found: dict[str, Any]) -> None:
    """Writes a record, for `source.places.recorded`."""
    write(RECORDS / f"{name}.json", json.dumps(found, indent=1) + "\n")


def plain(text: str) -> str:
    """Without names of this machine and its folders, and without the date in torchrun's lines.

    >>> plain("E1125 08:29:55.946000 17313 /x/multiprocessing/api.py:1002] failed (exitcode: -9)")
    'torchrun: failed (exitcode: -9)'
    """
    text = LOG_HEAD.sub("torchrun: ", text)
    text = text.replace(f"{ROOT}/", "").replace(str(ROOT), "DIR")
    text = re.sub(r"\S*/site-packages/", "", text)
    text = re.sub(r"\S*/bin/python\S*", "python", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "host-0", text)


def printed_lines(output: str) -> list[str]:
    """The lines of a terminal, where a bar is written over by what comes after it."""
    lines = [line.rpartition("\r")[2].rstrip() for line in output.split("\n")]
    return [plain(line) for line in lines if not BAR.search(line)]


def launched(words: Sequence[object], folder: Path = ROOT, check: bool = True) -> str:
    """Runs torchrun in `folder`, one thread in each rank, and returns all that was printed.

    Raises CalledProcessError, with `check`, if a rank has failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *map(str, words)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT, TOOLS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if check and done.returncode:
        sys.stderr.write(done.stdout)
        done.check_returncode()
    return done.stdout


def torchrun(num_ranks: int, words: Sequence[object], folder: Path) -> tuple[str, list[str], float]:
    """The command as a reader types it, what was printed, and how many seconds it took.

    It runs in `folder`. The program is docs/tools/records/dying_run.py. The exit code is not looked at.
    """
    program = "docs/tools/records/dying_run.py"
    launch = ["--standalone", "--nproc-per-node", str(num_ranks)]
    arguments = [str(word) for word in words]
    begun = time.monotonic()
    words = [*_options(arguments, launch), str(ROOT / program), *_flags(arguments)]
    printed = launched(words, folder, check=False)
    shown = ["torchrun", *_options(arguments, launch), program, *_flags(arguments)]
    return " ".join(shown), printed_lines(printed), time.monotonic() - begun


def _options(arguments: list[str], launch: list[str]) -> list[str]:
    """torchrun's own flags: those before "--"."""
    return launch + (arguments[: arguments.index("--")] if "--" in arguments else [])


def _flags(arguments: list[str]) -> list[str]:
    return arguments[arguments.index("--") + 1 :] if "--" in arguments else arguments


def provenance(name: str) -> dict[str, str]:
    """Where a recording comes from."""
    return {
        "recorded by": f"python docs/tools/record.py {name}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }
