"""Nothing is written through a link or into what belongs to others; and every place that writes goes one way."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from peer.config.writer import write_bytes
from peer.errors import LinkError, StateError
from peer.files import make_own_folder, open_own, replacing, write_whole
from peer.links import network
from peer.ops.collect import FOLDER, collect
from peer.ops.peer_processes import start_process
from peer.report.run_page import write_report
from peer.state.checkpoints import StateFolder
from peer.state.disk import Disk, replace
from peer.state.metrics import MetricsStore, Summary
from tests.report.sample_run import write_sample_run
from tests.test_layers import ROOT, modules

# -- every place that opens a file for writing -------------------------------------------------------------------------

ALLOWED = {
    "files": "the one place",
    "cli.fork_server": "/proc: the name and the command line of the own process",
    "ops.profile": "/proc: sets the peak of memory back",
    "net.security.keys": "O_EXCL: makes a new file or none, and follows no link",
    "state.disk": "O_NOFOLLOW; the state folder is its owner's alone (0700)",
    "state.checkpoints": "O_NOFOLLOW: the lock, to which nothing is written",
    "state.metrics": "SQLite opens by path: checked before, and a new file is made beside",
    "daemon.operator.audit_log": "in the state folder",
    "daemon.notes.evaluations": "in the state folder",
    "cli.app": "/dev/null",
    "__main__": "/dev/null, for streams that are closed",
    "net.tunnels": "a new folder of tempfile, 0700",
    "lab.study.race": "a new folder of tempfile, 0700",
    "lab.study.rival_cell": "a new folder of tempfile, 0700",
    "lab.study.rivals.worker": "a new folder of tempfile, 0700",
    "lab.study.rivals.training": "a new folder of tempfile, 0700",
    "train.datasets.catalogue": "an archive is unpacked into a folder that was made for it",
}
"""Modules that open files for writing on their own, and why nobody else's file is written there."""

WRITING_METHODS = {"write_text", "write_bytes", "touch", "savefig", "save_file", "write_table", "extractall"}
WRITING_FUNCTIONS = {
    "np.save", "np.savez", "shutil.copy", "shutil.copyfile", "shutil.copy2", "shutil.copytree", "shutil.move",
    "sqlite3.connect", "tempfile.mkdtemp", "tempfile.mkstemp", "tempfile.NamedTemporaryFile", "torch.save",
}  # fmt: skip


def opens_for_writing(call: ast.Call) -> bool:
    """Return whether a call opens or makes a file, as far as its text says so."""
    name = ast.unparse(call.func)
    method = name.rpartition(".")[2]
    if name in WRITING_FUNCTIONS:
        return True
    if "." in name and method in WRITING_METHODS:
        return True
    if name == "os.open":
        return any(flag in ast.unparse(call) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"))
    if method not in ("open", "fdopen") or name in ("os.fdopen", "tarfile.open", "images.open", "self.open"):
        return False
    words = [each for each in [*call.args, *(word.value for word in call.keywords)] if isinstance(each, ast.Constant)]
    modes = [each.value for each in words if isinstance(each.value, str) and set(each.value) <= set("rwaxbt+")]
    return any(set(mode) & set("wax+") for mode in modes if mode)


def writing_modules() -> dict[str, list[int]]:
    """Return module → lines on which it opens files for writing, beside what `replacing` hands out."""
    found: dict[str, list[int]] = {}
    for module, path in modules().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        handed_out: set[int] = set()
        for node in ast.walk(tree):
            # with replacing(path) as beside, open(beside, "w") …: whatever is opened inside is the new file.
            if isinstance(node, ast.With) and any("replacing(" in ast.unparse(each) for each in node.items):
                handed_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and opens_for_writing(node) and node.lineno not in handed_out
        ]
        if lines:
            found[module] = lines
    return found


def test_files_are_opened_for_writing_in_one_place() -> None:
    found = writing_modules()
    others = {f"{module}: lines {lines}" for module, lines in found.items() if module not in ALLOWED}
    assert not others, "write with peer.files, or say here why nobody else's file is written"
    assert not ALLOWED.keys() - found.keys(), "these open nothing any more"
    assert (ROOT / "files.py").exists()


@pytest.mark.parametrize(
    "text",
    [
        "open(path, 'w')", "open(path, mode='ab')", "path.open('r+')", "path.write_text(x)", "path.parent.touch()",
        "os.open(path, os.O_CREAT)", "sqlite3.connect(path)", "np.save(path, x)", "os.open(p, flags=os.O_RDWR | 0)",
    ],
)  # fmt: skip
def test_the_list_sees_each_way_of_writing(text: str) -> None:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert opens_for_writing(call)


# -- what a kill leaves half written -----------------------------------------------------------------------------------

LISTED = {
    "files": "what a kill left, to remove it",
    "cli.options": "when anything of a run was last written",
    "cli.training_run": "whether a folder is empty",
    "daemon.process": "whether a folder is empty: data that is not mounted",
    "net.tcp_info": "/proc",
    "run.plan": "whether a folder is empty",
    "state.disk": "names, which its users compare with their own, from the first character to the last",
    "train.datasets.catalogue": "an archive is unpacked into a folder that was made for it",
    "train.datasets.documents": "texts by their endings, in subfolders as well; no hidden ones",
    "train.datasets.image_folder": "folders, and images by their endings; no hidden ones",
}
"""Modules that list whole folders, and why a file that is half written is nothing to them."""
OF_ANOTHER = {"*": "daemon.device.limits: /sys"}
"""Patterns for files that no peer writes."""


def _texts(node: ast.AST) -> set[str]:
    """Return the texts below a node, with "x" in place of what they are filled with."""
    if isinstance(node, ast.JoinedStr):
        return {"".join(str(each.value) if isinstance(each, ast.Constant) else "x" for each in node.values)}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    return set().union(*map(_texts, ast.iter_child_nodes(node)))


def patterns(source: str) -> set[str]:
    """Return the patterns of file names in a module: those in its calls of glob, and where one is not written there,
    all texts of the module that may be one."""
    tree, found = ast.parse(source), set[str]()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("glob", "rglob"):
            texts = _texts(call.args[0]) or {text for text in _texts(tree) if not set(" `|(") & set(text)}
            found |= {text.rpartition("/")[2] for text in texts}
    return {text for text in found if "*" in text} - OF_ANOTHER.keys()


def all_patterns() -> list[tuple[str, str]]:
    """Return (module, pattern)."""
    sources = {module: path.read_text(encoding="utf-8") for module, path in modules().items()}
    return [(module, each) for module, text in sources.items() if "glob(" in text for each in sorted(patterns(text))]


@pytest.mark.parametrize(("module", "pattern"), all_patterns())
def test_no_pattern_takes_a_file_for_whole_that_is_being_written(module: str, pattern: str, tmp_path: Path) -> None:
    file = tmp_path / re.sub(r"\[[^]]*\]", "1", pattern).replace("*", "1")
    disk = Disk(tmp_path)
    for write in (partial(write_whole, file), lambda data: replace(disk, file.name, [data])):
        assert files_while(write, tmp_path, pattern) == []
        assert list(tmp_path.glob(pattern)) == [file]
        file.unlink()


def files_while(write: Callable[[bytes], None], folder: Path, pattern: str) -> list[Path]:
    """Return what a pattern finds in a folder right before a file gets its name."""
    found: list[Path] = []
    real = os.replace

    def watched(old: Any, new: Any) -> None:
        found.extend(folder.glob(pattern))
        assert os.path.exists(old), "it is being written"
        real(old, new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", watched)
        write(b"whole")
    return found


def test_folders_are_listed_where_it_is_said_why() -> None:
    lists = re.compile(r"\.iterdir\(|\blistdir\(|\bscandir\(|\bos\.walk\(")
    found = {module for module, path in modules().items() if lists.search(path.read_text(encoding="utf-8"))}
    assert found == LISTED.keys()


def test_what_a_kill_left_is_removed_by_the_next_writer_of_that_file(tmp_path: Path) -> None:
    file, other = tmp_path / "record.json", tmp_path / "other.json"
    with replacing(file) as first, replacing(file) as second, replacing(other) as unrelated:
        for beside in (first, second, unrelated):
            beside.write_text("half")
        write_whole(file, "whole")
        assert all(beside.exists() for beside in (first, second, unrelated)), "somebody is at work on them"
    left = tmp_path / first.name, tmp_path / unrelated.name, tmp_path / ".record.json.bak"
    for beside in left:
        beside.write_text("half")
    write_whole(file, "new")
    assert [beside.exists() for beside in left] == [False, True, True]
    assert (file.read_text(), other.read_text()) == ("new", "half")


# -- what the helper does ----------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that somebody would like us to overwrite."""
    file = tmp_path / "of-the-victim"
    file.write_text("precious")
    return file


def test_what_is_written_whole_takes_the_place_of_a_link(tmp_path: Path, secret: Path) -> None:
    link = tmp_path / "link"
    for write in (lambda: write_whole(link, "new"), lambda: write_bytes(link, b"new")):
        link.unlink(missing_ok=True)
        link.symlink_to(secret)
        write()
        assert not link.is_symlink()
        assert (link.read_text(), secret.read_text()) == ("new", "precious")


def test_an_error_leaves_the_old_file_and_nothing_beside(tmp_path: Path, secret: Path) -> None:
    def write_half() -> None:
        with replacing(secret) as beside:
            beside.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert secret.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [secret]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "file", b"")


def test_permissions_stay_and_devices_are_written_to(tmp_path: Path, secret: Path) -> None:
    secret.chmod(0o640)
    write_whole(secret, "new")
    assert secret.stat().st_mode & 0o777 == 0o640
    write_whole(Path("/dev/null"), "nothing")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("make", ["link", "pipe", "folder"])
def test_what_is_written_in_place_is_a_plain_file(tmp_path: Path, secret: Path, make: str) -> None:
    place = tmp_path / "place"
    makers: dict[str, Callable[[], None]] = {
        "link": lambda: place.symlink_to(secret), "pipe": lambda: os.mkfifo(place), "folder": place.mkdir,
    }  # fmt: skip
    makers[make]()
    with pytest.raises(OSError, match=r"link|plain file|directory|No such device"):
        open_own(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    assert secret.read_text() == "precious"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@needs_root
def test_what_belongs_to_others_is_refused(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    os.chown(file, 12345, 12345)
    os.chown(folder, 12345, 12345)
    with pytest.raises(PermissionError, match="of this user"):
        open_own(file, os.O_WRONLY | os.O_APPEND)
    with pytest.raises(PermissionError, match="another user"):
        make_own_folder(folder)


def test_a_folder_behind_a_link_or_open_to_others_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError, match="link"):
        make_own_folder(tmp_path / "link")
    (tmp_path / "theirs").chmod(0o777)
    with pytest.raises(PermissionError, match="other users can enter it"):
        make_own_folder(tmp_path / "theirs", 0o700)
    make_own_folder(tmp_path / "new" / "below", 0o700)
    assert (tmp_path / "new" / "below").stat().st_mode & 0o777 == 0o700


# -- the places that were found ----------------------------------------------------------------------------------------


def test_the_switch_of_shaped_links_is_run_from_no_folder_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network.tempfile, "gettempdir", lambda: str(tmp_path))
    planted = tmp_path / "planted"
    planted.mkdir(mode=0o700)
    (tmp_path / f"{network.PREFIX}-{os.geteuid()}").symlink_to(planted)
    with pytest.raises(LinkError, match="it is a link"):
        network._built_switch()
    assert not list(planted.iterdir())


def test_a_report_of_a_foreign_run_folder_overwrites_nothing_outside(tmp_path: Path, secret: Path) -> None:
    run = write_sample_run(tmp_path / "run")
    for name in ("report.html", "summary.json"):
        content = (run / name).read_bytes() if (run / name).exists() else b""
        (run / name).unlink(missing_ok=True)
        if name == "summary.json":
            (run / name).write_bytes(content)
        else:
            (run / name).symlink_to(secret)
    write_report(run)
    Summary.load(run / "summary.json").save(run / "summary.json")
    assert secret.read_text() == "precious"


def test_metrics_are_collected_into_no_folder_or_file_of_others(tmp_path: Path, secret: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    store.flush()
    store.close()
    before = (tmp_path / "metrics.sqlite").read_bytes()
    (tmp_path / "link.sqlite").symlink_to(tmp_path / "metrics.sqlite")
    with pytest.raises(StateError, match="link"):
        MetricsStore(tmp_path / "link.sqlite")
    assert (tmp_path / "metrics.sqlite").read_bytes() == before
    kits = tmp_path / "kits"
    (kits / "peer-0").mkdir(parents=True)
    (kits / "peer-0" / "peer.toml").write_text('[[peers]]\nname = "peer-0"\n')
    (kits / FOLDER).symlink_to(secret.parent)
    with pytest.raises(StateError, match="link"):
        collect(kits, ask=False)


def test_logs_locks_and_state_follow_no_link(tmp_path: Path, secret: Path) -> None:
    (tmp_path / "log.txt").symlink_to(secret)
    with pytest.raises(PermissionError, match="link"):
        start_process(["true"], tmp_path / "log.txt")
    state = tmp_path / "state"
    state.mkdir()
    (state / "lock").symlink_to(secret)
    with pytest.raises(StateError, match="cannot be used as a state folder"):
        StateFolder(state)
    (state / "journal").symlink_to(secret)
    for use in (Disk(state).create, Disk(state).open, lambda name: Disk(state).truncate(name, 0)):
        with pytest.raises(OSError, match="symbolic links"):
            use("journal")
    assert secret.read_text() == "precious"
