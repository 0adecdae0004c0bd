"""`sotto invite` and `sotto join`: what they print, and a run that an invited device joins."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import click
import pytest
from click.testing import Result

from peer.config.options import Config, load
from peer.errors import ConfigError
from peer.net.security.requests import request_certificate
from peer.ops import joining
from peer.ops.invitations import Invitations
from peer.ops.local_cluster import free_ports
from tests.cli.runner import sotto
from tests.library.scripts import write_kits
from tests.library.test_first_class import PATIENCE_S, SCRIPT
from tests.ops.test_local_cluster import wait_until

pytestmark = pytest.mark.timeout(900)


class Inviting:
    """`sotto invite` in a thread of the test; what it prints as JSON comes when it has ended."""

    def __init__(self, *arguments: str, typed: str = "") -> None:
        (port,) = free_ports(1)
        words = ("invite", "kits", "--port", str(port), *arguments)
        self._thread = threading.Thread(target=self._run, args=(words, typed))
        self.result: Result | None = None
        self._thread.start()

    def _run(self, words: tuple[str, ...], typed: str) -> None:
        self.result = sotto(*words, typed=typed)

    def invitations(self) -> list[str]:
        """Return the texts of the invitations that were made, of which each is a file."""
        found = Path("kits/invitations")
        wait_until(lambda: any(found.glob("*.json")) or self.result is not None)
        return [json.loads(file.read_text())["text"] for file in found.glob("*.json")]

    def ended(self) -> Result:
        self._thread.join(PATIENCE_S)
        assert self.result is not None
        return self.result


@pytest.fixture(autouse=True)
def _a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sotto("init", "cluster", "kits", "--peers", "2").exit_code == 0


def join_process(folder: Path, *words: str, typed: str) -> subprocess.Popen[str]:
    """Start `sotto join` with an invitation as its standard input, and its output in `log.txt`."""
    folder.mkdir(exist_ok=True)
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "peer", "join", *words],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(typed)
    process.stdin.close()
    return process


@pytest.mark.parametrize(("typed", "admitted"), [("y\n", True), ("n\n", False)])
def test_the_operator_sees_the_device_and_is_asked(tmp_path: Path, typed: str, admitted: bool) -> None:
    inviting = Inviting(typed=typed)
    (text,) = inviting.invitations()
    words = ("--name", "garage", "--host", "127.0.0.1:7801", "--no-run", "--set", "data.directory=images")
    device = join_process(tmp_path / "device", *words, typed=text)
    code = device.wait(PATIENCE_S)
    said = (tmp_path / "device" / "log.txt").read_text()
    result = inviting.ended()
    assert result.exit_code == 0
    assert result.stdout == f"{text}\n"
    (thumbprint,) = re.findall(r"thumbprint of its key: ([0-9A-F:]{95})", said)
    assert "run there: sotto join\n" in result.stderr
    assert "garage at 127.0.0.1 asks:" in result.stderr
    assert f"key        {thumbprint}" in result.stderr
    assert "address    127.0.0.1:7801" in result.stderr
    assert text not in said
    if admitted:
        assert code == 0, said
        assert "garage has its certificate" in result.stderr
        written = load(tmp_path / "device/garage/peer.toml", environment={})
        assert (written.peer.index, written.data.directory) == (2, str(tmp_path / "device/images"))
        assert "compressor.fraction = 0.1" in said
        assert "run --config garage/peer.toml" in said
    else:
        assert code == 3
        assert "refused    garage; its invitation is spent" in result.stderr
        assert "the operator did not admit this device" in said
        assert not Path("kits/peer-2").exists()


def test_nobody_is_admitted_where_nobody_confirms(tmp_path: Path) -> None:
    inviting = Inviting()
    device = join_process(tmp_path / "device", "--name", "garage", "--no-run", typed=inviting.invitations()[0])
    result = inviting.ended()
    assert result.exit_code == 3
    assert "a script gives --key, or --yes" in result.stderr
    wait_until(lambda: "waiting:" in (tmp_path / "device" / "log.txt").read_text())
    assert not Path("kits/peer-2").exists()
    # Whoever goes on with it admits the device that has waited.
    key = re.findall(r"key        (\S+)", result.stderr)[0].lower()
    port = re.findall(r"answering at 127.0.0.1:(\d+)", result.stderr)[0]
    again = sotto("invite", "kits", "--count", "0", "--port", port, "--key", key, "--json")
    assert again.exit_code == 0
    assert [json.loads(line)["event"] for line in again.stdout.splitlines()] == ["asks", "admitted", "kept"]
    assert device.wait(PATIENCE_S) == 0


def test_a_script_reads_of_a_leak_with_both_keys(tmp_path: Path) -> None:
    inviting = Inviting("--count", "2", "--yes", "--json")
    wait_until(lambda: len(inviting.invitations()) == 2)
    first, second = inviting.invitations()
    for name, text, code in (("garage", first, 0), ("thief", first, 3), ("attic", second, 0)):
        device = join_process(tmp_path / name, "--name", name, "--host", "-", "--no-run", typed=text)
        assert device.wait(PATIENCE_S) == code, (tmp_path / name / "log.txt").read_text()
    events = [json.loads(line) for line in inviting.ended().stdout.splitlines()]
    assert sorted(each["invitation"] for each in events[:2]) == sorted((first, second))
    rest = ["asks", "admitted", "kept", "leak", "asks", "admitted", "kept"]
    assert [each["event"] for each in events] == ["invitation"] * 2 + rest
    leak = events[5]
    assert (leak["name"], leak["first_key"]) == ("thief", events[2]["key"])
    assert leak["key"] not in (leak["first_key"], events[-1]["key"])
    assert leak["key"] in (tmp_path / "thief" / "log.txt").read_text()
    assert not (tmp_path / "thief" / "thief" / "peer.toml").exists()


@pytest.mark.parametrize(
    ("words", "typed", "code", "sentence"),
    [
        (("join",), "", 3, "this is no invitation; paste the line"),
        (("join",), "sotto-invitation-1-abcd", 3, "incomplete or was changed on its way"),
        (("join", "missing.py"), "", 2, "missing.py: there is no such script"),
        (
            ("join", "train.py", "sotto-invitation-1-abcd"),
            "",
            2,
            "leave it out here, and paste it when it is asked for",
        ),
        (("join", "sotto-invitation-1-abcd"), "", 2, "leave it out here, and paste it when it is asked for"),
        (("invite", "kits", "--hours", "169"), "", 2, "--hours: is 168 at most"),
        (("invite", "kits", "--host", "0.0.0.0"), "", 2, "--host: stands for all addresses"),
        (("invite", "kits", *("--host", "10.0.0.1") * 4), "", 2, "--host: can be given 3 times at most"),
        (("init", "cluster", "new", "--peers", "2", "--seats", "2"), "", 2, "--seats: needs certificates"),
        (("init", "cluster", "new", "--seats", "1", "--host", "-", "--host", "10.0.0.1"), "", 2, "--seats: needs"),
        (
            ("init", "cluster", "new", "-n", "2", "--seats", "1", "-s", "security.mode=insecure"),
            "",
            2,
            "--seats: needs",
        ),
        (("init", "cluster", "new", *("--host", "10.0.0.1"), *("--host", "-") * 2), "", 2, "--host: peer-1 and peer-2"),
        (("invite", "elsewhere"), "", 2, "elsewhere: no such folder; `sotto init cluster elsewhere"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(words: tuple[str, ...], typed: str, code: int, sentence: str) -> None:
    result = sotto(*words, typed=typed)
    assert (result.exit_code, sentence in result.stderr) == (code, True), result.stderr


@pytest.mark.parametrize("typed", ["n\n", "y\n"])
def test_a_device_shows_what_the_run_sets_and_asks_before_it_trains(
    typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("--task", "own.tasks:make", "--set", "training.learning_rate=0.125")
    assert sotto("init", "cluster", "run", "--peers", "2", *settings).exit_code == 0
    trained: list[Path] = []

    @click.command()
    @click.pass_context
    def run(_context: click.Context, /, **arguments: object) -> None:
        trained.append(cast(Path, arguments["config_file"]))

    file = Path("run/peer-0/peer.toml")
    invitation = SimpleNamespace(run="digits")
    monkeypatch.setattr("peer.net.security.invitations.read_invitation", lambda text: invitation)
    monkeypatch.setattr("peer.ops.joining.join", lambda *_, **__: file)
    monkeypatch.setattr("peer.cli.run.run", run)
    monkeypatch.setattr("peer.cli.invite.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    joined = sotto("join", typed="an invitation\n" + typed)
    assert joined.exit_code == 0, joined.output
    shown, asked, _ = joined.stderr.partition("Train with these settings?")
    assert asked
    for line in ('training.task = "own.tasks:make"', "training.learning_rate = 0.125", "peers: peer-0, peer-1"):
        assert line in shown
    assert trained == ([file] if typed == "y\n" else [])


def test_peers_that_join_on_one_machine_at_the_same_time_take_ports_of_their_own() -> None:
    with contextlib.ExitStack() as held:
        ports = [int(joining._free_address("127.0.0.1", held).rpartition(":")[2]) for _ in range(3)]
        assert len({*ports}) == 3


@pytest.mark.usefixtures("warm_python")
def test_an_invited_device_joins_a_script_in_progress(tmp_path: Path) -> None:
    """Two devices train a script of an own, in processes; a third has that script and a line of text."""
    (tmp_path / "own.py").write_text(SCRIPT)
    files = write_kits(tmp_path / "run" / "kits", 2)
    port, own = free_ports(2)
    train = ("--", "{peer}", "0.05", "200000")
    logs = [open(file.parent / "log.txt", "w") for file in files]  # noqa: SIM115
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "peer", "run", "../../../own.py", *train], cwd=file.parent, stdout=log, stderr=log
        )
        for file, log in zip(files, logs, strict=True)
    ]
    invited = [sys.executable, "-m", "peer", "invite", "run/kits", "--yes", "--port", str(port)]
    inviting = subprocess.Popen(invited, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert inviting.stdout is not None
        text = inviting.stdout.readline()
        begun = time.monotonic()
        words = ("../own.py", "--name", "garage", "--host", f"127.0.0.1:{own}", *train)
        processes.append(join_process(tmp_path / "device", *words, typed=text))
        log = tmp_path / "device" / "log.txt"
        wait_until(lambda: "link to peer-0 is up" in log.read_text(), PATIENCE_S)
        print(f"linked {time.monotonic() - begun:.1f} s after the command")
        wait_until(lambda: re.search(r"garage joins from round \d+ on", log.read_text()) is not None, PATIENCE_S)
        wait_until(lambda: "has done round" in log.read_text(), PATIENCE_S)
        _, err = inviting.communicate(timeout=PATIENCE_S)
        assert inviting.returncode == 0, err
        assert "garage has its certificate" in err
        assert "admitted to loop as garage; it joins some rounds after it connects" in log.read_text()
        assert "garage joins from round" in (files[0].parent / "log.txt").read_text()
    finally:
        for process in (*processes, inviting):
            process.send_signal(signal.SIGTERM)
        for process in (*processes, inviting):
            process.wait(PATIENCE_S)
        for each in logs:
            each.close()
    assert [process.returncode for process in processes] == [130, 130, 130]


def test_a_cluster_whose_devices_have_data_of_their_own_says_where_it_goes() -> None:
    own = ("--set", "data.partition=own", "--set", "data.directory=images", "--task", "image-folder")
    made = sotto("init", "cluster", "own", "--peers", "2", "--seats", "1", "--host", "127.0.0.1:7801", *own)
    assert "put the data of each device into its folder: own/peer-0/images\n" in made.stdout


def test_a_question_names_the_seat_that_is_left_when_it_is_asked() -> None:
    assert sotto("init", "cluster", "new", "--peers", "3", "--seats", "2", "--host", "10.0.0.1").exit_code == 0
    with Invitations(Path("new")) as desk:
        for name in ("garage", "attic"):
            request, _ = request_certificate(name, address=f"{name}:7700")
            desk.answer(desk.issue(["10.0.0.1:7710"], 3600).id, request, "here")
        first, second = desk.events.get(), desk.events.get()
        assert first.proposal is not None
        assert desk.decide(desk.asked_now(first), admit=True) is not None
        left = desk.asked_now(second)
        assert left.proposal is not None
        assert (first.proposal.entry.name, left.proposal.entry.name) == ("peer-1", "peer-2")
        signed = desk.decide(left, admit=True)
        assert signed is not None
        assert signed.identity.name == "peer-2"


def test_a_device_hears_that_the_last_seat_was_taken_while_it_waited() -> None:
    fixed = ("-s", "algorithm.name=ad-psgd", "-s", "graph.kind=ring")
    assert sotto("init", "cluster", "new", "--peers", "3", "--seats", "1", "--host", "10.0.0.1", *fixed).exit_code == 0
    with Invitations(Path("new")) as desk:
        asked = []
        for name in ("garage", "attic"):
            request, _ = request_certificate(name, address=f"{name}:7700")
            asked.append((desk.issue(["10.0.0.1:7710"], 3600).id, request, "here"))
            assert desk.answer(*asked[-1])["state"] == "waiting"
        first, second = desk.events.get(), desk.events.get()
        assert desk.decide(desk.asked_now(first), admit=True) is not None
        with pytest.raises(ConfigError):
            desk.asked_now(second)
        assert desk.answer(*asked[1])["state"] == "refused"


@pytest.mark.usefixtures("warm_python")
def test_a_run_begins_when_its_seats_are_filled(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    ports = free_ports(4)
    made = sotto("init", "--peers", "3", "--host", f"127.0.0.1:{ports[0]}", "--force")
    assert made.exit_code == 0
    assert "fill the seats with:" in made.stdout
    assert f"the others reach this machine at 127.0.0.1:{ports[0]}" in made.stdout
    invited = [sys.executable, "-m", "peer", "invite", "--yes", "--count", "2", "--port", str(ports[3])]
    inviting = subprocess.Popen(invited, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert inviting.stdout is not None
    train = ("../own.py", "--", "{peer}", "0", "12")
    devices = []
    for name, port in (("garage", ports[1]), ("attic", ports[2])):
        words = ("--name", name, "--host", f"127.0.0.1:{port}", *train)
        devices.append(join_process(tmp_path / name, *words, typed=inviting.stdout.readline()))
    _, said = inviting.communicate(timeout=PATIENCE_S)
    assert inviting.returncode == 0, said
    assert {*re.findall(r"signed +(garage|attic) as (peer-\d),", said)} in (
        {("garage", "peer-1"), ("attic", "peer-2")},
        {("garage", "peer-2"), ("attic", "peer-1")},
    )
    first = [sys.executable, "-m", "peer", "run", "own.py", *train[1:]]
    with open(tmp_path / "log.txt", "w") as log:
        devices.append(subprocess.Popen(first, cwd=tmp_path, stdout=log, stderr=log))
    for device, name in zip(devices, ("garage", "attic", "."), strict=True):
        said = (tmp_path / name / "log.txt").read_text
        assert device.wait(PATIENCE_S) == 0, said()
        assert re.search(r"The one model of all devices: \S+/average\.safetensors; that .* is peer-\d's own\.", said())
    assert "; round 0 begins when all are there" in (tmp_path / "attic" / "log.txt").read_text()
    # Without a folder it is that of the device here.
    folders = ([], [tmp_path / "garage/garage"], [tmp_path / "attic/attic"], ["kits"])
    for number, each in enumerate(folders):
        assert sotto("export", *map(str, each), "-o", f"{number}.safetensors").exit_code == 0
    assert len({Path(f"{number}.safetensors").read_bytes() for number in range(4)}) == 1, "every device's is the same"
    found = sorted(
        file.name for name in ("garage", "attic", ".") for file in (tmp_path / name).glob("peer-*.safetensors")
    )
    assert found == ["peer-0.safetensors", "peer-1.safetensors", "peer-2.safetensors"]


def test_inviting_ends_when_the_last_seat_is_filled(tmp_path: Path) -> None:
    assert sotto("init", "--peers", "2", "--host", "127.0.0.1", "--force").exit_code == 0
    (port,) = free_ports(1)
    with Invitations(Path("kits")) as desk:
        text, _ = [desk.issue([f"127.0.0.1:{port}"], 3600).text() for _ in range(2)]
    inviting = Inviting("--count", "0", "--yes", "--port", str(port))
    device = join_process(tmp_path / "device", "--name", "garage", "--no-run", typed=text)
    assert device.wait(PATIENCE_S) == 0
    result = inviting.ended()
    assert result.exit_code == 0
    assert result.stderr.endswith("garage has its certificate, and joins once its peer runs\nall seats are filled\n")


def test_a_device_says_again_and_again_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        pass

    with Invitations(Path("kits")) as desk:
        invitation = desk.issue([f"127.0.0.1:{free_ports(1)[0]}"], 3600)
    again = threading.Event()
    monkeypatch.setattr(joining, "telling", partial(joining.telling, every_s=0.01))

    def say(sentence: str) -> None:
        if sentence.startswith("waiting: nobody answers at 127.0.0.1") and sentence.endswith(" so far"):
            again.set()

    def sleep(seconds: float) -> None:
        assert again.wait(PATIENCE_S)
        raise Enough

    with pytest.raises(Enough):
        joining.join(tmp_path / "new", invitation, name="garage", host=None, own=Config(), say=say, sleep=sleep)
