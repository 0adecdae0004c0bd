"""All errors of the package, by the party at fault.

SottoError
├── ConfigError             the user's: names file, key, value and what would be valid
├── SecurityError           the user's: certificates and keys
├── UsageError              the user's: a training script calls `sottovoce` in a way that cannot work
├── DataError               the user's: data sets, model files, own tasks
│   └── TaskError               the code of an own task raised, or returned what training cannot use
├── StateError              the disk's: a state folder that cannot be read or belongs to another run
├── LinkError               the machine's: it cannot shape links (no root, a tool or the kernel lacks something)
├── RemoteError             another peer's
│   ├── RemoteProtocolError     it sent something that the protocol forbids; the message is dropped
│   │   └── FrameError          bytes that are not a valid frame (one subclass for each kind of lie, in `wire.errors`)
│   ├── StateBehind             the state of one of two peers is older than what the other knows of it
│   ├── HandshakeRefused        the two peers do not belong together, or one of them said so
│   └── PeerUnreachable         no connection within the time allowed
├── DivergenceError         the run's: loss or consensus left the range in which training on makes sense
└── LocalProtocolError      ours: a caller broke a contract; the process stops

The text of an error is one sentence that a user can act on. A command turns any `SottoError` into that sentence
and the error's `exit_code`; a traceback is only ever shown for a bug.
"""

from __future__ import annotations

import codecs
import difflib
import errno
import re
from collections.abc import Iterable

from peer.foreign_text import printable

INTERRUPTED = 130
"""The exit code after a signal that came before the end: it distinguishes such a peer from one that is done, or that
its operator stopped."""

_REMEDIES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room, or have the quota of this user raised",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`), or use another file system",
    errno.EROFS: "mount that file system for writing, or look in the kernel's log for why it is not",
    errno.EMFILE: "let this process open more files (`ulimit -n`, `LimitNOFILE=` in a unit)",
    errno.ENFILE: "this machine has too many open files: raise `fs.file-max`, or end what holds them",
    errno.EACCES: "let the user of this process do that there",
    errno.EPERM: "let the user of this process do that there",
    errno.EIO: "the disk or the network file system fails: look in the kernel's log",
    errno.ENODEV: "the disk is gone: attach it",
    errno.ENOENT: "it is gone: is what is mounted there away?",
    errno.ESTALE: "the network file system lost it: mount it again",
    errno.ENOLCK: "its file system cannot lock files: use a folder on a local disk, or NFS with locks",
    errno.EOPNOTSUPP: "its file system cannot do that: use a folder on a local disk",
    errno.ENOSYS: "its file system cannot do that: use a folder on a local disk",
    errno.ENAMETOOLONG: "use a shorter path",
}


LOWER_RATE = "lower the learning rate (training.learning_rate, or the training script's own)"
"""Remedy for numbers that are not finite, in a task and in a script."""


def remedy(error: Exception) -> str:
    """Return, as a clause, a remedy for a refusal of the operating system, by errno."""
    if isinstance(error, OSError):
        number = error.errno
    else:
        # SQLite has codes of its own, of which extended ones begin with the plain one's name.
        kind = getattr(error, "sqlite_errorname", "").removeprefix("SQLITE_").split("_")[0]
        number = {"FULL": errno.ENOSPC, "READONLY": errno.EROFS, "IOERR": errno.EIO}.get(kind)
    return _REMEDIES.get(number or 0, "repair what is named")


def why_not_utf8(error: UnicodeDecodeError) -> str:
    """Return why bytes are no UTF-8 text, without the subject, and a remedy if one is known."""
    if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "is UTF-16 text, as PowerShell's > writes it: save it as UTF-8"
    return "is not UTF-8 text"


class SottoError(Exception):
    """Base of all errors that the package raises on purpose."""

    exit_code = 1
    may_pass = False
    """Whether the error may pass by itself, as after a boot: a daemon waits for that."""


class ConfigError(SottoError):
    """A setting is missing, unknown, out of range, or contradicts another one."""

    exit_code = 2

    def __init__(
        self,
        problem: str,
        *,
        key: str | None = None,
        value: object = None,
        valid: str | None = None,
        file: str | None = None,
    ) -> None:
        self.problem, self.key, self.value, self.valid, self.file = problem, key, value, valid, file
        where = ": ".join(part for part in (file, key) if part)
        text = f"{where}: {problem}" if where else problem
        if value is not None:
            text += f" (got {value!r})"
        if valid is not None:
            text += f"; valid: {valid}{_did_you_mean(value, key, valid)}"
        super().__init__(text)


def _did_you_mean(value: object, key: str | None, valid: str) -> str:
    """Return a question after the valid name that is spelt most like `value` or, without one, like the last part of an
    unknown key; empty where none is alike."""
    written = value if isinstance(value, str) else "" if value is not None or key is None else key.rpartition(".")[2]
    names = [name.strip('"') for name in re.split(r", (?:or )?| or ", valid)]
    close = closest(written, (name for name in names if re.fullmatch(r"[\w.-]+", name)))
    return f"; did you mean {close}?" if close and close != written else ""


def closest(written: str, names: Iterable[str]) -> str | None:
    """Return the name that is spelt most like what was written; None where none is alike."""
    return next(iter(difflib.get_close_matches(written, [*names], n=1)), None)


class SecurityError(SottoError):
    """A certificate or key is missing, unreadable, expired, or does not belong to this peer."""

    exit_code = 3


class UsageError(SottoError):
    """A training script asks for something that a peer in its process cannot do."""

    exit_code = 2


class DataError(SottoError):
    """A data set, a model file or a user's task does not hold what it should."""

    exit_code = 2


class TaskError(DataError):
    """The code of a user's own task raised an exception (the cause of this one), or returned what
    training cannot use."""


class StateError(SottoError):
    """A state folder is damaged, locked by another process, or belongs to another run."""

    exit_code = 5


class SponsorLost(StateError):
    """The sponsor of a joining peer was lost before it gave the peer a model."""


class LinkError(SottoError):
    """Links cannot be shaped on this machine."""


class RemoteError(SottoError):
    """Another peer did something wrong, or failed to do something."""

    exit_code = 6

    def __init__(self, problem: str, *, peer: int | None = None) -> None:
        # A sentence about another peer often quotes it.
        self.problem, self.peer = printable(problem, None), peer
        super().__init__(self.problem if peer is None else f"peer {peer}: {self.problem}")


class RemoteProtocolError(RemoteError):
    """Another peer broke the protocol; its message is dropped and the daemon lives on."""


class FrameError(RemoteProtocolError):
    """Bytes that are not a valid frame."""


class StateBehind(RemoteError):
    """Two peers have no link because the state of one is older than the other knows it to be. Nobody is accused: a
    restored backup looks like this."""


class HandshakeRefused(RemoteError):
    """The hellos of two peers do not match; the text names the difference."""


class DeclaredLost(HandshakeRefused):
    """The other members have proven that they declared this peer lost; it may take part again as a newcomer."""

    def __init__(self, problem: str, *, incarnation: int) -> None:
        """`incarnation`: the one that comes next (`gossip.incarnations`)."""
        self.incarnation = incarnation
        super().__init__(problem)


class PeerUnreachable(RemoteError):
    """A neighbour could not be reached within the time allowed."""


class DivergenceError(SottoError):
    """Training left the range in which going on makes sense; the text gives the reason."""

    exit_code = 4


class LocalProtocolError(SottoError):
    """A caller inside the package broke a contract: a bug, never a peer's or a user's fault."""

    exit_code = 70
