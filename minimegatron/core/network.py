"""How processes of one machine reach each other, and what gloo must be told where there are several.

Torch-free. Megatron has no counterpart: it leaves all of this to the environment.

A container may have no IPv4, a loopback that is down, or a name that does not resolve. It may also have
inherited `GLOO_SOCKET_IFNAME` from another machine. Ranks of one machine need none of that but the
loopback.
"""

import contextlib
import os
import socket
from collections.abc import MutableMapping
from pathlib import Path

LOOPBACKS = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}
INTERFACES = "GLOO_SOCKET_IFNAME"
"""Names of network interfaces, with commas between them; gloo takes no others."""


def machine_id() -> str:
    """The same for processes that see each other's files and process numbers, and for no others."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    for namespace in ("pid", "mnt"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{namespace}"))
    return " ".join(parts)


def loopback_address() -> str:
    """127.0.0.1; or ::1, where only that works. Raises ConnectionError where neither does."""
    for address, family in LOOPBACKS.items():
        if _works(address, family):
            return address
    raise ConnectionError(
        "this machine cannot talk to itself: neither 127.0.0.1 nor ::1 answers; turn its loopback on "
        "(`ip link set lo up`), for ranks find each other there"
    )


def _works(address: str, family: int) -> bool:
    try:
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            listener.listen(1)
            socket.create_connection(listener.getsockname()[:2], 1.0).close()
    except OSError:
        return False
    return True


def keep_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Tells gloo to use the loopback, whatever it was told: ranks of one machine need no more."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        environment[INTERFACES] = loopback[0]


def check_interfaces(environment: MutableMapping[str, str]) -> None:
    """Raises ValueError if gloo is told to use an interface that this machine does not have."""
    here = [name for _, name in socket.if_nameindex()]
    for name in filter(None, environment.get(INTERFACES, "").split(",")):
        if name not in here:
            raise ValueError(
                f"{INTERFACES} is {environment[INTERFACES]!r}, but {socket.gethostname()} has no "
                f"interface {name!r}: name one of {', '.join(here)}, or unset it"
            )


def check_resolves(host: str, port: str) -> None:
    """Raises ValueError if `MASTER_ADDR`, here `host`, is a name that nobody here knows."""
    try:
        socket.getaddrinfo(host, port or None)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR is {host!r}, which {socket.gethostname()} cannot resolve ({error.strerror}): "
            "give an address instead of a name. torchrun passes on its own machine's name; "
            "`torchrun --local-addr 127.0.0.1 ...` does without, or --local-addr with this machine's "
            "address where there are several machines"
        ) from None


def gloo_address_note(environment: MutableMapping[str, str], master: str) -> str | None:
    """What to say before gloo gives other machines a loopback address; None if it will not.

    Without `GLOO_SOCKET_IFNAME` gloo takes what this machine's name resolves to. Many a machine's
    name resolves to a loopback. `master` is where rank 0 is: a loopback if all ranks are here.
    """
    if environment.get(INTERFACES) or _is_loopback(master):
        return None
    name = socket.gethostname()
    if not _is_loopback(name):
        return None
    return (
        f"this machine's name, {name}, resolves to no address that other machines reach; if they do "
        f"not answer, set {INTERFACES} to one of its interfaces: "
        f"{', '.join(name for _, name in socket.if_nameindex())}"
    )


def _is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's loopback, or unknown, which gloo takes for it."""
    try:
        found = [entry[4][0] for entry in socket.getaddrinfo(host, None)]
    except OSError:
        return True
    return all(address == "::1" or address.startswith("127.") for address in found)
