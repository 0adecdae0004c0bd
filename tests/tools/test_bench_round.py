"""The benchmark of a round: real peers and a real all-reduce of a small model, and figures that add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("warm_python")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_stages_of_a_round_add_up_to_what_its_process_took(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_round.py"), "--sizes", "3000", "--peers", "2"]
    command += ["--rounds", "9", "--repeats", "1", "--seed", "7", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["conditions"]["seed"] == 7
    assert figures["conditions"]["commit"]
    (result,) = figures["results"]
    *peers, reference = result["systems"].values()
    compressed, *whole, replicas, factors, gradients, plain = peers
    for row in peers:
        stages = row["stage_cpu_s"]
        assert row["cpu_s"]["mean"] == pytest.approx(sum(stage["mean"] for stage in stages.values()), rel=1e-6)
        # Sums of gradients and of their factors go through no compressor.
        compresses = ("compress",) if row in (compressed, *whole, replicas) else ()
        assert all(stages[name]["mean"] > 0.0 for name in ("train", "encode", "decode", "apply", *compresses))
        assert row["overhead_s"]["mean"] == pytest.approx(row["cpu_s"]["mean"] - stages["train"]["mean"], rel=1e-6)
        assert row["socket_bytes"] > 0
    # 30 of 3,000 numbers in a few bits each; all of them, as float32 and as good as incompressible.
    assert 40 < compressed["payload_bytes"] < 200
    assert all(9_000 < row["payload_bytes"] < 12_000 for row in whole)
    assert 40 < replicas["payload_bytes"] < 200
    assert 40 < factors["payload_bytes"] < gradients["payload_bytes"] < 13_000
    assert plain["socket_bytes"] < gradients["socket_bytes"]
    # Two processes exchange half of the vector twice.
    assert reference["socket_bytes"] == pytest.approx(12_000, rel=0.1)
    for name in result["systems"]:
        assert name in done.stdout
