"""Shapes links: between network namespaces for studies, and of containers that run already.

    tools/shape.py profiles                                   what there is
    tools/shape.py measure [--seconds 4] [PROFILE …]          two namespaces, what was asked and what was measured
    tools/shape.py containers PROFILE ID …                    limit what leaves these containers
    tools/shape.py release ID …                               and take it back
    tools/shape.py clean                                      remove what a killed command left

All but the first need root. Of a compose cluster: tools/shape.py containers dsl $(docker compose ps -q peer)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from links import measure, network
from links.profiles import PROFILES, find


def show_profiles() -> int:
    """Print all profiles."""
    for name, profile in PROFILES.items():
        rate = f"{profile.up_kbit:g}/{profile.down_kbit:g} kbit/s up/down" if profile.up_kbit else "no limit"
        loss = f", {profile.loss:.1%} lost" if profile.loss else ""
        print(f"{name:26}{rate}, {profile.latency_ms:g} ms one way{loss} ({profile.source})")
    return 0


def measure_profiles(names: Sequence[str], seconds: float) -> int:
    """Print what each profile turns out to be between two namespaces; return 1 if one is not what it should be."""
    head = f"{'profile':26}{'':6}{'asked':>12}{'goodput':>12}{'':8}{'asked':>10}{'round trip':>12}{'least':>10}"
    print(head)
    wrong = 0
    for name in names:
        profile = find(name)
        with network.link_network([profile, profile]) as links:
            for pair in ((0, 1), (1, 0)) if profile.up_kbit != profile.down_kbit else ((0, 1),):
                found = measure.measure(links, *pair, seconds=seconds)
                # What is lost at random limits TCP before the rate does.
                right = found.round_trip_is_right and (found.rate_is_right or profile.loss > 0)
                wrong += not right
                share = f"{found.goodput_kbit / found.asked_kbit:.1%}" if found.asked_kbit else ""
                trip, least = found.round_trip_ms, found.least_round_trip_ms
                print(
                    f"{name:26}{pair[0]} → {pair[1]} {found.asked_kbit:9g} kb {found.goodput_kbit:9.0f} kb {share:>7}"
                    f"{found.asked_round_trip_ms:8.2f} ms{trip:9.2f} ms{least:7.2f} ms"
                    f"{'' if right else '  not what was asked for'}",
                    flush=True,
                )
    return 1 if wrong else 0


def process_of(container: str) -> int:
    """Return the first process of a container. Raises LinkError if it does not run."""
    command = ["docker", "inspect", "--format", "{{.State.Pid}}", container]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not int(done.stdout):
        raise network.LinkError(f"container {container} does not run: {done.stderr.strip()}")
    return int(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("profiles")
    measuring = verbs.add_parser("measure")
    measuring.add_argument("profile", nargs="*", help="all that have a limit or a latency, if none is given")
    measuring.add_argument("--seconds", type=float, default=4.0, help="of each transfer")
    shaping = verbs.add_parser("containers")
    shaping.add_argument("profile")
    releasing = verbs.add_parser("release")
    for verb in (shaping, releasing):
        verb.add_argument("container", nargs="+")
        verb.add_argument("--interface", default="eth0")
    verbs.add_parser("clean")
    options = parser.parse_args(arguments)
    try:
        if options.verb == "profiles":
            return show_profiles()
        if options.verb == "clean":
            removed = network.clean()
            print(f"removed {len(removed)} namespaces" if removed else "nothing was left behind")
            return 0
        if options.verb == "measure":
            if (reason := network.missing()) is not None:
                raise network.LinkError(reason)
            return measure_profiles(
                options.profile or [name for name in PROFILES if name != "unshaped"], options.seconds
            )
        for container in options.container:
            pid = process_of(container)
            if options.verb == "release":
                network.release_container(pid, options.interface)
                continue
            profile = find(options.profile)
            remark = network.shape_container(pid, options.interface, profile)
            print(f"{container}: {asdict(profile)['up_kbit']:g} kbit/s{f'; {remark}' if remark else ''}")
    except (network.LinkError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
