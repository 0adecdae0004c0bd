"""The schema of every answer to a control call, checked before anything reads the answer.

The peer that answers is authenticated, but not trusted. A valid answer is plain JSON values with the fields below.
Other fields are dropped, so that no peer can set one that only a command may set. They may also come from a later
release. The reader judges whether an answer is true.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peer.foreign_text import printable_values
from peer.foreign_values import first_of, parse_json
from peer.records import Better

MOST_CHARACTERS = 2048
"""The longest text. Sentences are shorter; so is the address of a relayed caller."""
_MOST_NAMES = 8192
"""Peers that an answer can name: more than a run can have."""
_MOST_NEWCOMERS = 1024
_MOST_PROOF = 2 << 20

Count: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 53)]
Seconds: TypeAlias = Annotated[float, Field(ge=0.0, lt=1e12)]
Number: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 31)]
"""A peer's number."""
LongText: TypeAlias = Annotated[str, Field(max_length=1 << 20)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=64)]
Cell: TypeAlias = bool | Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | float | LongText | None
"""A value of SQLite."""
Digits: TypeAlias = Annotated[str, Field(max_length=_MOST_PROOF, pattern=r"^([0-9a-f]{2})*$")]
"""Bytes, hexadecimal."""


class Answer(BaseModel):
    """Fields of an answer, or of an object in it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, str_max_length=MOST_CHARACTERS, extra="ignore")


class NewcomerSaid(Answer):
    """A peer beyond everybody's list. Earlier releases say no certificate."""

    index: Number
    name: Name
    advertise: str | None = None
    relay: str | None = None
    certificate: Annotated[str, Field(max_length=1 << 15, pattern=r"^([0-9a-f]{2})*$")] = ""
    """DER, hexadecimal."""


class PeerSaid(Answer):
    """One peer's view of another."""

    state: str
    problem: str | None = None
    incarnation: Number = 0


class LinkSaid(Answer):
    """A link to one neighbour."""

    up: bool
    problem: str | None = None
    sends: bool = False
    receives: bool = False
    values: Count = 0
    bits_per_value: float | None = None
    entropy_bits_per_value: float | None = None
    frames: Count = 0
    payload_bytes: Count = 0
    frame_bytes: Count
    protobuf_bytes: Count = 0
    socket_bytes: Count | None = None
    packet_bytes: Count | None = None
    reconnects: Count = 0
    resent_frames: Count = 0
    offences: Count = 0
    last_offence: str | None = None
    relayed_bytes: Count | list[Count] | None = None
    unacknowledged_bytes: Count | None = None
    lateness_s: float | None = None
    late_after_s: float | None = None
    left_out: bool = False


class Claimed(Answer):
    """The evaluation of the worst peer, as it is told."""

    peer: Name
    accuracy: float | None
    metrics: dict[str, float]
    told_by: Name | None


class Diverged(Answer):
    """A divergence that other peers report."""

    name: Name
    round: Count
    reason: str
    told_by: Name


class Privacy(Answer):
    """The privacy budget spent by private local steps."""

    epsilon: float
    delta: float
    limit: float | None
    noise_multiplier: float | None = None


class Offender(Answer):
    """A neighbour that an operator should look at."""

    name: Name
    offences: Count
    last: str | None
    advice: str


class CertificateSaid(Answer):
    """Until when the certificates are valid."""

    serial: str = ""
    not_after: str = ""
    ca_not_after: str = ""
    days_left: Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)]


class Reached(Answer):
    """A limit of a device that is reached."""

    reason: str
    until: str | None


class LimitsSaid(Answer):
    """The limits of a device."""

    then: str = ""
    day_bytes: Count = 0
    month_bytes: Count = 0
    reached: list[Reached] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)


class Change(Answer):
    """A change of the members that is to come."""

    name: Name
    kind: str
    from_: Annotated[Count, Field(alias="from")]


class Suspect(Answer):
    """A member that some cannot reach."""

    name: Name
    votes: Count
    of: Count


class Protocol(Answer):
    """Versions of the protocol."""

    needed: Count
    usable: Count


class Admissions(Answer):
    """The log of admissions."""

    count: Count
    chain: str


class Precision(Answer):
    """In which precision a device trains."""

    precision: Literal["float32", "bfloat16", "int8"]
    step_s: dict[str, Annotated[float, Field(gt=0.0)]] = Field(default_factory=dict)


Names: TypeAlias = Annotated[list[Name], Field(max_length=_MOST_NAMES)]
Newcomers: TypeAlias = Annotated[list[NewcomerSaid], Field(max_length=_MOST_NEWCOMERS)]
Peers: TypeAlias = Annotated[dict[Name, PeerSaid], Field(max_length=_MOST_NAMES)]


class Status(Answer):
    """Round, loss, accuracies, links and traffic of a peer."""

    name: Name
    incarnation: Number = 0
    run: str = ""
    version: str = ""
    releases: Annotated[dict[Name, str | None], Field(max_length=_MOST_NAMES)] = Field(default_factory=dict)
    protocol: Protocol | None = None
    state: str
    round: Count
    rounds: Count | None = None
    loss: float | None = None
    accuracy: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    criterion: str = ""
    criteria: Annotated[dict[str, Better], Field(max_length=64)] = Field(default_factory=dict)
    worst: Claimed | None = None
    diverged: list[Diverged] = Field(default_factory=list)
    privacy: Privacy | None = None
    precision: Precision | None = None
    neighbors: Count = 0
    neighbors_up: Count = 0
    payload_bytes: Count
    frame_bytes: Count = 0
    protobuf_bytes: Count = 0
    socket_bytes: Count | None = None
    links: Annotated[dict[Name, LinkSaid], Field(max_length=_MOST_NAMES)]
    offenders: list[Offender] = Field(default_factory=list)
    newcomers: Newcomers = Field(default_factory=list)
    peers: Peers = Field(default_factory=dict)
    relayed: dict[str, Count] = Field(default_factory=dict)
    certificate: CertificateSaid | None = None
    admissions: Admissions | None = None
    seconds: Seconds
    limits: LimitsSaid = Field(default_factory=LimitsSaid)
    # For peers with rounds.
    budget_kbytes_per_s: float | None = None
    fraction: float | None = None
    bits: float | None = None
    push_weight: float | None = None
    durability: str = ""
    checkpoint_round: Count | None = None
    checkpoint_bytes: Count = 0
    journal_bytes: Count = 0
    members: Names = Field(default_factory=list)
    coming_changes: list[Change] = Field(default_factory=list)
    rejoined_from: Count | None = None
    set_back: str | None = None
    suspects: list[Suspect] = Field(default_factory=list)
    waiting_for: Names = Field(default_factory=list)
    # For peers without rounds.
    exchanges: Count = 0
    staleness: float | None = None
    most_staleness: float | None = None
    open_exchange: Name | None = None
    # For a peer that asks about its own fate.
    losses: Annotated[dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Digits], Field(max_length=_MOST_NAMES)] = (
        Field(default_factory=dict)
    )
    numbers: Annotated[dict[Name, Number], Field(max_length=_MOST_NAMES)] = Field(default_factory=dict)
    linked: bool = False


class Stopping(Answer):
    """A peer stops after its round."""

    stopping: bool
    round: Count
    newcomers: Newcomers = Field(default_factory=list)
    peers: Peers = Field(default_factory=dict)


class SnapshotTaken(Answer):
    """The round whose state is saved."""

    round: Count


class Reloaded(Answer):
    """The result of reading the list of peers again."""

    added: Names
    removed: Annotated[dict[Name, Count], Field(max_length=_MOST_NAMES)] = Field(default_factory=dict)
    left_to_others: Annotated[dict[Name, str], Field(max_length=_MOST_NAMES)] = Field(default_factory=dict)
    certificate_until: str | None = None


class Announced(Answer):
    """A change of the members that was announced."""

    name: Name
    round: Count
    from_: Annotated[Count, Field(alias="from")]


class Page(Answer):
    """Rows of the metrics."""

    columns: Annotated[list[str], Field(max_length=256)]
    rows: list[list[Cell]]
    last: Count | None


class Revoked(Answer):
    """The result of taking a list of revoked certificates."""

    number: Count
    revoked: Count
    news: bool


class Probed(Answer):
    """A peer's view of the caller."""

    name: Name
    software: str
    protocol: Annotated[list[Count], Field(min_length=2, max_length=2)]
    time: Seconds
    seen_as: str
    job: str
    job_parts: list[str] = Field(default_factory=list)
    settings: dict[str, str] | None = None
    neighbor: Name | None
    link: bool = False
    problem: str | None = None
    address: str | None = None
    reached: bool | None = None
    reason: str | None = None


ANSWERS: dict[str, type[Answer]] = {
    "status": Status,
    "stop": Stopping,
    "snapshot": SnapshotTaken,
    "reload": Reloaded,
    "leave": Announced,
    "remove": Announced,
    "metrics": Page,
    "revoke": Revoked,
    "probe": Probed,
}
"""Control call → schema of its answer."""
EXAMINED = {"state": "being examined by sotto doctor"}
"""The answer in place of a peer that is not running."""


def read_answer(verb: str, text: str) -> dict[str, Any]:
    """Return an answer to a control call as JSON values, its texts printable. Raises ValueError, with the reason, for
    an answer that no peer gives."""
    # A peer whose model diverged has a loss that no JSON can hold.
    tree = printable_values(parse_json(text, infinite="none"))
    try:
        answer = ANSWERS[verb].model_validate(tree)
    except ValidationError as error:
        raise ValueError(first_of(error)) from None
    return answer.model_dump(by_alias=True, exclude_unset=True)
