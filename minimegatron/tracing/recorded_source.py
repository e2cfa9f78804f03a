"""The lines of source that a recording mentions, kept with it, so that it can be read anywhere.

Megatron has no counterpart.
"""

import functools
import inspect
import linecache
import os
import sys
import sysconfig
import tokenize
from pathlib import Path
from typing import Any

from minimegatron.tracing.rank_trace import Source

_PACKAGE_PARENT = Path(__file__).resolve().parents[2]
_PACKAGE = str(_PACKAGE_PARENT / "minimegatron") + os.sep
_LAUNCHER = str(Path(_PACKAGE, "launching", "launcher.py"))
_NOT_OURS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def short_path(file: str) -> str:
    """A path as a reader knows it: from the package, or from the working directory, or whole."""
    return _short_path(file, os.getcwd())


@functools.lru_cache(maxsize=1024)  # asked for every call of a recording, of few files
def _short_path(file: str, working_directory: str) -> str:
    path = Path(file)
    for base in (_PACKAGE_PARENT, Path(working_directory)):
        if path.is_absolute() and path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return file


def is_ours(file: str) -> bool:
    """False for the standard library, installed packages except this one, and the launcher."""
    if file.startswith(_PACKAGE):
        return file != _LAUNCHER
    return not file.startswith(("<", *_NOT_OURS))


class SourceTexts:
    """Functions by "path:first line", and stacks of lines within them, each kept once."""

    def __init__(self, codes: dict[int, Any]):
        self.sources: dict[str, Source] = {}
        self.stacks: list[list[tuple[str, int]]] = []
        self._codes = codes
        self._stack_ids: dict[tuple, int] = {}

    def add_function(self, file: str, line: int, name: str) -> str:
        """Keeps a function's text; returns its key."""
        key = f"{short_path(file)}:{line}"
        if key not in self.sources:
            self.sources[key] = Source(name, function_text(file, line))
        return key

    def add_stack(self, frames: tuple) -> int:
        """Keeps a stack, given as (code id, instruction, ...) from the inside out.

        Returns its number.
        """
        if frames not in self._stack_ids:
            stack = []
            for code_id, instruction in list(zip(frames[::2], frames[1::2], strict=True))[::-1]:
                code = self._codes[code_id]
                if is_ours(code.co_filename):
                    line = _line_of(code, instruction)
                    stack.append((self._add_code(code, line), line))
            self._stack_ids[frames] = len(self.stacks)
            self.stacks.append(stack)
        return self._stack_ids[frames]

    def _add_code(self, code: Any, line: int) -> str:
        if code.co_name == "<module>":  # not the whole file, only the line that called
            key = f"{short_path(code.co_filename)}:{line}"
            text = linecache.getline(code.co_filename, line)
            self.sources.setdefault(key, Source("<module>", text))
            return key
        name = f"{module_name(code.co_filename)}.{code.co_qualname}"
        return self.add_function(code.co_filename, code.co_firstlineno, name)


def _line_of(code: Any, instruction: int) -> int:
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def module_name(file: str) -> str:
    """The dotted name of a source file's module, also of the one that was run as a script."""
    path = Path(short_path(file))
    if path.parts[:1] == ("minimegatron",):
        return ".".join(path.with_suffix("").parts)
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == file and name != "__main__":
            return name
    return Path(file).stem


def function_text(file: str, first_line: int) -> str:
    """A function's own text, from its first decorator on; "" where there is none."""
    lines = linecache.getlines(file)
    known = _texts.get((file, first_line))
    if known is None or known[0] is not lines:
        known = _texts[file, first_line] = (
            lines,
            _block(lines[first_line - 1 :] if first_line else []),
        )
    return known[1]


_texts: dict[tuple[str, int], tuple[list[str], str]] = {}
"""By file and first line: the file's lines, while `linecache` has no newer ones, and the text."""


def _block(lines: list[str]) -> str:
    try:
        return "".join(inspect.getblock(lines)) if lines else ""
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return ""
