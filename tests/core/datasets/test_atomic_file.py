"""A file that cannot be written: one sentence with its name, and nothing half written is left."""

import errno
import os
from pathlib import Path

import numpy
import pytest
import torch

from minimegatron.__main__ import main
from minimegatron.core.datasets import megatron_dataset
from minimegatron.core.datasets.atomic_file import AtomicFile, CannotWrite, write_atomically
from minimegatron.exercises.exercise import exercises
from minimegatron.exercises.student.student_folder import StudentFolder
from minimegatron.tracing import chrome, html
from minimegatron.tracing.rank_trace import RankTrace, save_rank
from minimegatron.training import curves
from minimegatron.training.datasets import workers
from minimegatron.training.datasets.data_samplers import build_pretraining_data_loader


@pytest.fixture
def full_disk(monkeypatch):
    """A disk on which nothing more finds room: noticed, as on many, when a file is put on it."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


def start_an_exercise(path: Path) -> None:
    StudentFolder.open(path.parent).start(exercises()[0])


WRITERS = {
    "a trace": lambda path: save_rank(RankTrace(), path.parent),
    "a trace for Chrome": lambda path: chrome.write_chrome(None, path),
    "a trace's page": lambda path: html.write_html(None, path),
    "a plan": lambda path: main(
        ["plan", "--pp", "2", "--microbatches", "2", "--output", str(path)]
    ),
    "an exercise": start_an_exercise,
    "notebooks": lambda path: main(["notebooks", str(path.parent)]),
    "indices": lambda path: megatron_dataset._save(path, numpy.arange(5000)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_b15_what_does_not_fit_on_the_disk_is_named_and_gone(
    full_disk, monkeypatch, capsys, tmp_path, writer
):
    monkeypatch.setattr(chrome, "chrome_trace", lambda run: {})
    monkeypatch.setattr(html, "html_page", lambda run, steps: "page \u2588")
    try:
        said = f"ended with {WRITERS[writer](tmp_path / 'out.txt')}; {capsys.readouterr().err}"
    except CannotWrite as error:
        said = str(error)
    assert f"cannot write {tmp_path}/" in said
    assert "No space left on device" in said
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_b15_what_is_no_file_is_written_as_it_comes():
    with pytest.raises(CannotWrite, match="cannot write /dev/full: No space left on device"):
        write_atomically("/dev/full", b"plan")
    assert not Path("/dev/full").is_file()


def test_b15_a_link_leads_to_the_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomically(tmp_path / "link", b"plan")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"plan"


def test_b15_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match=r"cannot write .*/file/out: "):
        AtomicFile(tmp_path / "file" / "out")


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict:
        return {"tokens": torch.zeros(1000, dtype=torch.int64), "none": None}


def test_b15_workers_without_room_for_their_batches_are_refused(monkeypatch):
    asked = []

    def has_room(place: Path, num_bytes: int) -> bool:
        asked.append(num_bytes)
        return False

    monkeypatch.setattr(workers, "IN_MEMORY", Path("/"))
    monkeypatch.setattr(workers, "has_room", has_room)
    monkeypatch.setattr(workers, "keep_sockets", lambda: None)
    options = {"micro_batch_size": 2, "data_parallel_rank": 0, "data_parallel_size": 1}
    with pytest.raises(CannotWrite, match=r"--num-workers 3 .*give --num-workers 0, or more room"):
        build_pretraining_data_loader(Samples(), 0, num_workers=3, **options)
    assert asked == [workers.LEAST_BYTES + 3 * 3 * 2 * 8000]
    assert build_pretraining_data_loader(Samples(), 0, num_workers=0, **options) is not None
    assert len(asked) == 1, "without workers nothing is asked"


def test_b15_curves_that_find_no_room_name_their_folder(monkeypatch):
    class Writer:
        log_dir = "/runs/curves"

        def add_scalar(self, name: str, value: float, iteration: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(curves._Writer, "now", Writer())
    with pytest.raises(CannotWrite, match="cannot write /runs/curves: No space left on device"):
        curves.write_curves({"lm loss": 1.0}, 1)
    monkeypatch.setattr(curves._Writer, "now", None)
    curves.write_curves({"lm loss": 1.0}, 1)
