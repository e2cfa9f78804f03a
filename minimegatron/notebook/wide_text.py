"""Text of long lines, such as call trees, in a notebook: the lines are not wrapped.

Called by: notebooks. Calls: IPython. Megatron has no counterpart.
"""

import html

from IPython.display import publish_display_data

FRAME = '<pre style="white-space: pre; overflow-x: auto">{}</pre>'
"""A notebook wraps what a cell prints at the width of the window; not this, which can be scrolled."""


def in_frame(text: str) -> str:
    """The text as HTML, each of its lines in one line."""
    return FRAME.format(html.escape(text))


def show_wide(text: str) -> None:
    """Shows `text` as `print` does, but a line that is too long is not wrapped."""
    publish_display_data({"text/plain": text, "text/html": in_frame(text)})
