"""Asks for known vulnerabilities of the packages in the image (`deploy/requirements.txt`), with pip-audit.

    make audit

It needs pip-audit and a connection to PyPI, which keeps the advisories. Exit code 0: every package was asked for and
none has a known vulnerability; 1: there is one; 2: some could not be asked for, which proves nothing.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "deploy" / "requirements.txt"


def known_to_pypi(requirements: str) -> str:
    """Return a list with builds, such as PyTorch's `+cpu`, under the version whose advisories PyPI keeps."""
    return re.sub(r"(?m)^([\w.-]+==[\w.]+)\+[\w.]+", r"\1", requirements)


def report(answer: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines for an answer of pip-audit in JSON. Raises ValueError if it is none."""
    lines, vulnerable, silent = [], 0, 0
    packages = json.loads(answer)["dependencies"]
    for package in packages:
        if "skip_reason" in package:
            silent += 1
            lines.append(f"{package['name']}: not asked for: {package['skip_reason']}")
        for found in package.get("vulns", ()):
            vulnerable += 1
            repair = f"repaired in {', '.join(found['fix_versions'])}" if found["fix_versions"] else "no repair yet"
            lines.append(f"{package['name']} {package['version']}: {found['id']}, {repair}")
    lines.append(f"{len(packages)} packages: {vulnerable} known vulnerabilities, {silent} not asked for")
    if vulnerable:
        return 1, lines
    return (2 if silent or not packages else 0), lines


def main() -> int:
    """Return the exit code."""
    if importlib.util.find_spec("pip_audit") is None:
        print("pip-audit is missing: pip install pip-audit")
        return 2
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as asked:
        asked.write(known_to_pypi(REQUIREMENTS.read_text()))
        asked.flush()
        command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--require-hashes",
                   "--format", "json", "--progress-spinner", "off", "--requirement", asked.name]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        status, lines = report(done.stdout)
    except ValueError:
        last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        print(f"pip-audit could not ask for vulnerabilities: {last}")
        return 2
    print(*lines, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
