"""The end of a rank's own process: no group of ranks and no thread of ours is left when Python ends.

Megatron has no counterpart.

While Python ends, a thread that asks for its lock is ended on the spot. If it is inside C++, the whole
process aborts: "terminate called without an active exception", SIGABRT. Two sorts of threads do:

* ours, inside a call of torch;
* gloo's. Such a thread frees the tensors of a message after the message has been reported as done, and
  to free a tensor that Python has seen takes Python's lock. On a busy machine that may come late.

So at exit our threads are joined and the groups destroyed, which joins the threads of a group, unless
somebody still refers to it. Then gloo's threads are watched until all of them sleep.
"""

import atexit
import faulthandler
import os
import time
from pathlib import Path

import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.training import failures

DESTROY_SECONDS = 20.0
"""How long to destroy the groups may take; longer where a collective is never completed."""
QUIET_SECONDS = 20.0
"""How long gloo's threads may take for what they have to free."""
LOOK_SECONDS = 0.005
STANDARD_ERROR = 2
GLOO_THREAD = "pt_gloo_runloop"


def end_properly() -> None:
    """From now on, however this process comes to its end by itself, it ends as the module says."""
    atexit.register(_end, os.getpid())


def _end(pid: int) -> None:
    if os.getpid() != pid:  # a child that was forked from a rank
        return
    # The hang doctor has been told already: `watch_ranks` registers that after this function.
    failures.stop_watching()
    failures.stop_watching_launcher()
    if dist.is_initialized():
        # Groups wait for what is under way. A watchdog, which needs no Python, shows the stacks and
        # ends the process with 1 where that never completes.
        faulthandler.dump_traceback_later(DESTROY_SECONDS, exit=True, file=STANDARD_ERROR)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
    _wait_until_quiet(QUIET_SECONDS)


def _wait_until_quiet(seconds: float) -> None:
    """Returns when gloo's threads have slept at two looks, or after `seconds`."""
    deadline, num_quiet = time.monotonic() + seconds, 0
    while num_quiet < 2 and time.monotonic() < deadline:
        # Asleep, this thread leaves Python's lock to whoever waits for it.
        time.sleep(LOOK_SECONDS)
        num_quiet = 0 if _are_threads_at_work() else num_quiet + 1


def _are_threads_at_work() -> bool:
    """Whether a thread of gloo's runs or is ready to. Elsewhere than on Linux nobody tells: False."""
    for task in Path("/proc/self/task").glob("*"):
        try:
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended meanwhile
            continue
        if name == GLOO_THREAD and state != "S":
            return True
    return False
