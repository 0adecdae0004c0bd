"""What is made of the records of one cell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from peer.lab.study import cell, folder
from peer.lab.study.study import Contender
from peer.links.measure import Measured
from peer.records import RoundRecord
from tests.lab.study.small_study import read


def test_figures_of_a_cell_leave_the_first_round_out() -> None:
    def row(peer: int, round_: int, time_s: float) -> RoundRecord:
        return RoundRecord(peer=peer, round=round_, time_s=time_s, loss=2.0 - round_, frame_bytes=100, train_s=0.1)

    records = [[row(peer, 0, 9.0), row(peer, 1, 10.0), row(peer, 2, 11.0 + peer)] for peer in range(2)]
    link = Measured(
        sender=0, receiver=1, asked_kbit=1, goodput_kbit=1, asked_round_trip_ms=1, round_trip_ms=1,
        least_round_trip_ms=1,
    )  # fmt: skip
    found = cell.summarize(records, [600, 900], 1, link)
    assert found.round_s == pytest.approx(1.25)
    assert found.rounds == 2
    assert found.mean_round_s == pytest.approx(1.25)
    assert found.interface_bytes == 250
    assert found.loss_curve[-1] == (11.5, 300.0, 0.0)


def test_a_cell_begins_when_the_last_process_has_held_up_everybody(tmp_path: Path) -> None:
    study = read(tmp_path)
    ring = study.config(study.contenders[0], 0, 4)
    assert cell.settle_rounds(ring, 8) == 1 + 4
    both = ("algorithm.name=allreduce", "graph.kind=complete", "graph.weights=uniform", "compressor.kind=none")
    assert cell.settle_rounds(study.config(Contender(name="all", options=both), 0, 4), 8) == 1 + 1


def test_what_others_compute_is_told_from_what_children_of_ours_did(monkeypatch: pytest.MonkeyPatch) -> None:
    burn = "import sys, time\nwhile time.process_time() < 0.4: pass\nprint(flush=True); sys.stdin.read()"
    before = folder.others_cpu_s()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert folder.others_cpu_s() - before > 0.3
        # What others do meanwhile is left out: the kernel's count stands still from here on.
        count = Path("/proc/stat").read_text(encoding="utf-8")
        monkeypatch.setattr(folder, "Path", lambda _: SimpleNamespace(read_text=lambda encoding: count))
        running = folder.others_cpu_s()
    # It has ended, and is one of ours.
    assert folder.others_cpu_s() - running < -0.2
