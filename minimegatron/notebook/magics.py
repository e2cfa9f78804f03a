"""`%%px`: a cell that runs on live ranks, its output labelled and in the order of ranks.

Megatron has no counterpart. ipyparallel's own `%%px` shows what comes first first.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.display import publish_display_data

from minimegatron.notebook.wide_text import in_frame, show_either

IN_CELL = re.compile(r'File ".*ipykernel_\d+.*", line (\d+) in <module>')
CELL_LINE = re.compile(r"Cell In\[(\d+)\], line (\d+)")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
HIGHLIGHT, PLAIN = "\x1b[31m", "\x1b[39m"


class CellError(RuntimeError):
    """A cell failed on some ranks. `errors` has (name, value, traceback) by rank.

    A notebook shows a line for each error. Their tracebacks stand above, folded: `show_errors`.
    """

    def __init__(self, errors: Mapping[int, Any], notes: Sequence[str] = ()):
        self.errors, self.notes = dict(errors), [note for note in notes if note]
        said = [_in_a_line(ranks, error) for ranks, error in _group(errors)]
        super().__init__("\n".join(said + self.notes))

    def _render_traceback_(self) -> list[str]:
        # IPython shows this in place of the frames of this package, which say nothing here.
        lines = [
            f"{HIGHLIGHT}{_in_a_line(ranks, error)}{PLAIN}" for ranks, error in _group(self.errors)
        ]
        for note in self.notes:
            lines += ["", *note.splitlines()]
        return lines


def show_errors(errors: Mapping[int, Any]) -> None:
    """Shows every error's traceback, folded in a notebook, unfolded where there is only text."""
    for ranks, error in _group(errors):
        title, text = f"Traceback of {_list(ranks)}", ANSI.sub("", error.traceback)
        folded = f"<details><summary>{title}</summary>{in_frame(text)}</details>"
        show_either(f"--- {title} ---\n{text}", folded)


def _in_a_line(ranks: list[int], error: Any) -> str:
    """Who, where, what: `rank 2, In [5], line 3: KeyError: 'trouble'`."""
    places = CELL_LINE.findall(ANSI.sub("", error.traceback))
    # The frames are written outermost first: the last in a cell is where the reader's code stands.
    where = f", In [{places[-1][0]}], line {places[-1][1]}" if places else ""
    return f"{_list(ranks)}{where}: {error.ename}: {error.evalue}"


def _group(errors: Mapping[int, Any]) -> list[tuple[list[int], Any]]:
    """The same exception on several ranks is shown once."""
    groups: dict[tuple, tuple[list[int], Any]] = {}
    for rank, error in errors.items():
        groups.setdefault((error.ename, error.evalue), ([], error))[0].append(rank)
    return list(groups.values())


def _list(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@magics_class
class RankMagics(Magics):
    """`%%px`, `%%px 0,2` and `%px` for one cluster."""

    def __init__(self, shell: Any, run: Callable[[str, Iterable[int] | None], None]):
        super().__init__(shell)
        self._run = run

    @no_var_expand
    @line_cell_magic
    def px(self, line: str, cell: str | None = None) -> None:
        """Runs a cell on all live ranks, or on those listed after `%%px`."""
        if cell is None:
            self._run(line, None)
        else:
            self._run(cell, _parse_ranks(line))


def _parse_ranks(line: str) -> list[int] | None:
    if not line.strip():
        return None
    try:
        return [int(word) for word in line.replace(",", " ").split()]
    except ValueError:
        raise ValueError(
            f"%%px {line.strip()}: give the numbers of ranks, as in %%px 0,2; or nothing, for all"
        ) from None


def show(replies: Mapping[int, Any]) -> None:
    """Shows what each rank printed, displayed and returned."""
    for rank in sorted(replies):
        reply, label = replies[rank], f"rank {rank}"
        _write(sys.stdout, label, reply.stdout)
        for output in reply.outputs:
            _display(label, output["data"], output.get("metadata"))
        if reply.execute_result:
            _display(label, reply.execute_result["data"], reply.execute_result.get("metadata"))
        _write(sys.stderr, label, reply.stderr)


def _write(stream: Any, label: str, text: str) -> None:
    for line in text.splitlines():
        print(f"{label} | {line}", file=stream)


def _display(label: str, data: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> None:
    if set(data) == {"text/plain"}:
        _write(sys.stdout, label, data["text/plain"])
    else:
        print(f"{label} |")
        sys.stdout.flush()
        publish_display_data(dict(data), metadata or {})


def places(stacks: Mapping[int, str], cell: str) -> str:
    """The line of `cell` in which each rank stands, of those whose `stacks` show one."""
    # IPython counts without the blank lines that a cell begins with.
    lines, said = re.sub(r"^(\s*\n)+", "", cell).splitlines(), []
    for rank, stack in sorted(stacks.items()):
        if (found := IN_CELL.search(stack)) and int(found[1]) <= len(lines):
            number = int(found[1])
            said.append(f"rank {rank} stands in line {number}: {lines[number - 1].strip()}")
    return "\n".join(said)
