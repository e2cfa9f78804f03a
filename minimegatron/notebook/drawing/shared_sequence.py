"""Pictures of a sequence that several ranks share: which pair of tokens is whose, and when.

Megatron has no counterpart.
"""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from minimegatron.notebook.drawing.palette import LIGHT_GREY, nth_colour


def draw_pairs(maps: Mapping[str, torch.Tensor], word: str) -> None:
    """A panel per name: a row per token that looks, a column per token that it looks at.

    Each map is int64 [s, s]: the number that colours a pair, or -1 where there is none. `word` says
    what the numbers count.
    """
    figure, panels = plt.subplots(
        1, len(maps), figsize=(3.7 * len(maps), 4.1), layout="constrained", squeeze=False
    )
    for panel, (name, numbers) in zip(panels[0], maps.items(), strict=True):
        colours = [
            [to_rgb(nth_colour(number) if number >= 0 else LIGHT_GREY) for number in row]
            for row in numbers.tolist()
        ]
        panel.imshow(colours)
        places = [place + 0.5 for place in range(len(numbers) - 1)]
        panel.set_xticks(places, minor=True)
        panel.set_yticks(places, minor=True)
        panel.grid(which="minor", color="white", lw=0.6)
        panel.set(title=name, xlabel="looks at token")
        panel.spines[:].set_visible(False)
        panel.tick_params(which="both", length=0)
    panels[0][0].set_ylabel("token")
    highest = max(int(numbers.max()) for numbers in maps.values())
    handles = [Patch(color=nth_colour(n), label=f"{word} {n}") for n in range(highest + 1)]
    figure.legend(handles=handles, loc="outside lower center", ncols=highest + 1, frameon=False)
    plt.show()
