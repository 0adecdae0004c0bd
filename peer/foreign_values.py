"""JSON and TOML from others: answers of peers, and files of a folder that may be another machine's.

The parsers of the standard library take NaN, lists nested until the stack ends, and numbers of thousands of digits.
Code that reads such a value later ends with an unexpected error. Length, depth, count and numbers are therefore checked
here, before anything else reads the value; a wrong one raises ValueError with the reason.
"""

from __future__ import annotations

import json
import tomllib
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError

from peer.errors import StateError

Infinite: TypeAlias = Literal["refused", "kept", "none"]
MOST_BYTES = 4 << 20
"""Most bytes of an answer, which are those of one gRPC message."""
_BYTES_A_VALUE = 4
"""A text may have as many values as its bound holds of these: "[]," has three, and its list takes 64 in memory."""
_MOST_LEVELS = 32
"""Most nested lists and objects. The deepest value that the package writes, the choices of a sweep, has six."""
_LARGEST = 1 << 128
"""Bound of integers. States of random generators are below it; a float can hold it."""
_WHY = 200

T = TypeVar("T")


def parse_json(text: str | bytes, *, most_bytes: int = MOST_BYTES, infinite: Infinite = "refused") -> Any:
    """Return the value of a text. Raises ValueError for invalid JSON or a value out of bounds. `infinite`: treatment of
    NaN and infinite numbers, which JSON lacks but a diverged run's figures have."""
    if len(text) > most_bytes:
        raise ValueError(f"longer than {most_bytes:,} bytes")
    comma = "," if isinstance(text, str) else b","
    if text.count(comma) > most_bytes // _BYTES_A_VALUE:  # type: ignore[arg-type]
        raise ValueError(f"more than {most_bytes // _BYTES_A_VALUE:,} values")
    try:
        value = json.loads(text, parse_constant=(lambda _: None) if infinite == "none" else float)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check(value, infinite == "kept")
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a text in TOML, which knows infinite numbers. Raises ValueError, as `parse_json`."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check(tables, may_be_infinite=True)
    return tables


def as_kind(kind: type[T], value: object, source: object) -> T:
    """Return a JSON value in `source` as one of `kind`: a dataclass, or a type like dict[str, float]. Keys without a
    field are left out. Raises StateError for a value of another kind."""
    try:
        # In the mode of JSON, in which a list stands for a tuple and an object for a dataclass.
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise StateError(f"{source}: is damaged, or another kind of file: {first_of(error)}") from None


def first_of(error: ValidationError) -> str:
    """Return the first fault of a value, and its place."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))[:_WHY]
    return f"{place}: {first['msg'][:_WHY]}" if place else first["msg"][:_WHY]


def _check(value: object, may_be_infinite: bool) -> None:
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        below: list[object] = []
        for each in level:
            if isinstance(each, list):
                below += each
            elif isinstance(each, dict):
                below += each
                below += each.values()
            elif isinstance(each, str):
                each.encode()  # Half of a surrogate pair can be neither printed nor written.
            elif isinstance(each, int) and not -_LARGEST < each < _LARGEST:
                raise ValueError("a number that is too large")
            elif isinstance(each, float) and each - each != 0 and not may_be_infinite:
                raise ValueError("a number that is not finite")
        if not below:
            return
        level = below
    raise ValueError("nested too deeply")
