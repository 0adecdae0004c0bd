"""Feeds the wire's decoder with bytes that a coverage-guided mutator (atheris, libFuzzer) makes up.

    python tools/fuzz_wire.py --runs 1000000          # a long run
    python tools/fuzz_wire.py --seconds 20            # a short one, as in the tests
    python tools/fuzz_wire.py --merge --work FOLDER   # keep those inputs of FOLDER that add coverage

What is checked of each input is described in tests/wire/fuzzing.py; the kept corpus lies in tests/wire/corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import atheris

with atheris.instrument_imports(include=["peer.wire"]):
    from tests.wire import fuzzing

ADDRESS_SPACE = 3 << 30
SECONDS_PER_INPUT = 10


def one_input(data: bytes) -> None:
    """Check one input; whatever escapes is a finding."""
    fuzzing.check(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, default=-1, help="inputs to try; without it, and without --seconds, forever"
    )
    parser.add_argument("--seconds", type=int, default=0, help="time to spend")
    parser.add_argument("--corpus", type=Path, default=fuzzing.CORPUS, help="kept inputs to start from")
    parser.add_argument("--work", type=Path, help="where new inputs go (a temporary folder)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutator; 0 takes one from the clock")
    parser.add_argument(
        "--merge", action="store_true", help="add to the corpus those inputs of --work that add coverage"
    )
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="fuzz-wire-"))
    work.mkdir(parents=True, exist_ok=True)
    options.corpus.mkdir(parents=True, exist_ok=True)
    if options.merge:
        folders = [str(options.corpus), str(work)]
        arguments = ["-merge=1", "-max_len=4096"]
    else:
        for data in fuzzing.seeds():
            (work / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        folders = [str(work), str(options.corpus)]
        arguments = [f"-runs={options.runs}", f"-max_total_time={options.seconds}", f"-seed={options.seed}"]
    # libFuzzer leaves by _exit, so the limit on memory is one of the whole process.
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    arguments += ["-max_len=8192", f"-timeout={SECONDS_PER_INPUT}", "-rss_limit_mb=1024", "-print_final_stats=1"]
    arguments += [f"-artifact_prefix={work}/"]
    atheris.Setup([sys.argv[0], *arguments, *folders], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
