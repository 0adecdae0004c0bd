"""Sentences about the limits of a peer's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HELD = {"slow": "slowed down", "pause": "paused", "leave": "leaving the run"}


def limits_reached(answer: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each limit reached, from the answer to `sotto status`: the state of the peer, the end if the
    calendar knows it, and the reason."""
    limits = answer.get("limits", {})
    held = _HELD.get(str(limits.get("then")), "held back")
    reached = limits.get("reached", ())
    return [
        f"{held} until {each['until']}: {each['reason']}" if each["until"] else f"{held}: {each['reason']}"
        for each in reached
    ]


def limits_nearly_reached(answer: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each limit that is nearly reached."""
    return [str(warning) for warning in answer.get("limits", {}).get("warnings", ())]
