"""Runs a bandwidth study: the same job under named links, algorithm by algorithm, beside what others have built.

    tools/bandwidth_study.py run tools/studies/moniqua.toml --out runs/moniqua      (as root)
    tools/bandwidth_study.py report tools/studies/moniqua.toml --out runs/moniqua

Every cell is a run of real peers in network namespaces whose links have the rate and the latency of a profile; what was
asked for and what was measured are both kept. A cell that is there is not run again, so that the command can be stopped
and started at will; remove its file to measure it anew. The folder then holds cells/, results.json, results.csv and
report.html, a single file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bandwidth import cell, plan, predict, rivals, tables
from bandwidth.other_work import OtherWork
from checkout import commit
from links import network
from links.profiles import find

from peer.errors import ConfigError, DivergenceError, SottoError
from peer.report.numbers import duration
from peer.train.models import MODELS

UNSHAPED = "unshaped"
"""The profile without limits."""
_START_S = 20.0
"""What eight processes take to start, for the estimate of the time left until it is known better."""


class Bench:
    """A study and the folder with what is known of it."""

    def __init__(self, study: plan.Study, folder: Path, packages: Path | None = None) -> None:
        self.study, self._folder, self._packages = study, folder, packages
        self._predictions: dict[tuple[str, str, int], predict.Prediction] = {}
        (folder / "cells").mkdir(parents=True, exist_ok=True)

    def missing(self, only: Sequence[str] = ()) -> list[tuple[plan.Contender, str, int]]:
        """Return the cells that are not there yet, all or what `only` names. Raises ConfigError."""
        return [each for each in self.study.cells(only) if not self._file(*each).exists()]

    def run(self, only: Sequence[str]) -> int:
        """Run what is missing; return how many cells failed. Raises ConfigError."""
        cells = self.missing(only)
        failed, overhead = 0, _START_S
        for done, (contender, profile, seed) in enumerate(cells):
            prediction, rounds = self.prediction(contender, profile)
            left = sum(self._expected_s(*each) + overhead for each in cells[done:])
            print(
                f"[{done + 1}/{len(cells)}, {duration(left)} left] {contender.name} on {profile}: {rounds} rounds",
                flush=True,
            )
            started, others = time.monotonic(), OtherWork()
            try:
                result = self._measure(contender, profile, seed, rounds)
            except SottoError as error:
                print(f"    failed: {error}", flush=True)
                failed += 1
                continue
            took = time.monotonic() - started
            overhead = max(1.0, took - self._expected_s(contender, profile, seed))
            row = {
                "contender": contender.name,
                "profile": profile,
                "seed": seed,
                "step_s": self.study.step_s,
                "peers": self.study.peers,
                "commit": commit(),
                "load": os.getloadavg()[0],
                "others_cpus": others.processors(),
                **asdict(result),
            }
            beside = self._file(contender, profile, seed).with_suffix(".new")
            beside.write_text(json.dumps(row, indent=1) + "\n")
            beside.rename(self._file(contender, profile, seed))
            foreseen = f" (predicted {prediction.round_s:.3f})" if prediction else ""
            print(f"    {result.round_s:.3f} s a round{foreseen}, {result.interface_bytes / 1000:.1f} kB", flush=True)
        return failed

    def prediction(self, contender: plan.Contender, profile: str) -> tuple[predict.Prediction | None, int]:
        """Return what the simulator says, for one of ours, and how many rounds the cell shall have."""
        study = self.study
        found = self.scaled(contender, profile, study.peers)
        round_s = found.round_s if found else self._rival_round_s(contender, profile)
        return found, min(study.most_rounds, max(study.least_rounds, round(study.cell_s / round_s)))

    def scaled(self, contender: plan.Contender, profile: str, num_peers: int) -> predict.Prediction | None:
        """Return the prediction for another number of peers; None for a rival."""
        if contender.rival is not None:
            return None
        key = (contender.name, profile, num_peers)
        if key in self._predictions:
            return self._predictions[key]
        study = self.study
        config = study.config(contender, study.seeds[0], 4)
        weight = self._kept(f"{contender.name}--frame", lambda: {"bytes": predict.frame_bytes(config, study.peers)})
        if weight is None:
            return None
        found = predict.predict(config, num_peers, find(profile), study.step_s, weight["bytes"])
        return self._predictions.setdefault(key, found)

    def rounds_to_target(self, contender: plan.Contender) -> int | None:
        """Return how many rounds a contender takes to the target, counted once; a rival, those of a job of ours."""
        if not self.study.target_job or (contender.rival is not None and not contender.options):
            return None
        config = self.study.target_config(contender, self.study.seeds[0])

        def count() -> dict[str, Any]:
            try:
                found = predict.rounds_to_target(config, self.study.peers, self.study.target_accuracy)
            except DivergenceError:
                found = None
            return {"rounds": found}

        # By what is trained, not by name: rivals are counted with jobs of ours.
        setting = f"{config.model_dump_json()} {self.study.peers} {self.study.target_accuracy}"
        kept = self._kept(f"target--{hashlib.sha256(setting.encode()).hexdigest()[:16]}", count)
        return kept["rounds"] if kept else None

    def rows(self) -> list[dict[str, Any]]:
        """Return the cells that are there, in the order of the study, with the rounds to the target."""
        rows = []
        for contender, profile, seed in self.study.cells():
            file = self._file(contender, profile, seed)
            if file.exists():
                row = json.loads(file.read_text())
                row["rounds_to_target"] = self.rounds_to_target(contender)
                found, _ = self.prediction(contender, profile)
                row["simulated_round_s"] = found.round_s if found is not None else None
                rows.append(row | self._foreseen(row))
        return rows

    def _foreseen(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return what a round was to take: what the simulator says of the links, on top of what it takes without any.

        The simulator knows the stated step and no processor. What eight peers compute on this machine, and what it does
        besides, is in the cell without links.
        """
        file = self._folder / "cells" / f"{row['contender']}--{UNSHAPED}--{row['seed']}.json"
        if row["simulated_round_s"] is None or row["profile"] == UNSHAPED or not file.exists():
            return {}
        alone = json.loads(file.read_text())["round_s"]
        foreseen = alone + row["simulated_round_s"] - self.study.step_s
        return {"predicted_round_s": foreseen, "predicted_link_share": 1 - alone / foreseen}

    def report(self, sizes: Sequence[int]) -> Path:
        """Write results.json, results.csv and report.html; return the last."""
        rows = self.rows()
        scaled = [
            {"contender": contender.name, "profile": profile, "peers": size, "round_s": found.round_s}
            for size in sizes
            for profile in self.study.profiles
            for contender in self.study.contenders
            if (found := self.scaled(contender, profile, size)) is not None
        ]
        results = {"study": asdict(self.study), "cells": rows, "predicted": scaled}
        (self._folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (self._folder / "results.csv").write_text(tables.as_csv(rows))
        page = self._folder / "report.html"
        page.write_text(tables.as_html(self.study, rows, scaled), encoding="utf-8")
        print(tables.as_text(self.study, rows))
        return page

    def _measure(self, contender: plan.Contender, profile: str, seed: int, rounds: int) -> cell.CellResult:
        study = self.study
        limit_s = 120.0 + 20 * study.cell_s + 3 * self._expected_s(contender, profile, seed)
        if contender.rival is not None:
            shapes = [list(parameter.shape) for parameter in MODELS[study.model].make().parameters()]
            return rivals.run_rival(
                contender.rival, shapes, study.peers, find(profile), rounds=rounds, step_s=study.step_s,
                limit_s=limit_s, packages=self._packages,
            )  # fmt: skip
        settle = cell.settle_rounds(study.config(contender, seed, rounds), study.peers)
        config = study.config(contender, seed, rounds + settle)
        return cell.run_cell(config, study.peers, find(profile), limit_s=limit_s)

    def _expected_s(self, contender: plan.Contender, profile: str, seed: int) -> float:
        """Return about what a cell takes, without what is started for it."""
        prediction, rounds = self.prediction(contender, profile)
        if prediction is not None:
            return rounds * prediction.round_s
        return rounds * self._rival_round_s(contender, profile) + self._rival_settle_s(contender, profile)

    def _rival_round_s(self, contender: plan.Contender, profile: str) -> float:
        """Return about what a round of a rival takes: the step, and what it sends over the upload."""
        if contender.rival is None:
            return self.study.step_s
        return self.study.step_s + rivals.RIVALS[contender.rival].sent_models * self._model_s(profile)

    def _rival_settle_s(self, contender: plan.Contender, profile: str) -> float:
        """Return about what passes before the rounds of a rival that count."""
        return rivals.RIVALS[contender.rival].settle_models * self._model_s(profile) if contender.rival else 0.0

    def _model_s(self, profile: str) -> float:
        """Return what a float32 model takes over the upload."""
        rate = find(profile).up_kbit
        kbit = sum(parameter.numel() for parameter in MODELS[self.study.model].make().parameters()) * 32 / 1000
        return kbit / rate if rate else 0.0

    def _kept(self, name: str, compute: Any) -> dict[str, Any] | None:
        """Return a figure that is computed once; None if the job is refused."""
        file = self._folder / "computed" / f"{name}.json"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            try:
                found = compute()
            except ConfigError as error:
                found = {"refused": str(error)}
            file.write_text(json.dumps(found) + "\n")
        found = json.loads(file.read_text())
        return None if "refused" in found else dict(found)

    def _file(self, contender: plan.Contender, profile: str, seed: int) -> Path:
        return self._folder / "cells" / f"{contender.name}--{profile}--{seed}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "report"])
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="these contenders and profiles only"
    )
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="what rivals import (pip install --target)")
    parser.add_argument("--peers", type=int, action="append", help="also predict for this many peers (report)")
    options = parser.parse_args(arguments)
    # So that peers and namespaces are gone afterwards, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        bench = Bench(plan.read_plan(options.study), options.out, options.packages)
        if options.verb == "run":
            if (reason := network.missing()) is not None:
                print(f"{reason}; nothing was run", file=sys.stderr)
                return 2
            failed = bench.run(options.only)
            if failed:
                print(f"{len(bench.missing())} cells are missing, {failed} of which failed just now")
                return 1
        sizes = options.peers if options.peers is not None else bench.study.predicted_peers
        print(f"report: {bench.report(sizes)}")
    except SottoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
