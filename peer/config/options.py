"""Every option of a run, with its unit in its name and one sentence on its effect.

One TOML file configures one peer. The shared sections are the same on every device of a run; peers compare their
digest in the hello. `load` reads and checks a file; `SECTIONS` is the schema that `sotto init` prints. This module
does not know what the options control.

Precedence: command-line overrides, then environment (`SOTTO_TRAINING__LEARNING_RATE=0.05`), then the file, then the
defaults here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zoneinfo
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from peer.config import schema
from peer.errors import ConfigError, why_not_utf8
from peer.files import MEANT, instead_of
from peer.foreign_text import normal_name
from peer.foreign_values import parse_toml

DIGITS = "digits"
"""`training.task` that needs no data beside the installation."""

OWN_LOOP = "loop"
"""`training.task` of a run whose local steps a script of the user's does."""

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
    """Name of the run; without one, that of the task, or of the module of your own. Peers of runs with different names
    refuse each other."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all random numbers in the run."""
    rounds: Count = 1000
    """Number of gossip rounds."""
    average: bool = True
    """After the last round, form the average of the models of all members, the same file on every device. Each device
    receives for it what differs from its own of every other one, in full precision and beside
    `compressor.budget_kbytes_per_s`. Not under robust mixing, which it would undo."""


class PeerOptions(Section):
    """Settings of this device; they may differ from peer to peer."""

    index: Whole = 0
    """Position of this peer in `[[peers]]`, counted from 0."""
    listen: str | None = "0.0.0.0:7700"
    """Address and port on which to accept connections; empty ("") to accept none and only dial out."""
    min_step_s: NonNegative = 0.0
    """Minimum duration of a local step. Studies use it to imitate a device of known speed."""
    slow_down: NonNegative = 0.0
    """After each local step, wait this many times its duration. Studies use it to imitate a slow device."""
    device: str = "cpu"
    """PyTorch device that computes the local step: cpu or cuda."""
    metrics_listen: str | None = None
    """Address and port on which to serve Prometheus metrics, without authentication (for example 127.0.0.1:9470). By
    default they are not served."""


class PeerAddress(Section):
    """One entry of `[[peers]]`: a peer as the others see it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,62}$")]
    """Name of the peer. Its certificate is issued to this name."""
    advertise: str | None = None
    """Address and port at which other peers reach it. Without one, it dials all its neighbours itself."""
    relay: str | None = None
    """Name of a reachable peer that relays between it and neighbours that cannot be dialled either."""
    joins_later: bool = False
    """The run begins without this peer; it becomes a member when it is started. Such peers come last in the list."""
    admitted: bool = False
    """This peer was admitted with `sotto admin sign` after the other peers had their lists. It becomes a member when it
    is started. Only its own list has to name it; such peers come after all others."""

    @property
    def is_first(self) -> bool:
        """Whether the run begins with it."""
        return not (self.joins_later or self.admitted)


class SecurityOptions(Section):
    """Access to the run."""

    mode: Literal["mtls", "tls+token", "insecure"] = "mtls"
    """mtls: both ends present a certificate signed by the run's CA. tls+token: listeners present a certificate and
    callers a shared token, for load balancers that terminate TLS. insecure: no encryption and no authentication, for
    experiments only."""
    ca: str = "ca.pem"
    """Certificate of the run's CA (path relative to this file). tls+token: the CA that must have signed the listener's
    certificate; "system" accepts the authorities that this machine trusts."""
    certificate: str = "peer.pem"
    """Certificate of this peer (path relative to this file)."""
    key: str = "peer.key"
    """Private key of this peer (path relative to this file)."""
    revoked: str = "revoked.pem"
    """The CA's list of revoked certificates, as this peer last received it. The file need not exist."""
    token: str = "token"
    """tls+token: file that holds the shared token."""
    plain_listener: bool = False
    """tls+token: listen without TLS. Only for a port that nothing but the load balancer can reach."""
    unsigned: Literal["refuse", "accept"] = "refuse"
    """mtls: treatment of statements about members that their author did not sign. accept: only while some devices run a
    release that signs nothing."""


class StateOptions(Section):
    """This peer's storage on disk."""

    directory: str = "state"
    """Folder for checkpoints, journals and metrics (path relative to this file)."""
    durability: Literal["process", "power"] = "process"
    """process: the journal is written before any message leaves, so the state survives kill -9. power: the journal is
    also synced to disk in every round, so the state survives a power failure."""
    checkpoint_every_rounds: Whole | None = None
    """Rounds between checkpoints. A training script that was killed repeats its steps since the last one. By default
    100, and with a script as many as have 16 steps (256 for more than 16 million parameters). 0: save only at the end,
    on SIGTERM and when the journal reaches a limit below."""
    keep_checkpoints: Count = 2
    """Number of checkpoints to keep, each with the journal that follows it."""
    journal_mbytes: Count = 512
    """Save a checkpoint early when the journal exceeds this size."""
    recover_within_s: Positive = 2.0
    """Save a checkpoint early when replaying the journal would take longer than this. A script may repeat steps for an
    eighth of `transport.give_up_after_s` and of `rounds.lost_after_s`."""
    ledger: bool = False
    """Also write an audit log with every model, weight and frame of each round, to check that mass is conserved."""


class GraphOptions(Section):
    """Edges between the peers in each round, and their weights."""

    kind: str | tuple[str, ...] = "directed-ring"
    """A graph (`sotto lab list graphs`), or a list of graphs that take turns."""
    weights: Literal["auto", "uniform", "metropolis", "explicit"] = "auto"
    """uniform: each sender splits its weight evenly (column stochastic). metropolis: doubly stochastic, for undirected
    graphs. explicit: those that the graph or its file defines. auto: the choice that suits graph and algorithm."""
    period: Count = 1
    """Duration of each graph where several take turns, in units of `period_unit`."""
    period_unit: Literal["rounds", "epochs"] = "rounds"
    """Unit of `period`. An epoch is one pass over the largest share of the training data."""
    degree: Count = 3
    """random-regular: number of neighbours of each peer."""
    probability: Fraction = 0.4
    """erdos-renyi, directed-erdos-renyi: probability of each edge."""
    seed: Whole = 0
    """Seed of random graphs."""
    file: str | None = None
    """JSON or TOML file with explicit matrices or edges, for kind = "file" (path relative to this file)."""


class AlgorithmOptions(Section):
    """Averaging of the models."""

    name: str = "quant-sgp"
    """An algorithm (`sotto lab list algorithms`)."""
    averaging_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """η, how far each round moves a model towards those of its neighbours. The default depends on the algorithm and on
    the strength of the compression."""
    drift_correction: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = 0.0
    """quant-sgp: β, how fast each peer learns how its own gradients differ from the mean of all peers', and takes the
    difference out of them; on skewed data peers then stay closer together. It costs no byte, and one vector as long as
    the model. auto: a sixth of the averaging rate times the spectral gap of the graph. 0: no correction. Jobs on
    digits that begin without a file set "auto"."""
    mixing: Literal["plain", "clipped", "trimmed-mean"] = "plain"
    """Mixing rule for neighbours' models. plain: their weighted average. The others bound the harm of a member that
    sends poisonous models, with d-psgd, choco-sgd and dcd-psgd on undirected graphs. clipped: no neighbour moves the
    model further than a radius. trimmed-mean: the largest and the smallest value of each number are left out."""
    attackers: Annotated[int, Field(ge=1)] = 1
    """clipped, trimmed-mean: number of neighbours of each peer assumed to lie."""
    clip_radius: Positive | None = None
    """clipped: the radius, as the norm of a difference between two models. The default follows the distances to the
    neighbours in each round."""
    memory: Literal["float32", "bfloat16"] = "float32"
    """Number type of copies of models (choco-sgd, quant-sgp, dcd-psgd) and of error memories (sparse-push, scsp,
    deep-squeeze, low-rank, compressed-allreduce). bfloat16 takes half of the memory, and is rounded stochastically."""
    whole_below: Whole = 0
    """Send layers with fewer numbers than this uncompressed."""
    push_weight_guard: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Push-sum: scale the local step by min(1, u / this), so that a peer that receives nothing does not diverge. 0: do
    not scale."""
    final_rounds: Whole | Literal["auto"] = 40
    """scsp: number of final rounds of full-precision averaging. "auto": enough to reduce the consensus distance by a
    factor of 1,000."""
    server: Whole = 0
    """parameter-server: index of the peer that acts as the server."""
    model_bits: Annotated[int, Field(ge=1, le=16)] | None = None
    """parameter-server: also quantize the model to this many bits, as in the empirical study."""
    model_range: Positive = 1.0
    """parameter-server with model_bits: the quantization grid covers ± this value."""
    rank: Annotated[int, Field(ge=1, le=64)] = 4
    """low-rank: number of vectors of each factor of a matrix. More follow the gradients more closely and cost
    proportionally more bytes. New jobs begin with 16."""
    factor_bits: Annotated[int, Field(ge=2, le=16)] = 8
    """low-rank: bits per number of the factors. New jobs begin with 6."""
    factor_exponents: Literal["vector", "layer"] = "vector"
    """low-rank: what has to fit into `factor_bits`. vector: the largest number of each vector. layer: that of all
    vectors of a layer, so that small ones take few bytes. New jobs on images begin with "layer"; set 2 bits more than
    with "vector"."""
    outer_rate: Positive = 1.0
    """compressed-allreduce, low-rank: how many times as far as the mean of the peers' steps the model moves."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """compressed-allreduce, low-rank, with adamw or muon in several local steps: β of Nesterov's momentum on the mean
    of the peers' steps, as in DiLoCo."""
    theta: Literal["verified", "constant", "theorem"] = "verified"
    """Moniqua's choice of θ. verified: θ adapts, a hash checks each decoded message, and a failed one is repaired
    exactly. constant: `theta_value`. theorem: the bound of the paper's theorem."""
    theta_value: Positive | None = None
    """Moniqua: the value of θ (constant; by default 2), or its first value (verified; by default 0.01: models begin
    alike, and θ grows with the distances between them)."""


class CompressorOptions(Section):
    """Compression of messages."""

    kind: str = "top_k"
    """A compressor (`sotto lab list compressors`)."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.02
    """top_k, random_k: fraction of each layer that is sent. Jobs that begin without a file set more."""
    value_bits: Annotated[int, Field(ge=1, le=16)] | None = 4
    """top_k, random_k: bits for each value that is sent, sign included. "none": send values exactly."""
    four_levels: bool = False
    """top_k, random_k: two value bits are a sign and one of two sizes, in place of −s, 0 or s, which round most of what
    was chosen to zero where few numbers are large. New jobs with `value_bits = 2` begin with it."""
    value_type: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number type of values that are not quantized (none; top_k and random_k without value_bits)."""
    bits: Annotated[int, Field(ge=1, le=16)] = 8
    """qsgd, modulo: bits per number."""
    unbiased: bool | None = None
    """qsgd, random_k: whether to use the unbiased variant. The default follows the algorithm's theory."""
    step: Positive = 0.01
    """grid: distance between two levels."""
    rounding: Literal["nearest", "stochastic", "dither"] | None = None
    """modulo: nearest, stochastic or dither (the default). grid: nearest or stochastic (the default)."""
    against_last: bool = True
    """modulo: code a layer against its codes of the round before (the reference codes) where that takes fewer bytes.
    Needs verified θ, the CPU and no bandwidth budget. Both ends of a link keep a copy of the codes."""
    coding: Literal["auto", "entropy", "packed"] = "auto"
    """entropy: spend processor time on fewer bytes. packed: every number takes its full width, for links that are
    faster than the coder. auto: packed for whole models (none) of at least a million numbers while the kernel measures
    more than 100 MB/s on each link to a receiver, entropy otherwise."""
    budget_kbytes_per_s: Positive | None = None
    """Limit on the data that this peer sends over each link, headers included. A controller lowers fraction or bits to
    fit, and the peer waits where that is not enough. Peers may set different limits, but either all set one or none
    does."""


class TrainingOptions(Section):
    """The local step."""

    task: str = DIGITS
    """A task (`sotto lab list tasks`), your own as "package.module:make_task", or "loop" where a training script of
    yours joins the run with `sottovoce.join`. The script then decides all other keys of this section."""
    task_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Keyword arguments for the task."""
    precision: Literal["auto", "float32", "bfloat16", "int8", "fastest"] = "auto"
    """bfloat16: convolutions and linear layers of any model take 16-bit operands, which is faster on processors with
    AMX. int8: train in 8-bit arithmetic, with a model built of layers that support it. auto: int8 for the
    task digits, float32 for all others. fastest: each device trains in the precision in which a few steps, measured
    before its first round, took least time."""
    batch_size: Count = 8
    """Samples per batch on each peer."""
    local_steps: Count = 1
    """τ, the number of gradient steps in each round."""
    learning_rate: Positive = 0.1
    """γ, the learning rate at the peak of its schedule."""
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    """Learning-rate schedule: how γ falls during the run."""
    warmup_rounds: Whole = 50
    """Number of rounds over which γ first rises linearly."""
    final_rate: Fraction = 0.0
    """cosine: the learning rate after the last round, as a fraction of that at the peak."""
    step_milestones: tuple[Fraction, ...] = (0.5, 0.75)
    """step: fractions of the run at which γ is multiplied by step_factor."""
    step_factor: Positive = 0.1
    """step: factor applied to γ at each milestone."""
    momentum: Literal["none", "heavy-ball", "nesterov", "qg", "qg-nesterov", "adam", "adamw", "muon", "script"] = (
        "nesterov"
    )
    """Kind of momentum. qg and qg-nesterov are quasi-global momentum. adamw: Adam, with the weight decay beside it
    (decoupled). muon: adamw, but steps of matrices between embeddings and last layer are orthogonal. script: the
    optimizer of a training script that averages gradients; only the script sets it."""
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum coefficient β (β₁ of Adam)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """β₂ of Adam."""
    mu: Annotated[float, Field(ge=0, lt=1)] | None = None
    """μ of quasi-global momentum; by default equal to beta."""
    weight_decay: NonNegative = 0.0
    """λ, the weight-decay coefficient."""
    clip_norm: Positive | None = None
    """Shorten the gradient of each step to this norm before momentum and weight decay; with algorithms that apply
    momentum to the mean of all gradients, shorten that mean. By default none is shortened."""
    only: tuple[str, ...] = ()
    """Train and send only parameters whose names, or whose modules' names, match one of these patterns ("head").
    Empty: all parameters."""
    warm_start: str | None = None
    """safetensors file with the initial weights (path relative to this file)."""
    label_adjustment: Literal["auto"] | bool = "auto"
    """Logit adjustment: train on what the shares of the classes among this peer's samples leave to be learned, and
    judge without them. auto: where those shares differ from those of all data by more than chance, but not where all
    peers hold one model at every step (with algorithms that average all gradients before it, and with sgp on a
    complete graph), nor with algorithm.drift_correction."""
    class_balance: Fraction = 0.0
    """α: this peer draws a class of which it has n samples in proportion to n^(1−α). 0: every sample equally often; 1:
    every class equally often."""
    class_balance_follows_rate: bool = False
    """Let α fall with γ after the warm-up, from one pass over the peer's samples to the next."""


class PrivacyOptions(Section):
    """Differential privacy of this device's samples (DP-SGD); peers may choose differently. Off unless
    `noise_multiplier` or `epsilon` is set."""

    noise_multiplier: Positive | None = None
    """σ, the standard deviation of the noise of a step, in units of `clip_norm`."""
    epsilon: Positive | None = None
    """ε that the whole run may spend. Without `noise_multiplier`, the noise follows from it; with it, a run that would
    spend more is refused."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """δ at which ε is accounted; choose less than 1 / (samples of this device)."""
    clip_norm: Positive = 1.0
    """C: the gradient of each sample is shortened to this norm."""
    simulation_seed: Whole = 0
    """Seed of noise and sampling in `sotto simulate`. Real peers draw a secret instead."""

    @property
    def is_on(self) -> bool:
        """Whether the local step is private."""
        return self.noise_multiplier is not None or self.epsilon is not None


Vote: TypeAlias = Literal["vote"]
VOTE: Vote = "vote"


class DataOptions(Section):
    """The training data, and how it is split among the peers."""

    directory: str | None = None
    """Folder that holds the data set, for tasks that read files."""
    classes: tuple[str, ...] = ()
    """Names of the class folders, in the order of their numbers, for tasks that read them: the same on all devices, of
    which each may lack some. Empty: each device numbers the folders that it has in the order of their names."""
    partition: Literal["skew", "dirichlet", "shards", "by-label", "iid", "own"] = "skew"
    """Split of the training data among the peers. Each device computes the same split on its own. by-label: each class
    (with the task text: each subfolder, in the order of names) is one peer's. own: nothing is split; every device
    trains on all samples that its task returns there."""
    skew: Fraction = 0.8
    """skew: fraction of the data that is sorted by label and dealt in blocks. The rest is dealt at random."""
    alpha: Positive = 0.5
    """dirichlet: concentration parameter. Smaller values give more skewed data."""
    labels_per_peer: Count = 2
    """shards: number of different labels on each peer."""
    holdout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of its own data that each peer holds out as a private test set."""
    weight_by_samples: bool = False
    """own: a device with n samples takes steps n · (number of devices) / total_samples times as long as without, so
    that every sample counts alike. Without it, every device counts alike."""
    total_samples: Count | None = None
    """own, with weight_by_samples: how many samples all devices have together, hold-outs included."""
    class_shares: tuple[NonNegative, ...] | Vote = ()
    """own: how frequent the classes are in the data of all devices, a number for each class in their order: fractions,
    percentages or counts. Logit adjustment needs to know. Empty: all classes are taken to be equally frequent. vote:
    before the first round, each device tells all others how frequent they are in its own data, and the mean counts."""

    @field_validator("classes")
    @classmethod
    def _as_all_devices_write_them(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(normal_name, names))


class RoundOptions(Section):
    """Waiting for neighbours in a round."""

    late: Literal["wait", "skip"] = "wait"
    """wait: wait for every neighbour. skip: continue without a late neighbour and apply its message when it arrives."""
    late_after_s: Positive = 2.0
    """skip: how long a peer waits for a neighbour after sending its own message. The maximum of adaptive deadlines."""
    deadlines: Literal["adaptive", "fixed"] = "adaptive"
    """skip: adaptive derives a deadline for each link from the delays of its last 32 messages. fixed: `late_after_s`
    for all links."""
    max_skipped_rounds: Count = 20
    """skip: number of consecutive rounds that a peer may do without a neighbour before it waits for it. Asynchronous
    algorithms: number of steps that a peer may take while no neighbour is reachable."""
    leave_out_after_s: Positive = 10.0
    """skip, with push-sum algorithms: give no weight to a neighbour that has confirmed no message for this long, until
    it confirms one. Neighbours confirm once a second."""
    lost_after_s: Positive | None = None
    """wait: declare a member lost that most members have not reached for this long, without an operator. Choose more
    than a restart, an upgrade or an outage takes that is to be waited for. By default only an operator decides."""
    rejoin: bool = True
    """wait: let a device that was declared lost take part again, as a newcomer under its name and certificate. false:
    it ends, and can only be added under another name."""
    abandon_after_s: Positive = 30.0
    """Asynchronous algorithms: abandon an exchange whose partner has been unreachable for this long. If the partner had
    already answered, half of the exchange is lost."""


class EvaluationOptions(Section):
    """When accuracy is measured."""

    every_rounds: Whole = 50
    """Rounds between evaluations. The last round is always evaluated; 0: only the last."""
    share_every: Count = 5
    """Send one in this many evaluations to all peers by gossip. The last one is always sent."""
    keep_models: bool = False
    """Keep the model of each evaluation in the state folder. `sotto up` computes the consensus distance from them."""


class GuardOptions(Section):
    """When a peer stops because its training diverges."""

    action: Literal["stop", "rollback"] = "stop"
    """stop: the peer that diverged ends and reports the reason. rollback: it also goes back to the last checkpoint that
    all peers have; `sotto up` puts all peers back to it."""
    max_loss: Positive = 1e4
    """Stop when the training loss exceeds this value or is not finite, or before a message is sent that reaches further
    than such losses explain. Should be alike on all devices, which refuse such messages."""
    max_neighbor_distance: Positive = 1e4
    """Stop when the distance to the neighbours' models exceeds this many times the norm of the model."""
    min_push_weight: Positive = 1e-6
    """Stop when the push-sum weight falls below this value."""


class TransportOptions(Section):
    """Connections. The defaults suit links from 1 Mbit/s to a LAN."""

    chunk_kbytes: Annotated[int, Field(ge=1, le=4096)] = 1024
    """Size of the largest chunk of a message on a stream."""
    window_kbytes: Annotated[int, Field(ge=64)] = 8192
    """Flow-control credit: how much may be in flight to one neighbour that it has not taken yet."""
    max_message_mbytes: Annotated[int, Field(ge=1)] = 2048
    """Size of the largest message that is accepted."""
    heartbeat_s: Positive = 10.0
    """Interval of heartbeats on an idle link. After three silent intervals the link is closed and dialled again."""
    dial_timeout_s: Positive = 10.0
    """Time limit of one connection attempt."""
    backoff_max_s: Positive = 30.0
    """Longest pause between two connection attempts. Pauses start at 0.1 s and double, with jitter."""
    give_up_after_s: Positive = 600.0
    """Stop with an error when a neighbour that the peer waits for has been unreachable for this long."""
    relay_kbytes_per_s: NonNegative = 1250.0
    """Limit on the traffic that this peer relays between peers that cannot dial each other. 0: relay nothing."""
    linger_s: Positive = 20.0
    """Time to stay reachable after the last round for neighbours that have not finished."""


class LimitOptions(Section):
    """Limits on the use of this device; each device has its own."""

    day_mbytes: Count | None = None
    """Data that the links of this peer may carry in a calendar day, sent and received."""
    month_mbytes: Count | None = None
    """The same for a calendar month."""
    timezone: str = "local"
    """Time zone of days, months and `hours`: a name such as Europe/Berlin, or local for that of the device."""
    hours: str | None = None
    """When the peer may work, such as 22:00-07:00."""
    min_battery_percent: Annotated[int, Field(ge=1, le=100)] | None = None
    """The least charge of the battery with which the peer works while the device is not on mains (Linux)."""
    only_on_mains: bool = False
    """Work only while the device is on mains (Linux). A device without a battery always is."""
    max_celsius: Positive | None = None
    """Highest temperature of the device, as its warmest thermal zone reports it (Linux). The peer works again when it
    has cooled by 3 degrees."""
    processor_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the time that local steps may take; the peer sleeps after each."""
    then: Literal["slow", "pause", "leave"] = "slow"
    """When a limit is reached. slow: begin a round only every `slow_step_s`. pause: begin no round until the limit is
    lifted; with rounds it needs rounds.late = "skip", since otherwise the whole run would pause. leave: leave the run
    for good, as `sotto admin leave` does. With an asynchronous algorithm, steps stand for rounds, and neighbours are
    answered in any case."""
    slow_step_s: Positive = 60.0
    """slow: least time between the beginnings of two rounds while a limit is reached. leave: the same, until the
    departure is announced."""
    sensors: str = "/sys/class"
    """Folder with power_supply and thermal, in which Linux reports battery and temperature."""

    @property
    def can_be_reached(self) -> bool:
        """Whether there is a limit that is reached at some times and not at others."""
        limits = (self.day_mbytes, self.month_mbytes, self.hours, self.min_battery_percent, self.max_celsius)
        return self.only_on_mains or any(limit is not None for limit in limits)

    @model_validator(mode="after")
    def _times_are_known(self) -> LimitOptions:
        if self.hours is not None and self.working_minutes is None:
            raise ValueError(f'hours is {self.hours!r}; valid: two different times, such as "22:00-07:00"')
        if self.timezone != "local":
            try:
                zoneinfo.ZoneInfo(self.timezone)
            except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
                raise ValueError(
                    f"this device knows no timezone {self.timezone!r}; valid: local, or a name such as Europe/Berlin"
                ) from None
        return self

    @property
    def working_minutes(self) -> tuple[int, int] | None:
        """When work begins and ends, in minutes of the day; None without `hours`, or if they cannot be read."""
        found = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", self.hours or "")
        if found is None:
            return None
        from_hour, from_minute, to_hour, to_minute = map(int, found.groups())
        begin, end = 60 * from_hour + from_minute, 60 * to_hour + to_minute
        return None if begin == end else (begin, end)


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
    limits: LimitOptions = LimitOptions()
    privacy: PrivacyOptions = PrivacyOptions()

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Config:
        # TLS takes names for the same that differ in case only.
        if len({peer.name.casefold() for peer in self.peers}) != len(self.peers):
            raise ValueError("two peers have the same name")
        reachable = {peer.name for peer in self.peers if peer.advertise is not None}
        for peer in self.peers:
            if peer.relay is not None and peer.relay not in reachable:
                raise ValueError(
                    f"the relay of {peer.name} is {peer.relay!r}, which is not a peer with an advertise address"
                )
        later = [2 if peer.admitted else int(peer.joins_later) for peer in self.peers]
        if later != sorted(later) or (later and all(later)):
            raise ValueError(
                "at least one peer has to begin the run; list the peers in this order: those that begin, those with "
                "joins_later, those with admitted"
            )
        if self.peers and self.peer.index >= len(self.peers):
            raise ValueError(f"peer.index is {self.peer.index}, but the {len(self.peers)} peers are counted from 0")
        return self

    @property
    def num_peers(self) -> int:
        return len(self.peers)

    @property
    def own(self) -> PeerAddress:
        """Entry of the peer that the file configures."""
        return self.peers[self.peer.index]

    @property
    def num_listed(self) -> int:
        """Number of peers that the lists of all devices have in common: those that were not admitted later."""
        return sum(not peer.admitted for peer in self.peers)

    def num_members(self, num_peers: int) -> int:
        """Return how many of the first `num_peers` peers take part from round 0 on."""
        return num_peers - sum(not peer.is_first for peer in self.peers[:num_peers])

    @property
    def momentum_rule(self) -> str:
        """The peers' use of `training.momentum`, by which they and their states compare it: releases before 0.3 took
        the mean of all peers' Adam where there is one mean, and now it is Adam of the mean."""
        of_mean = self.algorithm.name in ("allreduce", "parameter-server") and self.training.momentum == "adam"
        return "adam of the mean gradient, as from 0.3" if of_mean else self.training.momentum

    def run_digest(self) -> str:
        """Return hex digests, joined by dots, of what all peers of a run must share, in the order of SHARED_SECTIONS.

        The hello compares them, and can name the part that differs.
        """
        job = self._job()
        texts = (json.dumps(job[name], sort_keys=True) for name in SHARED_SECTIONS)
        return ".".join(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)

    def shared_settings(self) -> dict[str, str]:
        """Return what all peers of a run must share and is not at its default: "section.key" → the value as JSON."""
        job, default = self._job(), Config()._job()
        return {
            f"{section}.{key}": json.dumps(value)
            for section in SHARED_SECTIONS[:-1]
            for key, value in job[section].items()
            if value != default[section].get(key)
        }

    def _job(self) -> dict[str, Any]:
        """Return, by section, what the run digest holds."""
        job: dict[str, Any] = {name: getattr(self, name).model_dump(mode="json") for name in SHARED_SECTIONS[:-1]}
        # Where files lie is each device's own business.
        job["data"].pop("directory")
        job["graph"].pop("file")
        # The capacity of its links is, too; only the existence of a limit affects the averaging rate.
        job["compressor"]["budget_kbytes_per_s"] = self.compressor.budget_kbytes_per_s is not None
        job["training"]["momentum"] = self.momentum_rule
        if self.compressor.coding == "entropy":
            # Earlier releases had this as their default, and each device may choose it by itself.
            job["compressor"].pop("coding")
        # Earlier releases had a number in place of the value that depends on `theta`.
        job["algorithm"]["theta_value"] = 2.0 if self.algorithm.theta_value is None else self.algorithm.theta_value
        for section, always in _ALWAYS_COUNTED.items():
            options = getattr(self, section)
            for key, field in type(options).model_fields.items():
                if key not in always.split() and getattr(options, key) == field.get_default(call_default_factory=True):
                    job[section].pop(key, None)
        job["peers"] = [peer.name for peer in self.peers[: self.num_listed]]
        return job


SHARED_SECTIONS = ("run", "graph", "algorithm", "compressor", "training", "data", "rounds", "evaluation", "peers")
"""The sections that all peers of a run must share, and the names of the peers."""

_ALWAYS_COUNTED: Mapping[str, str] = {
    "run": "name seed rounds",
    "graph": "kind weights period period_unit degree probability seed",
    "algorithm": "name averaging_rate whole_below push_weight_guard final_rounds server model_bits model_range theta "
    "theta_value",
    "compressor": "kind fraction value_bits value_type bits unbiased step rounding against_last budget_kbytes_per_s",
    "training": "task task_options precision batch_size local_steps learning_rate schedule warmup_rounds "
    "step_milestones step_factor momentum beta beta2 mu weight_decay only warm_start",
    "data": "partition skew alpha labels_per_peer holdout_fraction",
    "rounds": "late late_after_s deadlines max_skipped_rounds leave_out_after_s abandon_after_s",
    "evaluation": "every_rounds share_every keep_models",
}
"""Shared options that the run digest has always held, by section. Every other one is part of it only where it is set: a
configuration from before an option came keeps its digest."""

CHOICES = Path(__file__).with_name("choices.toml")
"""What new jobs begin with: the table of what was measured, and its version."""

_IMPLIED: Mapping[tuple[str, str, Any], Mapping[str, Mapping[str, Any]]] = {
    ("algorithm", "name", "low-rank"): {
        "graph": {"kind": "complete"},
        "algorithm": {"rank": 16, "factor_bits": 6},
    },
    ("algorithm", "name", "compressed-allreduce"): {
        "graph": {"kind": "complete"},
        "compressor": {"fraction": 0.1, "value_bits": 2},
    },
    ("compressor", "value_bits", 2): {"compressor": {"four_levels": True}},
}
"""Section, key and its value → settings, beside the defaults, of a job that begins without a file, unless the job's row
of `CHOICES` has that value too. Files that leave these keys unset, and runs under way, keep their meaning."""

SECTIONS: Mapping[str, type[Section]] = {name: type(table) for name, table in Config()} | {"peers": PeerAddress}

DEFAULTS = "0.3"
"""The release whose defaults are those here. A file names it as `defaults`, for what it leaves out: a later release
with other defaults has to go on to know these."""

ENVIRONMENT_PREFIX = "SOTTO_"


def load(
    path: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    new_job: int | None = None,
) -> Config:
    """Return the checked configuration of a file with environment and `section.key=value` overrides applied.

    Without a path the defaults are the base; for a `new_job` of so many peers, with what `choices` offers. Raises
    ConfigError that names file, key, value and the valid values.
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
    if path is None and new_job:
        training = check(tree, sources=sources).training
        chosen = _chosen(choices(training.task, new_job, training.local_steps), tree)
        for (section, key, value), job in _IMPLIED.items():
            if tree.get(section, {}).get(key) == value and (section, key, value) not in chosen:
                tree |= {name: {**table, **tree.get(name, {})} for name, table in job.items()}
        for section, key, value in chosen:
            tree[section] = {key: value} | tree.get(section, {})
    return check(tree, file=str(path) if path is not None else None, sources=sources)


def load_device(
    path: Path,
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    script: str | None = None,
) -> Config:
    """Return the configuration of one device, as `load`. Raises ConfigError also for a file without peers, and where
    there is none says what makes one, or trains the `script` that was named without one."""
    config = load(path, overrides=overrides, environment=environment) if path.exists() else None
    if config is not None and config.peers:
        return config
    problem = "no such file" if config is None else "lists no [[peers]], so it is the file of a run and of no device"
    if others := _others_to_name(path):
        raise ConfigError(f"{problem}; {others}", file=str(path))
    if (near := instead_of(path)).startswith(MEANT):
        raise ConfigError(problem + near, file=str(path))
    words = f"--config {path}" if config is not None and script is None else f"{script or 'SCRIPT'} --peers 3"
    several = "`sotto init --peers 3` begins a run of several devices, and `sotto join` takes an invitation to one"
    raise ConfigError(f"{problem}; `sotto up {words}` trains on this machine alone, {several}", file=str(path))


def _others_to_name(path: Path) -> str:
    """Return which files of devices are below the folder of a path, as a request to name one; empty if none is. Seats,
    which have no key, are named where there is nothing else."""
    found = configurations_below(path.parent, path.name)
    others = " or ".join(map(str, ([each for each in found if each.with_name("peer.key").exists()] or found)[:3]))
    return f"name the file of a device: --config {others}" if others else ""


def choices(task: str, num_peers: int, local_steps: int = 1) -> list[dict[str, Any]]:
    """Return the rows of `CHOICES` for a new job, of which the first counts that leaves all that the job sets itself
    its meaning: settings with their reasons, what was measured, and keys that only count together."""
    rows: list[dict[str, Any]] = parse_toml(CHOICES.read_text(encoding="utf-8"))["rows"]
    return [
        row
        for row in rows
        if task in (row["tasks"] or [task])
        and row["peers"][0] <= num_peers <= row["peers"][1]
        and local_steps <= row["most_local_steps"]
    ]


def _chosen(rows: Sequence[Mapping[str, Any]], job: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return section, key and value of each setting of the first row that fits a job's own tables."""
    asked = {(name, key) for name in ("graph", "algorithm", "compressor") for key in job.get(name, {})}
    steps = job.get("training", {}).get("local_steps", math.inf)
    for row in rows:
        if steps < row.get("least_local_steps", 1):
            continue
        named = [(name, key, value) for name, key, value, _ in row["settings"]]
        together = [each for each in named if each[1] in row["together"]]
        alike = all(job.get(name, {}).get(key, value) == value for name, key, value in together)
        if not together or (alike and asked <= {each[:2] for each in named}):
            return named
    return []


def configurations_below(folder: Path, name: str = "peer.toml") -> list[Path]:
    """Return the files of devices in folders that `sotto join` or `sotto init cluster` made in `folder`."""
    return sorted([*folder.glob(f"*/{name}"), *folder.glob(f"*/peer-*/{name}")])


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ConfigError if it cannot be read or parsed."""
    try:
        return parse_toml(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        what = _others_to_name(path) or f"no such file; `sotto init` writes one{instead_of(path)}"
        raise ConfigError(what, file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(why_not_utf8(error), file=str(path)) from None
    except ValueError as error:
        raise ConfigError(f"is not valid TOML: {error}", file=str(path)) from None


def check(tree: Mapping[str, Any], *, file: str | None = None, sources: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of already parsed tables. Raises ConfigError for the first thing wrong.

    `sources` says where a dotted key came from, where that is not the file.
    """
    tree = dict(tree)
    if (named := tree.pop("defaults", DEFAULTS)) != DEFAULTS:
        problem = "this release knows no other defaults for what the file leaves out; install the release that wrote it"
        raise ConfigError(problem, key="defaults", value=named, valid=f'"{DEFAULTS}"', file=file)
    try:
        plain = {name: _plain(name, table, file, sources or {}) for name, table in tree.items()}
        return Config.model_validate(_with_run_name(plain))
    except ValidationError as error:
        raise _as_config_error(error, file, sources or {}) from None


def _with_run_name(tree: dict[str, object]) -> dict[str, object]:
    """Return the tables with a name of the run: by default that of the task."""
    run, training = tree.get("run", {}), tree.get("training", {})
    if not isinstance(run, dict) or not isinstance(training, dict) or "name" in run:
        return tree
    task = training.get("task")
    name = run_name_of(task) if isinstance(task, str) else ""
    return {**tree, "run": {**run, "name": name}} if name else tree


def run_name_of(task: str) -> str:
    """Return a name of a run after its task: of "package.module:make_task" the module. Empty if no character fits."""
    last = task.partition(":")[0].rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "-", last).strip("._-")[:64]


def _plain(section: str, table: object, file: str | None, sources: Mapping[str, str]) -> object:
    """Return the table with "none" turned into None, which TOML cannot write, where a key may be unset.

    Raises ConfigError for true and false where a number belongs: Python would take them for 1 and 0.
    """
    model = SECTIONS.get(section)
    if model is None or not isinstance(table, dict):
        return table
    result = dict(table)
    for name in table.keys() & model.model_fields.keys():
        if table[name] == "none" and schema.may_be_unset(model, name):
            result[name] = None
        elif isinstance(table[name], bool) and not schema.takes_booleans(model, name):
            key, valid = f"{section}.{name}", schema.accepts(model, name)
            file = _source(key, sources) or file
            raise ConfigError("is not valid", key=key, value=table[name], valid=valid, file=file)
    return result


def _put(tree: dict[str, Any], key: str, value: object, *, source: str) -> None:
    """Set a dotted key in the tree."""
    section, *names = key.split(".")
    if section not in SECTIONS:
        raise ConfigError("unknown section", key=section, valid=", ".join(SECTIONS), file=source)
    if section == "peers":
        raise ConfigError("can only be set in the file, as [[peers]] tables", key=section, file=source)
    table = tree
    for name in (section, *names[:-1]):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError("must be a table", key=name, value=table, file=source)
    table[names[-1]] = value


def _parse_value(text: str) -> object:
    """Return the TOML value that the text spells, or the text itself where it spells none (unquoted strings)."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
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
        return ConfigError(f"unknown {'key' if section else 'section'}", key=key, valid=valid, file=file)
    if first["type"] == "missing":
        return ConfigError("is missing", key=key, file=file)
    if section is None or len(names) == 1:
        valid = "[[peers]] tables" if key == "peers" else f"a table, [{key}]"
        return ConfigError("is not a table of options", key=key, value=first["input"], valid=valid, file=file)
    valid = schema.accepts(section, names[1])
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
