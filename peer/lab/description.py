"""TOML files that describe a grid: frozen tables that refuse unknown keys, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from peer.errors import ConfigError
from peer.foreign_values import parse_toml


class Table(BaseModel):
    """A frozen table; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Contender(Table):
    """Options that belong together, under a name."""

    name: str
    options: tuple[str, ...] = ()
    """Overrides of the job, section.key=value."""


Described = TypeVar("Described", bound=Table)


def read_description(kind: type[Described], path: Path) -> Described:
    """Return the content of a file. Raises ConfigError that names the fault."""
    file = str(path)
    try:
        return kind.model_validate(parse_toml(path.read_text(encoding="utf-8-sig")))
    except ValidationError as error:
        # A misspelt key is told before the one that is missing for it.
        first = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise ConfigError("is missing", key=key, file=file) from None
        if first["type"] == "extra_forbidden":
            valid = ", ".join(kind.model_fields) if len(first["loc"]) == 1 else None
            raise ConfigError("unknown key", key=key, valid=valid, file=file) from None
        raise ConfigError(f"is not valid: {first['msg']}", key=key, value=first["input"], file=file) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=file) from None
    except ValueError as error:
        raise ConfigError(f"is not valid TOML: {error}", file=file) from None
