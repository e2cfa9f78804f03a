"""MB/s of `minimegatron preprocess` beside plainer ways to the same files.

Run by: `python -m tests.benchmarks.preprocess --megabytes 20`. Calls: `core.datasets.preprocess`.

Every way turns the same JSONL (the standard library's source, repeated) into tokens with an
end-of-document each. All take turns, the first to go changing each time; medians. MB are 10^6 bytes
of JSONL. Ways that need a package which is not installed (megatron-core, tokenizers, datasets) are
left out, and said to be. Hugging Face's writes Arrow instead of .bin and .idx, to disk as well.

Imports no torch: every worker imports this module anew.
"""

import argparse
import array
import importlib.util
import itertools
import json
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy

from minimegatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from minimegatron.core.datasets.megatron_tokenizer import train_bpe
from minimegatron.core.datasets.preprocess import PreprocessConfig, preprocess

Way = Callable[[Path, str], object]
"""Reads the JSONL, writes a dataset at the prefix."""


def _texts(source: Path) -> Iterator[str]:
    with source.open() as lines:
        for line in lines:
            yield json.loads(line)["text"]


def _ours(workers: int, **settings) -> Way:
    def way(source: Path, prefix: str) -> None:
        config = PreprocessConfig(
            [str(source)], prefix, append_eod=True, workers=workers, **settings
        )
        preprocess(config)

    return way


def _plain_bytes(source: Path, prefix: str) -> None:
    """What one writes first: a Python loop, a list of ids per document, the .bin only."""
    lengths = []
    with open(f"{prefix}_text_document.bin", "wb") as out:
        for text in _texts(source):
            ids = [*text.encode(), 256]
            array.array("H", ids).tofile(out)
            lengths.append(len(ids))


def _one_at_a_time(encode: Callable[[str], list[int]], builder_class: type) -> Way:
    """As Megatron's tools/preprocess_data.py with one worker: encode, add, next."""

    def way(source: Path, prefix: str) -> None:
        builder = builder_class(f"{prefix}_text_document.bin", numpy.uint16)
        for text in _texts(source):
            ids = encode(text)
            if ids:
                builder.add_document([*ids, 256], [len(ids) + 1])
        builder.finalize(f"{prefix}_text_document.idx")

    return way


def _tokenizers_alone(tokenizer) -> Way:
    """`encode_batch` of text already in memory, nothing written: the ceiling of any BPE way."""
    texts: list[str] = []

    def way(source: Path, prefix: str) -> None:
        if not texts:
            texts.extend(_texts(source))
        for begin in range(0, len(texts), 64):
            tokenizer.encode_batch_fast(texts[begin : begin + 64], add_special_tokens=False)

    return way


def _hugging_face(encode_batch: Callable[[list[str]], list[list[int]]], workers: int) -> Way:
    """`datasets`: read the JSONL, `map` over it, leave the ids in its Arrow cache."""
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()  # else a repeat would read what the first run left

    def tokenize(batch: dict) -> dict:
        return {"input_ids": [[*ids, 256] for ids in encode_batch(batch["text"])]}

    def way(source: Path, prefix: str) -> None:
        with tempfile.TemporaryDirectory() as cache:
            data = datasets.load_dataset("json", data_files=str(source), cache_dir=cache)["train"]
            data.map(
                tokenize,
                batched=True,
                batch_size=64,
                num_proc=workers if workers > 1 else None,
                remove_columns=["text"],
            )

    return way


def _utf8(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def ways(source: Path, folder: Path, vocab_size: int) -> dict[str, Way]:
    """Every way this machine has the packages for."""
    found: dict[str, Way] = {
        "bytes: minimegatron": _ours(1),
        "bytes: minimegatron, 2 workers": _ours(2),
        "bytes: Python loop": _plain_bytes,
    }
    builders = {"minimegatron": IndexedDatasetBuilder}
    if importlib.util.find_spec("megatron"):
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder as TheirBuilder

        builders["megatron-core"] = TheirBuilder
        found["bytes: loop over megatron-core's builder"] = _one_at_a_time(
            lambda text: list(text.encode()), TheirBuilder
        )
    else:
        print("megatron-core is not installed: its builder is left out")
    has_datasets = importlib.util.find_spec("datasets") is not None
    if has_datasets:
        found["bytes: Hugging Face datasets"] = _hugging_face(_utf8, 1)
        found["bytes: Hugging Face datasets, 2 workers"] = _hugging_face(_utf8, 2)
    else:
        print("datasets is not installed: Hugging Face's way is left out")
    if not importlib.util.find_spec("tokenizers"):
        print("tokenizers is not installed: BPE is left out")
        return found
    import tokenizers

    file = folder / "tokenizer.json"
    file.write_text(train_bpe(itertools.islice(_texts(source), 200), vocab_size))
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    bpe = {"tokenizer_type": "bpe", "tokenizer_file": str(file)}
    found |= {
        "bpe: minimegatron": _ours(1, **bpe),
        "bpe: minimegatron, 2 workers": _ours(2, **bpe),
        "bpe: tokenizers alone, nothing written": _tokenizers_alone(tokenizer),
    }
    for name, builder in builders.items():
        found[f"bpe: loop over {name}'s builder"] = _one_at_a_time(
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids, builder
        )
    if has_datasets:

        def encode_batch(texts: list[str]) -> list[list[int]]:
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

        found["bpe: Hugging Face datasets"] = _hugging_face(encode_batch, 1)
        found["bpe: Hugging Face datasets, 2 workers"] = _hugging_face(encode_batch, 2)
    return found


def write_source(path: Path, megabytes: float) -> int:
    """The standard library's files, one JSON object each, again and again; returns the bytes."""
    size = 0
    with path.open("w") as out:
        for file in itertools.cycle(sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))):
            if size >= megabytes * 1e6:
                return size
            size += out.write(json.dumps({"text": file.read_text(errors="replace")}) + "\n")


def main() -> None:
    """Prints the table; `--json F` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "in.jsonl"
        size = write_source(source, args.megabytes)
        contenders = ways(source, folder, args.vocab_size)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for repeat in range(args.repeats):
            order = list(contenders)[repeat:] + list(contenders)[:repeat]
            for name in order:
                begin = time.perf_counter()
                contenders[name](source, str(folder / "out"))
                seconds[name].append(time.perf_counter() - begin)
        tokens = int(IndexedDataset(folder / "out_text_document").sequence_lengths.sum())
    load = os.getloadavg()[0]
    print(f"{size / 1e6:.1f} MB of JSONL, {os.cpu_count()} CPUs, load {load:.1f}; MB/s")
    print(f"  median    best  of {args.repeats}")
    rates = {name: size / 1e6 / statistics.median(times) for name, times in seconds.items()}
    for name, rate in rates.items():
        print(f"{rate:8.1f}{size / 1e6 / min(seconds[name]):8.1f}  {name}")
    if args.json:
        args.json.write_text(json.dumps({"megabytes_per_second": rates, "tokens": tokens}))


if __name__ == "__main__":
    main()
