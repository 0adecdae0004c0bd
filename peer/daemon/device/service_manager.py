"""Reports of the daemon's state to systemd (or another program that set NOTIFY_SOCKET); nothing happens without it."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> None:
    """Send a notification such as "READY=1" or "STOPPING=1" (sd_notify(3)); errors are ignored, as it advises."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    # A leading @ stands for Linux's abstract namespace, whose names begin with a zero byte.
    target = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        try:
            channel.connect(target)
            channel.send(state.encode(errors="replace"))
        except OSError:
            return
