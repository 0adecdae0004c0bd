"""What a process imports before it does anything, in processes of its own: here everything is imported already."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run(program: str, *arguments: str, folder: Path | None = None) -> str:
    """Return what a program printed."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


QUICK = """
import gc
from peer.train.startup import load_postponed, quick_imports

with quick_imports():
    import torch
"""


def test_torch_comes_without_what_no_peer_asks_for() -> None:
    out = run(QUICK + "import sys; print(gc.isenabled(), gc.get_freeze_count() > 10_000, 'torch._refs' in sys.modules)")
    assert out.split() == ["True", "True", "False"]


def test_layers_of_8_bit_training_come_when_one_is_made() -> None:
    program = (
        "import sys\n"
        "from peer.train.startup import quick_imports\n"
        "with quick_imports():\n"
        "    from peer.train import layers\n"
        "print('peer.train.eight_bit.linear' in sys.modules)\n"
        "print(type(layers._EightBit().linear(2, 3)).__name__, 'peer.train.eight_bit.linear' in sys.modules)\n"
    )
    assert run(program).split() == ["False", "Linear", "True"]


def test_what_is_postponed_is_loaded_when_it_is_asked_for() -> None:
    program = QUICK + (
        "import torch.optim.lr_scheduler\n"
        "from torch.distributions import Normal\n"
        "print(hasattr(torch.masked, 'nonsense'), hasattr(torch.masked, 'masked_tensor'))\n"
        "from torch.optim.lr_scheduler import LRScheduler, StepLR\n"
        "print(issubclass(StepLR, LRScheduler), Normal(0.0, 1.0).mean.item())\n"
    )
    assert run(program).split() == ["False", "True", "True", "0.0"]


def test_the_code_of_a_user_finds_no_module_empty() -> None:
    # The import of a module within an empty package would execute the package while that module is half done.
    program = (
        "import sys\n"
        "from peer.train import startup\n"
        "with startup.quick_imports():\n"
        "    from peer.daemon import process\n"
        "loaders = [sys.modules[name].__spec__.loader for name in startup._POSTPONED]\n"
        "def empty(): return [each for each in loaders if isinstance(each, startup._Later) and each._module]\n"
        "print(len(empty()) > 5)\n"
        "startup.load_postponed()\n"
        "from sottovoce.eight_bit import convert\n"
        "print(empty(), convert.__name__)\n"
    )
    assert run(program).splitlines() == ["True", "[] convert"]


def test_a_model_is_exported_after_quick_imports() -> None:
    program = (
        "from peer.train.startup import quick_imports\n"
        "with quick_imports():\n"
        "    import torch\n"
        "    from peer.train.portable import Example, trace\n"
        "inputs = torch.ones(3, 2)\n"
        "program = trace(torch.nn.Linear(2, 1), Example((inputs,), (), (frozenset({0}),)), 'linear')\n"
        "print(program.module()(torch.ones(5, 2)).shape)\n"
    )
    assert run(program).strip() == "torch.Size([5, 1])"


def test_two_threads_may_ask_at_once() -> None:
    program = QUICK + (
        "import threading\n"
        "found, gate = [], threading.Barrier(4)\n"
        "def ask():\n"
        "    gate.wait()\n"
        "    found.append(torch.distributions.kl_divergence)\n"
        "threads = [threading.Thread(target=ask) for _ in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(len(found), len(set(found)))\n"
    )
    assert run(program).split() == ["4", "1"]


def test_load_postponed_knows_tensors_without_data() -> None:
    program = QUICK + (
        "load_postponed()\nload_postponed()\n"
        "x = torch.empty(3, 4, device='meta')\n"
        "print(*torch.nn.functional.linear(x, torch.empty(5, 4, device='meta')).shape)\n"
    )
    assert run(program).split() == ["3", "5"]


def test_torch_that_is_there_already_stays_as_it_is() -> None:
    program = (
        "import torch\nbefore = torch.optim\n" + QUICK + "print(torch.optim is before, '__getattr__' in vars(before))"
    )
    assert run(program).split() == ["True", "False"]


def test_the_code_of_an_own_task_finds_all_of_torch(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "SHAPE = torch.nn.functional.linear(*(torch.empty(4, 4, device='meta'),) * 2).shape\n"
        "def make_task(): raise LookupError(tuple(SHAPE))\n"
    )
    program = QUICK + (
        "from peer.errors import TaskError\n"
        "from peer.train.tasks import resolve_task\n"
        "try: resolve_task('own:make_task')\n"
        "except TaskError as error: print(error)\n"
    )
    assert "LookupError: (4, 4)" in run(program, folder=tmp_path)


SOTTO = """
import json, sys
from peer.__main__ import main
try: main()
finally: print(json.dumps([name for name in sys.modules if "." not in name]), file=sys.__stderr__)
"""
SLOW = {"torch", "numpy", "grpc", "pydantic", "rich", "cryptography", "jinja2"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["up", "--help"], 0),
        (["run", "--help"], 0),
        (["version"], 0),
        (["up", "--no-such-option"], 2),
        (["up", "--peers", "many"], 2),
        (["no-such-command"], 2),
    ],
)
def test_help_and_a_wrong_option_need_nothing_that_is_slow_to_import(arguments: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SOTTO, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert not SLOW.intersection(json.loads(done.stderr.splitlines()[-1]))


def test_up_says_what_it_does_before_it_imports_what_is_slow(tmp_path: Path) -> None:
    """The first line that is printed ends the process, and with it the fork server."""
    program = (
        "import sys\n"
        "from peer.__main__ import main\n"
        "from peer.report.live import LineView\n"
        "printed = LineView.update\n"
        "def update(view, progress):\n"
        "    printed(view, progress)\n"
        "    print(*{'torch', 'numpy', 'grpc'}.intersection(sys.modules))\n"
        "    raise KeyboardInterrupt\n"
        "LineView.update = update\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "up"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[0].split()[-1] == "preparing"
    assert done.stdout.strip() == ""
    assert not list(tmp_path.iterdir()), "a run that never began leaves no folder"
