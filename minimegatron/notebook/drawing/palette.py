"""Colours that are told apart under every common colour blindness (Okabe and Ito).

Megatron has no counterpart.
"""

BLUE, SKY, GREEN = "#0072b2", "#56b4e9", "#009e73"
ORANGE, RED, PINK = "#e69f00", "#d55e00", "#cc79a7"
GREY, LIGHT_GREY, LINE_GREY = "#7f7f7f", "#f1f4f7", "#aab4be"
OLIVE = "#b8a900"

IN_TURN = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY, OLIVE)
"""For things of one kind that are numbered."""


def nth_colour(number: int) -> str:
    """The colour of thing `number`; after eight they begin again."""
    return IN_TURN[number % len(IN_TURN)]
