"""The Python that starts at once does what the interpreter does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.links.namespaces import needs_links
from tests.warm_python import WarmPython

pytestmark = pytest.mark.usefixtures("warm_python")

PYTHON = sys.executable
ROOT = Path(__file__).parents[1]
SAYS_ALL = """
import os, resource, sys
print(sys.argv[1:], sys.path[:2], sys.stdin.read(), os.getcwd())
print(os.environ["NAME"], resource.getrlimit(resource.RLIMIT_FSIZE))
print("told", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize(
    "words",
    [
        ("-c", SAYS_ALL, "first", "-second"),
        ("-u", "-c", SAYS_ALL),
        ("-P", "-c", SAYS_ALL),
        ("script.py", "first"),
        ("-m", "script", "first"),
        ("-m", "json.tool"),
        ("-m", "missing"),
        ("-c", "raise SystemExit('what went wrong')"),
        ("-c", "1 / 0"),
        ("-c", "import os; os.kill(os.getpid(), 9)"),
        ("-c", "import atexit, threading; atexit.register(print, 2); threading.Timer(0.1, print, [1]).start()"),
        # The interpreter itself does these.
        ("-I", "-c", "import sys; print(sys.flags.isolated, 'torch' in sys.modules)"),
        ("-V",),
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_a_process_prints_and_ends_as_one_of_the_interpreter(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"print(__name__)\n{SAYS_ALL}")
    environment = {"NAME": "value", "PATH": os.environ["PATH"], "PYTHONPATH": "/more"}
    ended = []
    for python in (PYTHON, sys.executable):
        command = ["prlimit", "--fsize=90000", python, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, input="typed", capture_output=True, text=True)
        ended.append((done.returncode, done.stdout, done.stderr.splitlines()[-1:]))
    if words == ("-m", "missing"):  # Its message begins with the path of the interpreter.
        ended = [(code, out, [lines[0].rpartition(": ")[2]]) for code, out, lines in ended]
    assert ended[1] == ended[0]


@pytest.mark.parametrize(
    ("settings", "finds", "loaded"),
    [
        ({}, ROOT, True),
        ({"PYTHONPATH": "/more"}, ROOT, True),
        ({"PYTHONPATH": f"{ROOT}:other"}, ROOT, True),
        ({"PYTHONPATH": f"other:{ROOT}"}, Path("other"), False),
        ({"PYTHONPATH": "other", "PYTHONSAFEPATH": "1"}, Path("other"), False),
        ({"SOTTOVOCE_NATIVE": "0"}, ROOT, False),
    ],
    ids=str,
)
def test_libraries_are_there_and_peer_where_it_is_the_one_that_is_found(
    settings: dict[str, str], finds: Path, loaded: bool, tmp_path: Path
) -> None:
    (tmp_path / "other" / "peer").mkdir(parents=True)
    (tmp_path / "other" / "peer" / "__init__.py").touch()
    code = "import sys; print('torch' in sys.modules, 'peer' in sys.modules); import peer; print(peer.__path__[0])"
    environment = {"PATH": os.environ["PATH"], **settings}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == f"True {loaded}"
    assert (tmp_path / done.stdout.splitlines()[1]).samefile(tmp_path / finds / "peer")


def test_another_peer_in_the_folder_of_a_command_or_of_a_script_is_the_one_that_is_found(tmp_path: Path) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "__init__.py").write_text("print('the other one')")
    script = tmp_path / "script.py"
    script.write_text("import peer")
    for words, folder in (("-c import peer", tmp_path), ("script.py", tmp_path), (str(script), ROOT)):
        command = [sys.executable, *words.split(" ", 1)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        assert done.stdout == "the other one\n"


def test_what_imports_set_in_the_environment_is_set_in_each_process() -> None:
    code = "import os, peer.net.rpc; print(os.environ['GRPC_DNS_RESOLVER'], os.environ['GRPC_VERBOSITY'])"
    environment = {**os.environ, "GRPC_VERBOSITY": "info"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "native info\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_process(number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(60) == -number
    # Whoever starts another one finds this one gone.
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert not Path(f"/proc/{pid}").exists()


def test_an_interrupt_reaches_a_process_in_the_background_that_takes_it_again(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); print(flush=True); time.sleep(300)"
    # It reads a line from the process before it goes on.
    script = 'mkfifo ready; "$0" -c "$1" > ready & read -r _ < ready; kill -INT $!; wait $!; echo $?'
    command = ["bash", "-c", script, sys.executable, code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["130"]


@pytest.mark.root
@needs_links
def test_a_process_is_in_the_network_that_it_is_started_in() -> None:
    code = "import os, sys; print(*map(os.readlink, sys.argv[1:]), 'torch' in sys.modules)"
    script = 'F="/proc/self/ns/net /proc/self/ns/mnt"; echo $(readlink $F) True; "$0" -c "$1" $F'
    command = ["unshare", "--net", "--mount", "sh", "-c", script, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected, found = done.stdout.splitlines()
    assert found == expected
    assert found.split()[0] != os.readlink("/proc/self/ns/net")


def test_it_ends_though_a_forked_process_holds_what_tells_it_to(tmp_path: Path) -> None:
    with WarmPython(tmp_path):
        child = os.fork()
        if not child:
            signal.pause()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_peer_knows_whose_end_is_its_own() -> None:
    environment = {**os.environ, "SOTTO_PARENT": str(os.getpid())}
    code = "import os; print(int(os.environ['SOTTO_PARENT']) == os.getppid())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
