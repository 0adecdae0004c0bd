"""Attacks a running cluster in every way that its threat model names, and shows what the others notice of it.

    python -m tests.stress.attack [--seconds 4] [--only NAME ...] [--json FILE]

Four real peers train together over mutual TLS (choco-sgd, `rounds.late = "skip"`), with the default limits. A fifth one
of their list is the attacker: it holds a certificate of the cluster, and for some attacks certificates that it should
not have. Each attack runs in a process of its own, at lower priority, since on its own machine it would not take the
peers' processor time; what is left of that is in the figures. Round times are those that the peers recorded, before,
during and after; the error is what the attacker was told, or how its connection ended.

`attacker` is what an attack has at hand, `attacks` are all of them, `cluster` are the four who train.
"""
