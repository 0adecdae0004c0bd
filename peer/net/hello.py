"""The first message between two peers: do they train the same run?

Pure: compares two hellos and describes differences in a sentence. Texts that come from another peer are cut and quoted
before they enter a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from peer.errors import HandshakeRefused
from peer.foreign_text import quote
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.protocol import BASED, MEANING, NEWEST, OLDEST, SETTINGS, release_with
from peer.wire.data_meaning import MOST_KINDS, Meaning, refuse_entries, refuse_told
from peer.wire.start_model import DIGEST_BYTES, ENTRY_BYTES, StartModel

PROTOCOL_MIN = OLDEST
PROTOCOL_MAX = NEWEST
MAX_TEXT = 256
MAX_SETTINGS = 64
_NAMED_SETTINGS = 3
MIN_WINDOW_BYTES = 4096
MIN_CHUNK_BYTES = 1024
MAX_HEARTBEAT_MS = 3_600_000
MAX_FRAMES = 1 << 53
"""More frames than any run sends over a link. Where the number sent is known, the claim is compared with it."""


@dataclass(frozen=True, kw_only=True)
class HelloInfo:
    """This peer's description of itself and its run for its neighbours."""

    run: str
    algorithm: str
    run_digest: str
    """Digests of the sections of the configuration that all peers share, joined by dots."""
    start: StartModel
    """The model with which the run starts."""
    graph_digest: str
    """Digest of the graph schedule."""
    num_peers: int
    name: str
    """Name of this peer in the list of peers."""
    software: str = "sottovoce"
    meanings: tuple[Meaning, ...] = ()
    """The meaning of the numbers in this device's data, by kind."""
    shared_sections: tuple[str, ...] = ()
    """The names of those sections; not sent."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What of them is not at its default: "section.key" → JSON."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """What the bits of results depend on: "torch" → its release."""
    max_frame_bytes: int | None = None
    """The largest frame that can occur in this run, if that is known beforehand; not sent."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms that two peers agreed on for one connection."""

    protocol: int
    received: int
    """The neighbour durably has our frames up to this number."""
    nonce: int
    """Drawn by the neighbour's process."""
    credit_bytes: int
    chunk_bytes: int
    """The largest sum of chunk data that the neighbour accepts in an envelope."""
    heartbeat_s: float
    """The longest pause between two envelopes of the neighbour."""
    seen_as: str
    software: str
    """Release that the neighbour claims to run."""
    other_buffers: str | None = None
    """Differences of its buffers from ours."""
    other_machine: str | None = None
    """Differences of its packages and processor from ours."""


@dataclass(frozen=True, kw_only=True)
class ToldProgress:
    """Signed statements in a hello about the progress of both ends; empty where it holds none."""

    own: bytes = b""
    """The sender's latest statement about itself."""
    shown: bytes = b""
    """The receiver's latest statement known to the sender."""
    admission: bytes = b""
    """The sender's signed admission that it was set back."""


class Progress(Protocol):
    """Reports the progress of this peer, and judges that of its neighbours (`peer.node.progress`)."""

    def told_to(self, peer: int) -> ToldProgress:
        """Return the statements for the hello to a neighbour."""
        ...

    def judge(self, peer: int, told: ToldProgress) -> None:
        """Take the statements of a neighbour's hello. Raises StateBehind where one of the two peers was set back, and
        RemoteProtocolError for a statement without a valid signature."""
        ...


def check_identity(theirs: pb.Hello, *, expected_name: str, certified_name: str | None, expected_index: int) -> None:
    """Check that a hello comes from the neighbour it should. Raises HandshakeRefused.

    `certified_name` is the name in the certificate it showed, None without TLS.
    """
    if certified_name is not None and certified_name != theirs.name:
        raise HandshakeRefused(
            f"it calls itself {quote(theirs.name)}, but its certificate is made out to {quote(certified_name)}"
        )
    if theirs.name != expected_name or theirs.index != expected_index:
        raise HandshakeRefused(
            f"it says it is peer {theirs.index}, {quote(theirs.name)}, but peer {expected_index}, "
            f"{quote(expected_name)}, is expected here; compare the lists of peers"
        )


def check_run(ours: HelloInfo, theirs: pb.Hello, needed: int = PROTOCOL_MIN) -> int:
    """Return the protocol version to use with a peer of the same run. `needed`: the lowest that serves the run by now.
    Raises HandshakeRefused naming both values."""
    name = quote(theirs.name)
    if theirs.protocol_max < PROTOCOL_MIN or theirs.protocol_min > PROTOCOL_MAX:
        raise HandshakeRefused(
            f"{name} speaks {_versions(theirs.protocol_min, theirs.protocol_max)} of the protocol ("
            f"{quote(theirs.software)}), we speak {_versions(PROTOCOL_MIN, PROTOCOL_MAX)} ({quote(ours.software)}); "
            "install the same release on both"
        )
    if theirs.protocol_max < needed:
        raise HandshakeRefused(
            f"{name} runs {quote(theirs.software)}, and this run uses what came with release {release_with(needed)}; "
            "install that one or a later one there"
        )
    if theirs.run != ours.run:
        raise HandshakeRefused(f"{name} is in run {quote(theirs.run)}, we are in {quote(ours.run)}")
    if theirs.num_peers != ours.num_peers:
        raise HandshakeRefused(
            f"{name} has {theirs.num_peers} peers in its list, we have {ours.num_peers}; "
            "every peer needs the same [[peers]]"
        )
    if theirs.algorithm != ours.algorithm:
        raise HandshakeRefused(
            f"{name} trains with algorithm {quote(theirs.algorithm)}, we train with {quote(ours.algorithm)}; "
            "every peer needs the same [algorithm]"
        )
    sections = _differing_sections(ours, theirs.run_digest)
    settings = differing_settings(ours.settings, theirs.settings if theirs.protocol_max >= SETTINGS else None)
    if ours.settings.get("training.task") == '"loop"':
        sections += ", and what the scripts give `join` (steps, every),"
    for what, found, where, differs in (
        ("configuration", settings, sections, theirs.run_digest != ours.run_digest),
        ("graph", "", "[graph] and its file", theirs.graph_digest != ours.graph_digest),
    ):
        if differs:
            raise HandshakeRefused(f"the {what} of {name} differs from ours{found}; compare {where} on both devices")
    # Equal configurations can still name different code or different files.
    _check_meanings(ours, theirs)
    _check_start(ours, theirs)
    return min(theirs.protocol_max, PROTOCOL_MAX)


def _check_meanings(ours: HelloInfo, theirs: pb.Hello) -> None:
    """Raise HandshakeRefused where the numbers in the data of two peers stand for different things."""
    if theirs.protocol_max < MEANING:
        return
    own = {each.kind: each for each in ours.meanings}
    for told in theirs.meanings[:MOST_KINDS]:
        if (mine := own.get(told.kind)) is None:
            continue
        here, there = quote(ours.name), quote(theirs.name)
        try:
            refuse_told(told.kind, told.digest, told.entries)
        except ValueError as error:
            raise HandshakeRefused(f"the {mine.kind} of {there} cannot be compared with ours: {error}") from None
        sentence = mine.difference(told.digest, told.entries, told.count, here=here, there=there)
        if sentence is not None:
            raise HandshakeRefused(sentence)


def _check_start(ours: HelloInfo, theirs: pb.Hello) -> None:
    name, differs, difference = quote(theirs.name), theirs.model_digest != ours.start.whole, None
    if _tells_start(ours, theirs):
        try:
            for entries in (theirs.start.parameters, theirs.start.buffers):
                refuse_entries(entries, ENTRY_BYTES)
        except ValueError as error:
            raise HandshakeRefused(f"the initial model of {name} cannot be compared with ours: {error}") from None
        difference = ours.start.difference(theirs.start.digest, theirs.start.parameters)
        differs = difference is not None
    if differs:
        found = "" if difference is None else f" ({difference})"
        raise HandshakeRefused(f"the initial model of {name} differs from ours{found}; {ours.start.remedy(difference)}")


def _tells_start(ours: HelloInfo, theirs: pb.Hello) -> bool:
    """Whether both ends compare their initial models tensor by tensor."""
    return bool(theirs.protocol_max >= BASED and len(theirs.start.digest) == DIGEST_BYTES and ours.start.digest)


def told_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return what a hello tells of the settings of this device."""
    return {key: value[:MAX_TEXT] for key, value in sorted(settings.items())[:MAX_SETTINGS]}


def differing_settings(ours: Mapping[str, str], theirs: Mapping[str, str] | None) -> str:
    """Return, after a colon, the keys whose values differ with both values; empty where none is known to.

    `theirs` is the other device's word about itself and may be anything; None where its release tells nothing.
    """
    if theirs is None:
        return ""
    own, told = told_settings(ours), told_settings(theirs)
    keys = sorted(key for key in own.keys() | told.keys() if own.get(key) != told.get(key))
    named = [
        f"{quote(key)[1:-1]} is {_setting(told.get(key))} there and {_setting(own.get(key))} here"
        for key in keys[:_NAMED_SETTINGS]
    ]
    more = f", and {len(keys) - _NAMED_SETTINGS} more" if len(keys) > _NAMED_SETTINGS else ""
    return f": {', '.join(named)}{more}" if keys else ""


def _setting(told: str | None) -> str:
    return "not set" if told is None else quote(told)[1:-1]


def _differing_sections(ours: HelloInfo, their_digest: str) -> str:
    """Return the sections in which two configurations differ, as a user reads them."""
    our_parts, their_parts = ours.run_digest.split("."), their_digest.split(".")
    if len(our_parts) != len(ours.shared_sections) or len(their_parts) != len(our_parts):
        return "sections outside [peer], [security], [state] and [transport]"
    pairs = zip(ours.shared_sections, our_parts, their_parts, strict=True)
    return " and ".join(f"[{name}]" for name, mine, yours in pairs if mine != yours)


def read_terms(ours: HelloInfo, theirs: pb.Hello, protocol: int) -> Terms:
    """Return the terms that the hello of a peer of the same run offers. Raises HandshakeRefused for impossible
    figures."""
    if theirs.window_bytes < MIN_WINDOW_BYTES or theirs.chunk_bytes < MIN_CHUNK_BYTES:
        raise HandshakeRefused(
            f"{quote(theirs.name)} accepts a window of {theirs.window_bytes} bytes and chunks of {theirs.chunk_bytes}; "
            f"at least {MIN_WINDOW_BYTES} and {MIN_CHUNK_BYTES} are needed"
        )
    if not 0 < theirs.heartbeat_ms <= MAX_HEARTBEAT_MS:
        raise HandshakeRefused(
            f"{quote(theirs.name)} announces a heartbeat every {theirs.heartbeat_ms} ms; "
            f"1 to {MAX_HEARTBEAT_MS} are valid"
        )
    if theirs.received > MAX_FRAMES:
        raise HandshakeRefused(f"{quote(theirs.name)} claims to have {theirs.received} of our frames")
    return Terms(
        protocol=protocol,
        received=theirs.received,
        nonce=theirs.nonce,
        credit_bytes=min(theirs.window_bytes, 1 << 40),
        chunk_bytes=theirs.chunk_bytes,
        heartbeat_s=theirs.heartbeat_ms / 1000,
        seen_as=theirs.seen_as,
        software=theirs.software,
        other_buffers=ours.start.buffers.differences(theirs.start.buffers) if _tells_start(ours, theirs) else None,
        other_machine=differing_settings(ours.machine, theirs.machine or None).removeprefix(": ") or None,
    )


def check_texts(theirs: pb.Hello) -> None:
    """Check that no text of a hello is too long to be shown. Raises HandshakeRefused."""
    for told, value in theirs.ListFields():
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise HandshakeRefused(f"its hello has a {told.name} of {len(value)} characters; {MAX_TEXT} are allowed")


def _versions(lowest: int, highest: int) -> str:
    return f"version {lowest}" if lowest == highest else f"versions {lowest} to {highest}"
