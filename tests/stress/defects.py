"""Defects that an audit found in the running daemon, and like ones, put back one at a time: are they found?

    python -m tests.stress.defects              # a table: defect, cases until it was found, what was found
    python -m tests.stress.defects --cases 20000

Each defect takes out checks of the program (`tests.stress.meaning.disabling`); in most cases one. Ends with 1 where one
was not found, or something was found without it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import Config, PeerAddress
from peer.daemon.notes import notes
from peer.daemon.notes.divergence import Diverged, Divergence
from peer.foreign_text import printable_values
from peer.net import control
from peer.net.relay import PieceStream
from peer.ops import control as ops_control
from peer.ops.control import Asked
from peer.proto.sottovoce.v1.relay_pb2 import Piece
from tests.stress.fuzz_meaning import quiet
from tests.stress.meaning.circumstances import circumstances_of
from tests.stress.meaning.disabling import disabled
from tests.stress.meaning.handlers import try_handlers
from tests.stress.meaning.report import Finding, Report
from tests.stress.meaning.trial import Effort, Trial

MOST_CASES = 6000
_EFFORT = Effort(moments=8, batches=2, lies=30, keeps_state=False)
_HANDLER_CASES = 200
_JUDGE, _MEMBERS = "peer.gossip.judge", "peer.node.membership_checks"


@dataclass(frozen=True, kw_only=True)
class Defect:
    """What the audit did, and the checks that stand against it now."""

    name: str
    checks: tuple[tuple[str, str], ...] = ()
    """(module, piece of the condition or of the sentence)."""
    instead: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    """Puts back what was done instead of what is done now."""
    algorithm: str = "d-psgd"
    """In which it is looked for; "" for the handlers of the daemon."""


def _stop_with_others(patch: pytest.MonkeyPatch) -> None:
    def heard(divergence: Divergence, source: int, note: bytes) -> None:
        _, round_, reason = notes.decode_divergence(note, 20)
        divergence.declare(Diverged(round_, reason))

    patch.setattr(Divergence, "heard", heard)


def _read_any_piece(patch: pytest.MonkeyPatch) -> None:
    async def read(stream: PieceStream) -> Piece | None:
        data = await stream.stream.read()
        return None if data is None else Piece.FromString(data)

    patch.setattr(PieceStream, "read", read)


def _read_as_it_comes(patch: pytest.MonkeyPatch) -> None:
    """Answers are the JSON that they are, its texts printable."""
    patch.setattr(control, "read_answer", lambda verb, text: printable_values(json.loads(text or "{}")))


def _ask_one_after_the_other(patch: pytest.MonkeyPatch) -> None:
    def call_all(asked: Sequence[Asked], verb: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        return [ops_control.call(each.config, each.base, each.peer, verb, arguments) for each in asked]

    patch.setattr(ops_control, "call_all", call_all)


def _dial_what_is_named(patch: pytest.MonkeyPatch) -> None:
    def newcomers(config: Config, base: Path, status: Mapping[str, Any]) -> dict[int, PeerAddress]:
        said = [each for each in status.get("newcomers", []) if each["name"] not in {e.name for e in config.peers}]
        return {e["index"]: PeerAddress(name=e["name"], advertise=e["advertise"], admitted=True) for e in said}

    patch.setattr(ops_control, "newcomers", newcomers)


DEFECTS = (
    Defect(name="a mixing weight of 2, a round early", checks=((_JUDGE, "not is_weight or all"),)),
    Defect(name="a push-sum weight of 1e300", checks=((_JUDGE, "not possible"),), algorithm="sgp"),
    Defect(
        name="numbers that overflow in the sum",
        # Either is enough.
        checks=((_JUDGE, "has diverged"), ("peer.gossip.plausibility", "sent what no honest peer does")),
        algorithm="sgp",
    ),
    Defect(name="a request for a repair to who has none", checks=((_JUDGE, "in phase"),), algorithm="sgp"),
    Defect(name="phases that no exchange has", checks=((_JUDGE, "in phase"),)),
    Defect(
        name="an exchange of number 2^63",
        checks=(("peer.gossip.pairs.judge", "speaks of exchange"),),
        algorithm="moniqua-ad-psgd",
    ),
    Defect(
        name="payloads that the algorithm cannot read",
        checks=(("peer.gossip.mixing", "where the algorithm cannot use it"),),
    ),
    Defect(name="a LEAVE or LOST of a past round", checks=((_MEMBERS, "too soon for all"),)),
    Defect(name="a LOST of the peer that hears it", checks=((_MEMBERS, "told this peer of its own"),)),
    Defect(
        name="an evaluation with senseless counts",
        checks=(
            ("peer.daemon.notes.notes", "whose counts are none"),
            ("peer.daemon.notes.evaluations", "not self.samples.fit(record)"),
        ),
        algorithm="",
    ),
    Defect(name="another's divergence, heeded", instead=_stop_with_others, algorithm=""),
    Defect(name="arguments that are no object", checks=(("peer.net.control", "not an object"),), algorithm=""),
    Defect(name="bytes that are no piece", instead=_read_any_piece, algorithm=""),
    Defect(name="answers that are read as they come", instead=_read_as_it_comes, algorithm=""),
    Defect(
        name="an answer in another peer's name", checks=(("peer.net.control", "result['name'] != name"),), algorithm=""
    ),
    Defect(name="a liar that is first in the list", instead=_ask_one_after_the_other, algorithm=""),
    Defect(name="newcomers that are invented", instead=_dial_what_is_named, algorithm=""),
)


@contextmanager
def put_back(defect: Defect) -> Iterator[None]:
    """Run the program with a defect."""
    with ExitStack() as stack:
        for module, piece in defect.checks:
            stack.enter_context(disabled(module, piece))
        defect.instead(stack.enter_context(pytest.MonkeyPatch.context()))
        yield


def search(algorithm: str, cases: int, known: Collection[str] = ()) -> tuple[int, Finding | None]:
    """Return after how many cases the fuzzer finds something beside what is known, and what; None if nothing.
    `algorithm`: "" for the handlers of the daemon."""
    report = Report()
    for seed in count(1):
        if algorithm:
            Trial(circumstances_of(algorithm, seed), seed, _EFFORT, report).run()
        else:
            try_handlers(seed, _HANDLER_CASES, report)
        new = [finding for finding in report.findings.values() if finding.problem not in known]
        if new:
            return report.num_cases, new[0]
        if report.num_cases >= cases:
            break
    return report.num_cases, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=MOST_CASES, help="lies to tell about each defect")
    options = parser.parse_args()
    quiet()
    wrong, known = 0, set[str]()
    for algorithm in sorted({defect.algorithm for defect in DEFECTS}):
        cases, found = 0, None
        while cases < options.cases:
            cases, found = search(algorithm, options.cases, known)
            if found is None:
                break
            wrong += 1
            known.add(found.problem)
            print(f"without a defect: {found.where}: {found.example[:200]}", flush=True)
        print(f"{algorithm or 'handlers'}: {cases:,} cases without a defect", flush=True)
    for defect in DEFECTS:
        with put_back(defect):
            cases, found = search(defect.algorithm, options.cases, known)
        wrong += found is None
        said = "NOT FOUND" if found is None else f"{found.where}: {found.problem}"
        print(f"{defect.name:<45} {cases:>7,} cases  {said[:120]}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
