"""The folder of a study: measures missing cells, computes their other figures, writes the report.

Every cell is a run of real peers in network namespaces whose links have the rate and latency of a profile; requested
and measured figures of the link are both kept. A cell whose file exists is not measured again, so a study can be
interrupted and continued at any time. The folder holds cells/, computed/, results.json, results.csv and report.html.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from peer.config.options import Config
from peer.errors import ConfigError, DivergenceError, StateError
from peer.files import write_whole
from peer.lab.grid import Files, one_by_one
from peer.lab.study import cell, predict, race_tables, tables
from peer.lab.study.checkout import commit
from peer.lab.study.race_folder import Finish, RaceFolder
from peer.lab.study.rival_cell import run_rival
from peer.lab.study.row import Cell, Row, Scaled
from peer.lab.study.study import Contender, Study
from peer.links.profiles import find
from peer.ops.executors import ALL, Shard
from peer.report.numbers import duration
from peer.run.setup import RunSetup
from peer.state.foreign_files import read_as
from peer.train.models import ready_model

UNSHAPED = "unshaped"
"""The profile without limits."""
StudyCell: TypeAlias = tuple[Contender, str, int]
"""A contender, the profile of its links, and a seed."""
_START_S = 20.0
"""Start-up time of a cell, for the estimate of the time left, until the first cell shows the real one."""


class StudyFolder:
    """A study and the folder that keeps its results."""

    def __init__(self, study: Study, folder: Path, packages: Path | None = None, data: Path | None = None) -> None:
        """`packages`: folder of Python packages for rivals alone (pip install --target). `data`: the data of a race."""
        self.study, self._folder, self._packages = study, folder, packages
        self.race = RaceFolder(study, folder, data)
        self._predictions: dict[tuple[str, str, int], float] = {}
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        (folder / "computed").mkdir(exist_ok=True)

    def cells(self, only: Sequence[str] = ()) -> Files[StudyCell, Cell]:
        """Return the cells of the study, all or those that `only` names. Raises ConfigError."""
        return Files(self.study.cells(only), self._folder / "cells", Cell, lambda c: f"{c[0].name}--{c[1]}--{c[2]}")

    def run(self, only: Sequence[str], say: Callable[[str], None], shard: Shard = ALL) -> int:
        """Measure the missing cells of a shard and report each to `say`; return how many failed. Raises ConfigError."""
        grid, overhead = self.cells(only), _START_S
        missing = grid.missing(shard)

        def begin(position: int, cell: StudyCell) -> None:
            left = sum(self._expected_s(*each) + overhead for each in missing[position:])
            place = f"[{position + 1}/{len(missing)}, {duration(left)} left]"
            say(f"{place} {cell[0].name} on {cell[1]}: {self.prediction(*cell[:2])[1]} rounds")

        def measure(cell: StudyCell) -> Cell:
            nonlocal overhead
            started, others_s = time.monotonic(), others_cpu_s()
            result = self._measure(*cell, self.prediction(*cell[:2])[1])
            took_s, others_s = time.monotonic() - started, others_cpu_s() - others_s
            overhead = max(1.0, took_s - self._expected_s(*cell))
            return Cell(
                contender=cell[0].name,
                profile=cell[1],
                seed=cell[2],
                step_s=self.study.step_s,
                peers=self.study.peers,
                commit=commit(),
                load=os.getloadavg()[0],
                others_cpus=max(0.0, others_s / took_s),
                result=result,
            )

        def tell(cell: StudyCell, row: Cell) -> str:
            prediction, _ = self.prediction(*cell[:2])
            foreseen = f" (predicted {prediction:.3f})" if prediction is not None else ""
            return f"{row.result.round_s:.3f} s a round{foreseen}, {row.result.interface_bytes / 1000:.1f} kB"

        return grid.run(one_by_one(missing, begin, measure), tell, lambda _, text: say(f"    {text}"))

    def merge(self, folders: Sequence[Path]) -> int:
        """Take the cells and curves of this study out of other folders; return how many are new. Raises StateError
        where one was measured twice, or a folder is none of a study."""
        cells, curves = self.cells(), self.race.curves()
        for folder in folders:
            if not (folder / "cells").is_dir() and not (folder / "curves").is_dir():
                raise StateError(f"{folder} contains no cells of a study")
        return sum(cells.merge(folder / "cells") + curves.merge(folder / "curves") for folder in folders)

    def prediction(self, contender: Contender, profile: str) -> tuple[float | None, int]:
        """Return the prediction of the simulator (None for a rival), and the number of rounds of the cell."""
        study = self.study
        found = self.scaled(contender, profile, study.peers)
        round_s = found if found is not None else self._rival_round_s(contender, profile)
        return found, min(study.most_rounds, max(study.least_rounds, round(study.cell_s / round_s)))

    def scaled(self, contender: Contender, profile: str, num_peers: int) -> float | None:
        """Return the prediction for any number of peers; None for a rival, or for a job that the validator refuses."""
        if contender.rival is not None:
            return None
        key = (contender.name, profile, num_peers)
        if key in self._predictions:
            return self._predictions[key]
        study = self.study
        config = study.config(contender, study.seeds[0], 4)
        weight = self._kept(f"{contender.name}--frame", "bytes", lambda: predict.weigh(config, study.peers).frame_bytes)
        if weight is None:
            return None
        found = predict.predict(config, num_peers, find(profile), config.peer.min_step_s, weight)
        return self._predictions.setdefault(key, found)

    def rounds_to_target(self, contender: Contender) -> int | None:
        """Return how many rounds a contender needs to reach the target, simulated once and kept.

        For a rival they are those of the job that stands for it. None: it does not reach the target, or has none.
        """
        if not self.study.target.job or (contender.rival is not None and not contender.options):
            return None
        config = self.study.target_config(contender, self.study.seeds[0])
        # The key is the trained job, not the name: rivals are counted with our jobs.
        setting = f"{config.model_dump_json()} {self.study.peers} {self.study.target.accuracy}"
        name = f"target--{hashlib.sha256(setting.encode()).hexdigest()[:16]}"
        rounds = self._kept(name, "rounds", lambda: self._count_rounds(config))
        return None if rounds is None else int(rounds)

    def rows(self) -> list[Row]:
        """Return the measured cells in the order of the study, with all figures."""
        return [self._row(contender, measured) for (contender, _, _), measured in self.cells().rows()]

    def report(self, sizes: Sequence[int]) -> tuple[Path, list[Row], list[Finish]]:
        """Write results.json, results.csv and report.html; return the last, the rows, and the finishes of the race.

        `sizes` are further numbers of peers to predict for.
        """
        rows = self.rows()
        finishes = self.race.finishes([row.cell for row in rows])
        scaled = [
            Scaled(contender=contender.name, profile=profile, peers=size, round_s=found)
            for size in sizes
            for profile in self.study.profiles
            for contender in self.study.contenders
            if (found := self.scaled(contender, profile, size)) is not None
        ]
        results = {
            "study": self.study.model_dump(mode="json"),
            "cells": [row.as_json() for row in rows],
            "predicted": [asdict(each) for each in scaled],
            "race": [each.as_json() for each in finishes],
        }
        write_whole(self._folder / "results.json", json.dumps(results, indent=1) + "\n")
        write_whole(self._folder / "results.csv", tables.as_csv(rows))
        page = self._folder / "report.html"
        race = self.study.race
        sections = [] if race is None else race_tables.sections(race, finishes, self.race.trained())
        write_whole(page, tables.as_html(self.study, rows, scaled, sections))
        return page, rows, finishes

    def _row(self, contender: Contender, measured: Cell) -> Row:
        """Return a cell with its prediction: the measured round without limits, plus the simulator's addition for
        links.

        The simulator knows the stated step but not the processor. The cell without limits contains the work of the
        peers on this machine.
        """
        found, _ = self.prediction(contender, measured.profile)
        row = Row(cell=measured, rounds_to_target=self.rounds_to_target(contender), simulated_round_s=found)
        unshaped = self.cells().get((contender, UNSHAPED, measured.seed))
        if found is None or measured.profile == UNSHAPED or unshaped is None:
            return row
        alone = unshaped.result.round_s
        foreseen = alone + found - self.study.step_s
        return replace(row, predicted_round_s=foreseen, predicted_link_share=1 - alone / foreseen)

    def _measure(self, contender: Contender, profile: str, seed: int, rounds: int) -> cell.CellResult:
        study = self.study
        limit_s = 120.0 + 20 * study.cell_s + 3 * self._expected_s(contender, profile, seed)
        rival = study.rival(contender)
        if rival is not None and contender.rival is not None:
            return run_rival(
                contender.rival, rival, self._rival_shapes, study.peers, find(profile), rounds=rounds,
                step_s=study.step_s, limit_s=limit_s, settings=contender.settings, packages=self._packages,
            )  # fmt: skip
        settle = cell.settle_rounds(study.config(contender, seed, rounds), study.peers)
        config = study.config(contender, seed, rounds + settle)
        return cell.run_cell(config, study.peers, find(profile), limit_s=limit_s)

    def _expected_s(self, contender: Contender, profile: str, seed: int) -> float:
        """Return the approximate duration of a cell from the start of its processes on."""
        prediction, rounds = self.prediction(contender, profile)
        if prediction is not None:
            return rounds * prediction
        rival = self.study.rival(contender)
        settle_s = rival.settle_models * self._model_s(profile) if rival else 0.0
        return rounds * self._rival_round_s(contender, profile) + settle_s

    def _rival_round_s(self, contender: Contender, profile: str) -> float:
        """Return the approximate duration of a rival's round: the step, and sending over the upload."""
        rival = self.study.rival(contender)
        step_s = self.study.step_s * self.study.steps_per_round(contender)
        return step_s + (rival.sent_models * self._model_s(profile) if rival else 0.0)

    def _model_s(self, profile: str) -> float:
        """Return the duration of sending a float32 model over the upload."""
        rate = find(profile).up_kbit
        return sum(map(math.prod, self._rival_shapes)) * 32 / 1000 / rate if rate else 0.0

    @cached_property
    def _rival_shapes(self) -> list[list[int]]:
        """The shapes of the parameters that rivals send. Raises ConfigError."""
        study = self.study
        if study.model is None:
            config = study.config(Contender(name="the job"), study.seeds[0], study.least_rounds)
            model = RunSetup.open(config, Path(), study.peers).trainer(0).model
        else:
            model = ready_model(study.model)
        return [list(parameter.shape) for parameter in model.parameters()]

    def _count_rounds(self, config: Config) -> int | None:
        try:
            return predict.rounds_to_target(config, self.study.peers, self.study.target.accuracy)
        except DivergenceError:
            return None

    def _kept(self, name: str, key: str, compute: Callable[[], float | None]) -> float | None:
        """Return a figure that is computed once and kept in a file; None if the job is refused."""
        file = self._folder / "computed" / f"{name}.json"
        if not file.exists():
            try:
                found: dict[str, float | str | None] = {key: compute()}
            except ConfigError as error:
                found = {"refused": str(error)}
            write_whole(file, json.dumps(found) + "\n")
        kept: dict[str, float | None] = read_as(dict[str, Any], file)
        return kept.get(key)


_WAITING = (3, 4)
"""Columns of /proc/stat that are not work: idle, and waiting for a disk."""
_COUNTED_TWICE = 8
"""First of the columns with time of guests, which the columns user and nice already include."""


def others_cpu_s() -> float:
    """Return the processor seconds used since the machine started, also those that a hypervisor took, without those of
    this process and of children that it has waited for. The kernel counts in hundredths of a second.

    The load average does not show other work: it includes the peers of the measurement, and anything that ran a minute
    ago.
    """
    columns = [int(word) for word in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]]
    ticks = sum(value for column, value in enumerate(columns[:_COUNTED_TWICE]) if column not in _WAITING)
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return ticks / os.sysconf("SC_CLK_TCK") - sum(usage.ru_utime + usage.ru_stime for usage in own)
