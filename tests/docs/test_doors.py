"""The table of doors in the study of attacks has every call and topic; it and the tables of SECURITY.md name tests that
exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from peer.daemon.notes import notes
from peer.net.outbox import REVOKED_TOPIC
from peer.node.loss_votes import LOST, ORDER
from peer.node.progress import PROGRESS
from peer.node.statements import MEMBERS
from peer.node.told import TOLD
from peer.proto.sottovoce.v1 import control_pb2, exchange_pb2, relay_pb2

TESTS = Path(__file__).parent.parent
STUDY = (TESTS.parent / "docs/studies/attacks.md").read_text(encoding="utf-8")
SECURITY = (TESTS.parent / "SECURITY.md").read_text(encoding="utf-8")
DEFENCES = [row for row in SECURITY.splitlines() if re.fullmatch(r"\| (?!attack |---).* \| .* \| .* \|", row)]
ROWS = [row for row in STUDY.partition("\n## Doors\n")[2].splitlines() if row.startswith("| ")][2:]
DOORS = "\n".join(row.split(" | ")[0] for row in ROWS)

CALLS = [
    method.name
    for file in (exchange_pb2, control_pb2, relay_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
TOPICS = [value for name, value in vars(notes).items() if name.isupper() and isinstance(value, str)]


def _named_tests(rows: list[str]) -> list[tuple[str, str]]:
    """Return (file, test or "") of all that a table names; a name without a file is of the file before it."""
    found, file = [], ""
    for row in rows:
        for named in re.findall(r"`([^`]+)`", row.split(" | ")[-1]):
            own, _, test = named.partition("::")
            file = own or file
            found.append((file, test))
    return found


@pytest.mark.parametrize("name", [*CALLS, *TOPICS, REVOKED_TOPIC, LOST, ORDER, TOLD, MEMBERS])
def test_every_call_and_topic_has_a_row(name: str) -> None:
    assert f"`{name}`" in DOORS


def test_topics_are_those_that_the_protocol_lists() -> None:
    """`note.proto` lists all; a topic that only the code knows would be missing above."""
    listed = re.findall(r'^//   "([^"]+)"', (TESTS.parent / "proto/sottovoce/v1/note.proto").read_text(), re.MULTILINE)
    assert {*TOPICS, LOST, PROGRESS, TOLD, REVOKED_TOPIC} == {*listed}


@pytest.mark.parametrize("rows", [ROWS, DEFENCES], ids=["doors", "defences"])
def test_every_row_names_tests_that_exist(rows: list[str]) -> None:
    assert len(rows) > 30
    assert all("`" in row.split(" | ")[-1] for row in rows)
    missing = [
        f"{file}::{test}"
        for file, test in _named_tests(rows)
        if not (TESTS / file).is_file() or (test and f"def {test}(" not in (TESTS / file).read_text(encoding="utf-8"))
    ]
    assert not missing


def test_defences_in_sentences_name_tests_that_exist() -> None:
    sentences = "\n".join(line for line in SECURITY.splitlines() if not line.startswith("|"))
    named, file = [], ""
    for own, test in re.findall(r"`([\w/]+\.py)?::(\w+)`", sentences):
        file = own or file
        named.append((file, test))
    assert len(named) > 30
    assert not [each for each in named if f"def {each[1]}(" not in (TESTS / each[0]).read_text(encoding="utf-8")]
