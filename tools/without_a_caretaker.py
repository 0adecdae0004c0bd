"""Runs a cluster through what otherwise needs a caretaker, by commands alone, and prints a report.

    tools/without_a_caretaker.py                     four peers: about six minutes
    tools/without_a_caretaker.py --folder kept       leave kits, logs and state folders in a folder

Four devices on this machine, each a process with a certificate, train on the digits. They begin with the release before
this one. While they train,

1. every certificate and key is replaced (`sotto init --join`, `sotto admin sign`, `sotto admin reload`),
2. every device is upgraded to this release, one after the other (`sotto stop`, `sotto run`),
3. one device is killed, and its folder deleted: the others declare it lost by themselves; another device takes its
   place (`sotto init --join`, `sotto admin sign`, `sotto run`), or, with --rejoin, the same one without its state,
4. one device reaches its data cap, slows down, and goes on when its next day begins. Its time zone is set so that its
   midnight comes within the run.

At the end come the sum of the push-sum weights, offences, and the accuracy of the worst peer beside a run of this
release in which nothing happens. Ends with code 1 if mass, rounds or accuracy are not what they should be.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer.config.options import load
from peer.errors import SottoError
from peer.lab.study.checkout import commit
from peer.ops.local_cluster import free_ports
from peer.state.metrics import MetricsStore
from tools.releases import PREDECESSOR, Device, Devices, Release, this_release, unpacked

PEERS = 4
LOST, CAPPED, SPARE = "peer-3", "peer-1", "garage"
SLOW_STEP_S = 2.0
_TIME_TO_REACH_CAP = 1.5
"""Ratio of the time until midnight to the time that the cap takes at the pace so far."""
_MASS_TOLERANCE = 1e-9
_POINT = 0.01


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Durations and settings of the run."""

    rounds: int = 2000
    min_step_s: float = 0.08
    lost_after_s: float = 45.0
    settings: Sequence[str] = ()
    rejoin: bool = False

    @property
    def options(self) -> list[str]:
        """The configuration, in the form of `--set`."""
        return [
            "algorithm.name=quant-sgp",
            f"run.rounds={self.rounds}",
            f"peer.min_step_s={self.min_step_s}",
            f"rounds.lost_after_s={self.lost_after_s}",
            "training.precision=float32",
            f"limits.slow_step_s={SLOW_STEP_S}",
            *self.settings,
        ]


class Demonstration:
    """One run with everything that happens in it."""

    def __init__(self, plan: Plan, folder: Path, predecessor: Release) -> None:
        self.plan, self.folder = plan, folder
        self.old, self.new = predecessor, this_release()
        self.kits = folder / "kits"
        self.ports = free_ports(PEERS + 1)
        self.lost_weights: dict[int, float] = {}
        """Round → the push-sum weight that the lost device wrote down before its folder was deleted."""
        self.joined_in = 0
        """The round in which all knew that its place was taken."""
        self._began = time.monotonic()
        self.devices: Devices

    def run(self) -> None:
        """Go through all of it. Raises SottoError at an unexpected outcome."""
        hosts = [part for port in self.ports[:PEERS] for part in ("--host", f"127.0.0.1:{port}")]
        self.sotto(self.old, "init", "cluster", str(self.kits), *hosts, *_set(self.plan.options))
        # A replacement has the kit of the first setup.
        shutil.copytree(self.kits / LOST, self.folder / "kept" / LOST)
        self.devices = Devices(self.kits)
        with self.devices:
            for device in self.devices.all:
                self.start(device, self.old)
            self.devices.until_beyond(5)
            self.say(f"all have done {self.devices.all[0].round()} rounds with release {self.old.version}")
            self.rotate()
            self.upgrade()
            self.lose_and_replace()
            self.reach_cap()
            self.say("the rest of the run: nothing happens any more")
            if any(self.devices.finish(900.0)):
                raise SottoError("a peer failed")
            self.say("all have ended with exit code 0")

    # -- what happens --------------------------------------------------------------------------------------------------

    def rotate(self) -> None:
        """Replace key and certificate of every device."""
        self.heading("Certificates")
        for device, port in zip(self.devices.all, self.ports, strict=False):
            before = self.certificate(device)
            request = self.folder / f"renewed-{device.name}"
            where = f"127.0.0.1:{port}"
            self.sotto(self.old, "init", "--join", str(request), "--name", device.name, "--host", where)
            named = ("--name", device.name, "--address", where)
            self.sotto(self.old, "sign", str(self.kits), str(request / "request.pem"), *named, "--yes")
            self.shell(f"mv {request / 'peer.key'} {device.kit / 'peer.key'}")
            (request / "peer.key").replace(device.kit / "peer.key")
            self.sotto(self.old, "reload", "--config", str(device.file))
            if (after := self.certificate(device)) == before:
                raise SottoError(f"{device.name} still shows the certificate {before}")
            self.say(f"{device.name}: serial {before[:8]}… is now {after[:8]}…, round {device.round()}")

    def upgrade(self) -> None:
        """Replace the release on every device."""
        self.heading("Releases")
        for device in self.devices.all:
            reached = self.devices.furthest()
            self.stop(device, self.old)
            self.start(device, self.new)
            self.devices.until_beyond(reached + 1)
            status = self.status(self.devices.all[0])
            known = status.get("releases", {device.name: status["version"]})
            named = ", ".join(f"{name} {version or 'unknown'}" for name, version in known.items())
            self.say(f"all go on, round {status['round']}; {self.devices.all[0].name} knows of: {named}")

    def lose_and_replace(self) -> None:
        """Kill a device, delete its folder, and let another one, or itself without its state, take its place."""
        self.heading("A loss")
        lost = next(device for device in self.devices.all if device.name == LOST)
        others = [device for device in self.devices.all if device is not lost]
        round_ = lost.round()
        lost.kill()
        self.shell(f"kill -9 (the process of {LOST})")
        self.lost_weights = weights(lost.kit)
        self.shell(f"rm -r {lost.kit}")
        shutil.rmtree(lost.kit)
        self.devices.all.remove(lost)
        self.say(f"{LOST} is gone in round {round_}")
        self.devices.until(
            lambda: all(LOST not in self.status(each)["members"] for each in others), f"{LOST} is declared lost"
        )
        self.say(f"{', '.join(each.name for each in others)} have declared it lost, round {others[0].round()}")
        if self.plan.rejoin:
            shutil.copytree(self.folder / "kept" / LOST, self.kits / LOST)
            self.shell(f"cp -r kept/{LOST} {self.kits / LOST}")
            name, kit = LOST, self.kits / LOST
        else:
            request, where = self.folder / SPARE, f"127.0.0.1:{self.ports[PEERS]}"
            self.sotto(self.new, "init", "--join", str(request), "--name", SPARE, "--host", where)
            signed = ("--name", SPARE, "--address", where, "--yes", "--json")
            answer = self.sotto(self.new, "sign", str(self.kits), str(request / "request.pem"), *signed)
            name, kit = SPARE, Path(json.loads(answer)["folder"])
            self.shell(f"mv {request / 'peer.key'} {kit / 'peer.key'}")
            (request / "peer.key").replace(kit / "peer.key")
        newcomer = Device(kit)
        self.start(newcomer, self.new)
        self.devices.all.append(newcomer)
        self.devices.until(lambda: all(name in self.status(each)["members"] for each in others), f"{name} joins")
        self.devices.until_beyond(others[0].round())
        self.joined_in = self.devices.furthest()
        self.say(f"{name} is a member, round {self.joined_in}")

    def reach_cap(self) -> None:
        """Give a device a data cap that it reaches, and a day that ends soon after that."""
        self.heading("A data cap")
        device = next(device for device in self.devices.all if device.name == CAPPED)
        began, before, first = time.monotonic(), self.carried(device), device.round()
        self.devices.until_beyond(first + 100, [device])
        carried, reached = self.carried(device) - before, device.round()
        rate, left = carried / (time.monotonic() - began), self.plan.rounds - reached
        # Reached after half of the rounds that are left, so that the day after has enough for the rest.
        cap_mbytes = math.ceil(carried / (reached - first) * left / 2 / (1 << 20))
        if cap_mbytes * (1 << 20) > 0.8 * carried / (reached - first) * left:
            raise SottoError(f"{left} rounds are too few to reach a cap of {cap_mbytes} MiB")
        reached = self.devices.furthest()
        self.stop(device, self.new)
        left_s = _TIME_TO_REACH_CAP * cap_mbytes * (1 << 20) / rate + 3 * SLOW_STEP_S
        zone, midnight = zone_with_midnight(time.time() + left_s)
        self.say(f"{CAPPED} carries {rate / 1000:.1f} kB/s; its midnight is in {left_s:.0f} s (TZ={zone})")
        self.start(device, self.new, {"TZ": zone, "SOTTO_LIMITS__DAY_MBYTES": str(cap_mbytes)})
        self.devices.until_beyond(reached + 1)
        self.devices.until(lambda: bool(self.limits(device)["reached"]), "the data cap", within_s=600.0)
        limit = self.limits(device)["reached"][0]
        self.say(f"{CAPPED} slows down in round {device.round()}: {limit['reason']}, until {limit['until']}")
        if time.time() >= midnight:
            raise SottoError("midnight came before the cap was reached")
        self.devices.until(lambda: not self.limits(device)["reached"], "the next day", within_s=600.0)
        late_s = time.time() - midnight
        if late_s < 0:
            raise SottoError("the device went on before its day was over")
        reached = self.devices.furthest()
        self.devices.until_beyond(reached + 20)
        self.say(f"the next day began {late_s:.0f} s ago: {CAPPED} goes on, round {device.round()}")

    # -- commands ------------------------------------------------------------------------------------------------------

    def sotto(self, release: Release, *arguments: str) -> str:
        """Run a command and print it; return its output."""
        self.shell("sotto " + " ".join(arguments))
        return release.sotto(*arguments)

    def start(self, device: Device, release: Release, environment: Mapping[str, str] | None = None) -> None:
        """Start a device."""
        own = "".join(f"{name}={value} " for name, value in (environment or {}).items())
        self.shell(f"{own}sotto run --config {device.file} &      # release {release.version}")
        device.start(release, environment or {})

    def stop(self, device: Device, release: Release) -> None:
        """Stop a device and wait for its end."""
        self.sotto(release, "stop", "--config", str(device.file))
        if code := device.wait():
            raise SottoError(f"{device.name} ended with code {code}")

    def shell(self, command: str) -> None:
        """Print the command as typed."""
        print(f"{self._at()}  $ {command.replace(f'{self.folder}/', '')}", flush=True)

    def say(self, sentence: str) -> None:
        """Print an outcome."""
        print(f"{self._at()}    {sentence}", flush=True)

    def heading(self, text: str) -> None:
        """Begin a part."""
        print(f"\n{self._at()}  {text}", flush=True)

    def _at(self) -> str:
        return f"{time.monotonic() - self._began:6.1f} s"

    # -- what is asked -------------------------------------------------------------------------------------------------

    def status(self, device: Device) -> Mapping[str, Any]:
        """Return the status of a peer. Raises SottoError if it does not answer for long."""
        answers: list[Mapping[str, Any]] = []

        def answers_now() -> bool:
            answer = device.status()
            answers[:] = [] if answer is None else [answer]
            return bool(answers)

        self.devices.until(answers_now, f"an answer of {device.name}")
        return answers[0]

    def certificate(self, device: Device) -> str:
        """Return the serial number of a peer's certificate."""
        return str(self.status(device)["certificate"]["serial"])

    def carried(self, device: Device) -> int:
        """Return the bytes over a peer's links since the run began, both directions: its own half twice."""
        return 2 * int(self.status(device)["socket_bytes"])

    def limits(self, device: Device) -> Mapping[str, Any]:
        """Return the limits in a peer's status."""
        found: Mapping[str, Any] = self.status(device)["limits"]
        return found


def zone_with_midnight(at: float) -> tuple[str, float]:
    """Return a time zone, as the variable TZ has it, in which a day begins at that time in seconds since 1970, and the
    time, rounded up to a second."""
    midnight = int(at) + 1
    ahead = -midnight % 86_400
    return f"DEMO-{ahead // 3600:02d}:{ahead // 60 % 60:02d}:{ahead % 60:02d}", float(midnight)


@dataclass(frozen=True)
class Outcome:
    """Figures from the metrics of a run."""

    masses: Mapping[int, float]
    """Round → Σu over all that took part."""
    missing_rounds: int
    """Rounds of which a device that was there from the beginning to the end has no row."""
    accuracies: Mapping[str, float]
    """Accuracy of each peer after the last round, as a fraction."""
    offences: int

    @property
    def worst(self) -> float:
        """The accuracy of the worst peer."""
        return min(self.accuracies.values())

    def settled(self) -> tuple[float, int]:
        """Return Σu at the end, and the round from which on it had that value."""
        rounds = sorted(self.masses)
        end = self.masses[rounds[-1]]
        others = (round_ for round_ in reversed(rounds) if abs(self.masses[round_] - end) > _MASS_TOLERANCE)
        return end, next(others, rounds[0] - 1) + 1


def weights(device: Path) -> dict[int, float]:
    """Return round → the push-sum weight u of a device after it."""
    store = MetricsStore(device / "state" / "metrics.sqlite", read_only=True)
    try:
        return {row.round: row.push_weight or 0.0 for row in store.rounds()}
    finally:
        store.close()


def outcome(kits: Path, lost: Mapping[int, float]) -> Outcome:
    """Return the outcome of the run in a cluster folder. `lost`: the weights of a device whose folder is gone."""
    masses, accuracies, missing, offences = dict(lost), dict[str, float](), 0, 0
    for file in sorted(kits.glob("peer-*/peer.toml")):
        config = load(file, environment={})
        own = config.own
        found = weights(file.parent)
        for round_, weight in found.items():
            masses[round_] = masses.get(round_, 0.0) + weight
        if own.is_first:
            missing += config.run.rounds - len(found)
        store = MetricsStore(file.parent / "state" / "metrics.sqlite", read_only=True)
        is_last = (config.peer.index, config.run.rounds, "test")
        last = [each for each in store.evaluations() if (each.peer, each.round, each.split) == is_last]
        accuracies[own.name] = sum(last[-1].correct) / sum(last[-1].total)
        offences += sum(link.offences for link in store.links())
        store.close()
    return Outcome(masses, missing, accuracies, offences)


def calm(plan: Plan, folder: Path) -> Outcome:
    """Return the outcome of the run in which nothing happens."""
    release, kits = this_release(), folder / "calm"
    hosts = [part for port in free_ports(PEERS) for part in ("--host", f"127.0.0.1:{port}")]
    release.sotto("init", "cluster", str(kits), *hosts, *_set([*plan.options, "peer.min_step_s=0"]))
    with Devices(kits) as devices:
        devices.start(release)
        if any(devices.finish(900.0)):
            raise SottoError("a peer of the calm run failed")
    return outcome(kits, {})


def report(demonstration: Demonstration, beside: Outcome) -> list[str]:
    """Print the outcome of a run; return each failure as a sentence."""
    found = outcome(demonstration.kits, demonstration.lost_weights)
    end, since = found.settled()
    known = max(demonstration.lost_weights)
    before = [mass for round_, mass in found.masses.items() if round_ <= known]
    off = max(abs(mass - PEERS) for mass in before)
    print(f"\nmass: Σu = {PEERS} to {off:.0e} in rounds 0 to {known}, {end:.9f} from round {since} to the end")
    print(
        f"      {LOST} had u = {demonstration.lost_weights[known]:.9f} after round {known}, the last that it wrote down"
    )
    print(f"rounds missing: {found.missing_rounds}   offences: {found.offences}")
    for name, accuracy in found.accuracies.items():
        print(f"{name:8}  {accuracy:.2%}")
    print(f"worst peer {found.worst:.2%}; in the calm run {beside.worst:.2%}")
    wrong = []
    if off > _MASS_TOLERANCE:
        wrong.append(f"Σu was off by {off} before the loss")
    if since > demonstration.joined_in:
        wrong.append(f"Σu changed in round {since}, after the last change of members")
    if not 0 < PEERS - end < PEERS:
        wrong.append(f"Σu is {end} at the end")
    if found.missing_rounds:
        wrong.append(f"{found.missing_rounds} rounds are missing")
    if found.offences:
        wrong.append(f"{found.offences} offences were counted")
    if abs(found.worst - beside.worst) > _POINT:
        wrong.append("the worst peer is more than a point away from that of the calm run")
    return wrong


def _set(options: Sequence[str]) -> list[str]:
    return [part for option in options for part in ("--set", option)]


def main() -> None:
    """Run it and print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--rejoin", action="store_true", help="let the lost device come back without its state")
    parser.add_argument("--folder", type=Path, help="keep everything in this folder")
    arguments = parser.parse_args()
    plan = Plan(rounds=arguments.rounds, rejoin=arguments.rejoin)
    print(f"commit {commit()}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "run"
        folder.mkdir(parents=True)
        demonstration = Demonstration(plan, folder, unpacked(PREDECESSOR, Path(temporary) / "predecessor"))
        demonstration.run()
        if wrong := report(demonstration, calm(plan, folder)):
            sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
