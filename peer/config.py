"""Every option of a run, with its unit in its name and one sentence that says what it does.

One TOML file configures one peer; the sections that describe the job are the same on every device of a run, and the
hello of the protocol compares them. `load` reads and checks a file; `SECTIONS` is the schema that `sotto init` prints.
This module knows nothing of what the options set in motion.

Precedence: command-line overrides, then environment (`SOTTO_TRAINING__LEARNING_RATE=0.05`), then the file, then the
defaults here.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from peer import config_schema
from peer.errors import ConfigError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A frozen table of options; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class RunOptions(Section):
    """The run as a whole; the same on every peer."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "digits"
    """Name of the run: peers of different runs refuse each other."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of every random number of the run."""
    rounds: Count = 1000
    """Number of gossip rounds."""


class PeerOptions(Section):
    """This device; the only section that differs from peer to peer (with `security` and `state`)."""

    index: Whole = 0
    """Position of this peer in `peers`, counted from 0."""
    listen: str | None = "0.0.0.0:7700"
    """Address and port to accept connections on; leave empty ("") to dial out only."""
    min_step_s: NonNegative = 0.0
    """Make each local step last at least this long: stands for a device of known speed in a study."""
    slow_down: NonNegative = 0.0
    """Wait this many times the duration of each local step after it: makes a fast machine a slow peer for a study."""
    device: str = "cpu"
    """torch device of the local step: cpu or cuda."""
    metrics_listen: str | None = None
    """Address and port to serve metrics for Prometheus on, to whoever asks (127.0.0.1:9470); nowhere by default."""


class PeerAddress(Section):
    """One entry of `[[peers]]`: a peer as the others see it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,62}$")]
    """Name of the peer; its certificate is made out to it."""
    advertise: str | None = None
    """Address and port under which the others reach it; without one it dials all its neighbours itself."""
    relay: str | None = None
    """Name of a reachable peer that connects it with neighbours that cannot be dialled either."""
    joins_later: bool = False
    """The run begins without it; it becomes a member when it is started. Such peers stand at the end of the list."""
    admitted: bool = False
    """It was signed in when the others had their lists (`sotto sign`), and joins like those above. Only its own list
    has to name it; such peers stand last of all."""

    @property
    def is_first(self) -> bool:
        """Whether the run begins with it."""
        return not (self.joins_later or self.admitted)


class SecurityOptions(Section):
    """Who may connect."""

    mode: Literal["mtls", "tls+token", "insecure"] = "mtls"
    """mtls: both ends show a certificate of the run's CA. tls+token: listeners show one and callers a shared token, for
    load balancers that end TLS. insecure: no encryption and no identity, for trials only."""
    ca: str = "ca.pem"
    """Certificate of the run's CA (path relative to this file). tls+token: what listeners are checked against, "system"
    for the authorities that this machine trusts."""
    certificate: str = "peer.pem"
    """Certificate of this peer."""
    key: str = "peer.key"
    """Private key of this peer."""
    revoked: str = "revoked.pem"
    """The CA's list of revoked certificates, as far as this peer has heard of one; it need not exist."""
    token: str = "token"
    """tls+token: file with the token, the same on every device."""
    plain_listener: bool = False
    """tls+token: listen without TLS, where only the load balancer that ends it can connect."""


class StateOptions(Section):
    """What this peer keeps on disk."""

    directory: str = "state"
    """Folder of checkpoints and metrics (path relative to this file)."""
    durability: Literal["process", "power"] = "process"
    """process: what happens is written to the journal before anything leaves, and survives kill -9. power: also synced
    in every round, and survives a power cut."""
    checkpoint_every_rounds: Whole = 100
    """Save a checkpoint every this many rounds; 0: only at the end, on SIGTERM and when the journal is long."""
    keep_checkpoints: Count = 2
    """How many checkpoints to keep, each with the journal after it."""
    journal_mbytes: Count = 512
    """Save a checkpoint early when the journal is larger than this, in units of 1024² bytes."""
    recover_within_s: Positive = 2.0
    """Save a checkpoint early when repeating the rounds in the journal would take longer than this."""
    ledger: bool = False
    """Also write every model, weight and frame of every round: what an audit of the conservation of mass needs."""


class GraphOptions(Section):
    """Who sends to whom, with which weight, in which round."""

    kind: str | tuple[str, ...] = "directed-ring"
    """A graph family (`sotto list graphs`), or several that take turns."""
    weights: Literal["auto", "uniform", "metropolis", "explicit"] = "auto"
    """uniform: every sender splits evenly (column stochastic). metropolis: doubly stochastic on undirected graphs."""
    period: Count = 1
    """Where graphs take turns: how long each one stays, in `period_unit`."""
    period_unit: Literal["rounds", "epochs"] = "rounds"
    """Unit of `period`; an epoch is one pass of the largest shard."""
    degree: Count = 3
    """Degree of random-regular."""
    probability: Fraction = 0.4
    """Edge probability of erdos-renyi."""
    seed: Whole = 0
    """Seed of the random graphs."""
    file: str | None = None
    """JSON or TOML file with explicit matrices or edges, for kind = "file" (path relative to this file)."""


class AlgorithmOptions(Section):
    """How models are averaged."""

    name: str = "quant-sgp"
    """An algorithm (`sotto list algorithms`)."""
    averaging_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """η, how far each round moves toward the neighbours; by default a good value for the algorithm."""
    whole_below: Whole = 0
    """Layers with fewer numbers than this are sent whole, uncompressed (counted like all the rest)."""
    push_weight_guard: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Scale the local step by min(1, u / this): keeps a peer that hears nobody from exploding. 0 turns it off."""
    final_rounds: Whole | Literal["auto"] = 40
    """scsp: how many of the last rounds are full-precision gossip; "auto": enough to shrink the distance 1000-fold."""
    server: Whole = 0
    """parameter-server: index of the peer that is the server."""
    model_bits: Annotated[int, Field(ge=1, le=16)] | None = None
    """parameter-server: also quantize the model, to this many bits (the empirical study's variant)."""
    model_range: Positive = 1.0
    """parameter-server with model_bits: the grid spans ± this."""
    theta: Literal["verified", "constant", "theorem"] = "verified"
    """Moniqua's θ. verified: adapted, checked by hash, repaired exactly. constant: `theta_value`. theorem: bounds."""
    theta_value: Positive = 2.0
    """θ itself (constant), or the first θ (verified)."""


class CompressorOptions(Section):
    """What is left out of a message."""

    kind: str = "top_k"
    """A compressor (`sotto list compressors`)."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.02
    """top_k, random_k: fraction of each layer that is sent."""
    value_bits: Annotated[int, Field(ge=1, le=16)] | None = 4
    """top_k, random_k: quantize the values that are sent to this many bits, sign included; none sends them exactly."""
    value_type: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of values that travel unquantized (none, top_k and random_k without value_bits)."""
    bits: Annotated[int, Field(ge=1, le=16)] = 8
    """qsgd, modulo: bits of each number."""
    unbiased: bool | None = None
    """qsgd, random_k: the unbiased or the biased variant; by default what the algorithm's theory asks for."""
    step: Positive = 0.01
    """grid: distance of two levels."""
    rounding: Literal["nearest", "stochastic", "dither"] | None = None
    """modulo: nearest, stochastic or dither; grid: nearest or stochastic. By default dither, and stochastic."""
    against_last: bool = True
    """modulo: tell codes as differences to those of the round before, layer by layer, where that takes fewer bytes. For
    verified θ on the CPU and without a budget; both ends of a link keep a copy of the codes. All peers alike."""
    budget_kbytes_per_s: Positive | None = None
    """What this peer may send over each of its links, headers included, in units of 1000 bytes/s: it lowers fraction or
    bits to fit, and waits where that is not enough. Peers may set different numbers, but all of them or none."""


class TrainingOptions(Section):
    """The local step."""

    task: str = "digits"
    """A task (`sotto list tasks`), or your own as "package.module:make_task"."""
    task_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Passed to the task as keyword arguments."""
    precision: Literal["auto", "float32", "int8"] = "auto"
    """int8: compute in 8 bits, where the model is built of layers that can. auto: what the task was tuned for, int8 for
    digits; float32 for your own."""
    batch_size: Count = 8
    """Samples of a batch on each peer."""
    local_steps: Count = 1
    """τ, gradient steps for each gossip round."""
    learning_rate: Positive = 0.1
    """γ at its highest."""
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    """How γ falls."""
    warmup_rounds: Whole = 50
    """Rounds of linear warm-up of γ."""
    step_milestones: tuple[Fraction, ...] = (0.5, 0.75)
    """step: at which fractions of the run γ is multiplied by step_factor."""
    step_factor: Positive = 0.1
    """step: the factor."""
    momentum: Literal["none", "heavy-ball", "nesterov", "qg", "qg-nesterov", "adam"] = "nesterov"
    """qg and qg-nesterov are quasi-global momentum."""
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum coefficient (Adam's β₁)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Adam's β₂."""
    mu: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Quasi-global momentum: μ; by default beta."""
    weight_decay: NonNegative = 0.0
    """λ of the weight decay."""
    only: tuple[str, ...] = ()
    """Train, and send, only parameters whose name matches one of these patterns ("head.*"); all when empty."""
    warm_start: str | None = None
    """safetensors file to start from (path relative to this file)."""


class DataOptions(Section):
    """The data and how it is split among the peers."""

    directory: str | None = None
    """Folder of the data set, for tasks that read one."""
    partition: Literal["skew", "dirichlet", "shards", "iid"] = "skew"
    """How the training data is dealt to the peers (every device computes the same split alone)."""
    skew: Fraction = 0.8
    """skew: the fraction that is sorted by label and dealt in blocks; the rest is dealt at random."""
    alpha: Positive = 0.5
    """dirichlet: concentration; smaller is more skewed."""
    labels_per_peer: Count = 2
    """shards: different labels of a peer."""
    holdout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of each peer's own data that it keeps as a private test split."""


class RoundOptions(Section):
    """What a round waits for."""

    late: Literal["wait", "skip"] = "wait"
    """wait for every neighbour; or skip a late one: go on without it and apply its message when it comes."""
    late_after_s: Positive = 2.0
    """skip: how long after the own message a neighbour counts as late; with adaptive deadlines the most."""
    deadlines: Literal["adaptive", "fixed"] = "adaptive"
    """skip: adaptive gives each link a deadline of its own, from how late its last 32 messages came. fixed:
    `late_after_s` for all."""
    max_skipped_rounds: Count = 20
    """skip: how many rounds in a row a neighbour may be missed before the peer waits for it after all. Asynchronous
    algorithms: how many steps a peer takes while it has no neighbour at all."""
    leave_out_after_s: Positive = 10.0
    """skip, with push-sum algorithms: give no weight to a neighbour that has confirmed nothing for this long, until it
    does; neighbours confirm once a second."""
    abandon_after_s: Positive = 30.0
    """Asynchronous algorithms: give up an exchange whose partner has been away this long; if it had answered, half of
    the exchange is lost."""


class EvaluationOptions(Section):
    """When accuracy is measured."""

    every_rounds: Whole = 50
    """Evaluate every this many rounds (and after the last); 0 only after the last."""
    share_every: Count = 5
    """Spread every this many-th evaluation to all peers by gossip (and the last one)."""
    keep_models: bool = False
    """Leave the model of every evaluation in the state folder: `sotto up` measures the consensus distance from them."""


class GuardOptions(Section):
    """When to give up."""

    action: Literal["stop", "rollback"] = "stop"
    """stop: end the run and say why. rollback: also put the state back to the last checkpoint all peers have."""
    max_loss: Positive = 1e4
    """Stop when the training loss exceeds this or is not finite."""
    max_neighbor_distance: Positive = 1e4
    """Stop when the local consensus distance exceeds this many times the norm of the model."""
    min_push_weight: Positive = 1e-6
    """Stop when the push-sum weight falls below this."""


class TransportOptions(Section):
    """Sockets. The defaults suit links from 1 Mbit/s to a LAN."""

    chunk_kbytes: Annotated[int, Field(ge=1, le=4096)] = 1024
    """Largest piece of a message on the stream, in units of 1024 bytes."""
    window_kbytes: Annotated[int, Field(ge=64)] = 8192
    """Credit: bytes on their way to one neighbour that it has not taken yet, in units of 1024 bytes."""
    max_message_mbytes: Annotated[int, Field(ge=1)] = 2048
    """Largest message that is accepted, in units of 1024² bytes."""
    heartbeat_s: Positive = 10.0
    """An idle link says that it lives this often; after three silent intervals it is closed and dialled anew."""
    dial_timeout_s: Positive = 10.0
    """How long one attempt to connect may take."""
    backoff_max_s: Positive = 30.0
    """Longest pause between two attempts to reconnect (they start at 0.1 s and double, with jitter)."""
    give_up_after_s: Positive = 600.0
    """End the run with an error when a neighbour that is waited for stays away this long."""
    relay_kbytes_per_s: NonNegative = 1250.0
    """What this peer carries between others that cannot dial each other, in units of 1000 bytes/s; 0: nothing."""
    linger_s: Positive = 20.0
    """After the last round: how long to stay for neighbours that have not finished."""


class Config(Section):
    """The whole configuration of one peer."""

    run: RunOptions = RunOptions()
    peer: PeerOptions = PeerOptions()
    peers: tuple[PeerAddress, ...] = ()
    security: SecurityOptions = SecurityOptions()
    state: StateOptions = StateOptions()
    graph: GraphOptions = GraphOptions()
    algorithm: AlgorithmOptions = AlgorithmOptions()
    compressor: CompressorOptions = CompressorOptions()
    training: TrainingOptions = TrainingOptions()
    data: DataOptions = DataOptions()
    rounds: RoundOptions = RoundOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    guard: GuardOptions = GuardOptions()
    transport: TransportOptions = TransportOptions()

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Config:
        names = [peer.name for peer in self.peers]
        if len(set(names)) != len(names):
            raise ValueError("two peers have the same name")
        reachable = {peer.name for peer in self.peers if peer.advertise is not None}
        for peer in self.peers:
            if peer.relay is not None and peer.relay not in reachable:
                raise ValueError(f"the relay of {peer.name}, {peer.relay!r}, is no peer with an advertise address")
        later = [2 if peer.admitted else int(peer.joins_later) for peer in self.peers]
        if later != sorted(later) or (later and all(later)):
            raise ValueError(
                "peers with joins_later stand at the end of the list, after at least one that begins, and those that "
                "were admitted after them"
            )
        if self.peers and self.peer.index >= len(self.peers):
            raise ValueError(f"peer.index is {self.peer.index}, but there are {len(self.peers)} peers (counted from 0)")
        return self

    @property
    def num_peers(self) -> int:
        return len(self.peers)

    @property
    def num_listed(self) -> int:
        """How many peers the lists of all devices have in common: those that were not admitted later."""
        return sum(not peer.admitted for peer in self.peers)

    def num_members(self, num_peers: int) -> int:
        """Return how many of the first `num_peers` peers take part from round 0 on."""
        return num_peers - sum(not peer.is_first for peer in self.peers[:num_peers])

    def run_digest(self) -> str:
        """Return hex digests, joined by dots, of what all peers of a run must share, in the order of SHARED_SECTIONS.

        The hello compares them, and can name the part that differs.
        """
        job: dict[str, Any] = {name: getattr(self, name).model_dump(mode="json") for name in SHARED_SECTIONS[:-1]}
        # Where files lie is each device's own business.
        job["data"].pop("directory")
        job["graph"].pop("file")
        # So is how much its links carry; only whether there is a limit decides about the averaging rate.
        job["compressor"]["budget_kbytes_per_s"] = self.compressor.budget_kbytes_per_s is not None
        job["peers"] = [peer.name for peer in self.peers[: self.num_listed]]
        texts = (json.dumps(job[name], sort_keys=True) for name in SHARED_SECTIONS)
        return ".".join(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)


SHARED_SECTIONS = ("run", "graph", "algorithm", "compressor", "training", "data", "rounds", "evaluation", "peers")
"""The sections that describe the job, and the names of the peers."""

SECTIONS: Mapping[str, type[Section]] = {
    "run": RunOptions,
    "peer": PeerOptions,
    "peers": PeerAddress,
    "security": SecurityOptions,
    "state": StateOptions,
    "graph": GraphOptions,
    "algorithm": AlgorithmOptions,
    "compressor": CompressorOptions,
    "training": TrainingOptions,
    "data": DataOptions,
    "rounds": RoundOptions,
    "evaluation": EvaluationOptions,
    "guard": GuardOptions,
    "transport": TransportOptions,
}

ENVIRONMENT_PREFIX = "SOTTO_"


def load(
    path: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Return the checked configuration of a file with environment and `section.key=value` overrides applied.

    Without a path the defaults are the base. Raises ConfigError that names file, key, value and what is valid.
    """
    tree = read_toml(path) if path is not None else {}
    environment = os.environ if environment is None else environment
    sources: dict[str, str] = {}
    for variable, text in sorted(environment.items()):
        if variable.startswith(ENVIRONMENT_PREFIX) and "__" in variable:
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            sources[key] = f"environment variable {variable}"
            _put(tree, key, _parse_value(text), source=sources[key])
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals or "." not in key:
            raise ConfigError("an override has the form section.key=value", value=override)
        sources[key] = "command line"
        _put(tree, key, _parse_value(text), source=sources[key])
    return check(tree, file=str(path) if path is not None else None, sources=sources)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ConfigError if it cannot be read or parsed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such file; `sotto init` writes one", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=str(path)) from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text", file=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"is not valid TOML: {error}", file=str(path)) from None


def check(tree: Mapping[str, Any], *, file: str | None = None, sources: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of already parsed tables. Raises ConfigError for the first thing wrong.

    `sources` says where a dotted key came from, where that is not the file.
    """
    try:
        return Config.model_validate({name: _plain(name, table, file, sources or {}) for name, table in tree.items()})
    except ValidationError as error:
        raise _as_config_error(error, file, sources or {}) from None


def _plain(section: str, table: object, file: str | None, sources: Mapping[str, str]) -> object:
    """Return the table with "none" turned into None, which TOML cannot write, where a key may be unset.

    Raises ConfigError for true and false where a number belongs: Python would take them for 1 and 0.
    """
    model = SECTIONS.get(section)
    if model is None or not isinstance(table, dict):
        return table
    result = dict(table)
    for name in table.keys() & model.model_fields.keys():
        if table[name] == "none" and config_schema.may_be_unset(model, name):
            result[name] = None
        elif isinstance(table[name], bool) and not config_schema.takes_booleans(model, name):
            key, valid = f"{section}.{name}", config_schema.accepts(model, name)
            file = _source(key, sources) or file
            raise ConfigError("is not valid", key=key, value=table[name], valid=valid, file=file)
    return result


def _put(tree: dict[str, Any], key: str, value: object, *, source: str) -> None:
    """Set a dotted key in the tree."""
    section, *names = key.split(".")
    if section not in SECTIONS:
        raise ConfigError("there is no such section", key=section, valid=", ".join(SECTIONS), file=source)
    if section == "peers":
        raise ConfigError("is a list that only the file can hold, as [[peers]] tables", key=section, file=source)
    table = tree
    for name in (section, *names[:-1]):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError("should be a table", key=name, value=table, file=source)
    table[names[-1]] = value


def _parse_value(text: str) -> object:
    """Return the TOML value that the text spells, or the text itself where it spells none (unquoted strings)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _as_config_error(error: ValidationError, file: str | None, sources: Mapping[str, str]) -> ConfigError:
    first = error.errors(include_url=False)[0]
    location = [part for part in first["loc"] if not _is_type_tag(part)]
    key = ".".join(str(part) for part in location)
    file = _source(key, sources) or file
    names = [str(part) for part in location if isinstance(part, str)]
    section = SECTIONS.get(names[0]) if names else None
    if first["type"] == "value_error":
        return ConfigError(str(first["ctx"]["error"]), key=key or None, file=file)
    if first["type"] == "extra_forbidden":
        valid = ", ".join(section.model_fields if section is not None else SECTIONS)
        return ConfigError(f"there is no such {'key' if section else 'section'}", key=key, valid=valid, file=file)
    if first["type"] == "missing":
        return ConfigError("is missing", key=key, file=file)
    if section is None or len(names) == 1:
        valid = "[[peers]] tables" if key == "peers" else f"a table, [{key}]"
        return ConfigError("is not a table of options", key=key, value=first["input"], valid=valid, file=file)
    valid = config_schema.accepts(section, names[1])
    return ConfigError("is not valid", key=key, value=first["input"], valid=valid, file=file)


def _source(key: str, sources: Mapping[str, str]) -> str | None:
    """Return where the value of `key`, or a part or the whole of it, was set, unless that was the file."""
    for name, source in sources.items():
        if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}."):
            return source
    return None


def _is_type_tag(part: object) -> bool:
    """pydantic adds the branch of a union to the location; users know only keys and positions."""
    return isinstance(part, str) and (part.startswith(("literal[", "constrained-", "tuple[")) or part in {"str", "int"})
