"""The workflows and the configuration of wheels name what exists, and nothing is released that was not tested."""

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
WORKFLOWS = ROOT / ".github" / "workflows"
WORKFLOW, TESTS = WORKFLOWS / "release.yml", WORKFLOWS / "tests.yml"


@pytest.mark.parametrize("workflow", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.stem)
def test_every_job_of_a_workflow_can_begin(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for name, job in jobs.items():
        assert set(job.get("needs", ())) <= jobs.keys(), name
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file(), name
            continue
        for step in job["steps"]:
            for target in re.findall(r"\bmake (\S+)", step.get("run", "")):
                assert target in targets or target == ".venv/.ready-dev", step
            for module in re.findall(r"python -m (tests\.\S+)", step.get("run", "")):
                assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file(), step
            assert ("uses" in step) != ("run" in step), step
            assert "@" in step.get("uses", "@"), f"{step} takes whatever version there is"
            for script in re.findall(r"\bdeploy/\S+\.sh", step.get("run", "")):
                assert os.access(ROOT / script, os.X_OK), script


def test_pull_requests_and_releases_wait_for_the_suite() -> None:
    tests, release = yaml.safe_load(TESTS.read_text()), yaml.safe_load(WORKFLOW.read_text())
    # YAML 1.1 reads `on` as true.
    assert {"pull_request", "push", "workflow_call"} <= tests[True].keys()
    assert any(".ci/run" in step.get("run", "") for step in tests["jobs"]["suite"]["steps"])
    assert release["jobs"]["tests"]["uses"] == f"./{TESTS.relative_to(ROOT)}"
    assert "tests" in release["jobs"]["release"]["needs"]


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
