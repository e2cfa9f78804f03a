"""Who calls whom in an unrolled step, as nested lists in HTML: what a reader sees without scripts.

Torch-free. Megatron has no counterpart.

`unrolled_page` says what the data hold.
"""

from collections.abc import Callable
from html import escape
from itertools import groupby
from typing import Any

LinkOf = Callable[[int], str]
"""Of a function, by its number: links to where it is explained, as HTML."""


def outline_html(data: dict[str, Any], links_of: LinkOf | None = None) -> str:
    """The links of the chain on each rank, and the messages of each; a function has its links once."""
    return "".join(_Outline(data, rank, links_of).html() for rank in data["ranks"])


class _Outline:
    """Of one rank."""

    def __init__(self, data: dict[str, Any], rank: dict[str, Any], links_of: LinkOf | None):
        self.data, self.rank, self.links_of = data, rank, links_of
        self.placed: set[int] = set()
        self.told: set[int] = set()
        self.messages: dict[int, list[tuple[int, list]]] = {}
        for number, message in enumerate(rank["messages"]):
            self.messages.setdefault(message[0], []).append((number, message))
        self.children: dict[int, list[int]] = {}
        for number, node in enumerate(rank["nodes"]):
            self.children.setdefault(node[1], []).append(number)

    def html(self) -> str:
        """The rank's heading, and its list."""
        number = self.rank["rank"]
        return (
            f'<h2 id="rank-{number}">Rank {number} <small>{escape(self.rank["place"])}</small></h2>'
            f'<ol class="u-outline">{self._item(0, [])}</ol>'
        )

    def _item(self, number: int, helpers: list[int]) -> str:
        function = self.data["views"][self.rank["nodes"][number][0]][0]
        # Once is enough, where no message would be lost.
        is_told = function in self.told and not self._has_messages(number)
        self.told.add(function)
        below = "" if is_told else self._below(number, [])
        inner = f"<ol>{below}</ol>" if below else ""
        carried = "".join(
            f"<li>{'; '.join(self._message(*one) for one in messages)}</li>"
            for _, messages in groupby(self.messages.get(number, ()), key=lambda one: one[1][8])
        )
        told = f'<ul class="u-messages">{carried}</ul>' if carried else ""
        head = self._head(self.rank["nodes"][number], helpers, bool(carried))
        place = "" if is_told else f' id="rank-{self.rank["rank"]}-call-{number}"'
        return f"<li{place}>{head}{told}{inner}</li>"

    def _below(self, number: int, helpers: list[int]) -> str:
        """The nearest links of the chain within a call, in order; `helpers` stand between."""
        parts: list[str] = []
        loops: list[int] = []
        for child in self.children.get(number, ()):
            node = self.rank["nodes"][child]
            part = self._item(child, helpers) if node[6] else self._below(child, [*helpers, child])
            if part:
                before, loops = loops, self.data["words"][node[8]]
                new = [line for line in loops if line not in before]
                parts += [f"<li><code>{escape(self._line(number, n))}</code></li>" for n in new]
            parts.append(part)
        return "".join(parts)

    def _has_messages(self, number: int) -> bool:
        return number in self.messages or any(
            map(self._has_messages, self.children.get(number, ()))
        )

    def _line(self, number: int, line: int) -> str:
        """A line of a call's function, without the comment behind it."""
        *_, first, last, text = self.data["functions"][
            self.data["views"][self.rank["nodes"][number][0]][0]
        ]
        own = line - (last - first + 1) if first and line > last else line
        return text.split("\n")[own - 1].partition("  #")[0].strip()

    def _head(self, node: list, helpers: list[int], is_carrying: bool) -> str:
        number = self.data["views"][node[0]][0]
        names = [self._name(self.rank["nodes"][helper]).partition(", ")[0] for helper in helpers]
        via = f"<i>via {escape(' › '.join(names))}</i> " if names else ""
        words = [] if is_carrying else [self._units(self.data["words"][node[4]])]
        words += [f"{node[3]} calls"] if node[3] > 1 else []
        told = " · ".join(filter(None, [*words, *self.data["words"][node[5]][:2]]))
        place = "" if number in self.placed else f" <small>{self._place(number)}</small>"
        self.placed.add(number)
        return f"<code>{escape(self._name(node))}</code> {via}{escape(told)}{place}"

    def _name(self, node: list) -> str:
        return self.data["names"][self.data["views"][node[0]][0]]

    def _place(self, number: int) -> str:
        if self.links_of is not None:
            return self.links_of(number)
        path, line = self.data["functions"][number][1:3]
        return f"{escape(path.rpartition('/')[2])}:{line}"

    def _units(self, units: list[list]) -> str:
        words = [f"microbatch{'' if which.isdigit() else 'es'} {which}" for _, which in units]
        if self.data["chunks"]:
            words = [
                f"chunk {chunk}: {word}" for (chunk, _), word in zip(units, words, strict=True)
            ]
        return "; ".join(words)

    def _message(self, number: int, message: list) -> str:
        _, is_sent, payload, microbatch, chunk, peer, peer_number, *_ = message
        where = f"rank {peer}"
        if peer_number >= 0:
            where = f'<a href="#rank-{peer}-message-{peer_number}">{where}</a>'
        arrow, to = ("→", "to") if is_sent else ("←", "from")
        of_chunk = f", chunk {chunk}," if self.data["chunks"] else ""
        words = f"{arrow} {self.data['words'][payload]} of microbatch {microbatch}{of_chunk} {to} "
        place = f"rank-{self.rank['rank']}-message-{number}"
        return f'<span id="{place}">{escape(words)}{where}</span>'
