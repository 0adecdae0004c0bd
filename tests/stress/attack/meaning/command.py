"""The command: one row for each lie."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from tests.stress.attack.meaning.insider import Insider, speak_as
from tests.stress.attack.meaning.lies import LIES, Lie
from tests.stress.attack.meaning.trial import COMMON, Outcome, Sides, Trial
from tests.warm_python import WarmPython
from tools.releases import Release

HERE = Path(__file__).resolve().parents[4]


def live(name: str, folder: str, release: str) -> int:
    """Be the attacker, in this process; return the exit code of its peer."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    speak_as(Path(release))
    return asyncio.run(Insider(Path(folder)).live(LIES[name].strike if name else None))


def describe(outcome: Outcome) -> str:
    """Return an outcome in some lines."""
    before, after = outcome.round_ms
    succeeded = "succeeded, as SECURITY.md says" if LIES[outcome.lie].admitted else "SUCCEEDED"
    lines = [f"{outcome.lie}: {'held' if outcome.held else succeeded}. {outcome.what}"]
    lines += [f"  {name} died: {words}" for name, words in outcome.died.items()]
    lines += [f"  {words}" for words in outcome.said]
    lines += [f"  the attacker was told: {words}" for words in outcome.told]
    answered, finished, same, stored = (
        "" if each else "NOT "
        for each in (outcome.answers_status, outcome.finished, outcome.same_models, not outcome.in_state)
    )
    lines.append(
        f"  {outcome.offences} offences; status {answered}answered; killed and started again: {outcome.restarted}; "
        f"{finished}all rounds; models {same}the same; state {stored}untouched; {'BELIEVED; ' * outcome.believed}"
        f"checkpoints {outcome.checkpoints[0]} → {outcome.checkpoints[1]}"
    )
    lines.append(
        f"  {outcome.memory_mb[0]:.0f} → {outcome.memory_mb[1]:.0f} MB, {outcome.log_bytes} B of log, round "
        f"{before:.0f} → {after:.0f} ms, slowest {outcome.slowest_ms:.0f} ms; {outcome.lie_bytes} B of lies "
        f"{outcome.figures or ''}"
    )
    if outcome.trouble:
        lines.append(f"  {outcome.trouble}")
    return "\n".join(lines)


class References:
    """Models of runs in which nobody lies, by their settings."""

    def __init__(self, folder: Path, sides: Sides) -> None:
        self._folder, self._sides = folder, sides
        self._models: dict[tuple[str, ...], list[str]] = {}

    def models(self, settings: tuple[str, ...]) -> list[str]:
        """Return a digest of each honest peer's model after the last round."""
        if settings not in self._models:
            folder = self._folder / f"nothing-{len(self._models)}"
            trial = Trial(folder, self._sides, None, settings)
            trial.run()
            self._models[settings] = trial.models()
            if len(self._models[settings]) != 3:
                raise SystemExit(f"the run in which nobody lies does not end well: see {trial.folder}")
        return self._models[settings]


def attempt(lie: Lie, folder: Path, sides: Sides, references: References) -> Outcome:
    """Tell one lie and return what became of the honest peers."""
    trial = Trial(folder / lie.name, sides, lie, lie.settings)
    outcome = trial.run()
    # Who skips late neighbours makes other models whenever the clock has a say.
    outcome.same_models = "rounds.late=skip" in lie.settings or trial.models() == references.models(lie.settings)
    if (trial.folder / "bombed").exists():
        outcome.figures["bombed"] = True
    return outcome


def main(arguments: argparse.Namespace) -> None:
    """Tell all lies and print what became of them."""
    names = arguments.only or list(LIES)
    release = (arguments.release or HERE).resolve()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="sotto-lies-") as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        # On a busy machine, most of a start is imports. The folder of this command is none of the installation's.
        installed = Release("", release, python=str(release / ".venv" / "bin" / "python"))
        with closing(installed.fork_server()) as honest, WarmPython(Path(temporary)) as warm:
            attacker = ("env", f"PYTHONPATH={HERE}", str(warm.executable), "-m", __name__)
            sides = Sides(release=release, honest=honest, attacker=attacker)
            references = References(folder, sides)
            for name in names:
                outcome = attempt(LIES[name], folder, sides, references)
                outcomes.append(outcome)
                print(describe(outcome), flush=True)
                if arguments.json is not None:
                    _write(arguments.json, release, outcomes)
    refusable = [outcome for outcome in outcomes if not LIES[outcome.lie].admitted]
    held = sum(outcome.held for outcome in refusable)
    print(f"{held} of {len(refusable)} lies came to nothing against {release}; the runs had {', '.join(COMMON)}")


def _write(path: Path, release: Path, outcomes: list[Outcome]) -> None:
    rows = [asdict(outcome) | {"held": outcome.held} for outcome in outcomes]
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps({"release": str(release), "lies": rows}, indent=1) + "\n")
    beside.rename(path)


if __name__ == "__main__":
    sys.exit(live(*sys.argv[1:]))
