"""`sotto watch` as a user runs it: the address, Ctrl-C, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cli.runner import sotto
from tests.report.sample_run import write_sample_run


@pytest.mark.usefixtures("warm_python")
def test_it_prints_the_address_serves_the_page_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "digits", rounds=20)
    (run / "peers").rename(run / "elsewhere")
    command = [sys.executable, "-m", "peer", "watch", str(run), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        origin, _, token = json.loads(process.stdout.readline())["address"].partition("/#token=")
        assert origin.startswith("http://127.0.0.1:")
        assert len(token) >= 32
        with urllib.request.urlopen(origin, timeout=60) as answer:
            assert b"Sottovoce" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{origin}/events", timeout=60)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


def test_what_is_missing_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = sotto("watch", "runs/digits")
    assert result.exit_code == 2
    assert "needs starlette and uvicorn: pip install 'sottovoce[watch]'" in result.stderr


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    result = sotto("watch", str(tmp_path))
    assert result.exit_code == 5
    assert "is no run folder, cluster folder or device folder" in result.stderr
