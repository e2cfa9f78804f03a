"""`minimegatron preprocess --input a.txt b.txt --output-prefix data/ab`: text to token files.

Counterpart: Megatron's `tools/preprocess_data.py`. Torch-free.
"""

import argparse
import os
import time

from tqdm import tqdm

from minimegatron.core.datasets.preprocess import PreprocessConfig, learn_tokenizer, preprocess
from minimegatron.core.datasets.sentences import SPLITTERS
from minimegatron.core.datasets.wordpiece_tokenizer import LOWER_CASE

USAGE = "--input FILE ... --output-prefix P [options]"
EXAMPLES = (
    "--input book.txt --output-prefix data/book",
    "--input *.jsonl --output-prefix data/web --append-eod",
    "--input a.txt --output-prefix a --tokenizer-type bpe",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of `PreprocessConfig`."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="text files, or *.jsonl")
    add(
        "--output-prefix",
        required=True,
        metavar="P",
        help="writes P_text_document.bin and .idx; P_KEY_document for each --json-keys KEY; "
        "P_KEY_sentence with --split-sentences",
    )
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="JSONL: keys that hold text (default: text)",
    )
    add(
        "--document-per",
        choices=("file", "paragraph", "line"),
        default="file",
        help="plain text: what counts as one document (default: file); a split into training and "
        "validation data never cuts through a document",
    )
    add(
        "--split-sentences",
        nargs="?",
        const="punctuation",
        choices=tuple(SPLITTERS),
        help="documents of sentences, for BERT and T5: of prose (punctuation), or of code (lines)",
    )
    _add_tokenizer(parser)
    add(
        "--dtype",
        choices=("auto", "uint8", "uint16", "int32", "int64"),
        default="auto",
        help="of stored tokens; auto takes uint16 below 65,500 tokens, else int32",
    )
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes; 1 (the default) works in this one, where BPE still uses every core",
    )


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tokenizer-type",
        choices=("byte", "bpe", *LOWER_CASE),
        default="byte",
        metavar="TYPE",
        help=f"byte (the default), bpe or, for BERT and T5, {' or '.join(LOWER_CASE)}",
    )
    add("--tokenizer-file", metavar="F", help="bpe: a tokenizer.json to use")
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help="bpe: learn N tokens from the input, and write P_tokenizer.json",
    )
    add(
        "--vocab-file",
        metavar="F",
        help="WordPiece: a vocabulary, one piece a line; by default one of the built-in text",
    )
    add("--eod-token", metavar="T", help="bpe: the end-of-document token, where it is not found")
    add("--append-eod", action="store_true", help="end each document with that token")


def run(args: argparse.Namespace) -> None:
    """Writes the datasets and says what became of the input. Raises ValueError."""
    names = PreprocessConfig.__dataclass_fields__
    config = PreprocessConfig(**{name: getattr(args, name) for name in names})
    total = sum(os.path.getsize(path) for path in config.input)
    try:
        if config.vocab_size is not None:
            with _bar("learning BPE", total) as bar:
                learn_tokenizer(config, bar.update)
            print(f"wrote {config.tokenizer_to_write}")
        begin = time.perf_counter()
        with _bar("tokenizing", total) as bar:
            summaries = preprocess(config, bar.update)
        seconds = time.perf_counter() - begin
    except OSError as error:
        raise ValueError(
            f"{error.filename or config.output_prefix}: {error.strerror}; "
            "what was there before is unchanged"
        ) from None
    print(f"{total / 1e6:,.1f} MB of text in {seconds:.1f} s, {total / 1e6 / seconds:.1f} MB/s")
    tokenizer_flags = ""
    if config.tokenizer_type == "bpe":
        file = config.tokenizer_file or config.tokenizer_to_write
        tokenizer_flags = f" --tokenizer-type BPETokenizer --tokenizer-file {file}"
    if config.tokenizer_type in LOWER_CASE:
        file = "" if config.vocab_file is None else f" --vocab-file {config.vocab_file}"
        tokenizer_flags = f" --tokenizer-type {config.tokenizer_type}{file}"
    for summary in summaries:
        left_out = f", {summary.empty_documents:,} empty" if summary.empty_documents else ""
        sentences = f"{summary.sentences:,} sentences, " if config.split_sentences else ""
        print(
            f"wrote {summary.prefix}.bin and .idx: {summary.documents:,} documents{left_out}, "
            f"{sentences}{summary.tokens:,} tokens"
        )
        print(f"train on it with --data-path {summary.prefix}{tokenizer_flags}")


def _bar(what: str, total: int) -> tqdm:
    """A progress bar in bytes and bytes per second; none where nobody watches."""
    # Not at once: a refusal then stands on a line of its own.
    options = {"disable": None, "leave": False, "delay": 0.5}
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, **options)
