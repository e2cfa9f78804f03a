"""Text of long lines, such as call trees, in a notebook: the lines are not wrapped.

Megatron has no counterpart.
"""

import html

from IPython import get_ipython
from IPython.display import publish_display_data

FRAME = '<pre style="white-space: pre; overflow-x: auto">{}</pre>'
"""A notebook wraps what a cell prints at the width of the window; not this, which can be scrolled."""


def in_frame(text: str) -> str:
    """The text as HTML, each of its lines in one line."""
    return FRAME.format(html.escape(text))


def show_wide(text: str) -> None:
    """Shows `text` as `print` does, but a line that is too long is not wrapped."""
    show_either(text, in_frame(text))


def show_either(text: str, as_html: str) -> None:
    """Shows HTML in a notebook, text elsewhere."""
    if get_ipython() is None:
        print(text)
    else:
        publish_display_data({"text/plain": text, "text/html": as_html})
