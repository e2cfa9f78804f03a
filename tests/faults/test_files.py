"""Damaged, missing, foreign and planted files: a clear line, nothing executed, the rest still loads."""

import builtins
import errno
import io
import json
import os
import pickle
import random
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.core.dist_checkpointing import storage
from minimegatron.core.dist_checkpointing.core import CheckpointingException
from minimegatron.core.dist_checkpointing.serialization import load_plain_tensors
from minimegatron.training.arguments import parse_args
from minimegatron.training.checkpoint_folder import (
    TRACKER,
    complete_iterations,
    remove_checkpoints,
    remove_leftovers,
)
from tests.faults.test_fuzz_inputs import damaged
from tests.ranks import run_ranks
from tests.training.short_runs import MODEL, TP2, run

# -- A folder with two checkpoints, made once --


def make_checkpoints(folder: str) -> None:
    run(f"{TP2} --save {folder}", 1)
    run(f"{TP2} --load {folder} --save {folder}", 2)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    run_ranks(make_checkpoints, 2, str(folder), timeout=100)
    return folder


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints"))


def refusal(folder: Path, flags: str = "") -> str:
    """The line that a command with this --load ends in, before anything starts."""
    with pytest.raises(ValueError) as refused:
        parse_args(argv=[*MODEL.split(), "--load", str(folder), *flags.split()], environ={})
    assert "\n" not in str(refused.value)
    return str(refused.value)


def accepted(folder: Path, flags: str = "") -> None:
    parse_args(argv=[*MODEL.split(), "--load", str(folder), *flags.split()], environ={})


def previous_still_loads(folder: Path) -> None:
    (folder / TRACKER).write_text("1")
    accepted(folder)
    assert len(load_plain_tensors(folder / "iter_0000001")) > 100


# -- Damage --


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"innocent": 1}).ljust(path.stat().st_size, b"\0"))


def edit_json(key: str, value: object) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


FRONT = {
    # file of the newest checkpoint, what happens to it, words of the answer
    "truncated shard": ("rank_00001.safetensors", truncate, ("rank_00001", "bytes instead of")),
    "missing shard": ("rank_00000.safetensors", Path.unlink, ("rank_00000", "is missing")),
    "truncated metadata": ("metadata.json", truncate, ("metadata.json is damaged",)),
    "missing metadata": ("metadata.json", Path.unlink, ("metadata.json is missing",)),
    "metadata of another format": ("metadata.json", edit_json("format", 2), ("format 2",)),
    "metadata is a pickle": ("metadata.json", replace_by_pickle, ("metadata.json is damaged",)),
    "missing common": ("common.json", Path.unlink, ("common.json is missing",)),
    "common is a list": ("common.json", lambda p: p.write_text("[1]"), ("common.json is damaged",)),
}


@pytest.mark.parametrize("damage", FRONT)
def test_damage_is_seen_before_the_start(folder, damage):
    name, harm, words = FRONT[damage]
    harm(folder / "iter_0000002" / name)
    message = refusal(folder)
    assert all(word in message for word in words), message
    previous_still_loads(folder)


def test_any_damage_to_what_describes_a_checkpoint(folder):
    """Values of both JSON files replaced, removed, doubled: refused in one line, or without harm."""
    dice, counts, newest = random.Random(0), Counter(), folder / "iter_0000002"
    whole = {name: (newest / name).read_text() for name in ("common.json", "metadata.json")}
    for number in range(150):
        name = dice.choice([*whole])
        value = json.loads(whole[name])
        for _ in range(dice.randint(1, 2)):
            value = damaged(value, dice)
        for other, text in whole.items():
            (newest / other).write_text(json.dumps(value) if other == name else text)
        try:
            accepted(folder)
            load_plain_tensors(newest, "model.decoder.layers.0.")
            counts["accepted"] += 1
        except (ValueError, CheckpointingException) as refused:
            assert "\n" not in str(refused), (number, refused)
            counts["refused"] += 1
    assert min(counts["accepted"], counts["refused"]) > 20, counts
    previous_still_loads(folder)


MARKERS = {
    "empty": (b"", "says '' instead of a number; to use iteration 2"),
    "words": (b"newest", "says 'newest' instead of a number"),
    "negative": (b"-2", "says '-2'"),
    "binary": (bytes(range(128, 256)), "instead of a number"),
    "too long": (b"1" * 5000, "names iteration"),
    "other digits": ("٢".encode(), "instead of a number"),
    "of nothing": (b"3", "names iteration 3"),
}


@pytest.mark.parametrize("kind", MARKERS)
def test_corrupt_marker(folder, kind):
    content, words = MARKERS[kind]
    (folder / TRACKER).write_bytes(content)
    message = refusal(folder)
    assert words in message and "write 2 into it" in message
    previous_still_loads(folder)


def test_missing_marker(folder):
    (folder / TRACKER).unlink()
    assert "write 2 into it" in refusal(folder)
    # With checkpoints in it, it is no folder to begin in.
    assert "write 2 into it" in refusal(folder, f"--save {folder}")
    previous_still_loads(folder)


def test_a_folder_to_begin_in(tmp_path):
    assert "the same folder as --save" in refusal(tmp_path)
    assert "the same folder as --save" in refusal(tmp_path, f"--save {tmp_path}/other")
    accepted(tmp_path, f"--save {tmp_path}/../{tmp_path.name}")


OTHER_MODELS = {
    "--hidden-size 32": ("--hidden-size is 32", "but 16", "use --hidden-size 16"),
    "--num-layers 8": ("--num-layers is 8", "use --num-layers 4"),
    "--max-position-embeddings 16": ("--max-position-embeddings is 16",),
    "--ffn-hidden-size 48": ("--ffn-hidden-size is 48", "use --ffn-hidden-size 64"),
    "--swiglu": ("--swiglu is given", "drop it"),
    "--disable-bias-linear": ("--disable-bias-linear is given", "drop it"),
    "--normalization RMSNorm": ("--normalization is RMSNorm", "use --normalization LayerNorm"),
    "--untie-embeddings-and-output-weights": ("--untie-embeddings-and-output-weights is given",),
    "--optimizer sgd": ("--optimizer is sgd", "adam", "--no-load-optim"),
}


@pytest.mark.parametrize("flags", OTHER_MODELS)
def test_other_models_are_refused(pristine, flags):
    message = refusal(pristine, flags)
    assert all(word in message for word in OTHER_MODELS[flags]), message


def test_other_layouts_are_not(pristine):
    accepted(pristine, "--bf16 --seq-length 4 --padded-vocab-size 300")
    accepted(pristine, "--global-batch-size 16 --override-opt-param-scheduler")
    accepted(pristine, "--optimizer sgd --finetune")


# -- What only reading shows --


def test_a_flipped_bit_is_seen(folder):
    path = folder / "iter_0000002/rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    accepted(folder)
    with pytest.raises(CheckpointingException, match=r"rank_00000.safetensors is damaged: \S+ at"):
        load_plain_tensors(folder / "iter_0000002")
    previous_still_loads(folder)


def load_with_other_schedule(folder: str) -> list[float]:
    flags = f"{TP2} --load {folder} --lr 1e-3 --train-iters 40"
    ours = run(f"{flags} --override-opt-param-scheduler", 3)
    theirs = run(f"{flags} --use-checkpoint-opt-param-scheduler", 3)
    longer = run(f"{TP2} --load {folder} --train-iters 40 --lr-decay-iters 20", 22)
    assert (longer["began"], len(longer["losses"])) == (2, 20)
    return [result["lr"] for result in (ours, theirs, longer)]


def test_other_schedules(pristine):
    longer, slower = refusal(pristine, "--train-iters 30"), refusal(pristine, "--lr 1e-3")
    assert "--lr-decay-iters (or else --train-iters) in samples is 120 here" in longer
    assert "but 80 in the checkpoint" in longer
    assert "--lr is 0.001 here but 0.01" in slower
    for message in (longer, slower):
        assert "set --override-opt-param-scheduler to keep ours" in message
        assert "--use-checkpoint-opt-param-scheduler to take the checkpoint's" in message
    for flags in ("--lr-decay-iters 20", "--finetune", "--no-load-optim"):
        accepted(pristine, f"--train-iters 30 {flags}")
    lrs = run_ranks(load_with_other_schedule, 2, str(pristine), timeout=100)[0]
    # After three steps of a linear way down over 40, or the checkpoint's 20; and beyond its end.
    assert lrs == pytest.approx([1e-3 * (1 - 3 / 40), 1e-2 * (1 - 3 / 20), 0.0])


# -- A planted pickle --


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_nothing_is_executed(folder, tmp_path):
    crater = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(crater))
    pickle.loads(bomb)
    assert crater.exists()  # it works
    crater.unlink()
    newest = folder / "iter_0000002"
    # Where torch's own reader, older checkpoints and Megatron's keep pickles.
    for name in (".metadata", "__0_0.distcp", "rank_00000.pt", "common.pt", "metadata.pkl"):
        (newest / name).write_bytes(bomb)
    accepted(folder)
    assert len(load_plain_tensors(newest)) > 100
    # In the place of files that are read.
    for name in ("rank_00000.safetensors", "common.json", "metadata.json"):
        path = newest / name
        path.write_bytes(bomb.ljust(path.stat().st_size, b"\0"))
        with pytest.raises((ValueError, CheckpointingException)):
            accepted(folder)
            load_plain_tensors(newest)
    (folder / TRACKER).write_bytes(bomb)
    refusal(folder)
    assert not crater.exists()
    previous_still_loads(folder)


# -- Writing fails --


def full_disk(path: str | Path, mode: str = "r"):
    """`open`, except that what is written goes to a device that is always full."""
    return builtins.open("/dev/full" if "w" in mode else path, mode)


class SmallFile(io.FileIO):
    """A file that may not grow beyond 20,000 bytes.

    The limit is the process's, and memory that ranks share is a file too: so it holds within a write.
    """

    def write(self, data: Any) -> int:
        """As a file's."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            return super().write(data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def small_files(path: str | Path, mode: str = "r"):
    """`open`, except that what is written goes to a `SmallFile`."""
    if "w" not in mode:
        return builtins.open(path, mode)
    return io.BufferedWriter(SmallFile(path, "w"))


def saves_that_fail(folder: str) -> list[str]:
    messages = []
    rank = torch.distributed.get_rank()

    def failing_save() -> None:
        try:
            run(f"{TP2} --load {folder} --save {folder}", 3)
        except CheckpointingException as error:
            messages.append(str(error))

    # -- A full disk under one rank's file --
    if rank == 1:
        storage.open = full_disk
    failing_save()
    if rank == 1:
        del storage.open
    # -- A file that may not grow: the first bytes are written, the rest is not --
    if rank == 0:
        storage.open = small_files
    failing_save()
    if rank == 0:
        del storage.open
    # -- Only the very end fails: the folder cannot get its name --
    if rank == 0:
        renamed = storage.os.replace
        storage.os.replace = refuse_to_rename
    failing_save()
    if rank == 0:
        storage.os.replace = renamed
    # -- And once there is room --
    run(f"{TP2} --load {folder} --save {folder}", 3)
    return messages


def refuse_to_rename(source: Path, target: Path) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))


def test_saves_that_fail(folder):
    results = run_ranks(saves_that_fail, 2, str(folder), timeout=150)
    for messages in results:
        assert messages == results[0]
        full, limited, unnamed = messages
        assert "rank 1: No space left on device" in full
        assert "rank 0: File too large" in limited
        assert "rank 0: Input/output error" in unnamed
        for message in messages:
            assert "\n" not in message and "cannot save" in message
            assert "iter_0000003" in message and "iteration 2 is complete there" in message
    assert sorted(path.name for path in folder.iterdir()) == [
        "iter_0000001",
        "iter_0000002",
        "iter_0000003",
        TRACKER,
    ]
    assert (folder / TRACKER).read_text() == "3"


def test_leftovers(folder):
    def names() -> set[str]:
        return {path.name for path in folder.iterdir()}

    kept = names()
    (folder / "iter_0000004.tmp-0123abcd").mkdir()
    (folder / "iter_0000004.tmp-0123abcd/rank_00000.safetensors").write_text("half")
    (folder / "iter_0000002.tmp-0123abcd-replaced").mkdir()
    remove_leftovers(folder)
    assert names() == kept
    # Killed between the two renames, the only copy has this name.
    (folder / "iter_0000002").rename(folder / "iter_0000002.tmp-0123abcd-replaced")
    remove_leftovers(folder)
    assert "iter_0000002.tmp-0123abcd-replaced" in names()
    (folder / "iter_0000002.tmp-0123abcd-replaced").rename(folder / "iter_0000002")
    # Newer ones than the marked are an earlier run's, and not counted.
    (folder / TRACKER).write_text("1")
    remove_checkpoints(folder, keep_last=1)
    assert complete_iterations(folder) == [1, 2]
    (folder / TRACKER).write_text("2")
    remove_checkpoints(folder, keep_last=1)
    assert complete_iterations(folder) == [2]
