"""JSON as torch's flight recorder writes it about NCCL, for tests: by hand, or of gloo's calls here."""

import json
from typing import Any

from torch._C import _distributed_c10d as c10d

DEFAULT, TENSOR = ("0", "default_pg"), ("3", "tp")


def entry(name: str, number: int, state: str = "scheduled", **more: Any) -> dict[str, Any]:
    """One call: collective `number` of its group, or message `number`. Both count from 1."""
    is_p2p = name.startswith(("send", "recv")) or more.get("is_p2p", False)
    return {
        "record_id": 0,
        "pg_id": 0,
        "process_group": list(DEFAULT),
        "thread_id": "140717252987776",
        "thread_name": "python",
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1795562838319650659,
        "input_sizes": [[4, 8]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 8]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": is_p2p,
        **more,
    }


def in_tensor_group(name: str, number: int, state: str = "scheduled", **more: Any) -> dict:
    """The same in the tensor group."""
    return entry(name, number, state, process_group=list(TENSOR), pg_id=3, **more)


def batch_end(number: int, state: str = "scheduled") -> dict[str, Any]:
    """What `batch_isend_irecv` adds to the entries of its messages."""
    nothing = dict.fromkeys(("input_sizes", "input_dtypes", "output_sizes", "output_dtypes"), [])
    return entry("coalesced", number, state, is_p2p=True, **nothing)


def answer(*entries: dict, ranks: tuple[int, ...] = (0, 1), **more: Any) -> bytes:
    """What a rank says; every group has the same `ranks`."""
    groups = dict.fromkeys(tuple(one["process_group"]) for one in entries)
    config = {
        name: {"name": name, "desc": description, "ranks": str(list(ranks))}
        for name, description in groups
    }
    data = {
        "version": "2.10",
        "comm_lib_version": "2.27.5",
        "nccl_comm_state": {},
        "pg_config": config,
        "pg_status": {},
        "entries": list(entries),
        **more,
    }
    if not entries:
        del data["entries"]
    return json.dumps(data).encode()


def pretend_nccl(text: bytes | None = None) -> None:
    """From now on this process says `text` of NCCL's calls; None: what torch really knows of gloo's."""

    def dump(includeCollectives: bool = True, onlyActive: bool = False) -> bytes:
        if text is not None:
            return text
        known = c10d._dump_fr_trace_json(includeCollectives, onlyActive)
        return known.replace(b'"gloo:', b'"nccl:')

    c10d._dump_nccl_trace_json = dump
