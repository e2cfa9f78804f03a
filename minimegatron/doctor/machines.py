"""Watchmen of several machines: one of them, the head, knows of all ranks.

Torch-free. Megatron has no counterpart.

A hang stops every machine, and its cause is on one of them. So each watchman tells the head how long
its own ranks have been quiet, and the head, when all have been for long enough, asks for their
records. Lines of JSON, over one TCP connection per machine:

```
to the head:    {"token"}   {"quiet"} ...   {"records"}
from the head:                 "report"                 "end"
```

The token, drawn by rank 0 and handed to all ranks by their process group, keeps others out.
"""

import contextlib
import json
import math
import secrets
import select
import socket
import time
from typing import Any

from minimegatron.core.json_text import parse_json
from minimegatron.core.network import loopback_address
from minimegatron.doctor.records import RankRecord, record_from_dict, record_to_dict

REPORT, END = "report", "end"
REPORT_SECONDS = 5.0
"""How long the head waits for records of another machine."""


class _Line:
    """One connection, a line at a time, without ever waiting."""

    def __init__(self, connection: socket.socket):
        self.connection, self._received = connection, b""
        self.is_open = True

    def send(self, message: Any) -> None:
        try:
            self.connection.settimeout(1.0)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.close()

    def receive(self) -> list[Any]:
        """What has come since."""
        while self.is_open and select.select([self.connection], [], [], 0)[0]:
            try:
                received = self.connection.recv(1 << 16)
            except OSError:
                received = b""
            if not received:
                self.close()
            self._received += received
        *lines, self._received = self._received.split(b"\n")
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):
                messages.append(parse_json(line, "a message"))
        return messages

    def close(self) -> None:
        self.is_open = False
        self.connection.close()


class Head:
    """The head's side: waits for `num_others` watchmen."""

    def __init__(self, num_others: int, token: str):
        self._num_others, self._token = num_others, token
        # With nobody to wait for, nobody from outside need find it.
        self._listener = _listen("" if num_others else loopback_address())
        self.port = self._listener.getsockname()[1]
        self._strangers: list[_Line] = []
        self._others: list[_Line] = []
        self._quiet: dict[_Line, float] = {}
        self._records: dict[_Line, list[RankRecord]] = {}

    def look(self) -> None:
        """Takes in who has come, and what they say."""
        while select.select([self._listener], [], [], 0)[0]:
            self._strangers.append(_Line(self._listener.accept()[0]))
        for line in list(self._strangers):
            for message in line.receive():
                self._strangers.remove(line)
                token = message.get("token") if isinstance(message, dict) else None
                if secrets.compare_digest(str(token).encode(), self._token.encode()):
                    self._others.append(line)
                else:
                    line.close()
                break
        for line in self._others:
            for message in line.receive():
                if "quiet" in message:
                    self._quiet[line] = message["quiet"]
                if "records" in message:
                    self._records[line] = [record_from_dict(r) for r in message["records"]]

    def have_all_come(self) -> bool:
        """Whether every other machine's watchman has been here."""
        return len(self._others) >= self._num_others

    def quiet(self) -> float:
        """For how long all other machines have been quiet. One whose ranks have ended counts not."""
        if not self.have_all_come():
            return 0.0
        known = [self._quiet.get(line, 0.0) for line in self._others if line.is_open]
        return min(known, default=math.inf)

    def ask(self) -> list[RankRecord]:
        """The records of all other machines' ranks, as far as they answer."""
        self._records.clear()
        for line in self._others:
            line.send(REPORT)
        deadline = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline and any(
            line.is_open and line not in self._records for line in self._others
        ):
            time.sleep(0.05)
            self.look()
        return [record for records in self._records.values() for record in records]

    def tell_end(self) -> None:
        """Tells all other machines to end their ranks."""
        for line in self._others:
            line.send(END)


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


class Branch:
    """Another watchman's side. Without a head it goes on alone, until its ranks are over."""

    def __init__(self, address: str, port: int, token: str):
        connection = socket.create_connection((address, port), timeout=30)
        self._line = _Line(connection)
        self._line.send({"token": token})

    def look(self, quiet: float) -> list[str]:
        """Tells how long the ranks here have been quiet; returns what the head wants."""
        if self._line.is_open:
            self._line.send({"quiet": quiet})
        return self._line.receive()

    def report(self, records: list[RankRecord]) -> None:
        """Answers `REPORT`."""
        self._line.send({"records": [record_to_dict(record) for record in records]})
