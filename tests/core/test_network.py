"""Ranks of one machine need its loopback and nothing else; of several, one sentence before any wait."""

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from minimegatron.core import network
from minimegatron.doctor import machines
from minimegatron.training import initialize, process_group

MINUTE = timedelta(minutes=1)


def launched_by_hand(monkeypatch, **variables: str) -> None:
    """The environment of a program that somebody else's variables came to, a pod's say."""
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def refuse_to_wait(*_: object, **__: object) -> None:
    raise AssertionError("it waits")


def test_b6_gloo_is_told_the_loopback_whatever_it_was_told():
    environment = {"GLOO_SOCKET_IFNAME": "eth7"}
    network.keep_to_loopback(environment)
    assert environment["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")


def test_b6_an_interface_that_is_not_there_is_named_before_any_wait(monkeypatch, capsys):
    launched_by_hand(monkeypatch, GLOO_SOCKET_IFNAME="ib0,eth77", RANK="3")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0")])
    monkeypatch.setattr(process_group, "find_each_other", refuse_to_wait)

    class Args:
        rank, world_size, local_world_size, distributed_timeout_minutes = 3, 8, 4, 10

    with pytest.raises(SystemExit) as ended:
        process_group.init_process_group(Args)
    assert ended.value.code == initialize.BAD_ARGUMENTS
    said = capsys.readouterr().err
    assert "GLOO_SOCKET_IFNAME is 'ib0,eth77'" in said
    assert "no interface 'eth77': name one of lo, ib0, or unset it" in said


def test_b6_a_pods_variables_are_named_before_the_wait(monkeypatch, capsys):
    launched_by_hand(
        monkeypatch, RANK="3", WORLD_SIZE="8", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    said = []

    def wait(*_: object, **__: object) -> None:
        deadline = time.monotonic() + 60
        while not (text := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.01)
        said.append(text)
        raise dist.DistNetworkError("The client socket has timed out\nframe #0: ...")

    monkeypatch.setattr(process_group, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(process_group, "rendezvous", wait)
    with pytest.raises(ConnectionError) as caught:
        process_group.find_each_other(3, 8, MINUTE)
    assert "rank 3 waits for the others at 127.0.0.1:1, for at most 1 minutes" in said[0]
    assert "RANK 3, WORLD_SIZE 8: to train in one process, unset RANK, WORLD_SIZE" in said[0]
    assert str(caught.value) == (
        "rank 0 cannot be reached at MASTER_ADDR 127.0.0.1, MASTER_PORT 1: "
        "The client socket has timed out"
    )


def test_b6_ranks_that_find_each_other_at_once_say_nothing(monkeypatch, capsys):
    launched_by_hand(
        monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    store = dist.HashStore()
    monkeypatch.setattr(process_group, "rendezvous", lambda *_, **__: iter([(store, 1, 2)]))
    monkeypatch.setattr(process_group, "fresh_store", lambda store, *_: store)
    monkeypatch.setattr(process_group, "SILENT_SECONDS", 600.0)
    assert process_group.find_each_other(1, 2, MINUTE) is store
    assert capsys.readouterr().err == ""
    assert not any(isinstance(one, threading.Timer) for one in threading.enumerate())


def test_b6_without_torchrun_every_process_says_why_it_refuses(monkeypatch, capsys):
    launched_by_hand(monkeypatch, RANK="3", WORLD_SIZE="8")
    monkeypatch.setattr(process_group.time, "sleep", refuse_to_wait)
    with pytest.raises(SystemExit):
        process_group.refuse(ValueError("--global-batch-size 4 is not divisible by 8"))
    said = capsys.readouterr().err
    assert "not divisible by 8 (the environment says RANK 3, WORLD_SIZE 8: to train in one" in said


def test_b6_a_missing_address_is_named(monkeypatch):
    launched_by_hand(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="", MASTER_PORT="x")
    with pytest.raises(ValueError, match=r"MASTER_ADDR is '' and MASTER_PORT 'x'.*torchrun"):
        process_group.find_each_other(1, 2, MINUTE)


def test_b7_a_name_that_nobody_knows_is_refused_before_the_wait(monkeypatch):
    launched_by_hand(
        monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="pod-7f", MASTER_PORT="2950"
    )
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def unknown(host: str, *_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(process_group, "rendezvous", refuse_to_wait)
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'pod-7f'.*--local-addr 127\.0\.0\.1"):
        process_group.find_each_other(1, 2, MINUTE)


@pytest.mark.parametrize("there", [["127.0.0.1", "::1"], ["::1"], []])
def test_b7_the_loopback_that_is_there_is_taken(monkeypatch, there):
    monkeypatch.setattr(network, "_works", lambda address, family: address in there)
    if there:
        assert network.loopback_address() == there[0]
    else:
        with pytest.raises(ConnectionError, match="ip link set lo up"):
            network.loopback_address()


def test_b7_a_loopback_is_tried_not_believed():
    address = network.loopback_address()
    assert network._works(address, network.LOOPBACKS[address])
    assert not network._works("192.0.2.1", socket.AF_INET), "an address of nobody's"


def test_b7_what_gloo_would_tell_other_machines_in_vain(monkeypatch):
    known = {"box": "127.0.1.1", "head": "10.0.0.1"}

    def resolve(host: str, *_: object) -> list:
        return [(socket.AF_INET, 0, 0, "", (known.get(host, host), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    note = network.gloo_address_note({}, "head")
    assert "name, box, resolves to no address" in note and "GLOO_SOCKET_IFNAME" in note
    assert network.gloo_address_note({}, "127.0.0.1") is None, "all ranks are on this machine"
    assert network.gloo_address_note({"GLOO_SOCKET_IFNAME": "eth0"}, "head") is None
    known["box"] = "10.0.0.2"
    assert network.gloo_address_note({}, "head") is None


def test_b7_the_watchman_listens_on_the_loopback_that_is_there(monkeypatch):
    asked = []

    class Listener:
        def getsockname(self) -> tuple:
            return "::1", 77, 0, 0

    def listen(address: tuple, family: int) -> Listener:
        asked.append((address, family))
        return Listener()

    monkeypatch.setattr(network, "_works", lambda address, family: address == "::1")
    monkeypatch.setattr(socket, "create_server", listen)
    assert machines.Head(0, "token").port == 77
    assert asked == [(("::1", 0), socket.AF_INET6)]
