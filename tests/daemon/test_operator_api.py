"""What an operator can ask, and what it is told, without a peer that trains."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.config.options import PeerAddress, PrivacyOptions
from peer.config.precision_choice import PrecisionChoice
from peer.daemon.members.admissions import Admissions
from peer.daemon.members.peer_list_reload import PeerList
from peer.daemon.notes.divergence import Claim
from peer.daemon.operator.operator_api import OperatorApi
from peer.daemon.parts import CommonParts
from peer.daemon.rounds import RoundLoop
from peer.daemon.runtime import Runtime
from peer.errors import SottoError
from peer.gossip.incarnations import Numbering
from peer.gossip.membership import ChangeKind
from peer.net.answers import read_answer
from peer.net.offences import NOTABLE
from peer.records import ACCURACY, RoundRecord
from peer.run.privacy_budget import Budget, epsilon
from peer.state.admission_log import AdmissionLog
from peer.state.metrics import MetricsStore
from tests.daemon.parts import FakeMembers, FakeTransport, neighbors_over
from tests.state.failing_disk import FailingDisk

NAMES = ["ada", "ben", "cleo"]
SOFTWARE = ("sottovoce 0.2.0", "sottovoce 0.1.0", None)


class Roster:
    numbering = Numbering(len(NAMES))

    def __init__(self) -> None:
        self.newcomers: dict[int, PeerAddress] = {}

    @property
    def others(self) -> list[int]:
        return sorted({1, 2, *self.newcomers})

    def name(self, peer: int) -> str:
        return NAMES[peer]

    def certificate(self, peer: int) -> bytes:
        return b"DER"

    def index_of(self, name: str) -> int | None:
        return NAMES.index(name) if name in NAMES else None


class Snapshots:
    taken = 0

    async def take_snapshot(self) -> None:
        self.taken += 1


class Asked:
    """An operator's API over parts that only take note."""

    def __init__(self) -> None:
        self.runtime, self.members, self.saver = Runtime(), FakeMembers(), Snapshots()
        self.transport = transport = FakeTransport(up={1}, problems={2: "nobody listens at 10.0.0.3:7700"})
        run = SimpleNamespace(name="digits", rounds=50)
        self.metrics = MetricsStore(None)
        local = SimpleNamespace(
            index=0,
            number=0,
            incarnation=0,
            name="ada",
            access=None,
            roster=Roster(),
            config=SimpleNamespace(run=run, privacy=PrivacyOptions(epsilon=3.0)),
            others=[1, 2],
            metrics=self.metrics,
            budget=None,
            chosen=None,
        )
        self.local = local
        self.finished: set[int] = set()
        self.log = AdmissionLog(FailingDisk(), lambda: 0.0)
        neighbors = neighbors_over(transport, (1, 2))
        transport_facts: Any = transport
        transport_facts.relay, transport_facts.relayed = SimpleNamespace(carried={}), lambda peer: None
        self.claims: dict[int, Claim] = {}
        loop = SimpleNamespace(
            round=7,
            figures=lambda: {"push_weight": 1.0},
            link_figures=lambda peer: {},
            progress=None,
            saver=self.saver,
            requests=self.members,
        )
        common = SimpleNamespace(
            local=local,
            runtime=self.runtime,
            neighbors=neighbors,
            evaluations=SimpleNamespace(
                own=lambda: None,
                worst=lambda: None,
                finished=lambda: self.finished,
                criteria=(ACCURACY,),
                told=(ACCURACY,),
            ),
            divergence=SimpleNamespace(claims=lambda: self.claims),
            metrics=SimpleNamespace(last_loss=0.5, flush=self.metrics.flush, put_links=self.metrics.flush),
            admissions=Admissions(self.log, cast(Any, None), neighbors, None),
            releases=SimpleNamespace(software=lambda: dict(enumerate(SOFTWARE)), needed=3, usable=4),
            limits=None,
        )
        self.api = OperatorApi(cast(CommonParts, common), cast(RoundLoop, loop), cast(PeerList, None))

    def ask(self, verb: str, **arguments: object) -> dict[str, Any]:
        return asyncio.run(self.api.control(verb, arguments))


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_the_status_says_who_is_said_to_have_diverged(asked: Asked) -> None:
    assert asked.ask("status")["diverged"] == []
    asked.claims[1] = Claim(20, "the loss is too high", told_by=2)
    assert asked.ask("status")["diverged"] == [
        {"name": NAMES[1], "round": 20, "reason": "the loss is too high", "told_by": NAMES[2]}
    ]


def test_the_status_says_which_release_each_member_runs(asked: Asked) -> None:
    assert asked.ask("status")["releases"] == {"ada": "0.2.0", "ben": "0.1.0", "cleo": None}
    assert asked.ask("status")["protocol"] == {"needed": 3, "usable": 4}


def test_the_status_says_what_stands_in_the_way_of_a_link(asked: Asked) -> None:
    status = asked.ask("status")
    assert (status["state"], status["round"], status["rounds"], status["loss"]) == ("running", 7, 50, 0.5)
    assert (status["neighbors"], status["neighbors_up"], status["push_weight"]) == (2, 1, 1.0)
    assert {name: link["problem"] for name, link in status["links"].items()} == {
        "ben": None,
        "cleo": "nobody listens at 10.0.0.3:7700",
    }
    assert status["frame_bytes"] == 300


def test_the_status_names_a_neighbour_that_broke_the_protocol_again_and_again(asked: Asked) -> None:
    for n in range(NOTABLE - 1):
        asked.transport.offences.add(1, f"frame {n} is wrong")
    status = asked.ask("status")
    assert status["offenders"] == []
    assert (status["links"]["ben"]["offences"], status["links"]["cleo"]["offences"]) == (NOTABLE - 1, 0)
    asked.transport.offences.add(1, "its checksum is wrong")
    (offender,) = asked.ask("status")["offenders"]
    assert (offender["name"], offender["offences"], offender["last"]) == ("ben", NOTABLE, "its checksum is wrong")
    assert "`sotto remove ben`" in offender["advice"]


def test_the_status_says_what_privacy_spent_with_the_round_under_way(asked: Asked) -> None:
    pytest.importorskip("dp_accounting")
    assert asked.ask("status")["privacy"] is None
    asked.local.budget = Budget(1.5, 0.1, 1e-5, 50, 1)
    told = asked.ask("status")["privacy"]
    assert told == {"epsilon": asked.local.budget.spent(8), "delta": 1e-5, "limit": 3.0, "noise_multiplier": 1.5}
    assert told["epsilon"] >= epsilon(1.5, 0.1, 8, 1e-5)


def test_the_status_says_which_precision_the_device_chose(asked: Asked) -> None:
    assert asked.ask("status")["precision"] is None
    asked.local.chosen = PrecisionChoice("int8", {"float32": 0.002, "int8": 0.001})
    told = asked.ask("status")["precision"]
    assert told == {"precision": "int8", "step_s": {"float32": 0.002, "int8": 0.001}}


def test_what_a_peer_answers_is_what_others_read_of_it(asked: Asked) -> None:
    """A field that `peer.net.answers` does not know is lost on its way."""
    for verb, arguments in (
        ("status", {}),
        ("snapshot", {}),
        ("metrics", {"table": "rounds"}),
        ("stop", {}),
    ):
        answer = json.loads(json.dumps(asked.ask(verb, **arguments)))
        assert read_answer(verb, json.dumps(answer)) == answer


def test_a_stop_is_remembered(asked: Asked) -> None:
    answer = asked.ask("stop")
    assert answer.pop("peers").keys() == {"ben", "cleo"}
    assert answer == {"stopping": True, "round": 7, "newcomers": []}
    assert asked.runtime.stop_reason == "stopped by the operator"
    assert not asked.runtime.stops_at_once
    assert asked.ask("status")["state"] == "stopping"


def test_the_status_says_what_became_of_others(asked: Asked) -> None:
    asked.members.standings = {2: "left"}
    asked.finished = {1, 2}
    assert asked.ask("status")["peers"] == {
        "ben": {"state": "finished", "problem": None},
        "cleo": {"state": "left", "problem": "nobody listens at 10.0.0.3:7700"},
    }
    # What was told of it before it was excluded does not make it one that finished.
    asked.members.standings = {1: "lost"}
    assert asked.ask("status")["peers"]["ben"]["state"] == "lost"


def test_metrics_are_handed_over_from_a_round_on(asked: Asked) -> None:
    asked.metrics.put(*(RoundRecord(peer=0, round=t, time_s=t / 10, loss=1.0) for t in range(5)))
    page = asked.ask("metrics", table="rounds", after=2)
    at = page["columns"].index("round")
    assert [row[at] for row in page["rows"]] == [3, 4]
    assert page["last"] is None
    assert asked.ask("metrics", table="links")["rows"] == []
    json.dumps(page)


@pytest.mark.parametrize("arguments", [{}, {"table": "checkpoints"}, {"table": "rounds", "after": "0; DROP TABLE"}])
def test_metrics_are_of_some_tables_only(asked: Asked, arguments: dict[str, object]) -> None:
    with pytest.raises(SottoError, match="metrics takes a table"):
        asked.ask("metrics", **arguments)


def test_a_snapshot_is_left_to_whoever_saves(asked: Asked) -> None:
    assert asked.ask("snapshot") == {"round": 7}
    assert asked.saver.taken == 1


def test_leaving_and_removing_are_announced(asked: Asked) -> None:
    assert asked.ask("leave") == {"from": 12}
    assert asked.ask("remove", name="cleo") == {"from": 12}
    assert asked.members.announced == [(ChangeKind.LEAVE, 0), (ChangeKind.LOST, 2)]


@pytest.mark.parametrize(
    ("verb", "arguments", "says"),
    [
        ("remove", {"name": "dora"}, "there is no peer 'dora' in this run"),
        ("remove", {}, "there is no peer 'None' in this run"),
        ("remove", {"name": "x" * 1000}, "there is no peer 'x{80}' in this run"),
        ("remove", {"name": "ada"}, "ada is running and can leave by itself: sotto admin leave"),
        ("shout", {}, "there is no control call 'shout'; valid: status, stop,"),
    ],
)
def test_what_cannot_be_done_is_said(asked: Asked, verb: str, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(SottoError, match=says):
        asked.ask(verb, **arguments)
    assert asked.members.announced == []
