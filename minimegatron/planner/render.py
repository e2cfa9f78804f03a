"""Pictures and files of a simulation: one function, four formats.

Megatron has no counterpart.
"""

import json

from minimegatron.planner.layer_costs import simulation_to_json
from minimegatron.planner.render_chrome import render_chrome
from minimegatron.planner.render_svg import render_svg
from minimegatron.planner.render_text import render_text
from minimegatron.planner.simulator import Simulation

FORMATS = ("text", "svg", "json", "chrome")


def render(
    simulation: Simulation,
    format: str = "text",
    width: int = 100,
    colour: bool = False,
    critical_path: bool = False,
) -> str:
    """The simulation as text of the given format.

    * "text": for a terminal of `width` columns, with colours on request.
    * "svg": a picture, the critical path outlined on request.
    * "json": every action and time, in the schema of `actions`.
    * "chrome": for Perfetto and chrome://tracing.

    Raises ValueError for another format.
    """
    if format == "text":
        return render_text(simulation, width, colour)
    if format == "svg":
        return render_svg(simulation, critical_path)
    if format == "json":
        return json.dumps(simulation_to_json(simulation), separators=(",", ":")) + "\n"
    if format == "chrome":
        return render_chrome(simulation)
    raise ValueError(f"unknown format {format!r}; use one of {', '.join(FORMATS)}")
