"""The files of one peer's durable state: checkpoints, each followed by the journal since.

Runs with and without rounds share this: file names, the owner's identity, replacements of damaged files, and deletion
of old ones. `peer.node.durable` and `peer.node.durable_pair` know the meaning of the records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peer.errors import StateError
from peer.protocol import NEWEST, OLDEST, release_with
from peer.state.checkpoints import Checkpoint, Checkpoints, checkpoint_name
from peer.state.disk import Disk, writing
from peer.state.journal import Begun, Called, Journal, JournalContent, Stepped, read_journal
from peer.state.kept_progress import begin_era

_PREFIX, _SUFFIX = "journal-", ".log"
_ASIDE = "set-aside-"
_DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{8,}\b")
WAYS_ON = "start again what began it, or give every device a new folder for a new run: --set state.directory=NEW"
_OR_ANEW = "; or, if no other device has met this one, rename its state folder, so that it begins round 0 anew"
"""Another remedy for a device that has begun round 0 at most: nobody has any of its messages that it would repeat."""


class StateFiles:
    """The state folder of one peer. Its methods raise StateError."""

    def __init__(self, disk: Disk, identity: Mapping[str, str], *, keep: int, regular: int) -> None:
        """`identity`: values that a state must have to belong to this peer (run, name, model, …). `keep` and `regular`
        are those of `Checkpoints`."""
        self.protocol = OLDEST
        """The lowest version of the protocol that serves the run, by the files read or by `pin`."""
        self._identity = dict(identity)
        self.checkpoints = Checkpoints(disk, keep=keep, regular=regular)
        self._disk, self._keep = disk, keep

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of the state's owner, as in checkpoints and the headers of journals.

        The release that is needed is named in the run as well, which releases that do not know the version report as
        another run, and leave the files as they are.
        """
        if self.protocol == OLDEST:
            return self._identity
        return {**self._expected(self.protocol, is_named=True), "protocol": self.protocol}

    def load_newest(self, notices: list[str]) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; those that are not are set aside, with a sentence in `notices`.
        None if there was none yet, or a journal leads from the start to where this peer was."""
        problem: StateError | None = None
        for round_ in reversed(self.checkpoints.rounds()):
            try:
                checkpoint = self.checkpoints.load(round_)
            except StateError as error:
                notices.append(f"{error}; the state before it is used, and the journal since")
                problem = error
                self.checkpoints.set_aside(round_)
                continue
            self._check_identity(checkpoint.state, "checkpoint")
            return checkpoint
        if problem is not None and 0 not in self.journal_rounds():
            raise problem
        return None

    def chain(self, base_round: int, facts: Mapping[str, Any] | None = None) -> list[int]:
        """Return the rounds of the journals since the checkpoint of a round, ascending, at least one; `facts` are for
        the header of that where it is new."""
        chain = [round_ for round_ in self.journal_rounds() if round_ >= base_round]
        if not chain:
            # A new folder, or the process ended between the checkpoint and its journal.
            self.new_journal(base_round, facts).close()
            chain = [base_round]
        return chain

    def read_journal(self, round_: int, notices: list[str]) -> JournalContent:
        """Return the content of the journal after a round, with a sentence in `notices` if its end is damaged."""
        name = journal_name(round_)
        content = read_journal(self._disk, name)
        self._check_identity(content.header, "journal")
        if content.problem is not None:
            notices.append(f"{name}: {content.problem}; it is used up to there")
        return content

    def new_journal(self, round_: int, facts: Mapping[str, Any] | None = None) -> Journal:
        """Begin the journal after a round; `facts` are for its header."""
        return Journal.create(self._disk, journal_name(round_), {**self.identity, "round": round_, **(facts or {})})

    def checkpoint_bytes(self, round_: int) -> int:
        """Return the size of a checkpoint; 0 if there is none."""
        name = checkpoint_name(round_)
        return self._disk.size(name) if name in self._disk.names() else 0

    def prune(self) -> None:
        """Delete the journals before the oldest checkpoint that one may have to go back to."""
        rounds = self.checkpoints.rounds()
        if len(rounds) < self._keep:
            return
        with writing("old journals"):
            for round_ in self.journal_rounds():
                if round_ < rounds[-self._keep]:
                    self._disk.unlink(journal_name(round_))

    def go_back(self, round_: int) -> int:
        """Set aside everything newer than the last checkpoint at or before `round_`; return its round (0: the start).

        Files are renamed to set-aside-N-NAME, with an N of their own each time, and nothing ever deletes or reads them.
        """
        earlier = (name for name in self._disk.names() if name.startswith(_ASIDE))
        numbers = (name.removeprefix(_ASIDE).partition("-")[0] for name in earlier)
        aside = f"{_ASIDE}{1 + max((int(number) for number in numbers if number.isdecimal()), default=0)}-"
        begin_era(self._disk)
        with writing("what is set aside"):
            # Before the checkpoints: without one, a journal would restore the peer.
            for each in reversed(self.journal_rounds()):
                self._disk.rename(journal_name(each), aside + journal_name(each))
            left = self.checkpoints.go_back(round_, aside)
            self._disk.sync_folder()
        return left

    def _check_identity(self, found: Mapping[str, Any], what: str) -> None:
        # Release 0.2 named the version in folders whose run needed what is the oldest now.
        protocol, is_named = found.get("protocol", OLDEST), "protocol" in found
        if not isinstance(protocol, int) or not OLDEST <= protocol <= NEWEST:
            raise StateError(f"the {what} uses what came with a later release; install that one")
        expected = self._expected(protocol, is_named)
        for key, value in self._identity.items():
            if found.get(key) != expected[key]:
                told = str(found.get(key)).removeprefix(expected[key].removesuffix(value))
                there, here = (_DIGEST.sub(r"\1", each)[:40] for each in (told, value))
                apart = f"{key} {there!r}, but this peer has {here!r}"
                if _DIGEST.fullmatch(value):
                    apart = f"another {key}{' ([graph] or [[peers]] has changed)' if key == 'graph' else ''}"
                advice = WAYS_ON + ("" if begun_round(self._disk) else _OR_ANEW)
                raise StateError(f"the {what} belongs to {apart}; {advice}")
        self.protocol = max(self.protocol, protocol)

    def _expected(self, protocol: int, is_named: bool) -> dict[str, str]:
        """Return the identity in a state that needs a version of the protocol, and whether it names it."""
        mark = f"(needs release {release_with(protocol)}) " if is_named else ""
        return {key: mark + value if key == "run" else value for key, value in self._identity.items()}

    def journal_rounds(self) -> list[int]:
        """Return the rounds of the journals that are there, ascending."""
        numbers = (
            name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
            for name in self._disk.names()
            if name.startswith(_PREFIX) and name.endswith(_SUFFIX)
        )
        return sorted(int(number) for number in numbers if number.isdecimal())


def begun_round(disk: Disk) -> int | None:
    """Return a round that a run has begun, judging by its state folder: that of its newest checkpoint, or 0 if the
    journal before the first one holds a step. None if the run has not begun. Raises StateError."""
    files = StateFiles(disk, {}, keep=1, regular=0)
    journals = files.journal_rounds()
    newest = max([*files.checkpoints.rounds(), *journals], default=0)
    if newest == 0 and 0 in journals:
        records = read_journal(disk, journal_name(0)).records
        return 0 if any(isinstance(record, Begun | Stepped | Called) for record in records) else None
    return newest or None


def begin_anew(begun: int) -> str:
    """Return, as a clause, how to begin without the settled rounds of a run; `begun`: the result of `begun_round`."""
    return "begin a new run" if begun else "begin a new run" + _OR_ANEW


def gives_other_bits(name: str, what: str) -> StateError:
    """Return the error for a journal `name` whose repetition gives another result than before."""
    return StateError(
        f"{name}: replaying it gives {what}; the machine, the version of torch or numpy, the training data or the "
        "configuration has changed: undo the change, or restore the state folder from a backup"
    )


def journal_name(round_: int) -> str:
    """Return the file name of the journal that follows the checkpoint of a round."""
    return f"{_PREFIX}{round_:08d}{_SUFFIX}"
