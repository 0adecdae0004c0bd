"""Whether links can be made on this machine, and which network namespaces it has."""

from __future__ import annotations

import subprocess

import pytest

from peer.links import network

_MISSING = network.missing()
needs_links = pytest.mark.skipif(_MISSING is not None, reason=f"links cannot be shaped here: {_MISSING}")


def namespaces() -> set[str]:
    """Return the names of the network namespaces of this machine, whoever made them."""
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listing.splitlines()}
