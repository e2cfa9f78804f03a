"""Text files and JSONL into indexed datasets, with as many processes as asked for.

Counterpart: Megatron's `tools/preprocess_data.py`, whose output names it keeps:
`PREFIX_KEY_document.bin`, and `PREFIX_KEY_sentence.bin` of documents of sentences. There the input is
JSONL only; partitioning is left out.

The main process reads and writes, in order; workers take a batch of raw lines or a file name, and
return tokens in the form they have on disk. Torch-free.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context

import numpy

from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from minimegatron.core.datasets.megatron_tokenizer import (
    MegatronTokenizer,
    UnreadableText,
    build_tokenizer,
    decode_document,
    train_bpe,
)
from minimegatron.core.datasets.raw_text import (
    JSONL_SUFFIXES,
    Batch,
    is_jsonl,
    read_batches,
    texts_of,
)
from minimegatron.core.datasets.sentences import split_sentences
from minimegatron.core.datasets.wordpiece_tokenizer import LOWER_CASE, build_wordpiece

Progress = Callable[[int], object]
"""Called with how many more input bytes are finished."""


@dataclass(frozen=True)
class PreprocessConfig:
    """What to read, how to tokenize it, where to write it."""

    input: Sequence[str]
    output_prefix: str
    json_keys: Sequence[str] = ("text",)
    """Of JSONL: each key's text goes to a dataset of its own."""
    document_per: str = "file"
    """Of plain text: a document per "file", "paragraph" (blank lines between) or "line"."""
    tokenizer_type: str = "byte"
    tokenizer_file: str | None = None
    vocab_size: int | None = None
    """BPE without a tokenizer file: learn one of this size from the input."""
    vocab_file: str | None = None
    """WordPiece: its vocabulary; None for one of the built-in text."""
    split_sentences: str | None = None
    """Cut documents into sentences, by "punctuation" or by "lines"; BERT and T5 need it."""
    eod_token: str | None = None
    append_eod: bool = False
    """End each document with the end-of-document token."""
    dtype: str = "auto"
    """Of the stored tokens: "auto" for what the vocabulary takes, or a name."""
    workers: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError, in the words of the flags, for what cannot be."""
        if self.workers < 1:
            raise ValueError(f"--workers is {self.workers}; give 1 or more")
        if self.tokenizer_type == "byte" and (self.tokenizer_file or self.vocab_size):
            raise ValueError(
                "--tokenizer-file and --vocab-size go with --tokenizer-type bpe; bytes need neither"
            )
        if self.tokenizer_type == "bpe" and bool(self.tokenizer_file) == bool(self.vocab_size):
            raise ValueError(
                "--tokenizer-type bpe needs --tokenizer-file, to use a tokenizer.json, or "
                "--vocab-size, to learn one from the input, and not both"
            )
        self._check_sentences()
        for path in self.input:
            if not os.path.isfile(path):
                kind = "is a folder" if os.path.isdir(path) else "does not exist"
                raise ValueError(f"--input: {path} {kind}; name text or JSONL files")
        kinds = {is_jsonl(path) for path in self.input}
        if len(kinds) != 1:
            raise ValueError(
                f"--input holds {'both JSONL and plain text' if kinds else 'no file'}; "
                "give files of one kind"
            )
        if self.reads_jsonl and self.document_per != "file":
            raise ValueError("--document-per goes with plain text; JSONL has a document per line")
        if not self.reads_jsonl and list(self.json_keys) != ["text"]:
            raise ValueError(
                f"--json-keys goes with JSONL, but {self.input[0]} does not end in "
                f"{', '.join(JSONL_SUFFIXES)}"
            )
        for key in self.json_keys:
            if self.json_keys.count(key) > 1:
                raise ValueError(f"--json-keys names {key!r} twice")

    def _check_sentences(self) -> None:
        if self.tokenizer_type in LOWER_CASE:
            if self.tokenizer_file or self.vocab_size or self.eod_token:
                raise ValueError(
                    "--tokenizer-file, --vocab-size and --eod-token go with --tokenizer-type bpe; "
                    f"{self.tokenizer_type} takes --vocab-file"
                )
        elif self.vocab_file is not None:
            raise ValueError(
                f"--vocab-file {self.vocab_file} goes with --tokenizer-type "
                f"{' or '.join(LOWER_CASE)}, not with {self.tokenizer_type}"
            )
        if self.split_sentences is not None and self.append_eod:
            raise ValueError(
                "--append-eod goes with samples that run over documents; those made of sentences, by "
                "--split-sentences, do not; drop one"
            )

    @property
    def reads_jsonl(self) -> bool:
        return is_jsonl(self.input[0])

    @property
    def tokenizer_to_write(self) -> str:
        """Where a learned tokenizer goes."""
        return f"{self.output_prefix}_tokenizer.json"

    def prefix_of(self, key: str) -> str:
        """What a dataset is called: the argument for `--data-path`."""
        level = "document" if self.split_sentences is None else "sentence"
        return f"{self.output_prefix}_{key}_{level}"


@dataclass
class Summary:
    """What became of one key: the dataset's name and what it holds."""

    prefix: str
    documents: int = 0
    empty_documents: int = 0
    """Left out: they have no tokens."""
    sentences: int = 0
    """As many as documents, where those are not cut."""
    tokens: int = 0


# -- Encoding: in workers --


@dataclass(frozen=True)
class Encoded:
    """Documents of one key: their tokens as they go to disk, and how many each sentence has.

    A document that is not cut counts as one sentence.
    """

    tokens: bytes
    lengths: list[int]
    sentences: list[int]
    """Of each document."""
    empty: int
    """Documents without tokens, which are left out."""


class Encoder:
    """Turns batches into tokens; every worker has one."""

    def __init__(self, config: PreprocessConfig):
        self.config = config
        file = config.tokenizer_file
        if config.tokenizer_type == "bpe" and file is None:
            file = config.tokenizer_to_write
        if config.tokenizer_type in LOWER_CASE:
            self.tokenizer = build_wordpiece(config.tokenizer_type, config.vocab_file)
        else:
            self.tokenizer = build_tokenizer(config.tokenizer_type, file, config.eod_token)
        self.dtype = choose_dtype(config.dtype, self.tokenizer)
        self.end = numpy.array([self.tokenizer.eod] if config.append_eod else [], self.dtype)

    def encode(self, batch: Batch) -> list[Encoded]:
        """One result per key. Raises ValueError, with file and line, for text it cannot read."""
        results = []
        for documents in texts_of(batch, self.config.json_keys):
            try:
                cut = [self._sentences(text, number) for number, text in enumerate(documents)]
                tokenized = self.tokenizer.tokenize_batch([text for texts in cut for text in texts])
            except UnreadableText as error:
                raise _not_utf8(batch, error.document, error.byte) from None
            results.append(self._encoded(tokenized, [len(texts) for texts in cut]))
        return results

    def _sentences(self, document: bytes, number: int) -> list[bytes]:
        """What becomes a sequence each: the sentences of a document, or all of it."""
        if self.config.split_sentences is None:
            return [document]
        text = decode_document(document, number)
        return [part.encode() for part in split_sentences(text, self.config.split_sentences)]

    def _encoded(self, tokenized: list[numpy.ndarray], counts: list[int]) -> Encoded:
        """`tokenized` holds `counts[i]` sequences of document i, one document after the other."""
        parts, lengths, sentences, begin = [], [], [], 0
        for count in counts:
            kept = [ids for ids in tokenized[begin : begin + count] if len(ids)]
            begin += count
            if kept:
                parts += [*kept, self.end]
                lengths += [len(ids) for ids in kept]
                lengths[-1] += len(self.end)
                sentences.append(len(kept))
        joined = numpy.concatenate(parts, dtype=self.dtype, casting="unsafe") if parts else b""
        return Encoded(bytes(joined), lengths, sentences, len(counts) - len(sentences))


def _not_utf8(batch: Batch, number: int, byte: int) -> ValueError:
    return ValueError(
        f"{batch.place(number)}: byte {byte} is not UTF-8; convert the file, or use "
        "--tokenizer-type byte, which reads any bytes"
    )


def choose_dtype(name: str, tokenizer: MegatronTokenizer) -> type[numpy.number]:
    """The dtype for this vocabulary, or the named one. Raises ValueError if that is too narrow."""
    if name == "auto":
        return DType.optimal_dtype(tokenizer.vocab_size)
    dtype = getattr(numpy, name)
    if numpy.iinfo(dtype).max < tokenizer.vocab_size - 1:
        raise ValueError(
            f"--dtype {name} holds ids up to {numpy.iinfo(dtype).max}, but the vocabulary has "
            f"{tokenizer.vocab_size}; use --dtype auto"
        )
    return dtype


_encoder: Encoder | None = None


def _start_worker(config: PreprocessConfig) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _encoder = Encoder(config)


def _encode_in_worker(batch: Batch) -> list[Encoded]:
    assert _encoder is not None, "the pool's initializer makes it"
    return _encoder.encode(batch)


def _encode_all(config: PreprocessConfig, encoder: Encoder) -> Iterator[tuple[int, list[Encoded]]]:
    """The size of every batch and its tokens, in the order of the input."""
    batches = read_batches(config.input, config.document_per)
    if config.workers == 1:
        for batch in batches:
            yield batch.size, encoder.encode(batch)
        return
    # Spawned, not forked: learning a BPE leaves threads behind.
    pool = ProcessPoolExecutor(
        config.workers, get_context("spawn"), initializer=_start_worker, initargs=(config,)
    )
    under_way: deque[tuple[int, Future[list[Encoded]]]] = deque()
    try:
        for batch in batches:
            under_way.append((batch.size, pool.submit(_encode_in_worker, batch)))
            # A few more than workers, so that none waits; not all, so that memory stays small.
            if len(under_way) > 4 * config.workers:
                size, future = under_way.popleft()
                yield size, future.result()
        for size, future in under_way:
            yield size, future.result()
    except BrokenProcessPool:
        raise ValueError(
            f"one of {config.workers} workers was killed, perhaps for want of memory; "
            "use fewer --workers, or cut the largest file"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


# -- The whole job --


def learn_tokenizer(config: PreprocessConfig, progress: Progress) -> None:
    """Learns a BPE from the input and writes it to `config.tokenizer_to_write`."""
    tokenizer = train_bpe(_texts_to_learn_from(config, progress), config.vocab_size)
    write_atomically(config.tokenizer_to_write, tokenizer.encode())


def _texts_to_learn_from(config: PreprocessConfig, progress: Progress) -> Iterator[str]:
    for batch in read_batches(config.input, config.document_per):
        for documents in texts_of(batch, config.json_keys):
            for number, document in enumerate(documents):
                try:
                    yield document.decode()
                except UnicodeDecodeError as error:
                    raise _not_utf8(batch, number, error.start) from None
        progress(batch.size)


def preprocess(config: PreprocessConfig, progress: Progress = lambda size: None) -> list[Summary]:
    """Writes one dataset per key. Nothing appears under its name unless the whole input was read.

    Raises ValueError for input it cannot read, OSError for output it cannot write.
    """
    encoder = Encoder(config)
    keys = config.json_keys if config.reads_jsonl else ["text"]
    summaries = [Summary(config.prefix_of(key)) for key in keys]
    with ExitStack() as unfinished:
        builders = [
            unfinished.enter_context(IndexedDatasetBuilder(f"{summary.prefix}.bin", encoder.dtype))
            for summary in summaries
        ]
        for size, results in _encode_all(config, encoder):
            for builder, summary, encoded in zip(builders, summaries, results, strict=True):
                builder.add_tokenized(encoded.tokens, encoded.lengths, encoded.sentences)
                summary.documents += len(encoded.sentences)
                summary.sentences += len(encoded.lengths)
                summary.empty_documents += encoded.empty
                summary.tokens += sum(encoded.lengths)
            progress(size)
        for summary in summaries:
            if not summary.tokens:
                raise ValueError(
                    f"no text for {summary.prefix} in {', '.join(config.input)}; nothing written"
                )
        for builder, summary in zip(builders, summaries, strict=True):
            builder.finalize(f"{summary.prefix}.idx")
    return summaries
