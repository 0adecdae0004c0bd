"""The releases of a run's peers, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from peer.foreign_text import printable


def versions_of(answers: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return name of a peer → its release, from the answers to `status`: each peer's word about itself, and the others'
    about those that do not answer."""
    said, heard = dict[str, str](), dict[str, str]()
    for answer in answers:
        if "version" in answer and "name" in answer:
            said[str(answer["name"])] = printable(str(answer["version"]))
        known = answer.get("releases")
        if isinstance(known, dict):
            heard |= {str(name): printable(str(version)) for name, version in known.items() if version is not None}
    return heard | said


def mixed(versions: Mapping[str, str]) -> str | None:
    """Return which peers run another release than most, as a sentence without a full stop; None where all run the
    same."""
    groups: dict[str, list[str]] = {}
    for name, version in versions.items():
        groups.setdefault(version, []).append(name)
    if len(groups) < 2:
        return None
    most = max(groups, key=lambda version: (len(groups[version]), version))
    parts = [
        f"{_listed(names)} {'runs' if len(names) == 1 else 'run'} {version}"
        for version, names in sorted(groups.items())
        if version != most
    ]
    rest = groups[most]
    return ", ".join([*parts, f"the others {most}" if len(rest) > 1 else f"{rest[0]} {most}"])


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
