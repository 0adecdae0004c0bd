"""Whoever is asked may answer anything: whoever asks gets one error that names it, whatever was asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from peer.errors import RemoteError, RemoteProtocolError
from peer.net.admission import CONTROL_VERBS
from peer.net.answers import ANSWERS, EXAMINED, read_answer
from peer.net.control import call_control
from peer.net.rpc import Caller, Server
from peer.net.services import CONTROL_SERVICE
from peer.proto.sottovoce.v1 import control_pb2
from tests.ops.answering import HONEST

RAW = {
    "a list nested 600 deep": "[" * 600 + "]" * 600,
    "an object nested 600 deep": '{"a":' * 600 + "1" + "}" * 600,
    "infinity in place of a number": '{"numbers": {"a": Infinity}}',
    "a list": "[]",
    "null": "null",
    "no JSON": "{",
    "nothing": "",
    "half a character": '{"name": "\\ud800"}',
    "a number of 5000 digits": '{"round": ' + "9" * 5000 + "}",
    "brackets without an end": "[" * 1_000_000,
    "a million lists": "[" + "[]," * 1_100_000 + "[]]",
    "an object without the fields": "{}",
}


async def asked(verb: str, *results: str | bytes) -> list[dict[str, Any] | RemoteError]:
    """Return what comes of a call that is answered with each of these results, or bytes in place of a response."""
    remaining = list(results)

    async def answer(caller: Caller, request: bytes) -> bytes:
        result = remaining.pop(0)
        return result if isinstance(result, bytes) else control_pb2.ControlResponse(result=result).SerializeToString()

    server = Server((), max_concurrent=4)
    server.serve_calls(CONTROL_SERVICE, {verb.capitalize(): answer})
    port = server.bind("127.0.0.1:0", None)
    await server.start()
    found: list[dict[str, Any] | RemoteError] = []
    try:
        for _ in results:
            try:
                found.append(await call_control(f"127.0.0.1:{port}", verb, name="peer-0", security=None))
            except RemoteError as error:
                found.append(error)
    finally:
        await server.stop(0.0)
    return found


def test_there_is_a_shape_for_every_call() -> None:
    assert ANSWERS.keys() == {*CONTROL_VERBS} == HONEST.keys()


@pytest.mark.parametrize("verb", CONTROL_VERBS)
def test_nonsense_is_an_error_that_names_who_answered(verb: str) -> None:
    *lies, truth = asyncio.run(asked(verb, *RAW.values(), b"\xff\xff", json.dumps(HONEST[verb])))
    for what, found in zip([*RAW, "no response"], lies, strict=True):
        assert isinstance(found, RemoteProtocolError), what
        assert found.problem.startswith("peer-0 at 127.0.0.1:"), what
        assert f"answered {verb!r} with nonsense: " in found.problem, what
        assert len(found.problem) < 500, what
    assert truth == HONEST[verb]


def _lies(value: Any, place: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return each place in an answer with what no peer says there."""
    if isinstance(value, dict):
        return [lie for key, each in value.items() for lie in _lies(each, (*place, key))]
    return [(place, lie) for lie in ({"a": [[]]}, "x" * 3000, -1.5, 1 << 90, [None])]


@pytest.mark.parametrize("verb", CONTROL_VERBS)
def test_a_field_of_another_kind_is_refused(verb: str) -> None:
    honest = HONEST[verb]
    assert read_answer(verb, json.dumps(honest)) == honest
    for (*outer, last), lie in _lies(honest):
        told = json.loads(json.dumps(honest))
        inner = told
        for key in outer:
            inner = inner[key]
        inner[last] = lie
        with pytest.raises(ValueError, match=last):
            read_answer(verb, json.dumps(told))


def test_what_an_answer_holds_beside_its_fields_is_left_out() -> None:
    lies = {"error": "x", "exit_code": 99, "note": "has left", "index": 7, "told_by": "x"}
    assert read_answer("status", json.dumps(HONEST["status"] | lies)) == HONEST["status"]


def test_a_peer_that_answers_as_another_is_not_believed() -> None:
    (found,) = asyncio.run(asked("status", json.dumps(HONEST["status"] | {"name": "peer-7"})))
    assert isinstance(found, RemoteProtocolError)
    assert "answered 'status' as 'peer-7'" in found.problem


def test_a_peer_that_is_examined_does_not_run() -> None:
    (found,) = asyncio.run(asked("status", json.dumps(EXAMINED)))
    assert isinstance(found, RemoteError)
    assert "is being examined by sotto doctor" in found.problem
