"""Texts and values, made fit for a log, a terminal, a page and JSON: no escape sequences, line breaks or NaN."""

from __future__ import annotations

import unicodedata
from typing import Any

_MOST_CHARACTERS = 500


def printable(text: str, most: int | None = _MOST_CHARACTERS) -> str:
    """Return a text with a space for each character that cannot be printed, cut to `most` characters."""
    return "".join(c if c.isprintable() else " " for c in text[:most])


def quote(text: str, most: int = 80) -> str:
    """Return a text, printable and at most so long, in quotation marks."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")


def printable_values(value: object) -> object:
    """Return a JSON value with all texts in it printable, keys included."""
    if isinstance(value, str):
        return printable(value, None)
    if isinstance(value, dict):
        return {printable(key, None): printable_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [printable_values(item) for item in value]
    return value


def finite(value: Any) -> Any:
    """Return a value as portable JSON: None in place of numbers that are not finite, text as keys."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def normal_name(name: str) -> str:
    """Return a name in Unicode's normal form C, as all devices write it, whatever their file systems do."""
    return unicodedata.normalize("NFC", name)
