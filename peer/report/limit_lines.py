"""What a peer says of the limits of its device, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HELD = {"slow": "slowed down", "pause": "paused", "leave": "leaving the run"}


def limits_reached(answer: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each limit that is reached, after the answer to `sotto status`: what the peer is, until when
    if the calendar knows, and why."""
    limits = answer.get("limits", {})
    held = _HELD.get(str(limits.get("then")), "held back")
    reached = limits.get("reached", ())
    return [
        f"{held} until {each['until']}: {each['reason']}" if each["until"] else f"{held}: {each['reason']}"
        for each in reached
    ]


def limits_nearly_reached(answer: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each limit of which little is left."""
    return [str(warning) for warning in answer.get("limits", {}).get("warnings", ())]
