"""The workflows and the configuration of wheels name what exists, and nothing is released that was not tested."""

from __future__ import annotations

import hashlib
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


def test_a_release_is_audited_and_every_week_too() -> None:
    def audits(workflow: Path) -> bool:
        jobs = yaml.safe_load(workflow.read_text())["jobs"]
        return any(step.get("run") == "make audit" for job in jobs.values() for step in job.get("steps", ()))

    weekly = yaml.safe_load((WORKFLOWS / "audit.yml").read_text())
    assert audits(WORKFLOW)
    assert audits(WORKFLOWS / "audit.yml")
    (times,) = weekly[True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", times["cron"])


def test_what_is_published_is_counted_and_attested() -> None:
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["release"]["steps"]
    first = [step.get("run") or step["uses"] for step in steps]
    finishes = first.index("deploy/finish-release.sh wheelhouse")
    (attests,) = (number for number, each in enumerate(first) if each.startswith("actions/attest-build-provenance@"))
    (publishes,) = (number for number, each in enumerate(first) if each.startswith("gh release create"))
    assert finishes < attests < publishes
    assert steps[attests]["with"]["subject-path"] == first[publishes].split()[-1] == "wheelhouse/*"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_release_gets_a_bill_of_materials_and_checksums_of_all_files(tmp_path: Path) -> None:
    """With stand-ins for Python and the packages that the script installs."""
    tools, release = tmp_path / "tools", tmp_path / "release"
    tools.mkdir()
    release.mkdir()
    (tools / "pip").write_text("#!/bin/sh\n")
    (tools / "cyclonedx-py").write_text(
        "#!/bin/sh\nwhile [ $# -gt 1 ]; do [ $1 = --output-file ] && out=$2; shift; done\n"
        """echo '{"components": [{"bom-ref": "click"}]}' >"$out"\n"""
    )
    (tools / "python3").write_text(f'#!/bin/sh\nmkdir -p "$3/bin" && cp {tools}/pip {tools}/cyclonedx-py "$3/bin"\n')
    for each in tools.iterdir():
        each.chmod(0o755)
    names = [f"sottovoce-0.3.0-cp311-abi3-linux_{os.uname().machine}.whl", "sottovoce-0.3.0.tar.gz"]
    for name in names:
        (release / name).write_text(name)
    path = f"{tools}:{os.environ['PATH']}"
    script = ROOT / "deploy" / "finish-release.sh"
    subprocess.run(["bash", str(script), str(release)], check=True, env={**os.environ, "PATH": path})
    listed = dict(line.split()[::-1] for line in (release / "SHA256SUMS").read_text().splitlines())
    assert listed == {
        name: hashlib.sha256((release / name).read_bytes()).hexdigest() for name in (*names, "sottovoce.cdx.json")
    }


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
