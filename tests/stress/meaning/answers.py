"""Answers to control calls, told lies: what a member answers to a peer that asks what became of it, to a probe, and to
the commands of an operator.

The calls, their proofs and their readers are those of production; only the sockets are not there. Of three peers,
peer-1 lies, in answers that it signs with its own certificate. Whatever it says, a call ends with an answer or with one
error that names it; nothing that asks several peers ends by it, leaves the others out, or dials what it invents.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

import peer.cli.control as cli
import peer.net.control as calls
from peer.config.options import Config, SecurityOptions, load
from peer.daemon.assembly import Parts
from peer.daemon.members.own_loss import OwnLoss, ask_members, status_of
from peer.errors import SottoError
from peer.net.admission import CONTROL_VERBS
from peer.net.rpc import Caller, Status, StreamLost
from peer.net.security.certificates import Role
from peer.net.security.credentials import Credentials, load_credentials
from peer.net.security.proofs import prove
from peer.ops import collect, control
from peer.ops.cluster_summary import write_cluster_summary
from peer.proto.sottovoce.v1 import control_pb2
from peer.report.run_data import load_run
from peer.report.run_page import render
from peer.report.status_table import status_table
from peer.state.metrics import EvaluationRecord, LinkRecord, MetricsStore
from peer.watch.observer import Observer
from peer.watch.view import View
from tests.ops.answering import HONEST
from tests.report.sample_run import round_record
from tests.stress.meaning.worlds import PromiseBroken

LIAR = "peer-1"
ROUNDS = 20
RAW = (
    "", "null", "[]", "{", "7", '"x"', "[" * 600 + "]" * 600, '{"a":' * 600 + "1" + "}" * 600, "[" * 50_000,
    '{"numbers": {"a": Infinity}}', '{"numbers": {"a": 1e999}}', '{"round": ' + "9" * 5000 + "}", '{"name": "\\ud800"}',
    "[" + "[]," * 3000 + "[]]",
)  # fmt: skip
"""Answers that are none from their first character on."""
_SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 20, 21, 3.5, -2.5, 1 << 31, 1 << 53, 1 << 63, 1 << 70, 10**300, 1e308, -1e308,
    5e-324, float("nan"), float("inf"), float("-inf"), "", "x",
    "peer-0", "peer-1", "peer-9", "x" * 3000, "\x1b[2J", "a\nb",
    "\ud800", "<script>x", "00" * 40, "zz", "running", "member", "left", "lost", "finished", "higher", "diverged: a: b",
)  # fmt: skip
_KEYS = (
    "error", "exit_code", "note", "state", "name", "index", "told_by", "losses", "numbers", "proofs", "newcomers",
    "peers", "links", "limits", "precision", "privacy", "criteria", "waiting_for", "coming_changes", "members",
    "diverged", "offenders", "certificate", "releases", "from", "added", "removed", "columns", "rows", "last",
    "round", "protocol", "time",
)  # fmt: skip


class Liars:
    """Stands for every connection that a call would open, and remembers where to."""

    def __init__(self, cluster: Path, random: Random, honest: dict[str, Any]) -> None:
        """`cluster`: the folder of three kits. `honest`: a status of a peer."""
        self.cluster, self.random, self.honest = cluster, random, honest
        self.dialled: list[str] = []
        self.is_honest = False
        """Whether nobody lies."""

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Let nothing be dialled."""
        liars = self

        class Channel:
            def __init__(self, address: str, name: str, access: object, options: object = ()) -> None:
                self.address, self.name, self.access = address, name, access

            async def call(self, service: str, method: str, request: bytes, *, timeout_s: float) -> bytes:
                liars.dialled.append(self.address)
                assert isinstance(self.access, Credentials)
                verifier = self.access.identity.name
                return liars.response(
                    self.name, method.lower(), control_pb2.ControlRequest.FromString(request), verifier
                )

            async def close(self) -> None:
                pass

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calls, "Channel", Channel)
            # Read from disk for each call, which costs more than the call.
            patch.setattr(control, "credentials", lambda config, base: _operator(self.cluster))
            yield

    def response(self, name: str, verb: str, request: control_pb2.ControlRequest, verifier: str) -> bytes:
        """Return what a peer answers."""
        random = self.random
        truth = self.truth(name, verb, json.loads(request.arguments))
        text = json.dumps(truth)
        if name == LIAR and not self.is_honest:
            if random.random() < 0.03:
                raise StreamLost(_refusal(random))
            text = random.choice(RAW) if random.random() < 0.1 else json.dumps(lie(random, truth))
        answer = control_pb2.ControlResponse(result=text)
        answer.certificate, answer.proof = prove(
            credentials_of(self.cluster, name), request.challenge, verifier=verifier, answer=text.encode()
        )
        return answer.SerializeToString()

    def truth(self, name: str, verb: str, arguments: Mapping[str, Any]) -> Any:
        """Return what an honest peer would answer."""
        if verb == "metrics" and "table" in arguments:
            return _page(int(name[-1]), arguments["table"], arguments["after"])
        honest: dict[str, Any] = copy.deepcopy(self.honest if verb == "status" else HONEST[verb])
        if verb == "status" and arguments.get("proofs"):
            honest |= {"losses": {}, "numbers": {f"peer-{index}": index for index in range(3)}}
        return honest | ({"name": name} if verb in ("status", "probe") else {})


class _Refused(Exception):
    """A call that is answered with a status of gRPC in place of an answer."""


def _refusal(random: Random) -> BaseException:
    error = StreamLost(_Refused(random.choice(("\x1b[2J", "x" * 9000, "", "certificate"))))
    error.status = random.choice(list(Status))
    return error


def lie(random: Random, truth: Any) -> Any:
    """Return an answer with one to three changes anywhere in it."""
    told = copy.deepcopy(truth)
    if "name" in told and random.random() < 0.15:
        return told | {"name": random.choice(("peer-0", "peer-2", "peer-9"))}
    if "newcomers" in told and random.random() < 0.15:
        return told | {"newcomers": _invented(random)}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        told = _changed(random, told, depth=0)
    return told


def _changed(random: Random, value: Any, depth: int) -> Any:
    if isinstance(value, dict) and (not value or random.random() < 0.85):
        if not value or random.random() < 0.25:
            value[random.choice(_KEYS)] = _anything(random)
            return value
        key = random.choice(list(value))
        if random.random() < 0.1:
            del value[key]
        else:
            value[key] = _changed(random, value[key], depth + 1)
        return value
    if isinstance(value, list) and value and random.random() < 0.8:
        if random.random() < 0.1:
            return value * random.choice((2, 50))
        place = random.randrange(len(value))
        value[place] = _changed(random, value[place], depth + 1)
        return value
    return _anything(random)


def _anything(random: Random) -> Any:
    match random.randrange(8):
        case 0:
            return [random.choice(_SCALARS) for _ in range(random.choice((0, 1, 3)))]
        case 1:
            return {random.choice(("a", "peer-0", "peer-1", "3", "-1", "x" * 99)): random.choice(_SCALARS)}
        case 2:
            value: Any = random.choice(_SCALARS)
            for _ in range(random.choice((2, 31, 40, 200))):
                value = random.choice(([value], {"a": value}))
            return value
        case 3:
            return _invented(random)
    return random.choice(_SCALARS)


def _invented(random: Random) -> list[dict[str, Any]]:
    """Return newcomers that there are not."""
    first = random.choice((3, 4, 5000, 1 << 40))
    return [
        {"index": first + each, "name": f"new-{each}", "advertise": f"192.0.2.9:{each}",
         "relay": None, "certificate": random.choice(("", "00", "30" * 400))}
        for each in range(random.choice((1, 70, 1100)))
    ]  # fmt: skip


@cache
def credentials_of(cluster: Path, name: str) -> Credentials:
    """Return what a peer of a cluster folder proves itself with."""
    config = load(cluster / name / "peer.toml", environment={})
    loaded = load_credentials(config.security, cluster / name, name)
    assert isinstance(loaded, Credentials)
    return loaded


@cache
def _operator(cluster: Path) -> Credentials:
    files = {"ca": "ca.pem", "certificate": "operator.pem", "key": "operator.key"}
    loaded = load_credentials(SecurityOptions(**files), cluster, None, role=Role.OPERATOR)
    assert isinstance(loaded, Credentials)
    return loaded


@cache
def _listed(cluster: Path) -> list[collect.Member]:
    return collect.members_of(cluster)


@cache
def _store(index: int) -> MetricsStore:
    store = MetricsStore(None)
    store.put(*(round_record(index, each, ROUNDS) for each in range(6)))
    store.put(EvaluationRecord(peer=index, round=5, split="test", correct=(3,), total=(9,), metrics={"RMSE": 0.5}))
    store.put(LinkRecord(peer=index, neighbor=(index + 1) % 3, frames=6, up=True))
    return store


def _page(index: int, table: str, after: int) -> dict[str, Any]:
    columns, rows, last = _store(index).page(table, after=after)
    return {"columns": columns, "rows": rows, "last": last}


class Askers:
    """Everybody in production who asks."""

    def __init__(
        self, config: Config, folder: Path, parts: Parts, service: calls.ControlService, random: Random
    ) -> None:
        """`folder`: of peer-0, beside those of the others. `service`: what answers at peer-0."""
        self._config, self._folder, self._parts, self._random = config, folder, parts, random
        self._service = service
        self._status = parts.operator.status()
        self.liars = Liars(folder.parent, random, json.loads(json.dumps(self._status)))
        self._hosts = {entry.advertise for entry in config.peers}

    def ask(self) -> None:
        """Let one of them ask. Raises RemoteError or SecurityError where it was a single call, and PromiseBroken."""
        asker: Callable[[], None] = self._random.choice(
            (self._one, self._one, self._one, self._peer, self._peer, self._peer, self._probe, self._all, self._all,
             self._watch, self._remove)
            if self._random.random() < 0.97 else (self._report,)
        )  # fmt: skip
        self.liars.dialled.clear()
        with self.liars.instead():
            asker()
        invented = {*self.liars.dialled} - self._hosts
        if invented:
            raise PromiseBroken(f"a peer that is invented is dialled: {sorted(map(str, invented))[0]}")

    def _one(self) -> None:
        """A command that asks one peer."""
        verb = self._random.choice(CONTROL_VERBS)
        arguments = {"table": self._random.choice(("rounds", "evaluations", "links")), "after": -1}
        answer = control.call(self._config, self._folder, 1, verb, arguments if verb == "metrics" else None)
        json.dumps(answer, allow_nan=False)
        if verb in ("status", "probe") and answer["name"] != LIAR:
            raise PromiseBroken(f"{LIAR} answers as {answer['name']}, and is believed")

    def _peer(self) -> None:
        """A peer that asks the members what became of it; peer-2 does not lie."""
        local, loop = self._parts.common.local, self._parts.loop
        own_loss = getattr(loop, "own_loss", None)

        async def story() -> None:
            await ask_members(local.roster, local.access)
            await status_of(LIAR, local.roster[1].advertise or "", local.access)
            if isinstance(own_loss, OwnLoss):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(OwnLoss, "is_in_doubt", lambda *_: True)
                    watching = asyncio.ensure_future(own_loss.watch())
                    for _ in range(20):
                        await asyncio.sleep(0)
                    watching.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await watching

        try:
            asyncio.run(story())
        except SottoError as error:
            raise PromiseBroken(f"what another answers ends this peer: {error}") from error

    def _probe(self) -> None:
        """A peer that looks for `sotto doctor` of peer-1 whether it reaches that one."""
        asyncio.run(self._service.probe(1, Caller("ipv4:127.0.0.1:1", (), None)))

    def _all(self) -> None:
        """`sotto status --all` and `sotto stop --all`."""
        verb = self._random.choice(("status", "stop"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli, "load_peer", lambda _: (self._config, self._folder))
            try:
                answers = cli.call(None, None, True, verb)
            except SottoError as error:
                raise PromiseBroken(f"what one peer answers ends the command: {error}") from error
        if [answer["name"] for answer in answers] != ["peer-0", "peer-1", "peer-2"]:
            raise PromiseBroken(f"other peers are shown than were asked: {[answer['name'] for answer in answers]}")
        if "error" in answers[0] or "error" in answers[2]:
            raise PromiseBroken("for what one peer answers, others are not heard")
        if cli.exit_code(answers) not in (0, 1, 3, 6):
            raise PromiseBroken("another chooses the exit code")
        json.dumps(answers, allow_nan=False)
        Console(file=io.StringIO(), width=120).print(status_table(answers))

    def _remove(self) -> None:
        """`sotto remove` of peer-2."""
        asyncio.run(control.remove(self._config, self._folder, "peer-2"))

    def _members(self) -> list[collect.Member]:
        return [replace(member) for member in _listed(self._folder.parent)]

    def _watch(self) -> None:
        """The live page."""
        observer = Observer("cluster", self._members(), None)
        for _ in range(2):
            snapshot = asyncio.run(observer.look())
            for part in View(observer.figures).parts(snapshot, left_s=None, events=(), log=()).values():
                json.loads(part, parse_constant=no_number)
        states = {view.name: view.state for view in snapshot.peers}
        if {states["peer-0"], states["peer-2"]} != {"running"}:
            raise PromiseBroken(f"for what one peer answers, others are not shown: {states}")
        if len(states) > 3:
            raise PromiseBroken("peers are shown that there are not")

    def _report(self) -> None:
        """`sotto report`."""
        directory = self._folder.parent
        try:
            members = collect.collect(directory)
            write_cluster_summary(directory, members)
            page = render(load_run(directory))
        finally:
            shutil.rmtree(directory / collect.FOLDER, ignore_errors=True)
        if "<script>x" in page:
            raise PromiseBroken("a report holds markup of a peer")
        if [members[index].answer is None for index in (0, 2)] != [False, False]:
            raise PromiseBroken("for what one peer answers, others are not asked")


def no_number(constant: str) -> object:
    raise PromiseBroken(f"an answer holds {constant}, which is no JSON")
