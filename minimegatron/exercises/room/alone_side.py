"""The room of an exercise's pure parts: one process, started for the purpose, without torch.

Megatron has no counterpart.

Its input is one line, the job. Its argument is the number of a file that takes its lines, and after
`job.seconds` its Python stack, which is its end.
"""

import faulthandler
import json
import math
import os
import resource
import sys

from minimegatron.exercises.room import stand_ins
from minimegatron.exercises.room.room import Job, Room

SPARE_SECONDS = 5
"""Of computing, after which the system ends what this process has started."""


def main() -> None:
    """Does the job and ends."""
    lines = int(sys.argv[1])
    job = Job(**json.loads(sys.stdin.readline()))
    stand_ins.install()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # It ends by itself, with all that it starts, even if nobody is left to end it.
    faulthandler.dump_traceback_later(job.seconds, exit=True, file=lines)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(job.seconds) + SPARE_SECONDS, most))
    with os.fdopen(lines, "w", encoding="utf-8") as file:
        # Twice, since a function of numbers must give the same answer each time.
        Room(job, lambda line: print(line, file=file, flush=True), times=2).work()
        sys.stdout.flush()
        sys.stderr.flush()
        file.flush()
        # Threads and exit functions of the student's need not be waited for.
        os._exit(0)
