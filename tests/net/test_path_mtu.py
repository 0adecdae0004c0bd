"""What the kernel knows of the way to another device."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from peer.ops.doctor import path_mtu


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_the_way_to_this_machine_has_the_mtu_of_its_interface() -> None:
    # The length of a packet of IPv4 is a number of 16 bits.
    assert path_mtu("127.0.0.1", 7700) == min(int(Path("/sys/class/net/lo/mtu").read_text()), 65535)


def test_of_a_name_that_nobody_knows_nothing_is_known() -> None:
    assert path_mtu("nobody.invalid", 7700) is None


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="there is no IPv6 here")
def test_ipv6_is_asked_in_its_own_way() -> None:
    if re.search(r"\blo$", Path("/proc/net/if_inet6").read_text(), re.MULTILINE):
        assert path_mtu("::1", 7700) == int(Path("/sys/class/net/lo/mtu").read_text())
