"""Links between namespaces are no faster, no shorter and no safer than was asked for, and leave nothing behind.

How close they come is for `sotto lab shape measure` to say: on a busy machine a test could only guess.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from peer.errors import ConfigError
from peer.links import measure, network
from peer.links.profiles import PROFILES, Profile, find
from tests.links.namespaces import namespaces, needs_links


@pytest.mark.root
@needs_links
def test_a_link_keeps_to_its_rate_and_its_latency() -> None:
    slow, far_away = (Profile(up_kbit=2_000, down_kbit=8_000, latency_ms=latency_ms) for latency_ms in (10, 30))
    with network.LinkNetwork([slow, slow, far_away]) as links:
        assert links.rate_kbit(0, 1) == 2_000
        near = measure.measure(links, 0, 1, seconds=1.0)
        assert near.asked_round_trip_ms == pytest.approx(20.0, abs=0.5)
        # Whatever else the machine does can only make it slower.
        assert near.least_round_trip_ms > 18.0
        assert 0 < near.goodput_kbit < 2_000
        # The mean of the two profiles: 20 ms there and back.
        far = measure.measure(links, 0, 2, seconds=0.2)
        assert far.least_round_trip_ms > 36.0
        before = links.sent_bytes(0)
        subprocess.run([*links.command(0), "bash", "-c", f"echo > /dev/udp/{links.address(1)}/9"], check=True)
        assert links.sent_bytes(0) > before


@pytest.mark.root
@needs_links
def test_the_thinner_of_upload_and_download_decides() -> None:
    sender = Profile(up_kbit=20_000, down_kbit=20_000, latency_ms=0)
    receiver = Profile(up_kbit=20_000, down_kbit=1_000, latency_ms=0)
    with network.LinkNetwork([sender, receiver]) as links:
        found = measure.measure(links, 0, 1, seconds=1.0)
        assert found.asked_kbit == 1_000
        assert found.goodput_kbit < 1_000


@pytest.mark.root
@needs_links
def test_packets_are_lost_as_often_as_was_asked() -> None:
    lossy = Profile(up_kbit=20_000, down_kbit=20_000, latency_ms=0, loss=0.05)
    with network.LinkNetwork([lossy, lossy], seed=7) as links:
        flood = f"for i in {{1..2000}}; do echo > /dev/udp/{links.address(1)}/9; done"
        subprocess.run([*links.command(0), "bash", "-c", flood], check=True)
    got = links.counters[1]
    assert got["frames"] + got["lost"] + got["dropped"] >= 2000
    # Both ends lose 5 %: 0.0975 of 2,000, whose standard deviation is 13.
    assert 130 < got["lost"] < 260


@pytest.mark.root
@needs_links
def test_what_a_killed_process_left_is_cleaned() -> None:
    program = (
        "import sys\n"
        "from peer.links import network, profiles\n"
        "links = network.LinkNetwork([profiles.find('10mbit')] * 2)\n"
        "print(links.namespace(0), links.namespace(1), flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    left = set(owner.stdout.readline().split())
    assert len(left) == 2
    assert left <= namespaces()
    # Its own are not taken from a process that lives.
    assert not left & set(network.clean())
    owner.kill()
    owner.communicate()
    assert left <= set(network.clean())
    assert not left & namespaces()


@pytest.mark.root
@needs_links
def test_a_name_left_behind_under_the_id_of_this_process_is_taken_over() -> None:
    """Ids are used again, and where /run is on a disk the names outlive the machine they were made on."""
    program = (
        "import os, subprocess\n"
        "from peer.links import network, profiles\n"
        "left, probe = (f'{network.PREFIX}-{os.getpid()}-{what}' for what in (0, 'probe'))\n"
        "for name in (left, probe):\n"
        "    subprocess.run(['ip', 'netns', 'add', name], check=True)\n"
        "assert network.missing() is None\n"
        "with network.LinkNetwork([profiles.find('unshaped')] * 2) as links:\n"
        "    assert links.namespace(0) == left\n"
        "    subprocess.run([*links.command(0), 'ip', 'link', 'show', network.INTERFACE], check=True)\n"
        "    print(left, links.namespace(1))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = set(done.stdout.splitlines()[-1].split())
    assert len(names) == 2
    assert not names & namespaces()


def test_profiles_of_the_paper() -> None:
    paper = {name: (each.up_kbit, each.latency_ms) for name, each in PROFILES.items() if name.startswith("moniqua")}
    assert set(paper.values()) == {(200e3, 0.15), (100e3, 0.15), (100e3, 1.0), (1e3, 1.0), (20e3, 0.15)}


def test_a_profile_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="valid: moniqua"):
        find("carrier-pigeon")
    with pytest.raises(ValueError, match="is no link"):
        Profile(up_kbit=-1, down_kbit=1, latency_ms=0)
