"""Folders that processes share: where there is room, and where a socket's path is short enough."""

import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest

from minimegatron.doctor import folders
from minimegatron.launching import launcher


def test_b2_a_folder_lies_where_there_is_room(monkeypatch, tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    asked = []

    def has_room(place: Path, num_bytes: int) -> bool:
        asked.append((place, num_bytes))
        return place == large

    monkeypatch.setattr(folders, "_places", lambda: [small, large])
    monkeypatch.setattr(folders, "has_room", has_room)
    large.mkdir()
    folder = folders.make_folder("minimegatron-test-", num_bytes=1000)
    assert folder.parent == large
    assert asked == [(small, 1000), (large, 1000)]
    folders.remove_folder(folder)


def test_b2_without_room_anywhere_one_sentence_names_the_remedy(monkeypatch):
    monkeypatch.setattr(folders, "has_room", lambda place, num_bytes: False)
    with pytest.raises(OSError, match=r"has room for 1000 bytes \(tried: .*/dev/shm.*set TMPDIR"):
        folders.make_folder("minimegatron-test-", num_bytes=1000)


def test_b2_room_is_tried_not_believed(tmp_path):
    assert folders.has_room(tmp_path, 100_000)
    assert not folders.has_room(tmp_path / "nowhere", 0)
    assert list(tmp_path.iterdir()) == []


def test_b2_without_room_for_records_ranks_are_not_watched(monkeypatch, capsys):
    def make_folder(prefix: str, num_bytes: int = 0) -> Path:
        if num_bytes:
            raise OSError(28, "no folder has room")
        return Path("there")

    monkeypatch.setattr(launcher, "make_folder", make_folder)
    ranks = launcher.RankProcesses(os.getpid, 2, hang_timeout=5.0)
    assert ranks._make_folder() == Path("there")
    assert ranks._hang_timeout is None
    said = capsys.readouterr().err
    assert said == (
        "minimegatron: the hang doctor does not watch these ranks: no folder has room\n"
    )


@pytest.mark.parametrize("length", [20, 80, 120])
def test_b3_sockets_lie_where_their_path_is_short_enough(monkeypatch, tmp_path, length):
    long = tmp_path / ("x" * length)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    config = multiprocessing.current_process()._config
    monkeypatch.setitem(config, "tempdir", None)
    folders.keep_sockets()
    folder = Path(config["tempdir"])
    try:
        socket_path = folder / "listener-12345678"
        assert len(os.fsencode(socket_path)) <= folders.MOST_SOCKET_BYTES
    finally:
        folders.remove_folder(folder)


def test_b3_where_no_path_is_short_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(folders, "_places", lambda: [Path("/" + "x" * 90)])
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    with pytest.raises(OSError, match=r"a path of at most \d+ letters .*set TMPDIR"):
        folders.keep_sockets()
