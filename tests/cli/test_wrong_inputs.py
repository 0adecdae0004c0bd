"""Wrong inputs and the one sentence that each gets: no traceback, nothing on stdout, an exit code that says whose fault
it is. Each case names what the sentence has to contain."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cli.runner import sotto

LATIN_1 = '[run]\nname = "Zürich"\n'.encode("latin-1")
SCENARIO = {
    "algorithm": "sgp",
    "nodes": 2,
    "dim": 1,
    "layers": [1],
    "rounds": 1,
    "lr": 0.1,
    "objective": {"curvature": [[1.0], [1.0]], "target": [[0.0], [1.0]]},
    "x0": [0.0],
    "mixing": [[[0.5, 0.5], [0.5, 0.5]]],
}


def scenario(**changes: object) -> bytes:
    return json.dumps({key: value for key, value in (SCENARIO | changes).items() if value is not None}).encode()


@dataclass(frozen=True)
class Case:
    """One wrong input."""

    name: str
    arguments: str
    says: tuple[str, ...]
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    """Name → content, None for a folder."""
    environment: Mapping[str, str] = field(default_factory=dict)
    code: int = 2


def toml(text: str) -> dict[str, bytes | None]:
    return {"peer.toml": text.encode()}


def graph(content: object) -> dict[str, bytes | None]:
    return {"graph.json": content if isinstance(content, bytes) else json.dumps(content).encode()}


SEVERAL = "`sotto init --peers 3` begins a run of several devices"
FILE_GRAPH = "lab graph -n 2 --graph file -s graph.file=graph.json"

CASES = [
    # -- configuration files ------------------------------------------------------------------------------------------
    Case("not-toml", "lab validate -c peer.toml", ("peer.toml", "not valid TOML", "line 1"), toml("run]\n")),
    Case("not-utf-8", "lab validate -c peer.toml", ("peer.toml", "UTF-8"), {"peer.toml": LATIN_1}),
    Case(
        "own-data-for-simulated-peers",
        "simulate -n 2 -s data.partition=own",
        ("data.partition", "all peers of this command read the same data", "data.partition=skew", "sotto run"),
    ),
    Case("own-data-for-peers-here", "up -n 2 -s data.partition=own", ("data.partition", "read the same data")),
    Case("own-data-for-a-search", "lab tune -n 2 -s data.partition=own", ("data.partition", "read the same data")),
    Case("no-such-file", "lab validate -c peer.toml", ("peer.toml", "no such file", "sotto init")),
    Case("folder-for-file", "lab validate -c peer.toml", ("peer.toml", "directory"), {"peer.toml": None}),
    *(
        Case(
            f"no-file-for-{words}", words, ("peer.toml: no such file", f"`sotto up {script} --peers 3`", SEVERAL), files
        )
        for files in ({"train.py": b"", "api_every.py": b""},)
        for words, script in (
            ("run", "SCRIPT"),
            ("run train.py -- --lr 1", "train.py"),
            ("run -m train", "-m train"),
            ("remove peer-2", "SCRIPT"),
            ("doctor", "SCRIPT"),
        )
    ),
    *(
        Case(f"no-device-for-{words}", words, ("peer.toml: lists no [[peers]]", says), toml("") | {"train.py": b""})
        for words, says in (
            ("run train.py", f"`sotto up train.py --peers 3` trains on this machine alone, {SEVERAL}"),
            *(
                (words, f"`sotto up --config peer.toml` trains on this machine alone, {SEVERAL}")
                for words in (
                    *("run", "doctor", "status", "stop", "remove peer-2", "watch .", "watch peer.toml", "export ."),
                    *("status --all", "status --json", "admin reload", "admin leave", "admin rejoin", "admin audit"),
                    "admin rollback --round 3",
                )
            ),
        )
    ),
    *(
        Case(
            f"no-device-in-kits-for-{words}",
            words,
            ("kits/peer-0/peer.toml: lists no [[peers]]", "`sotto up --config kits/peer-0/peer.toml`"),
            {"kits/peer-0/peer.toml": b""},
        )
        for words in (
            *("status kits", "stop kits", "watch kits", "report kits", "export kits", "invite kits"),
            "admin rollback --round 3 kits",
        )
    ),
    Case(
        "no-device-beside-kits",
        "run train.py",
        ("lists no [[peers]]", "name the file of a device: --config kits/peer-0/peer.toml"),
        toml("") | {"train.py": b"", "kits/peer-0/peer.toml": b""},
    ),
    Case(
        "unknown-section", "lab validate -c peer.toml", ("peer.toml", "rnu", "unknown section", "run"), toml("[rnu]\n")
    ),
    Case(
        "unknown-key", "lab validate -c peer.toml", ("run.round", "unknown key", "rounds"), toml("[run]\nround = 3\n")
    ),
    Case(
        "text-for-number",
        "lab validate -c peer.toml",
        ("run.rounds", "'many'", "whole number"),
        toml('[run]\nrounds = "many"'),
    ),
    Case(
        "true-for-number",
        "lab validate -c peer.toml",
        ("run.rounds", "True", "whole number"),
        toml("[run]\nrounds = true"),
    ),
    Case(
        "number-for-text", "lab validate -c peer.toml", ("state.directory", "5", "text"), toml("[state]\ndirectory = 5")
    ),
    Case("out-of-range", "lab validate -c peer.toml", ("data.skew", "1.5", "from 0 to 1"), toml("[data]\nskew = 1.5")),
    Case(
        "not-a-number",
        "lab validate -c peer.toml",
        ("guard.max_loss", "nan", "above 0"),
        toml("[guard]\nmax_loss = nan"),
    ),
    Case(
        "not-a-choice",
        "lab validate -c peer.toml",
        ("rounds.late", "'never'", '"wait" or "skip"'),
        toml('[rounds]\nlate = "never"'),
    ),
    Case("section-is-a-number", "lab validate -c peer.toml", ("run", "3", "table"), toml("run = 3")),
    Case("peers-is-a-table", "lab validate -c peer.toml", ("peers", "[[peers]]"), toml('[peers]\nname = "a"')),
    Case(
        "peer-without-name",
        "lab validate -c peer.toml",
        ("peers.0.name", "missing"),
        toml("[[peers]]\nadvertise = 'a:1'"),
    ),
    Case(
        "peer-name-with-blank", "lab validate -c peer.toml", ("peers.0.name", "'a b'"), toml("[[peers]]\nname = 'a b'")
    ),
    Case("two-peers-of-one-name", "lab validate -c peer.toml", ("same name",), toml("[[peers]]\nname = 'a'\n" * 2)),
    Case("index-beyond-peers", "run", ("peer.index is 4", "1 peers"), toml("[peer]\nindex = 4\n[[peers]]\nname = 'a'")),
    Case("run-name-with-slash", "lab validate -n 2 -s run.name=a/b", ("run.name", "'a/b'", "short name")),
    # -- misspelt names -----------------------------------------------------------------------------------------------
    *(
        Case(f"misspelt-{meant}", words, (f"did you mean {meant}?",), {"grid.toml": b"contender = 1"})
        for meant, words in (
            ("learning_rate", "lab validate -n 2 -s training.learing_rate=1"),
            ("training", "lab validate -n 2 -s trainin.momentum=adam"),
            ("nesterov", "lab validate -n 2 -s training.momentum=nestrov"),
            ("sgp", "lab validate -n 2 --algorithm sgd"),
            ("ring", "lab validate -n 2 --graph rng"),
            ("top_k", "lab validate -n 2 --compressor topk"),
            ("digits", "simulate -n 2 --task digit"),
            ("hidden", "simulate -n 2 -s training.task_options.hiden=3"),
            ("contenders", "lab sweep run grid.toml"),
            ("moniqua", "lab study run moniqa"),
        )
    ),
    # -- command line and environment ---------------------------------------------------------------------------------
    Case("override-without-value", "lab validate -s run.rounds", ("'run.rounds'", "section.key=value")),
    Case("override-without-section", "lab validate -s rounds=3", ("'rounds=3'", "section.key=value")),
    Case("override-of-unknown-section", "lab validate -s foo.bar=1", ("command line", "foo", "unknown section")),
    Case("override-of-unknown-key", "lab validate -s run.bar=1", ("command line", "run.bar", "rounds")),
    Case("override-of-peers", "lab validate -s peers.name=a", ("command line", "peers", "[[peers]]")),
    Case("shorthand-out-of-range", "lab validate --skew 2", ("command line", "data.skew", "2.0", "from 0 to 1")),
    Case("shorthand-no-number", "lab validate --rounds many", ("--rounds", "'many'", "sotto lab validate --help")),
    Case(
        "environment-value",
        "lab validate -n 2",
        ("SOTTO_RUN__ROUNDS", "'many'"),
        environment={"SOTTO_RUN__ROUNDS": "many"},
    ),
    Case("environment-section", "lab validate -n 2", ("SOTTO_RNU__SEED", "rnu"), environment={"SOTTO_RNU__SEED": "1"}),
    Case("environment-key", "lab validate -n 2", ("SOTTO_RUN__SED", "run.sed"), environment={"SOTTO_RUN__SED": "1"}),
    Case("unknown-command", "trian", ("'trian'", "sotto --help")),
    Case("unknown-option", "up --pers 3", ("--pers", "--peers", "sotto up --help")),
    Case("no-peers-wanted", "up --peers 0", ("--peers", "0")),
    Case(
        "other-number-of-peers",
        "lab validate -c peer.toml -n 3",
        ("--peers", "3", "valid: 1"),
        toml("[[peers]]\nname = 'a'"),
    ),
    Case("unknown-list", "lab list modles", ("modles", "models")),
    # -- algorithm, compressor, graph ---------------------------------------------------------------------------------
    Case("unknown-algorithm", "lab validate -n 8 --algorithm fedavg", ("algorithm.name", "'fedavg'", "quant-sgp")),
    Case("unknown-compressor", "lab validate -n 8 --compressor gzip", ("compressor", "gzip", "top_k")),
    Case("unknown-graph", "lab graph -n 8 --graph moebius", ("graph.kind", "'moebius'", "directed-ring")),
    Case("torus-of-a-prime", "lab graph -n 7 --graph torus", ("graph.kind", "torus", "7 is prime")),
    Case("hypercube-of-six", "lab graph -n 6 --graph hypercube", ("graph.kind", "power of two", "6")),
    Case("half-an-edge", "lab graph -n 5 --graph random-regular", ("graph.degree", "3", "both numbers are odd")),
    Case("degree-too-large", "lab graph -n 4 --graph random-regular -s graph.degree=4", ("graph.degree", "4")),
    Case(
        "probability-of-nothing",
        "lab graph -n 4 --graph erdos-renyi -s graph.probability=0",
        ("graph.probability", "0"),
    ),
    Case("metropolis-on-arrows", "lab graph -n 4 -s graph.weights=metropolis", ("graph.weights", "both directions")),
    Case("four-nodes-for-five", "lab graph -n 5 --graph four-node-a", ("graph.kind", "four")),
    Case("no-graph-file-named", "lab graph -n 2 --graph file", ("graph.file",)),
    Case("no-graph-file", FILE_GRAPH, ("graph.json",)),
    Case("graph-file-is-no-json", FILE_GRAPH, ("graph.json", "JSON"), graph(b"[[1, 0]")),
    Case("graph-file-says-nothing", FILE_GRAPH, ("graph.json", "matrices"), graph({"nodes": 2})),
    Case("matrix-of-other-size", FILE_GRAPH, ("graph.json", "(1, 1)", "2 peers"), graph([[[1.0]]])),
    Case("column-loses-mass", FILE_GRAPH, ("column 0", "0.9", "sum to 1"), graph([[[0.5, 0.5], [0.4, 0.5]]])),
    Case("negative-weight", FILE_GRAPH, ("negative", "-0.5"), graph([[[1.5, 0.5], [-0.5, 0.5]]])),
    Case("nothing-kept", FILE_GRAPH, ("peer 0", "diagonal"), graph([[[0, 0.5], [1, 0.5]]])),
    # -- tasks, data and models ---------------------------------------------------------------------------------------
    Case("unknown-task", "simulate --task mnistt", ("training.task", "'mnistt'", "digits")),
    Case("unknown-task-option", "simulate -s training.task_options.hiden=3", ("training.task_options.hiden", "hidden")),
    Case("no-such-module", "simulate --task nowhere:make", ("training.task", "'nowhere:make'")),
    Case("no-such-function", "simulate --task peer.errors:make", ("training.task", "make")),
    Case("no-warm-start", "simulate -s training.warm_start=w.safetensors", ("w.safetensors",)),
    Case(
        "damaged-warm-start",
        "simulate -s training.warm_start=w.safetensors",
        ("w.safetensors", "safetensors"),
        {"w.safetensors": b"nothing"},
    ),
    Case("trains-nothing", "simulate -s 'training.only=[\"tail.*\"]'", ("training.only", "tail.*")),
    Case("unknown-device", "simulate -s peer.device=tpu9", ("peer.device", "tpu9")),
    # -- files and folders --------------------------------------------------------------------------------------------
    Case("init-over-a-file", "init", ("peer.toml", "already exists", "--force"), toml("")),
    Case("init-below-a-file", "init -o peer.toml/x.toml", ("peer.toml/x.toml",), toml("")),
    Case("init-into-a-folder", "init -o here --force", ("here", "directory"), {"here": None}),
    Case("cluster-without-peers", "init cluster kits", ("--peers", "missing")),
    Case("cluster-with-odd-hosts", "init cluster kits -n 3 --host a --host b", ("--host", "2 times, but there are 3")),
    Case("cluster-with-bad-port", "init cluster kits -n 1 --host a:b", ("--host", "'a:b'")),
    Case("cluster-over-a-cluster", "init cluster kits -n 1", ("kits/ca.pem", "already exists"), {"kits/ca.pem": b""}),
    Case("name-with-slash", "simulate --name a/b", ("--name", "'a/b'")),
    Case("name-of-an-old-run", "simulate --name old", ("runs/old", "--name"), {"runs/old/summary.json": b""}),
    Case("runs-is-a-file", "simulate --runs-dir runs", ("runs", "created"), {"runs": b""}),
    Case("slow-nobody", "simulate --slow 9=2 -n 4", ("--slow", "'9=2'", "0 to 3")),
    Case("slow-by-nothing", "simulate --slow 1=0 -n 4", ("--slow", "'1=0'", "above 0")),
    Case("report-of-nothing", "report runs/old", ("runs/old", "no such folder"), code=5),
    Case("report-of-an-empty-folder", "report old", ("old", "not a run folder"), {"old": None}, code=5),
    Case("export-of-nothing", "export runs/old", ("runs/old", "no such folder"), code=5),
    Case("export-of-an-empty-folder", "export old", ("old", "peer.toml"), {"old": None}, code=5),
    Case(
        "export-before-the-first-checkpoint",
        "export .",
        ("state", "no checkpoint"),
        toml("[[peers]]\nname = 'a'"),
        code=5,
    ),
    Case("export-over-a-file", "export old", ("model.safetensors", "--force"), {"old": None, "model.safetensors": b""}),
    Case("status-of-nothing", "status --run old", ("old", "no such folder")),
    Case("status-of-an-empty-folder", "status --run old", ("old", "no peers"), {"old": None}),
    Case("stop-two-ways", "stop --run old --all", ("--run", "--all"), {"old": None}),
    # -- scenario files -----------------------------------------------------------------------------------------------
    Case("no-scenario", "lab replay s.json", ("s.json", "no such file")),
    Case("scenario-is-no-json", "lab replay s.json", ("s.json", "JSON"), {"s.json": b"{"}),
    Case("scenario-is-a-list", "lab replay s.json", ("s.json",), {"s.json": b"[]"}),
    Case("scenario-lacks-a-key", "lab replay s.json", ("s.json", "rounds"), {"s.json": scenario(rounds=None)}),
    Case(
        "scenario-of-unknown-algorithm",
        "lab replay s.json",
        ("s.json", "algorithm", "fedavg"),
        {"s.json": scenario(algorithm="fedavg")},
    ),
    Case(
        "scenario-loses-mass",
        "lab replay s.json",
        ("s.json", "mixing"),
        {"s.json": scenario(mixing=[[[0.5, 0.5], [0.4, 0.5]]])},
    ),
    Case("scenario-with-wrong-sizes", "lab replay s.json", ("s.json", "layers"), {"s.json": scenario(layers=[2])}),
    Case(
        "scenario-expects-otherwise",
        "lab replay s.json --json",
        ("s.json", "differs"),
        {"s.json": scenario(expect={"u": [[1, 1], [2, 2]]})},
        code=1,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_input_gets_one_sentence(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in case.files.items():
        path = tmp_path / name
        if content is None:
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = sotto(*shlex.split(case.arguments), **case.environment)
    assert result.exit_code == case.code, result.output
    # `sotto up` says that it is preparing before it can know whether task and data are right.
    sentence = re.sub(r"^\d+ ms  preparing\n", "", result.stderr.strip())
    # What `sotto run` says last stands in a log, and has its time.
    time = r"[\d-]+ [\d:,]+ " if case.arguments.startswith("run") else ""
    assert re.match(f"{time}sotto: error: ", sentence)
    assert "\n" not in sentence
    assert "Traceback" not in result.output
    for fragment in case.says:
        assert fragment in sentence
    if "--json" not in case.arguments:
        assert result.stdout == ""
    # What failed leaves nothing behind, except a scenario's or a run's parent folder.
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file()] == [p for p in before if p.is_file()]


def test_the_table_is_long_and_names_each_case_once() -> None:
    assert len(CASES) >= 25
    assert len({case.name for case in CASES}) == len(CASES)
