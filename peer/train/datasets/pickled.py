"""Reads the values of a pickle without running it: what CIFAR's Python batches need, and nothing else.

A pickle is a program that may call any function. This reader knows the operations that build dictionaries, lists,
tuples, texts, bytes and numbers, and the three calls by which numpy writes an array of bytes, which it recognises by
name and never makes: nothing named in a file is ever imported or called. Everything else is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from peer.errors import DataError

_ARRAY = {(module, "_reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")}
_NDARRAY, _DTYPE, _ENCODE = ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")
_NAMES = _ARRAY | {_NDARRAY, _DTYPE, _ENCODE}


def read_values(data: bytes, name: str) -> dict[str, Any]:
    """Return the dictionary that the pickle `data` holds, its keys as text and its arrays as uint8[...].

    Raises DataError, with `name`, for anything but such a dictionary.
    """
    try:
        value = _Reader(data).run()
    except (_Refused, IndexError, KeyError, ValueError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"{name} is no batch in the format of CIFAR's Python files: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{name} holds a {type(value).__name__}, not the dictionary of a CIFAR batch")
    return {_text(key): item.array(name) if isinstance(item, _Array) else item for key, item in value.items()}


class _Refused(Exception):
    """The pickle does something that a batch has no need of."""


class _Mark:
    """Where a list, tuple or set of dictionary items begins on the stack."""


@dataclass(frozen=True)
class _Name:
    """A function or class that the pickle names."""

    module: str
    name: str


@dataclass
class _Type:
    """numpy.dtype("u1"), with whatever state."""

    code: str


@dataclass
class _Array:
    """numpy's empty array, and the state that fills it."""

    state: Any = None

    def array(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        state = self.state
        if not isinstance(state, tuple) or len(state) != 5:
            raise DataError(f"{name} holds an array without contents")
        _, shape, kind, fortran, content = state
        if isinstance(content, str):
            content = content.encode("latin-1")
        if not isinstance(kind, _Type) or not isinstance(content, bytes) or fortran is not False:
            raise DataError(f"{name} holds an array that is not of bytes in rows")
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise DataError(f"{name} holds an array with the shape {shape!r}")
        total = 1
        for size in shape:
            total *= size
        if total != len(content):
            raise DataError(f"{name} holds an array of {list(shape)} in {len(content)} bytes")
        return np.frombuffer(bytearray(content), np.uint8).reshape(shape)


class _Reader:
    """The stack machine, without its dangerous half."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return the value that the program leaves."""
        while True:
            code = self._take(1)
            if code == b".":
                return self._stack.pop()
            step = _OPERATIONS.get(code)
            if step is None:
                raise _Refused(f"operation {code!r} at byte {self._at - 1} is not one that data needs")
            step(self)

    def _take(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._data):
            raise _Refused("it ends too early")
        part = self._data[self._at : self._at + count]
        self._at += count
        return part

    def _number(self, layout: str) -> int:
        return int(struct.unpack(layout, self._take(struct.calcsize(layout)))[0])

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        part = self._take(end - self._at)
        self._at += 1
        return part.decode("ascii")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _since_mark(self) -> list[Any]:
        for position in range(len(self._stack) - 1, -1, -1):
            if isinstance(self._stack[position], _Mark):
                items = self._stack[position + 1 :]
                del self._stack[position:]
                return items
        raise _Refused("a list ends that never began")

    def _skip(self, count: int) -> None:
        self._take(count)

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise _Refused("a tuple has too few values")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._push(items)

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise _Refused("values are appended to what is no list")
        target.extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise _Refused("items are set in what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Only these: the hash of a deeply nested tuple would overflow the C stack.
            if not isinstance(key, (str, bytes)):
                raise _Refused(f"a key is a {type(key).__name__}")
            target[key] = value

    def _name(self, module: str, name: str) -> None:
        if (module, name) not in _NAMES:
            raise _Refused(f"it wants to call {module}.{name}")
        self._push(_Name(module, name))

    def _stack_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _Refused("a name is no text")
        self._name(module, name)

    def _call(self) -> None:
        """Stand for the three calls that numpy's arrays are written as; a text encoded as bytes is encoded."""
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise _Refused("it wants to call what is no function")
        named = (function.module, function.name)
        if named in _ARRAY and arguments and arguments[0] == _Name(*_NDARRAY):
            self._push(_Array())
        elif named == _DTYPE and arguments and _text(arguments[0]) in ("u1", "|u1"):
            self._push(_Type("u1"))
        elif named == _ENCODE and len(arguments) == 2 and isinstance(arguments[0], str):
            if arguments[1] not in ("latin1", "latin-1"):
                raise _Refused(f"a text is encoded as {arguments[1]!r}")
            self._push(arguments[0].encode("latin-1"))
        else:
            raise _Refused(f"it calls {function.module}.{function.name} for something else than an array of bytes")

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, _Array):
            target.state = state
        elif not isinstance(target, _Type):
            raise _Refused("it sets the state of what is no array")

    def _remember(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _recall(self, index: int) -> None:
        self._push(self._memo[index])


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if not isinstance(value, str):
        raise _Refused(f"a {type(value).__name__} stands where a text should")
    return value


def _counted(layout: str, convert: Callable[[bytes], Any]) -> Callable[[_Reader], None]:
    return lambda reader: reader._push(convert(reader._take(reader._number(layout))))


def _as_bytes(part: bytes) -> bytes:
    return part


def _as_text(part: bytes) -> str:
    return part.decode("utf-8", "surrogatepass")


_OPERATIONS: dict[bytes, Callable[[_Reader], None]] = {
    b"\x80": lambda r: r._skip(1),  # PROTO
    b"\x95": lambda r: r._skip(8),  # FRAME
    b"(": lambda r: r._push(_Mark()),
    b"}": lambda r: r._push({}),
    b"]": lambda r: r._push([]),
    b")": lambda r: r._push(()),
    b"N": lambda r: r._push(None),
    b"\x88": lambda r: r._push(True),
    b"\x89": lambda r: r._push(False),
    b"K": lambda r: r._push(r._number("<B")),
    b"M": lambda r: r._push(r._number("<H")),
    b"J": lambda r: r._push(r._number("<i")),
    b"U": _counted("<B", _as_bytes),  # SHORT_BINSTRING and BINSTRING: texts of Python 2 are bytes
    b"T": _counted("<i", _as_bytes),
    b"C": _counted("<B", _as_bytes),  # SHORT_BINBYTES, BINBYTES and BINBYTES8
    b"B": _counted("<I", _as_bytes),
    b"\x8e": _counted("<Q", _as_bytes),
    b"\x8c": _counted("<B", _as_text),  # SHORT_BINUNICODE, BINUNICODE and BINUNICODE8
    b"X": _counted("<I", _as_text),
    b"\x8d": _counted("<Q", _as_text),
    b"t": lambda r: r._push(tuple(r._since_mark())),
    b"\x85": lambda r: r._tuple(1),
    b"\x86": lambda r: r._tuple(2),
    b"\x87": lambda r: r._tuple(3),
    b"a": lambda r: r._append([r._stack.pop()]),
    b"e": lambda r: r._append(r._since_mark()),
    b"s": lambda r: r._set([r._stack.pop(-2), r._stack.pop()]),
    b"u": lambda r: r._set(r._since_mark()),
    b"q": lambda r: r._remember(r._number("<B")),
    b"r": lambda r: r._remember(r._number("<I")),
    b"\x94": lambda r: r._remember(len(r._memo)),  # MEMOIZE
    b"h": lambda r: r._recall(r._number("<B")),
    b"j": lambda r: r._recall(r._number("<I")),
    b"c": lambda r: r._name(r._line(), r._line()),
    b"\x93": lambda r: r._stack_name(),
    b"R": lambda r: r._call(),
    b"b": lambda r: r._build(),
}
