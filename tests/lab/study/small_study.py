"""A study of two contenders on two links, and a race of every kind of contender on the digits, in a few steps."""

from __future__ import annotations

from pathlib import Path

from peer.lab.study import cell
from peer.lab.study.study import Study, read_plan

SMALL, SMALL_RACE = (
    Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8") for name in ("small_study", "small_race")
)


def read(folder: Path, text: str = SMALL) -> Study:
    """Write a study into a folder and read it."""
    file = folder / "study.toml"
    file.write_text(text)
    return read_plan(file)


def result(*, round_s: float = 1.0, interface_bytes: float = 1.0) -> cell.CellResult:
    """Return a measurement."""
    return cell.CellResult(
        rounds=10,
        round_s=round_s,
        mean_round_s=1.0,
        train_s=1.0,
        gossip_s=1.0,
        wait_s=1.0,
        cpu_s=1.0,
        payload_bytes=1.0,
        interface_bytes=interface_bytes,
        goodput_kbit=1.0,
        round_trip_ms=1.0,
        asked_kbit=1.0,
        asked_round_trip_ms=1.0,
        loss_curve=((0.0, 5.0, 2.0), (1.0, 9.0, 1.0)),
    )
