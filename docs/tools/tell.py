"""Prints what the tools know and no page says: one door for the questions of people who edit pages.

    python docs/tools/tell.py minutes            how long each page and each path of the tour takes
    python docs/tools/tell.py translations zh    what is missing or older in docs/zh, by page
    python docs/tools/tell.py names SITE         where each name leads that other texts use
    python docs/tools/tell.py hang NAME          what the hang doctor says of a small job

Run by: a person. Calls: `source.commands`, then one tool of the list. `why` tells of one page.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from source.commands import run_command  # noqa: E402

COMMANDS = {
    "minutes": "tour.tour",
    "translations": "pages.translations",
    "names": "rosetta.named_in_texts",
    "hang": "records.hanging_ranks",
}

if __name__ == "__main__":
    sys.exit(run_command(__doc__, COMMANDS))
