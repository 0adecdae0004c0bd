"""A script as a whole run: `sotto up`, `run` and `simulate` with it, and what it does without them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import sottovoce
import torch
from safetensors.torch import load_file
from torch.utils.data import IterableDataset, TensorDataset

from peer.config.options import load
from peer.ops import standing
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from tests.cli.runner import sotto
from tests.library.scripts import write_kits
from tests.ops.test_local_cluster import wait_until

pytestmark = [pytest.mark.usefixtures("warm_python"), pytest.mark.timeout(900)]

PATIENCE_S = 400.0
"""Time for what takes seconds on a machine at rest."""

SCRIPT = """
import sys, time
import sottovoce, torch

name, pause, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
numbers = torch.Generator().manual_seed(7)
inputs = torch.randn(90, 4, generator=numbers)
mine = sottovoce.local(torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long()))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with sottovoce.join(model, every=3, steps=steps, keep=[optimizer]) as peer:
    print(f"{peer.name} begins at {peer.steps} with {len(mine)} samples", flush=True)
    while not peer.done:
        x, y = mine[peer.steps % len(mine)]
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if peer.step(loss):
            print(f"has done round {peer.round}", flush=True)
        if name == "peer-1" and steps == 7:
            raise ValueError("what I did not expect")
        time.sleep(pause)
    peer.save(f"{name}.safetensors")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(SCRIPT)
    return file


def begin(folder: Path, *words: str, environment: Mapping[str, str] = os.environ) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def models(folder: Path, peers: int = 3) -> list[dict[str, bytes]]:
    """Return the tensors that the scripts of peers have saved, and remove their files, whose headers have no order."""
    files = [folder / f"peer-{peer}.safetensors" for peer in range(peers)]
    found = [{name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()} for file in files]
    for file in files:
        file.unlink()
    return found


def test_a_killed_run_goes_on_and_comes_to_what_the_simulation_does(script: Path) -> None:
    folder = script.parent
    process = begin(folder, "-m", "peer", "up", "own.py", "--peers", "3", "--no-live", "--", "{peer}", "0.02", "238")
    peers = folder / "runs" / "own" / "peers"
    logs = [peers / f"peer-{peer}" / "log.txt" for peer in range(3)]
    wait_until(lambda: all(log.exists() and "has done round 6" in log.read_text() for log in logs), PATIENCE_S)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    log = (peers / "peer-0" / "log.txt").read_text()
    assert "peer-0 begins at 0 with 30 samples" in log
    # From another folder: the run knows its own.
    again = begin(peers, "-m", "peer", "up", "--resume", "own", "--runs-dir", str(folder / "runs"), "--json")
    out, err = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, err
    summary = json.loads(out)
    assert (summary["ended"], summary["rounds"], summary["completed_rounds"]) == ("completed", 80, 80)
    assert (summary["parameters"], summary["num_peers"]) == (58, 3)
    assert load(folder / "runs" / "own" / "config.toml", environment={}).run.rounds == 80
    assert load_file(folder / "runs" / "own" / "model.safetensors").keys() == {
        f"{layer}.{what}" for layer in (0, 2) for what in ("weight", "bias")
    }
    formed = [(peers / f"peer-{peer}" / "state" / "average.safetensors").read_bytes() for peer in range(3)]
    assert len({*formed}) == 1
    averages = load_file(peers / "peer-0" / "state" / "average.safetensors")
    of_run = load_file(folder / "runs" / "own" / "model.safetensors")
    assert all(torch.equal(averages[name], of_run[name]) for name in of_run)
    begun = [line for line in (peers / "peer-0" / "log.txt").read_text().splitlines() if " begins at " in line]
    assert len(begun) == 2
    assert begun[1] != begun[0]
    real = models(folder)
    simulated = begin(folder, "-m", "peer", "simulate", "own.py", "--peers", "3", "--", "{peer}", "0", "238")
    _, err = simulated.communicate(timeout=PATIENCE_S)
    assert simulated.returncode == 0, err
    assert real == models(folder)
    assert "peer-2 begins at 0" in (folder / "runs" / "own-simulated" / "logs" / "peer-2.txt").read_text()
    done = sotto("up", "--resume", "own", "--runs-dir", str(folder / "runs"))
    assert "already complete" in done.stderr
    hub = folder / "hub"
    refused = sotto("export", str(folder / "runs" / "own"), "--format", "huggingface", "-o", str(hub))
    assert refused.exit_code == 2, refused.output
    assert "cannot describe the model of a training script; let the script write its config.json" in refused.stderr
    assert not hub.exists(), "refused before anything is written"


@pytest.mark.parametrize(("leaves_with", "code"), [("no texts in here", 1), (7, 7)])
def test_a_script_that_exits_is_shown_as_python_shows_it(leaves_with: str | int, code: int, tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(f"raise SystemExit({leaves_with!r})")
    file = tmp_path / "peer.toml"
    file.write_text('[security]\nmode = "insecure"\n[[peers]]\nname = "peer-0"\n')
    for words in (("simulate", "exits.py", "-n", "2", "--no-save"), ("run", "exits.py", "--config", str(file))):
        done = sotto_in(tmp_path, *words)
        assert done.returncode == code, done.stderr
        said = [line for line in done.stderr.splitlines() if "preparing" not in line and " so far" not in line]
        assert said == ([leaves_with] if code == 1 else [])
    done = sotto_in(tmp_path, "up", "exits.py", "-n", "2", "--no-live")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "SystemExit" not in done.stderr
    if code == 1:
        assert f" ended with code 1: {leaves_with} (see " in done.stderr.splitlines()[-1]


def test_a_run_trains_as_soon_as_all_scripts_have_joined(script: Path) -> None:
    """Also where the first round takes long."""
    waits = "while not __import__('os').path.exists('go'):\n            time.sleep(0.05)\n        x, y = mine"
    script.write_text(SCRIPT.replace("x, y = mine", waits))
    run = begin(script.parent, "-m", "peer", "up", "own.py", "--peers", "2", "--no-live", "--", "{peer}", "0", "6")
    assert run.stderr is not None
    first = next(line for line in run.stderr if "  round 0/2" in line and "/2  round" not in line)
    (script.parent / "go").touch()
    _, err = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, err
    assert "  training  round 0/2" in first


def test_a_script_that_fails_is_shown_and_ends_the_run(script: Path) -> None:
    folder = script.parent
    process = begin(folder, "-m", "peer", "up", "own.py", "-n", "2", "--no-live", "--", "{peer}", "0", "7")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, err
    *lines, last = err.splitlines()
    line = SCRIPT.splitlines().index('            raise ValueError("what I did not expect")') + 1
    sentence = f"in your script: ValueError: what I did not expect ({script}:{line}, in <module>)"
    assert last.startswith(f"sotto: error: peer-1 ended with code 2: {sentence}")
    assert "the last lines of peer-1:" in lines
    assert f'        File "{script}", line {line}, in <module>' in lines
    assert not any(str(Path(sottovoce.__file__).parent) in each for each in lines)
    assert json.loads((folder / "runs" / "own" / "summary.json").read_text())["ended"].startswith("failed: peer-1")
    simulated = sotto_in(folder, "simulate", "own.py", "-n", "2", "--no-save", "--", "{peer}", "0", "7")
    assert simulated.returncode == 2
    assert simulated.stderr.splitlines()[-1] == f"sotto: error: {sentence}"


def sotto_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    process = begin(folder, "-m", "peer", *words)
    out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test_peers_that_disagree_on_the_steps_refuse_each_other(script: Path) -> None:
    script.write_text(SCRIPT.replace("steps=steps", "steps=steps + int(name[-1]) * 30"))
    found = sotto_in(script.parent, "up", "own.py", "-n", "2", "--no-live", "--", "{peer}", "0", "30")
    assert found.returncode == 6, found.stderr
    assert "[run]" in found.stderr.splitlines()[-1]
    found = sotto_in(script.parent, "simulate", "own.py", "-n", "2", "--", "{peer}", "0", "30")
    assert found.returncode == 2
    assert "joined with another every, steps," in found.stderr.splitlines()[-1]


def test_a_script_that_never_joins_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("print('trains something else')")
    for command in ("up", "simulate"):
        found = sotto_in(tmp_path, command, "other.py", "-n", "2", "--no-live")
        assert found.returncode == 2
        assert "join" in found.stderr.splitlines()[-1]


def test_devices_run_a_module_with_all_their_samples(script: Path) -> None:
    folder = script.parent
    (folder / "mine").mkdir()
    (folder / "mine" / "__main__.py").write_text(SCRIPT)
    files = write_kits(folder / "kits", 2)
    arguments = ("--", "{peer}", "0", "12")
    with_file = [begin(file.parent, "-m", "peer", "run", str(script), *arguments) for file in files[:1]]
    words = ("-m", "mine", "--config", str(files[1]), "--set", "peer.min_step_s=0", *arguments)
    for process in (*with_file, begin(folder, "-m", "peer", "run", *words)):
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        assert "with 90 samples" in out
    assert (files[0].parent / "peer-0.safetensors").exists()
    assert (folder / "peer-1.safetensors").exists()
    for file in files:
        # The file says 1,000 rounds, the script 12 / 3.
        ended = standing.from_folder(standing.with_length(load(file, environment={}), file.parent), file.parent)
        assert ended is not None
        assert (ended.state, ended.round) == ("finished", 4)


def test_devices_need_no_seed_in_their_script_and_come_to_what_the_simulation_does(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processes that are forked from one draw the same in any case.
    monkeypatch.setattr(sys, "executable", str(Path(sys.prefix) / "bin" / "python"))
    folder = script.parent
    # A simulation would deal the samples out.
    text = SCRIPT.replace("torch.nn.Tanh()", "torch.nn.Dropout(0.2)").replace("sottovoce.local(", "(")
    head = "    while not peer.done:"
    script.write_text(text.replace(head, f'    print("draws", torch.randint(1 << 60, (1,)).item())\n{head}'))
    files = write_kits(folder / "kits", 2, "run.seed=3")
    arguments = ("--", "{peer}", "0", "12")
    processes = [begin(folder, "-m", "peer", "run", "own.py", "--config", str(file), *arguments) for file in files]
    drawn = []
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        drawn += [line for line in out.splitlines() if line.startswith("draws ")]
    # Behind the model, each device draws numbers of its own.
    assert len({*drawn}) == 2
    real = models(folder, 2)
    simulated = sotto_in(folder, "simulate", "own.py", "--config", str(files[0]), *arguments)
    assert simulated.returncode == 0, simulated.stderr
    assert real == models(folder, 2)


def plain(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = begin(folder, *words, environment={**os.environ, **environment})
    out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test_plain_python_trains_alone_and_says_so_first_and_last(script: Path) -> None:
    found = plain(script.parent, "own.py", "alone", "0", "31")
    assert found.returncode == 0, found.stderr
    first, *_, last = found.stderr.splitlines()
    assert " this script trains alone: " in first
    assert last.endswith(" this script has trained alone: no other device had a part in its model")
    assert "peer-0 begins at 0 with 90 samples" in found.stdout
    assert (script.parent / "alone.safetensors").exists()
    script.write_text(SCRIPT.replace("steps=steps, ", ""))
    found = plain(script.parent, "own.py", "alone", "0", "31")
    assert "steps=N" in found.stderr.splitlines()[-1]


def test_plain_python_never_trains_alone_where_a_device_is_meant(script: Path) -> None:
    ranks = plain(script.parent, "own.py", "a", "0", "9", RANK="0", WORLD_SIZE="2")
    assert "sotto up SCRIPT --peers 2" in ranks.stderr.splitlines()[-1]
    files = write_kits(script.parent, 2)
    among = plain(script.parent, "own.py", "a", "0", "9")
    assert f"own.py --config {files[0]}`" in among.stderr.splitlines()[-1]
    beside = files[0].parent / "own.py"
    beside.write_text(SCRIPT)
    elsewhere = script.parent / "elsewhere"
    elsewhere.mkdir()
    near = plain(elsewhere, str(beside), "a", "0", "9")
    assert f"start it in {beside.parent}" in near.stderr.splitlines()[-1]
    assert {ranks.returncode, among.returncode, near.returncode} == {1}
    assert not list(script.parent.rglob("*.safetensors"))


def test_a_device_in_its_own_folder_is_found_without_a_word(tmp_path: Path) -> None:
    (file,) = write_kits(tmp_path, 1, "algorithm.name=local", "graph.kind=complete")
    (file.parent / "own.py").write_text(SCRIPT)
    found = plain(file.parent, "own.py", "a", "0", "9")
    assert found.returncode == 0, found.stderr
    assert "peer-0 begins at 0 with 90 samples" in found.stdout
    assert (file.parent / "state" / "model.safetensors").exists()


@pytest.mark.parametrize("labelled", [True, False])
def test_shares_are_dealt_where_all_read_the_same_data(
    tmp_path: Path, labelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    labels = torch.arange(60) % 3
    samples = TensorDataset(torch.arange(60.0), labels if labelled else labels.float())
    shares: dict[str, list[int]] = {}

    def train(where: sottovoce.Place) -> None:
        mine = sottovoce.local(samples)
        shares[where.name] = [int(mine[index][0]) for index in range(len(mine))]
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
        with sottovoce.join(model, every=1, steps=2) as peer:
            while not peer.done:
                peer.step()

    config = load(environment={}, overrides=["training.task=loop", "data.skew=1"])
    file = write_cluster(tmp_path, config, [Host("127.0.0.1", port) for port in free_ports(3)])[0]
    sottovoce.simulate(train, file)
    assert sorted(sample for share in shares.values() for sample in share) == list(range(60))
    sorted_by_label = all(len({sample % 3 for sample in share}) == 1 for share in shares.values())
    assert sorted_by_label == labelled
    assert ("dealt at random" in caplog.text) != labelled
    assert sottovoce.local(samples, sottovoce.place(file)) is samples


def test_samples_without_a_number_cannot_be_dealt(tmp_path: Path) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    def train(where: sottovoce.Place) -> None:
        sottovoce.local(Stream())

    config = load(environment={}, overrides=["training.task=loop"])
    file = write_cluster(tmp_path, config, [Host("127.0.0.1", port) for port in free_ports(2)])[0]
    with pytest.raises(sottovoce.UsageError, match="a Stream has no length"):
        sottovoce.simulate(train, file)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["up", "nothing.py"], "nothing.py: there is no such script"),
        (["simulate", "-m", "no.such.module", "-n", "2"], "-m: there is no such module"),
        (["up", "onw.py"], "onw.py: there is no such script; did you mean own.py?"),
        (["run", "onw.py"], "onw.py: there is no such script; did you mean own.py?"),
        (["simulate", "kist/own.py"], "kist/own.py: there is no such script; did you mean kits?"),
        (["up", "train"], "train: there is no such script; "),
        (["up", "-m", "onw"], "-m: there is no such module as onw; did you mean own?"),
        (["simulate", "-m", "kits.ottter"], "-m: there is no such module as kits.ottter; did you mean kits.otter?"),
        (["simulate", "own.py", "--stacked"], "--stacked: cannot be used with a script"),
        (["up", "own.py", "--resume", "x"], "--resume: is not the folder of a run"),
        (["up", "own.py", "--lr", "1"], "--lr"),
    ],
)
def test_wrong_command_lines_get_a_sentence(
    script: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], part: str
) -> None:
    monkeypatch.chdir(script.parent)
    Path("kits").mkdir()
    Path("kits/otter.py").touch()
    found = sotto(*words)
    assert found.exit_code == 2
    assert part in found.stderr.splitlines()[-1]
    assert not list(script.parent.glob("runs/*"))
