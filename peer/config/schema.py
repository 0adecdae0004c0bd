"""Describes in words the values that an option accepts, from the types in `config/options.py` alone.

Error messages, the file that `sotto init` writes and docs/configuration.md take their words from this module, so they
cannot disagree with what is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

_UNITS = {
    "_kbytes_per_s": "kB/s",
    "_kbytes": "KiB",
    "_mbytes": "MiB",
    "_s": "seconds",
    "_rounds": "rounds",
    "_bits": "bits",
}
_RANGES = (
    ("minimum", "of at least"),
    ("exclusiveMinimum", "above"),
    ("maximum", "of at most"),
    ("exclusiveMaximum", "below"),
)


def accepts(section: type[BaseModel], key: str) -> str:
    """Return the values that `key` accepts: "a whole number of at least 1 (rounds)"."""
    return _describe(properties(section)[key]) + (f" ({unit(key)})" if unit(key) else "")


def may_be_unset(section: type[BaseModel], key: str) -> bool:
    """Return whether `key` takes None, which a TOML file spells "none"."""
    return {"type": "null"} in properties(section)[key].get("anyOf", ())


def takes_booleans(section: type[BaseModel], key: str) -> bool:
    """Return whether `key` may be true or false."""
    value = properties(section)[key]
    return any(branch.get("type") == "boolean" for branch in value.get("anyOf", [value]))


def sentence(section: type[BaseModel], key: str) -> str:
    """Return the sentence that the schema says about `key`."""
    return str(properties(section)[key].get("description", "")).replace("\n", " ")


def unit(key: str) -> str:
    """Return the unit that the name of a key ends in, or nothing."""
    return next((text for ending, text in _UNITS.items() if f"_{key}".endswith(ending)), "")


@cache
def properties(section: type[BaseModel]) -> Mapping[str, Mapping[str, Any]]:
    """Return the JSON schema of every key of a section, in the order of its definition."""
    schema: Mapping[str, Mapping[str, Any]] = section.model_json_schema()["properties"]
    return schema


def _describe(value: Mapping[str, Any]) -> str:
    choices = [choice for branch in value.get("anyOf", [value]) for choice in _choices(branch)]
    *most, last = dict.fromkeys(choices)
    if not most:
        return last
    # A comma before "or" keeps "at most 1, or "none"" from reading as a limit.
    return f"{', '.join(most)}{',' if any(' ' in choice for choice in most) else ''} or {last}"


def _choices(branch: Mapping[str, Any]) -> list[str]:
    if "const" in branch:
        return [_quoted(branch["const"])]
    if "enum" in branch:
        return [_quoted(choice) for choice in branch["enum"]]
    match branch.get("type"):
        case "null":
            return ['"none"']
        case "boolean":
            return ["true", "false"]
        case "integer":
            return [_ranged("a whole number", branch)]
        case "number":
            return [_ranged("a number", branch)]
        case "array":
            return [f"a list in which each item is {_describe(branch['items'])}"]
        case "object":
            return [f"a table in which each value is {_describe(branch['additionalProperties'])}"]
        case "string" if "pattern" in branch:
            underscore = ", underscores" if "_" in branch["pattern"] else ""
            return [f"a short name of letters, digits, dots, dashes{underscore}"]
        case _:
            return ["text"]


def _ranged(noun: str, branch: Mapping[str, Any]) -> str:
    if "minimum" in branch and "maximum" in branch:
        return f"{noun} from {branch['minimum']} to {branch['maximum']}"
    limits = [f"{words} {branch[name]}" for name, words in _RANGES if name in branch]
    return f"{noun} {' and '.join(limits)}".replace("and of", "and").rstrip()


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
