"""Who counts as a rank of this host, and what a rank without memory to share says."""

import os
import socket
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from minimegatron.backend import handshake, mesh
from minimegatron.backend.mesh import connect
from minimegatron.backend.slots import Arena

SECRET = b"s" * 16


# -- Other users --


def test_a_caller_of_another_user_is_turned_away(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    socket.send_fds(theirs, [handshake._HELLO.pack(1, SECRET)], [0])
    other = os.geteuid() + 1
    monkeypatch.setattr(handshake, "_peer", lambda connection: (os.getpid(), other, 0))
    with pytest.warns(UserWarning, match=f"of user {other} called this rank"):
        _, met = handshake._check_caller(ours, SECRET, {1})
    assert met is None


def test_an_address_of_another_user_is_not_called(monkeypatch):
    name = f"\0minimegatron-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen()
        address = handshake._Address((), name, SECRET)
        monkeypatch.setattr(handshake, "_peer", lambda connection: (1, os.geteuid() + 1, 0))
        with pytest.raises(ConnectionError, match="belongs to user"):
            handshake._call(address, 1, 0, 0, time.monotonic() + 5)


# -- Ranks that do not come, systems that cannot --


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(ConnectionError, match=r"rank 1 of the group has not come within 0\.2 s"):
        connect(dist.HashStore(), 0, 2, timedelta(seconds=0.2))


def test_without_linux_gloo_carries_everything(monkeypatch):
    alone = (0, 1, timedelta(seconds=5))
    assert connect(dist.HashStore(), *alone) == {}
    monkeypatch.setattr(sys, "platform", "darwin")
    assert connect(dist.HashStore(), *alone) is None


# -- In containers --


def test_b1_a_host_that_hides_its_identity_is_like_no_other(monkeypatch):
    def hidden(path: str, *_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", path)

    here = handshake._host()
    assert here == handshake._host()
    monkeypatch.setattr(handshake, "open", hidden, raising=False)
    one, other = handshake._host(), handshake._host()
    assert one != other, "ranks that cannot know it do not share memory"
    assert here not in (one, other)


@pytest.mark.parametrize("without_memory", ["this rank", "the other", "both"])
def test_b1_without_memory_to_share_all_ranks_use_gloo(without_memory):
    def gather(mine: list) -> list[list]:
        host = [] if without_memory != "this rank" else list(handshake._host())
        return [mine, [host, *mine[1:]]]

    descriptor = 0 if without_memory == "the other" else None
    assert handshake.meet(0, gather, [1], [], descriptor, 5.0) is None


@pytest.mark.parametrize("limit", ["system call", "size of files"])
def test_b1_a_container_may_forbid_memory_without_a_name(monkeypatch, limit):
    def forbidden() -> None:
        raise PermissionError(1, "Operation not permitted")

    assert isinstance(mesh._new_arena(), Arena)
    if limit == "system call":
        monkeypatch.setattr(mesh, "Arena", forbidden)
    else:
        monkeypatch.setattr(mesh.resource, "getrlimit", lambda which: (4096, 4096))
    assert mesh._new_arena() is None
