"""Where the repository is: the line that clones it, and the link to it.

Called by: `macros`. Calls: `places`. The address is REPOSITORY_URL of the environment, or else
`Repository` under `[project.urls]` in pyproject.toml. A site that is built without it leaves the line
out, and links to the page on how the repository is laid out.
"""

import os

from source.page_words import say
from source.places import project


def repository_url() -> str:
    """The address, "" if nobody has said one."""
    return os.environ.get("REPOSITORY_URL") or project().get("urls", {}).get("Repository", "")


def clone_lines(url: str) -> str:
    """From nothing to a training run.

    >>> print(clone_lines("https://host/minimegatron"))
    $ git clone https://host/minimegatron
    $ cd minimegatron && make demo
    """
    return f"$ git clone {url}\n$ cd minimegatron && make demo"


def repository_link(url: str, up: str) -> str:
    """As Markdown, seen from a page that `up` leads to the root of."""
    if url:
        words = say("page.repository")
        return f"[{words}]({url})"
    words = say("page.about-the-repository")
    return f"[{words}]({up}contributing.md)"
