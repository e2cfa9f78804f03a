"""The pictures of the notebooks, so that their cells hold only what is drawn.

    from minimegatron.notebook.drawing import draw_groups

Each function draws and shows one figure. `ranks`: what ranks are and exchange; `runs`: what a run
did; `hiding`: all-to-alls beside the computation; `sizes`: numbers side by side; `token_ways`: who
chose whom, and how even the load is; `shared_sequence`: pairs of tokens over ranks; `model_stages`:
models over the stages of a pipeline.
"""

from minimegatron.notebook.drawing.hiding import draw_hiding, draw_lanes
from minimegatron.notebook.drawing.model_stages import StageOfModel, draw_models
from minimegatron.notebook.drawing.ranks import (
    draw_groups,
    draw_matrices,
    draw_programs,
    draw_snapshots,
)
from minimegatron.notebook.drawing.runs import (
    draw_buffer,
    draw_calls,
    draw_flights,
    draw_held_bytes,
    draw_waiting,
)
from minimegatron.notebook.drawing.shared_sequence import draw_pairs
from minimegatron.notebook.drawing.sizes import (
    draw_changes,
    draw_configurations,
    draw_lengths,
    draw_shares,
    draw_stages,
    draw_weights,
)
from minimegatron.notebook.drawing.token_ways import (
    draw_balance,
    draw_routing,
    draw_splits,
    draw_ways,
)

__all__ = [
    "StageOfModel",
    "draw_balance",
    "draw_buffer",
    "draw_calls",
    "draw_changes",
    "draw_configurations",
    "draw_flights",
    "draw_groups",
    "draw_held_bytes",
    "draw_hiding",
    "draw_lanes",
    "draw_lengths",
    "draw_matrices",
    "draw_models",
    "draw_pairs",
    "draw_programs",
    "draw_routing",
    "draw_shares",
    "draw_snapshots",
    "draw_splits",
    "draw_stages",
    "draw_waiting",
    "draw_ways",
    "draw_weights",
]
