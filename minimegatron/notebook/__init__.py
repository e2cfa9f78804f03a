"""Ranks that stay alive between the cells of a notebook, on ipyparallel.

    from minimegatron.notebook import live_ranks

    ranks = live_ranks(4)      # starts four processes, with torch.distributed initialised

    %%px                       # at the top of a cell: every rank runs it, and keeps its variables
    x = torch.full((2,), float(rank))
    dist.all_reduce(x)
    x                          # shown for every rank, in the order of ranks

    %%px 1,3                   # only these ranks
    %px x.sum()                # one line

    ranks["x.sum()"]           # in the notebook itself: the value on each rank, rank 0's first
    ranks.push(y=3)            # every rank gets a copy
    ranks.stop()               # ends them; so does the end or restart of the notebook's kernel

Each rank has `rank`, `world_size`, `torch`, `dist` (torch.distributed) and `device`. A rank that
raises shows its own traceback, folded, and all ranks stay as they are. Ranks that can never go on
are ended, with the hang doctor's word, and fresh ones take their place.

For whole runs, where nothing has to stay alive, `minimegatron.launch(fn, 4)` is quicker; `fn` may be
defined in a cell. It too says when ranks hang.

Beside ranks: `predict` and `compare` lock a reader's answers in and set them beside what is found;
`show_wide` shows text with lines too long to wrap; `drawing` has the notebooks' pictures.
"""

from minimegatron.notebook import ahead  # noqa: F401  first, for it starts something
from minimegatron.notebook.live_ranks import LiveRanks, live_ranks
from minimegatron.notebook.predictions import compare, predict
from minimegatron.notebook.wide_text import show_wide

__all__ = ["LiveRanks", "compare", "live_ranks", "predict", "show_wide"]
