"""Text files and JSONL, read as batches of documents.

Torch-free. Counterpart: the reading half of Megatron's `tools/preprocess_data.py`.

The main process cuts files into `Batch`es of raw lines, or only names a file; `texts_of` makes text
of them in a worker, where parsing JSON and reading whole files are spread over processes.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minimegatron.core.json_text import parse_json

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
BATCH_BYTES = 1 << 20
"""Text handed to a worker at once: long enough to outweigh the hand-over, short enough to spread."""


def is_jsonl(path: str) -> bool:
    """Whether the name says one JSON object per line."""
    return path.lower().endswith(JSONL_SUFFIXES)


@dataclass(frozen=True)
class Batch:
    """Raw documents of one file and the line each begins on; or, for None, the unread file."""

    path: str
    size: int
    documents: list[bytes] | None = None
    lines: list[int] = field(default_factory=list)

    def place(self, number: int) -> str:
        """Where document `number` begins, for messages: `path:line`."""
        return f"{self.path}:{self.lines[number]}" if self.lines else self.path


def read_batches(paths: Iterable[str], document_per: str) -> Iterator[Batch]:
    """All files in order, in batches of about `BATCH_BYTES`. JSONL has a document per line; other
    text one per "file", "paragraph" or "line", as `document_per` says."""
    for path in paths:
        if not is_jsonl(path) and document_per == "file":
            yield Batch(path, os.path.getsize(path))
            continue
        with open(path, "rb") as file:
            by_paragraph = document_per == "paragraph" and not is_jsonl(path)
            documents = _paragraphs(file) if by_paragraph else enumerate(file, start=1)
            yield from _in_batches(path, documents)


def _paragraphs(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Runs of lines, each with the blank lines after it, and the number of its first line."""
    begin, run, blank = 1, [], False
    for number, line in enumerate(file, start=1):
        if blank and line.strip():
            yield begin, b"".join(run)
            begin, run = number, []
        run.append(line)
        blank = not line.strip()
    if run:
        yield begin, b"".join(run)


def _in_batches(path: str, documents: Iterable[tuple[int, bytes]]) -> Iterator[Batch]:
    texts, lines, size = [], [], 0
    for line, text in documents:
        texts.append(text)
        lines.append(line)
        size += len(text)
        if size >= BATCH_BYTES:
            yield Batch(path, size, texts, lines)
            texts, lines, size = [], [], 0
    if texts:
        yield Batch(path, size, texts, lines)


def texts_of(batch: Batch, json_keys: Sequence[str]) -> list[list[bytes]]:
    """Per key, the text of each document; other text than JSONL counts as one key.

    Raises ValueError, with file and line, for what is not JSON or has no text under a key.
    """
    if batch.documents is None:
        return [[Path(batch.path).read_bytes()]]
    if not is_jsonl(batch.path):
        return [[text.rstrip(b"\r\n") for text in batch.documents]]
    texts: list[list[bytes]] = [[] for _ in json_keys]
    for number, line in enumerate(batch.documents):
        record = _parse(line, batch.place(number)) if line.strip() else dict.fromkeys(json_keys, "")
        for key, column in zip(json_keys, texts, strict=True):
            column.append(_value(record, key, batch.place(number)))
    return texts


def _parse(line: bytes, place: str) -> dict:
    try:
        record = parse_json(line, place)
    except ValueError as error:
        raise ValueError(
            f"{error}; write one JSON object per line, or rename the file if it is plain text"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: holds a {type(record).__name__}, not an object with keys")
    return record


def _value(record: dict, key: str, place: str) -> bytes:
    if key not in record:
        raise ValueError(
            f"{place}: has no key {key!r}, only {', '.join(map(repr, record)) or 'none'}; "
            "name the right one with --json-keys"
        )
    if not isinstance(record[key], str):
        raise ValueError(f"{place}: {key!r} holds a {type(record[key]).__name__}, not text")
    # A lone surrogate, which JSON can spell and UTF-8 cannot, becomes "?".
    return record[key].encode(errors="replace")
