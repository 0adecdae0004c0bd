"""The script for Slurm arrays and the manifest for Kubernetes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from peer.lab.sweep.folder import SweepFolder
from tests.lab.sweep.small_sweep import SMALL, read, results

SWEEPS = Path(__file__).resolve().parents[2] / "deploy" / "sweeps"


@pytest.mark.parametrize("version", ["1.29", "1.33"])
def test_the_manifest_matches_the_schemas(version: str) -> None:
    for document in yaml.safe_load_all((SWEEPS / "indexed-job.yaml").read_text()):
        assert kubernetes_validate.validate(document, version, strict=True) is not None


def test_the_job_has_a_pod_for_each_shard() -> None:
    job, claim = yaml.safe_load_all((SWEEPS / "indexed-job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert container["command"][-1].endswith(f'--shard "$JOB_COMPLETION_INDEX/{job["spec"]["completions"]}"')
    volumes = {volume["name"]: volume for volume in job["spec"]["template"]["spec"]["volumes"]}
    assert volumes["results"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.usefixtures("warm_python")
def test_the_tasks_of_a_slurm_array_complete_a_sweep(tmp_path: Path) -> None:
    """With the variables that Slurm sets, and two tasks side by side in one folder."""
    text = SMALL.replace("seeds = [0, 1, 2]", "seeds = [0]").replace("[0.05, 0.1]", "[0.05]")
    sweep, folder = read(tmp_path, text), tmp_path / "results"
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_CPUS_PER_TASK": "1",
    }
    command = [str(SWEEPS / "slurm.sh"), str(tmp_path / "sweep.toml"), str(folder), "2"]
    tasks = [
        subprocess.Popen(command, env=environment | {"SLURM_ARRAY_TASK_ID": str(index)}, stdout=subprocess.DEVNULL)
        for index in range(2)
    ]
    assert [task.wait() for task in tasks] == [0, 0]
    found = SweepFolder(sweep, folder)
    assert found.grid.missing() == []
    assert [row["ended"] for row in results(found)] == ["completed"] * 4
