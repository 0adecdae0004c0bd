"""The release workflow and the configuration of wheels name what exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


def test_every_job_of_the_workflow_can_begin() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    for name, job in jobs.items():
        assert set(job.get("needs", ())) <= jobs.keys(), name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert "@" in step.get("uses", "@"), f"{step} takes whatever version there is"
            for script in re.findall(r"\bdeploy/\S+\.sh", step.get("run", "")):
                assert os.access(ROOT / script, os.X_OK), script


def test_wheels_are_tested_with_commands_that_exist() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    lowest = "cp311"
    assert options["build"].startswith(f"{lowest}-")
    assert f'"{lowest}"' in (ROOT / "setup.py").read_text()
    runners = yaml.safe_load(WORKFLOW.read_text())["jobs"]["wheels"]["strategy"]["matrix"]["runner"]
    assert len(runners) == len(re.findall(r"x86_64|aarch64", options["build"])) == 2
    first, second = options["test-command"]
    assert "native.available()" in first
    assert second.startswith("sotto simulate ")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_of_a_release_is_sound() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "deploy" / "finish-release.sh")], check=True)
