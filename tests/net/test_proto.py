from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from peer.proto.sottovoce.v1 import control_pb2, exchange_pb2, note_pb2

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    pytest.importorskip("grpc_tools")
    spec = importlib.util.spec_from_file_location("generate_proto", ROOT / "tools" / "generate_proto.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_code_is_fresh(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["generate_proto.py", "--check"])
    assert generator.main() == 0


def test_stale_missing_and_left_over_code_is_found(generator: ModuleType, tmp_path: Path) -> None:
    fresh, old = tmp_path / "fresh", tmp_path / "old"
    for folder in (fresh, old):
        folder.mkdir()
        generator.generate(folder)
    assert generator.differences(fresh, old) == []
    modules = sorted((old / "sottovoce" / "v1").glob("*.py"))
    modules[0].write_text(modules[0].read_text() + "# touched\n")
    modules[1].rename(modules[1].with_name("renamed_pb2.py"))
    assert generator.differences(fresh, old) == [
        "sottovoce/v1/exchange_pb2.py is missing",
        "sottovoce/v1/renamed_pb2.py has no source any more",
        "sottovoce/v1/control_pb2.py is out of date",
    ]


def test_another_version_of_the_compiler_is_no_difference(generator: ModuleType, tmp_path: Path) -> None:
    fresh, old = tmp_path / "fresh", tmp_path / "old"
    for folder in (fresh, old):
        folder.mkdir()
        generator.generate(folder)
    for module in old.rglob("*.py"):
        text = module.read_text()
        begin = text.index("ValidateProtobufRuntimeVersion(")
        version = text[begin : text.index("''", begin)]
        module.write_text(text.replace(version, "ValidateProtobufRuntimeVersion(\n    Domain.PUBLIC, 6, 31, 0,"))
    assert generator.differences(fresh, old) == []


def test_the_generated_code_runs_with_every_protobuf_that_may_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [text for text in project["dependencies"] if text.startswith("protobuf")]
    for module in (ROOT / "peer" / "proto").rglob("*_pb2.py"):
        found = re.search(r"^# Protobuf Python Version: (\d+)\.(\d+)\.0$", module.read_text(), re.MULTILINE)
        assert found is not None, module
        major, minor = map(int, found.groups())
        assert wanted == f"protobuf>={major}.{minor},<{major + 2}", module


def test_the_services_are_what_the_transport_serves() -> None:
    (exchange,) = exchange_pb2.DESCRIPTOR.services_by_name["Peer"].methods
    assert (exchange.name, exchange.client_streaming, exchange.server_streaming) == ("Exchange", True, True)
    control = control_pb2.DESCRIPTOR.services_by_name["Control"]
    assert control.full_name == "sottovoce.v1.Control"
    assert [method.name for method in control.methods] == [
        "Status", "Stop", "Snapshot", "Reload", "Leave", "Remove", "Revoke", "Metrics", "Probe",
    ]  # fmt: skip


def test_numbers_of_fields_never_change() -> None:
    """The compatibility promise of exchange.proto and note.proto: this table only grows."""
    fields = {
        message.name: {field.name: field.number for field in message.fields}
        for file in (exchange_pb2, note_pb2)
        for message in file.DESCRIPTOR.message_types_by_name.values()
    }
    assert fields == {
        "Envelope": {"chunks": 1, "receipt": 2, "credit": 3, "bulletins": 4, "hello": 5, "close": 6},
        "Chunk": {"sequence": 1, "data": 2, "offset": 3, "frame_bytes": 4},
        "Bulletin": {"topic": 1, "data": 2},
        "Hello": {
            "protocol_min": 1,
            "protocol_max": 2,
            "run": 3,
            "algorithm": 4,
            "model_digest": 5,
            "graph_digest": 6,
            "run_digest": 7,
            "num_peers": 8,
            "index": 9,
            "name": 10,
            "nonce": 11,
            "received": 12,
            "window_bytes": 13,
            "chunk_bytes": 14,
            "heartbeat_ms": 15,
            "software": 16,
            "seen_as": 17,
            "challenge": 18,
            "certificate": 19,
            "proof": 20,
            "progress": 21,
            "shown": 22,
            "admission": 23,
            "start": 24,
            "meanings": 25,
            "settings": 26,
            "machine": 27,
            "receiver": 28,
        },
        "Meaning": {"kind": 1, "digest": 2, "entries": 3, "count": 4},
        "StartModel": {"digest": 1, "parameters": 2, "buffers": 3},
        "Close": {"kind": 1, "reason": 2},
        "EvaluationNote": {"peer": 1, "round": 2, "split": 3, "correct": 4, "total": 5, "metrics": 6},
        "DivergenceNote": {"peer": 1, "round": 2, "reason": 3},
        "ReleaseNote": {"peer": 1, "protocol_max": 2, "software": 3, "said_ms": 4},
        "ReplicaNote": {"round": 1, "digests": 2},
        "ClassNote": {"peer": 1, "shares": 2, "samples": 3},
        "SharesNote": {"peer": 1, "digest": 2},
        "ToldNote": {"peer": 1, "first_segment": 2, "owners": 3, "digests": 4},
        "ShareNote": {"peer": 1, "round": 2, "weight": 3, "digests": 4},
        "AverageNote": {"peer": 1, "round": 2, "shares": 3, "file": 4},
        "ShareChunk": {"owner": 1, "index": 2, "asks": 3, "data": 4},
        "DataNote": {"train_digest": 1, "test_digest": 2},
        "RefusalNote": {"reason": 1},
    }
