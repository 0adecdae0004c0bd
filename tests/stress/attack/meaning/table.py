"""Outcomes of two releases as one table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEAD = (
    "| lie | before | after | what honest peers say | round, before and after the lie | memory | log |\n"
    "| --- | --- | --- | --- | ---: | ---: | ---: |\n"
)


def table(before: Path, after: Path) -> str:
    """Return Markdown of the files that `--json` wrote for two releases."""
    old, new = (
        {row["lie"]: row for row in json.loads(path.read_text())["lies"]} for path in (before, after)
    )  # fmt: skip
    return _HEAD + "".join(_row(old.get(name), row) for name, row in new.items())


def _row(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> str:
    said = new["said"] or new["told"][:1] or [""]
    cells = (
        f"`{new['lie']}`: {new['what'].rstrip('.')}",
        "not run" if old is None else what_became(old),
        what_became(new),
        _short(re.sub(r"^peer-\d: ", "", said[0])),
        "{:.0f} → {:.0f} ms".format(*new["round_ms"]),
        "{:.0f} → {:.0f} MB".format(*new["memory_mb"]),
        f"{new['log_bytes'] / 1000:.1f} kB",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def what_became(row: Mapping[str, Any]) -> str:
    """Return in some words what became of three honest peers."""
    found = []
    if row["trouble"]:
        return str(row["trouble"])
    if row["died"]:
        reason = next(iter(row["died"].values())).split("sotto: error: ")[-1].split(" (run the same")[0]
        found.append(f"{len(row['died'])} of 3 end: {_short(reason)}")
    if row["restarted"].startswith("ends with"):
        found.append("ends again when started again")
    if not row["finished"] and not row["died"]:
        found.append("no round ends any more")
    if not row["same_models"] and row["finished"]:
        found.append("other models")
    if row["in_state"]:
        found.append("in the state folder")
    if row["believed"]:
        found.append("believed and passed on")
    if row["checkpoints"][1] < row["checkpoints"][0]:
        found.append("checkpoints deleted")
    if row["memory_mb"][1] > row["memory_mb"][0] + 32:
        found.append("memory grows")
    if row["log_bytes"] > 16_384:
        found.append(f"{row['log_bytes'] / 1000:.0f} kB of log in seconds")
    if row["figures"].get("tunnels", 0) > 2:
        found.append(f"{row['figures']['tunnels']} connections at once")
    if row["slowest_ms"] > 15_000:
        found.append(f"a round of {row['slowest_ms'] / 1000:.0f} s")
    return "; ".join(found) or "nothing"


def _short(text: str) -> str:
    return text if len(text) <= 110 else text[:109] + "…"
