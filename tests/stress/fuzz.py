"""Feeds the wire's decoder with bytes that a coverage-guided mutator (atheris, libFuzzer) makes up.

    python -m tests.stress.fuzz --runs 1000000          # a long run
    python -m tests.stress.fuzz --seconds 20            # a short one, as in the tests
    python -m tests.stress.fuzz --merge --work FOLDER   # keep those inputs of FOLDER that add coverage

What is checked of each input is described in tests/wire/fuzzing.py; the kept corpus lies in tests/wire/corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import atheris

# The hooks on comparisons keep a reference to every array compared, so the modules that compare arrays go without.
NUMERIC = ["ans", "bits", "tokens", "indices", "plans", "section_writer"]
with atheris.instrument_imports(include=["peer.wire"], exclude=[f"peer.wire.{name}" for name in NUMERIC]):
    from tests.wire import fuzzing

COMMAND = [sys.executable, "-m", "tests.stress.fuzz"]
ADDRESS_SPACE = 3 << 30
SECONDS_PER_INPUT = 10
MOST_BYTES = 8192
KEPT_BYTES = 2048
RUNS_PER_PROCESS = 250_000


def one_input(data: bytes) -> None:
    """Check one input; whatever escapes is a finding."""
    fuzzing.check(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=0, help="inputs to try; without it, and without --seconds, forever")
    parser.add_argument("--seconds", type=int, default=0, help="time to spend")
    parser.add_argument("--corpus", type=Path, default=fuzzing.CORPUS, help="kept inputs to start from")
    parser.add_argument("--work", type=Path, help="where new inputs and findings go (a temporary folder)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutator")
    parser.add_argument("--merge", action="store_true", help="keep those inputs of --work that add coverage")
    if any(argument.startswith("-merge_control_file=") for argument in sys.argv):
        # The inner process of a merge, which libFuzzer starts by itself.
        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="fuzz-wire-"))
    work.mkdir(parents=True, exist_ok=True)
    options.corpus.mkdir(parents=True, exist_ok=True)
    if options.merge:
        # libFuzzer starts the inner process through a shell, by the name that it is given here.
        sys.argv[0] = " ".join(COMMAND)
        fuzz(work, options.corpus, ["-merge=1", f"-max_len={KEPT_BYTES}"])
    for data in fuzzing.seeds():
        (work / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    if options.seconds or 0 < options.runs <= RUNS_PER_PROCESS:
        limits = [f"-max_total_time={options.seconds}", f"-runs={options.runs or -1}", f"-seed={options.seed}"]
        fuzz(options.corpus, work, [*limits, f"-max_len={MOST_BYTES}"])
    # A long run goes through many processes: the mutator's own memory grows, and each begins with what the last found.
    started, tried = time.monotonic(), 0
    while not options.runs or tried < options.runs:
        runs = min(RUNS_PER_PROCESS, options.runs - tried) if options.runs else RUNS_PER_PROCESS
        command = [*COMMAND, "--runs", str(runs), "--seed", str(options.seed + tried // RUNS_PER_PROCESS)]
        command += ["--corpus", str(options.corpus), "--work", str(work)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"{result.stdout}\n{result.stderr[-8000:]}\nfound after {tried:,} inputs; see {work}")
        tried += runs
        seconds = time.monotonic() - started
        print(f"{tried:,} inputs in {seconds:.0f} s ({tried / seconds:.0f} a second), no finding", flush=True)


def fuzz(begin: Path, into: Path, arguments: list[str]) -> NoReturn:
    """Hand over to libFuzzer: it starts from the inputs of both folders, adds to `into`, and ends the process, with 0
    where nothing was found."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    arguments += [f"-timeout={SECONDS_PER_INPUT}", "-rss_limit_mb=2048", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *arguments, f"-artifact_prefix={into}/", str(into), str(begin)], one_input)
    atheris.Fuzz()
    raise AssertionError("libFuzzer does not return")


if __name__ == "__main__":
    main()
