"""init, validate, graph and list."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from peer import native
from peer.config.options import load
from peer.daemon.process import warn_of
from peer.errors import PeerUnreachable
from peer.ops.local_cluster import free_ports
from peer.run.plan import validate_config
from tests.cli.runner import sotto


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_init_writes_a_file_with_the_settings_given() -> None:
    result = sotto("init", "-o", "job.toml", "--set", "run.rounds=7", "-s", "graph.kind=torus")
    assert (result.exit_code, result.stdout) == (0, "wrote job.toml\n")
    config = load(Path("job.toml"), environment={})
    assert (config.run.rounds, config.graph.kind) == (7, "torus")


@pytest.mark.parametrize(
    ("settings", "answer", "warns"),
    [
        (["training.precision=bfloat16"], 0, True),
        (["training.precision=bfloat16"], 1, False),
        (["training.precision=bfloat16"], -1, False),
        (["training.precision=bfloat16", "peer.device=cuda"], 0, False),
        (["training.precision=float32"], 0, False),
    ],
)
def test_validate_warns_of_bfloat16_where_the_processor_emulates_it(
    settings: list[str], answer: int, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is imported first in this test keeps the library that it finds.
    monkeypatch.setattr(native, "lib", SimpleNamespace(**vars(native.lib) | {"processor_bfloat16": lambda: answer}))
    arguments = [word for setting in settings for word in ("--set", setting)]
    result = sotto("lab", "validate", "-n", "4", "--json", *arguments)
    assert result.exit_code == 0
    found = [finding for finding in json.loads(result.stdout)["findings"] if finding["key"] == "training.precision"]
    assert [finding["level"] for finding in found] == (["warning"] if warns else [])
    assert all("two to seven times as long" in finding["sentence"] for finding in found)


def test_init_cluster_writes_peers_that_validate() -> None:
    result = sotto("init", "cluster", "kits", "--peers", "3", "--rounds", "9")
    assert result.exit_code == 0
    assert "sotto run --config kits/peer-0/peer.toml" in result.stdout
    for index in range(3):
        file = f"kits/peer-{index}/peer.toml"
        assert sotto("lab", "validate", "--config", file).exit_code == 0
        assert load(Path(file), environment={}).run.rounds == 9


def test_kits_of_a_script_lie_where_one_says_and_are_replaced_aloud() -> None:
    assert "replaced" not in sotto("init", "--peers", "3").stdout
    refused = sotto("init", "--peers", "3", "--set", "run.rounds=9")
    assert refused.exit_code == 2
    assert "name another folder (DIRECTORY of `sotto init cluster`, -o of `sotto init --peers`)" in refused.stderr
    made = sotto("init", "--peers", "3", "--set", "run.rounds=9", "--algorithm", "sgp", "-o", "my kits")
    assert made.exit_code == 0
    assert "wrote my kits: 3 peers" in made.stdout
    _, _, again = made.stdout.partition("if that is wrong: ")
    words = shlex.split(again.replace("HOST", "192.0.2.7"))[1:]
    replaced = sotto(*words)
    assert "replaced the keys in my kits: devices that were given the old ones need their new folder" in replaced.stdout
    config = load(Path("my kits/peer-0/peer.toml"), environment={})
    made_of = config.peers[0].advertise, config.run.rounds, config.algorithm.name, config.training.task
    assert made_of == ("192.0.2.7:7700", 9, "sgp", "loop")


def test_seats_that_are_free_are_no_fault_of_a_device_that_starts(caplog: pytest.LogCaptureFixture) -> None:
    sotto("init", "--peers", "3", "--host", "10.0.0.1")
    config, base = load(Path("kits/peer-0/peer.toml"), environment={}), Path("kits/peer-0")
    findings = {each.key for each in validate_config(config, base) if each.level == "warning"}
    assert "peers" in findings, "of a whole cluster it is one"
    warn_of(config, base)
    assert {message.partition(":")[0] for message in caplog.messages} == findings - {"peers"}


@pytest.mark.parametrize("command", ["doctor", "doctor kits", "doctor kits/peer-0", "doctor kits/peer-0/peer.toml"])
def test_doctor_finds_the_device_below_a_folder(command: str) -> None:
    sotto("init", "--peers", "2", "--host", f"127.0.0.1:{free_ports(1)[0]}")
    assert "this is peer-0" in sotto(*command.split()).stdout


@pytest.mark.parametrize("command", ["doctor", "doctor kits"])
def test_doctor_does_not_choose_between_devices(command: str) -> None:
    sotto("init", "cluster", "kits", "--peers", "2")
    result = sotto(*command.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert "name the file of a device: --config kits/peer-0/peer.toml or kits/peer-1/peer.toml" in result.stderr


@pytest.mark.parametrize("kits", [("--peers", "2"), ("cluster", "kits", "--peers", "2")])
@pytest.mark.parametrize("command", ["status", "stop", "remove peer-1"])
def test_a_command_that_a_log_names_finds_the_device_here(command: str, kits: tuple[str, ...]) -> None:
    options = () if "cluster" in kits else ("--host", "127.0.0.1")
    assert sotto("init", *kits, *options).exit_code == 0
    result = sotto(*command.split())
    if "cluster" in kits and "remove" not in command:
        assert result.exit_code == 2, "it addresses one device, and here are two"
        return
    assert result.exit_code == PeerUnreachable.exit_code
    assert "nobody listens at 127.0.0.1:7700" in result.output


def test_a_valid_configuration_is_called_valid() -> None:
    result = sotto("lab", "validate", "-n", "8")
    assert result.exit_code == 0
    assert "valid: quant-sgp for 8 peers, 1000 rounds" in result.stdout


def test_a_file_without_peers_is_said_to_be_no_devices() -> None:
    assert sotto("init").exit_code == 0
    result = sotto("lab", "validate")
    assert result.exit_code == 0
    assert (
        "warning: peers: lists no peers, so it is the file of a run (`sotto up --config`) and of no device"
        in result.stdout
    )
    found = json.loads(sotto("lab", "validate", "--json").stdout)["findings"]
    assert [each["level"] for each in found if each["key"] == "peers"] == ["warning"]
    assert "lists no peers" not in sotto("lab", "validate", "-n", "3").stdout, "no file was asked about"


def test_what_theory_excludes_is_an_error_with_a_reason() -> None:
    arguments = ("validate", "-n", "4", "--algorithm", "moniqua", "--graph", "ring", "--compressor", "top_k")
    result = sotto(*arguments)
    assert result.exit_code == 2
    assert "error: " in result.stdout
    assert "modulo" in result.stdout
    assert "valid:" not in result.stdout.splitlines()[-1]
    answer = json.loads(sotto(*arguments, "--json").stdout)
    assert answer["valid"] is False
    assert answer["num_peers"] == 4
    assert any(finding["level"] == "error" and finding["sentence"] for finding in answer["findings"])


def test_a_run_that_theory_excludes_does_not_start() -> None:
    result = sotto("up", "-n", "4", "--algorithm", "moniqua", "--graph", "ring", "--compressor", "top_k")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("sotto: error: ")
    assert not Path("runs").exists()


def test_the_file_in_the_folder_is_used_unless_a_number_of_peers_is_given() -> None:
    Path("peer.toml").write_text("[run]\nrounds = 31\n" + "".join(f"[[peers]]\nname = 'p{i}'\n" for i in range(5)))
    assert "for 5 peers, 31 rounds" in sotto("lab", "validate").stdout
    assert "for 5 peers, 9 rounds" in sotto("lab", "validate", "--rounds", "9").stdout
    assert "for 3 peers, 1000 rounds" in sotto("lab", "validate", "-n", "3").stdout
    Path("peer.toml").unlink()
    assert (result := sotto("lab", "validate")).exit_code == 2, "nothing was checked"
    assert "peer.toml" in result.stderr


def test_graph_shows_weights_and_figures() -> None:
    result = sotto("lab", "graph", "-n", "4", "--graph", "ring")
    assert result.exit_code == 0
    assert "spectral gap" in result.stdout
    assert "1/3" in result.stdout


def test_graph_as_json_gives_columns_that_sum_to_one() -> None:
    answer = json.loads(sotto("lab", "graph", "-n", "6", "--graph", "exponential-one-peer", "--json").stdout)
    assert answer["time_varying"] is True
    assert len(answer["graphs"]) == 3
    for edges in answer["graphs"]:
        for sender in range(6):
            assert sum(e["weight"] for e in edges if e["sender"] == sender) == pytest.approx(1)


def test_graph_draws_a_file_and_keeps_stdout_for_json() -> None:
    result = sotto("lab", "graph", "-n", "4", "--svg", "new/g.svg", "--json")
    assert json.loads(result.stdout)["num_peers"] == 4
    assert Path("new/g.svg").read_text().lstrip().startswith("<")


@pytest.mark.parametrize("what", ["models", "tasks", "algorithms", "compressors", "graphs"])
def test_lists_are_complete_sentences_and_json(what: str) -> None:
    rows = json.loads(sotto("lab", "list", what, "--json").stdout)
    text = sotto("lab", "list", what).stdout
    assert len(rows) >= 2
    assert max(map(len, text.splitlines())) <= 80, "as wide as a terminal"
    for row in rows:
        assert row["name"] in text
        assert "".join(row["summary"].split()) in "".join(text.split())


@pytest.mark.parametrize(
    ("settings", "key", "says"),
    [
        (("training.task=pets:make_task",), "training.task", "there is no module pets here"),
        (("training.task=peer.pets:make_task",), "training.task", "there is no module peer.pets here"),
        (("training.task=cifar10",), "data.directory", "the folder with the data of task cifar10"),
        (("training.task=cifar10", "data.directory=nowhere"), "data.directory", "/nowhere on this device"),
        (("training.task=text", "data.directory=nothing"), "data.directory", "there is nothing in nothing"),
        (("data.directory=nowhere",), "data.directory", "/nowhere on this device; "),
        (("data.directory=nothign/cats",), "data.directory", "on this device; did you mean nothing?"),
        (("data.directory=nothing/../cast.py",), "data.directory", "on this device; did you mean nothing/../cats.py?"),
        (("training.task=cast:make_task",), "training.task", "there is no module cast here; did you mean cats?"),
    ],
)
def test_a_task_or_data_that_are_not_here_are_not_valid(
    settings: tuple[str, ...], key: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "cats.py").write_text("raise SystemExit('it is not executed')")
    words = [word for each in settings for word in ("--set", each)]
    result = sotto("lab", "validate", "-n", "4", "--json", *words)
    found = json.loads(result.stdout)
    assert (result.exit_code, found["valid"]) == (2, False)
    assert any(each["key"] == key and says in each["sentence"] for each in found["findings"])
    assert sotto("lab", "validate", "-n", "4", "--set", "training.task=cats:make_task").exit_code == 0
    assert sotto("init", *words).exit_code == 0
    text = (tmp_path / "peer.toml").read_text()
    (tmp_path / "peer.toml").write_text(text + '[[peers]]\nname = "a"\nadvertise = "127.0.0.1:7700"\n')
    assert says in sotto("doctor").output


def test_validate_says_what_was_found_in_the_data(tmp_path: Path) -> None:
    for name in ("train/cat/0", "train/dog/0", "val/cat/0"):
        file = tmp_path / f"{name}.png"
        file.parent.mkdir(parents=True)
        Image.new("RGB", (40, 40), "red").save(file)
    (tmp_path / "train/cat/notes.txt").touch()
    command = ("validate", "--peers", "1", "--read-data", "--set", "training.task=image-folder")
    options = ("--set", f"data.directory={tmp_path}", "--set", "data.partition=iid")
    result = sotto(*command, *options, "--json")
    assert json.loads(result.stdout)["data"] == {
        "training": ["train: cat 1, dog 1", "train: left out: .txt"],
        "test": ["val: cat 1, dog 0"],
    }
    content = (tmp_path / "train/cat/0.png").read_bytes()
    # Only decoding shows it: beginning and end are those of an image.
    (tmp_path / "train/cat/1.png").write_bytes(content[:60] + bytes(8) + content[68:])
    result = sotto(*command, *options)
    assert result.exit_code == 2
    assert "1.png cannot be read as an image" in result.stderr
