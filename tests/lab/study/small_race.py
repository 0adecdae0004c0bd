"""A race of every kind of contender on the digits: two peers, a few steps."""

from __future__ import annotations

SMALL_RACE = """
name = "small-race"
title = "digits"
peers = 2
step_s = 0.05
seeds = [0]
profiles = ["10mbit"]
cell_s = 1
least_rounds = 3
most_rounds = 4
job = ["training.task=synthetic", "training.task_options.parameters=20000", "transport.linger_s=1"]

[race]
steps = 8
warmup_steps = 4
evaluate_every = 4
skews = [0.8]
targets = [0.01, 0.999]
job = [
    "training.task=digits",
    "training.task_options={hidden=16}",
    "training.precision=float32",
    "training.learning_rate=0.1",
]

[[contenders]]
name = "sgp"
options = ["algorithm.name=sgp", "compressor.kind=none", "training.local_steps=2"]

[[contenders]]
name = "allreduce"
options = ["algorithm.name=allreduce", "graph.kind=complete", "compressor.kind=none"]

[[contenders]]
name = "ddp"
rival = "ddp"
options = ["algorithm.name=allreduce", "graph.kind=complete", "compressor.kind=none"]

[[contenders]]
name = "powersgd"
rival = "ddp-powersgd"
settings = { rank = 1 }
options = ["algorithm.name=allreduce", "graph.kind=complete", "compressor.kind=none"]

[[contenders]]
name = "local-sgd"
rival = "local-sgd"
settings = { period = 4, bits = 8 }
options = ["algorithm.name=local", "compressor.kind=none"]

[[contenders]]
name = "diloco"
rival = "diloco"
settings = { period = 4, inner = "adamw" }
options = ["algorithm.name=local", "compressor.kind=none"]
training = ["training.class_balance=0.5", "training.learning_rate=0.01"]
timed_as = "local-sgd"
"""
