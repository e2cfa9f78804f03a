"""Values that travel between a student's room and its judge: exact types, as one line of JSON.

Imports no torch unless a tensor comes. Megatron has no counterpart.

A value whose class a student has made could answer every comparison with "equal". So a value is
written only if its type is exactly one of these: None, bool, int, float, str, bytes, list, tuple,
dict, torch.Tensor. What is read is made of these and of nothing else.
"""

import base64
import json
import math
import sys
from typing import Any

from minimegatron.core.json_text import parse_json
from minimegatron.exercises.room.stand_ins import stood_for, used_words

MOST_BYTES = 16 << 20
"""Of one line."""
MOST_KEYS = 10_000
"""Of one dict: keys can be chosen so that looking them up takes longer and longer."""
MOST_DEPTH = 30
MOST_BITS = 4096
"""Of an int: Python writes no longer ones as text."""
DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]  # what a check hands on


class NotPlain(TypeError):
    """A value that is not plain data. The message says where, and what it is."""


def to_line(value: Any) -> str:
    """The value as JSON, without a line break. Raises NotPlain."""
    line = json.dumps(_encode(value, "the answer", 0))
    if len(line) > MOST_BYTES:
        raise NotPlain(f"the answer has {len(line)} bytes; {MOST_BYTES} are allowed")
    return line


def from_line(line: str | bytes) -> Any:
    """The inverse. Raises ValueError for anything that `to_line` does not write."""
    if len(line) > MOST_BYTES:
        raise ValueError(f"a line has {len(line)} bytes; {MOST_BYTES} are allowed")
    try:
        return _decode(parse_json(line, "an answer"))
    except (KeyError, TypeError, IndexError, RuntimeError, OverflowError) as error:
        raise ValueError(f"not plain data: {error}") from error


def kind_of(value: Any) -> Any:
    """Types, keys, lengths and shapes of plain data, without the values; nan and inf are kinds.

    >>> kind_of({"a": [1, 2.5], "b": (float("nan"), None)})
    {'a': ['int', 'float'], 'b': ('nan', 'NoneType')}
    """
    kind = type(value)
    if kind is dict:
        return {key: kind_of(one) for key, one in value.items()}
    if kind in (list, tuple):
        return kind(kind_of(one) for one in value)
    if kind is float:
        return "float" if math.isfinite(value) else str(value)
    if hasattr(value, "dtype"):
        return str(value.dtype), list(value.shape), bool(value.isfinite().all())
    return kind.__name__


def _encode(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if depth > MOST_DEPTH:
        raise NotPlain(f"{where} is nested more than {MOST_DEPTH} deep")
    if value is None or kind in (bool, int, str):
        if kind is int and value.bit_length() > MOST_BITS:
            raise NotPlain(
                f"{where} is an int of {value.bit_length()} bits; {MOST_BITS} are allowed"
            )
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind in (list, tuple):
        items = [_encode(one, f"{where}[{i}]", depth + 1) for i, one in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict:
        if len(value) > MOST_KEYS:
            raise NotPlain(f"{where} has {len(value)} keys; {MOST_KEYS} are allowed")
        pairs = [
            [_encode(key, f"a key of {where}", depth + 1), _encode(one, _at(where, key), depth + 1)]
            for key, one in value.items()
        ]
        return {"dict": pairs}
    torch = sys.modules.get("torch")
    if torch is not None and kind is getattr(torch, "Tensor", None):
        return {"tensor": _tensor_data(value, where)}
    if name := stood_for(value):
        raise NotPlain(f"{where} comes from {name}\n{used_words(name)}")
    raise NotPlain(f"{where} is {_a(kind)}; plain Python values and tensors are expected")


def _at(where: str, key: Any) -> str:
    return f"{where}[{key!r}]" if type(key) in (str, int, bool) else where


def _a(kind: type) -> str:
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def _tensor_data(tensor: Any, where: str) -> list:
    torch = sys.modules["torch"]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        raise NotPlain(f"{where} is a meta tensor, which has a shape and no numbers")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise NotPlain(
            f"{where} is a tensor of layout {layout}; an ordinary, dense one is expected"
        )
    if dtype not in DTYPES:
        raise NotPlain(f"{where} is a tensor of {dtype}, which no exercise asks for")
    plain = tensor.detach().cpu().contiguous()
    # An empty tensor keeps its strides, whatever is asked of it, and cannot be seen as bytes then.
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return [dtype, list(plain.shape), base64.b64encode(data).decode()]


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return [_decode(one) for one in value] if isinstance(value, list) else value
    ((kind, inner),) = value.items()
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inner]
    if kind == "bytes":
        return base64.b64decode(inner)
    if kind == "tuple":
        return tuple(_decode(one) for one in inner)
    if kind == "dict":
        if len(inner) > MOST_KEYS:
            raise ValueError(f"a dict has {len(inner)} keys; {MOST_KEYS} are allowed")
        return {_decode(key): _decode(one) for key, one in inner}
    if kind == "tensor":
        return _tensor(*inner)
    raise ValueError(f"not plain data: {kind!r}")


def _tensor(dtype: str, shape: list[int], text: str) -> Any:
    import torch

    if dtype not in DTYPES:
        raise ValueError(f"no tensor of {dtype!r} is expected")
    data = bytearray(base64.b64decode(text))
    if not data:
        # Never torch.empty: its memory holds old data, and the shape may ask for any amount of it.
        return torch.zeros(0, dtype=getattr(torch, dtype)).reshape(shape)
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape).clone()
