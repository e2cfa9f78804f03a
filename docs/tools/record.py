"""Makes anew what is kept of runs, of Megatron and of files: one door for all that is recorded.

    python docs/tools/record.py                        the names
    python docs/tools/record.py restart                that record
    python docs/tools/record.py traces 1f1b one-rank   with words of its own

Run by: a person; the Makefile. Called by: `why`, for the list. Calls: `source.commands`, then one
tool of the list.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from source.commands import run_command  # noqa: E402

COMMANDS = {
    "traces": "records.traces",
    "timeline": "records.timeline",
    "restart": "records.restart",
    "verdicts": "records.verdicts",
    "overlap": "records.overlap",
    "expert-loads": "records.expert_loads",
    "kept-bytes": "records.kept_bytes",
    "rank-bytes": "records.rank_bytes",
    "entered-files": "records.entered_files",
    "megatron-core": "records.megatron_core",
    "megatron-files": "records.megatron_files",
    "links": "source.link_names",
    "spine": "source.spine",
    "notebooks": "pages.notebook_runs",
}

if __name__ == "__main__":
    sys.exit(run_command(__doc__, COMMANDS))
