"""The `.bin/.idx` format byte for byte, what corrupt files say, atomic writing, resident memory."""

import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.core.datasets import atomic_file, indexed_dataset
from minimegatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset
from minimegatron.core.datasets.gpt_dataset import GPTDataset
from minimegatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    open_tokens,
)
from minimegatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset
from minimegatron.core.datasets.utils import DataError
from tests.core.datasets.corpora import write_dataset
from tests.figures import figure

DOCUMENTS = [[1, 2, 3], [40_000], [5, 6]]


def test_bytes_on_disk(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", DOCUMENTS)
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 40_000, 5, 6)
    assert (tmp_path / "d.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)  # version
        + struct.pack("<B", 8)  # uint16
        + struct.pack("<QQ", 3, 4)  # sequences, document entries
        + struct.pack("<3i", 3, 1, 2)  # lengths
        + struct.pack("<3q", 0, 6, 8)  # where each begins
        + struct.pack("<4q", 0, 1, 2, 3)  # where each document begins, and the end
    )


def test_bytes_on_disk_with_modes_and_documents_of_several_sequences(tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    with IndexedDatasetBuilder(f"{prefix}.bin", numpy.int32, multimodal=True) as builder:
        builder.add_document(torch.tensor([7, -1, 9]), [2, 1], [0, 1])
        builder.add_item([4], mode=3)
        builder.end_document()
        builder.finalize(f"{prefix}.idx")
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<4i", 7, -1, 9, 4)
    assert Path(f"{prefix}.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 4, 3, 3)
        + struct.pack("<3i", 2, 1, 1)
        + struct.pack("<3q", 0, 8, 12)
        + struct.pack("<3q", 0, 2, 3)
        + struct.pack("<3b", 0, 1, 3)
    )
    sequences, modes = IndexedDataset(prefix, multimodal=True)[1:3]
    assert [s.tolist() for s in sequences] == [[9], [4]]
    assert modes.tolist() == [1, 3]
    # Modes that are not asked for are passed over.
    assert IndexedDataset(prefix)[1].tolist() == [9]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([numpy.uint8, numpy.int8, numpy.int16, numpy.int32, numpy.int64, numpy.uint16]),
    st.lists(st.lists(st.lists(st.integers(0, 127), max_size=6), max_size=4), max_size=6),
)
def test_what_is_written_is_read(tmp_path_factory, dtype, documents) -> None:
    prefix = tmp_path_factory.mktemp("d") / "d"
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for sequences in documents:
            builder.add_document(sum(sequences, []), [len(s) for s in sequences])
        builder.finalize(f"{prefix}.idx")
    dataset = IndexedDataset(prefix)
    expected = [s for sequences in documents for s in sequences]
    assert [s.tolist() for s in dataset[:]] == expected
    assert all(s.dtype == dtype for s in dataset[:])
    assert numpy.diff(dataset.document_indices).tolist() == [len(d) for d in documents]
    for i, sequence in enumerate(expected):
        for offset in range(len(sequence) + 1):
            assert dataset.get(i, offset).tolist() == sequence[offset:]
            assert dataset.get(i, offset, 0).tolist() == []
        assert dataset.get(i, 0, len(sequence)).tolist() == sequence
    again = pickle.loads(pickle.dumps(dataset))
    assert len(again) == len(expected)


def test_reads_stay_inside_the_sequence(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_dataset(tmp_path / "d", DOCUMENTS))
    with pytest.raises(IndexError, match="tokens 1 to 4 of sequence 0 .* which has 3"):
        dataset.get(0, 1, 3)
    with pytest.raises(IndexError):
        dataset[3]
    with pytest.raises(ValueError, match="its step is 2, not 1"):
        dataset[::2]
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 9


def test_optimal_dtype() -> None:
    assert DType.optimal_dtype(257) is numpy.uint16
    assert DType.optimal_dtype(65_499) is numpy.uint16
    assert DType.optimal_dtype(65_500) is numpy.int32
    assert DType.optimal_dtype(None) is numpy.int32
    assert [DType.size(code) for code in range(1, 9)] == [1, 1, 2, 4, 8, 8, 4, 2]


# -- Corrupt files --

IDX = "d.idx"


def _patch(offset: int, data: bytes):
    return lambda content: content[:offset] + data + content[offset + len(data) :]


# 9 header, 8 version, 1 dtype, 8 + 8 counts: lengths from 34, pointers from 46, documents from 70.
CORRUPTIONS = [
    (IDX, lambda c: b"", "has 0 bytes, fewer than the 34 of its header"),
    (IDX, lambda c: c[:20], "has 20 bytes, fewer than the 34"),
    (IDX, lambda c: c[:-1], "3 sequences and 4 document entries take 102 bytes, but it has 101"),
    (IDX, lambda c: c + b"xx", "but it has 104"),
    (IDX, _patch(0, b"PK\x03\x04"), "begins with b'PK"),
    (IDX, _patch(0, b"\x80\x04\x95"), r"begins with b'\\x80"),  # a pickle
    (IDX, _patch(9, b"\x02"), "its version is 2, not 1"),
    (IDX, _patch(17, b"\x63"), "its dtype code is 99, not one of 1 to 8"),
    (IDX, _patch(18, b"\xff" * 8), "18446744073709551615 sequences"),
    (IDX, _patch(18, b"\x02"), "2 sequences and 4 document entries take 90 bytes"),
    (IDX, _patch(34, struct.pack("<i", -3)), "sequence 0 has length -3"),
    (IDX, _patch(34, struct.pack("<i", 4)), "sequence 1 is said to begin at byte 6, not at 8"),
    (IDX, _patch(42, struct.pack("<i", 90)), "d.bin has 12 bytes, but .*d.idx describes 188"),
    (IDX, _patch(46, struct.pack("<q", -8)), "sequence 0 is said to begin at byte -8, not at 0"),
    (IDX, _patch(54, struct.pack("<q", 1 << 60)), "sequence 1 is said to begin at byte 1152921"),
    (IDX, _patch(70, struct.pack("<q", 1)), "document table runs over 1 to 3, not 0 to 3"),
    (IDX, _patch(94, struct.pack("<q", 2)), "document table runs over 0 to 2, not 0 to 3"),
    (IDX, _patch(78, struct.pack("<q", 3)), "document table decreases"),
    ("d.bin", lambda c: c[:-1], "d.bin has 11 bytes, but .*d.idx describes 12"),
    ("d.bin", lambda c: b"", "d.bin has 0 bytes, but .*d.idx describes 12"),
    ("d.bin", lambda c: c * 2, "d.bin has 24 bytes, but .*d.idx describes 12"),
]


@pytest.mark.parametrize(("name", "change", "reason"), CORRUPTIONS)
def test_corrupt_files_are_refused_with_path_and_numbers(tmp_path, name, change, reason) -> None:
    write_dataset(tmp_path / "d", DOCUMENTS)
    path = tmp_path / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=reason) as caught:
        IndexedDataset(tmp_path / "d")
    message = str(caught.value)
    assert str(tmp_path / name) in message
    assert "minimegatron preprocess" in message
    assert "\n" not in message


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_to_the_index_is_refused_or_harmless(tmp_path_factory, data) -> None:
    """Nothing but ValueError, and no read outside the file, whatever the bytes are."""
    folder = tmp_path_factory.mktemp("d")
    write_dataset(folder / "d", DOCUMENTS)
    path = folder / IDX
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        dataset = IndexedDataset(folder / "d")
    except ValueError:
        return
    assert sum(s.nbytes for s in dataset[:]) <= 12


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="d.idx does not exist; a dataset is named by"):
        IndexedDataset(tmp_path / "d")
    assert not IndexedDataset.exists(tmp_path / "d")
    assert IndexedDataset.exists(write_dataset(tmp_path / "d", []))
    assert len(IndexedDataset(tmp_path / "d")) == 0


# -- Writing --


def test_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d.bin", numpy.uint16) as builder:
        with pytest.raises(ValueError, match="tokens from 3 to 70000 do not fit uint16"):
            builder.add_document([3, 70_000], [2])
        with pytest.raises(ValueError, match="tokens from -1 to 5 do not fit uint16"):
            builder.add_item(numpy.array([-1, 5]))
        with pytest.raises(ValueError, match="not whole numbers"):
            builder.add_item([0.5])
        with pytest.raises(ValueError, match="lengths add up to 2, but there are 3 tokens"):
            builder.add_document([1, 2, 3], [2])
    with pytest.raises(ValueError, match="dtype complex64 has no code"):
        IndexedDatasetBuilder(tmp_path / "d.bin", numpy.complex64)


def test_nothing_appears_before_finalize_or_after_an_error(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", DOCUMENTS)
    before = Path(f"{prefix}.idx").read_bytes()
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(f"{prefix}.bin", numpy.uint16) as b:
        b.add_item([1])
        assert [s.tolist() for s in IndexedDataset(prefix)[:]] == DOCUMENTS
        raise RuntimeError
    assert Path(f"{prefix}.idx").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx"]


@pytest.mark.parametrize("survivors", range(4))
def test_killed_while_publishing_leaves_old_new_or_no_dataset(tmp_path, monkeypatch, survivors):
    """Stops after each of: nothing, old index gone, new tokens there, new index there."""
    prefix = write_dataset(tmp_path / "d", DOCUMENTS)
    steps = []

    def step(real):
        def stepped(*arguments, **named):
            if len(steps) == survivors:
                raise KeyboardInterrupt
            steps.append(real)
            return real(*arguments, **named)

        return stepped

    monkeypatch.setattr(atomic_file.os, "replace", step(atomic_file.os.replace))
    real_unlink = Path.unlink
    monkeypatch.setattr(
        Path,
        "unlink",
        lambda path, **named: (
            step(real_unlink)(path, **named) if path.name == "d.idx" else real_unlink(path, **named)
        ),
    )
    try:
        write_dataset(tmp_path / "d", [[9, 9], [8]])
    except KeyboardInterrupt:
        assert survivors < 3
    monkeypatch.undo()
    if IndexedDataset.exists(prefix):
        found = [s.tolist() for s in IndexedDataset(prefix)[:]]
        assert found == (DOCUMENTS if survivors == 0 else [[9, 9], [8]])
    else:
        assert survivors in (1, 2)


def test_a_full_disk_leaves_the_old_dataset(tmp_path: Path) -> None:
    """Runs with a limit on file sizes, which fails writes as a full disk does."""
    prefix = write_dataset(tmp_path / "d", DOCUMENTS)
    code = f"""
import resource, signal
from minimegatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with IndexedDatasetBuilder({prefix + ".bin"!r}) as builder:
        for _ in range(1000):
            builder.add_document([1] * 1000, [1000])
        builder.finalize({prefix + ".idx"!r})
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "File too large", done.stderr
    assert [s.tolist() for s in IndexedDataset(prefix)[:]] == DOCUMENTS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_add_index_joins_datasets(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", DOCUMENTS)
    b = write_dataset(tmp_path / "b", [[], [65_535]])
    with IndexedDatasetBuilder(tmp_path / "ab.bin", numpy.uint16) as builder:
        builder.add_index(a)
        builder.add_index(b)
        builder.finalize(tmp_path / "ab.idx")
    write_dataset(tmp_path / "direct", [*DOCUMENTS, [], [65_535]])
    for suffix in ("bin", "idx"):
        joined, direct = (tmp_path / f"{name}.{suffix}" for name in ("ab", "direct"))
        assert joined.read_bytes() == direct.read_bytes()
    with (
        IndexedDatasetBuilder(tmp_path / "c.bin", numpy.int32) as builder,
        pytest.raises(ValueError, match="holds uint16, not int32"),
    ):
        builder.add_index(a)


# -- Memory --

_RESIDENT = """
import random, sys
import numpy
from minimegatron.core.datasets.indexed_dataset import IndexedDataset

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

prefix, reads = sys.argv[1], int(sys.argv[2])
before = resident()
dataset = IndexedDataset(prefix)
tokens = numpy.memmap(prefix + ".bin", dtype=numpy.uint16, mode="r")
random.seed(0)
for read in (dataset.get, lambda i, offset, n: tokens[i * 4096 + offset :][:n]):
    worst = total = 0
    for _ in range(reads):
        total += int(read(random.randrange(len(dataset)), random.randrange(3000), 1024).sum())
        worst = max(worst, resident())
    print(worst - before, total)
"""


def test_random_access_stays_small_in_memory(tmp_path: Path) -> None:
    """1 GiB of tokens, read all over: under 50 MB more resident memory, where a plain map adds all
    that was touched. The file has holes, but what is read from them is as resident as any."""
    sequences, length = 131_072, 4096
    prefix = tmp_path / "d"
    with IndexedDatasetBuilder(f"{prefix}.bin", numpy.uint16) as builder:
        builder._file.file.truncate(sequences * length * 2)
        builder.add_tokenized(b"", [length] * sequences, [1] * sequences)
        builder.finalize(f"{prefix}.idx")
    assert Path(f"{prefix}.bin").stat().st_size == 1 << 30
    done = subprocess.run(
        [sys.executable, "-c", _RESIDENT, str(prefix), "5000"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    ours, plain = (int(line.split()[0]) / 1e6 for line in done.stdout.splitlines())
    figure(f"5,000 random reads of 2 KiB from 1 GiB add {ours:.1f} MB; a plain map, {plain:.0f} MB")
    assert ours < 50 and plain > 100


# -- Files that hold no tokens --


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float64])
def test_b12_an_index_of_fractions_holds_no_tokens(tmp_path, dtype):
    prefix = write_dataset(tmp_path / "d", [[1.0, 2.5]], dtype)
    assert IndexedDataset(prefix)[0].tolist() == [
        1.0,
        2.5,
    ]  # features of something: that is allowed
    words = f"d.idx says that {prefix}.bin holds {numpy.dtype(dtype)}, but tokens are whole numbers"
    for build in (GPTDataset, BERTMaskedWordPieceDataset, T5MaskedWordPieceDataset):
        with pytest.raises(DataError, match=re.escape(words)):
            build.build_low_level_dataset(prefix, None)
    for whole in (numpy.uint8, numpy.int8, numpy.int16, numpy.int64):
        assert open_tokens(write_dataset(tmp_path / "w", [[1, 2]], whole))[0].tolist() == [1, 2]


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_b12_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch, ending):
    prefix = write_dataset(tmp_path / "d", DOCUMENTS)

    def refuse(path, *mode):
        if path.endswith(ending):
            raise PermissionError(13, "Permission denied", path)
        return open(path, *mode)

    monkeypatch.setattr(indexed_dataset, "open", refuse, raising=False)
    with pytest.raises(DataError, match=f"d.{ending} cannot be read: Permission denied"):
        IndexedDataset(prefix)
