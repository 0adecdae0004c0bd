"""A member that lies: attacks on what messages mean, from inside the run.

    python -m tests.stress.attack --meaning [--release PATH] [--only NAME ...] [--json FILE]

Three honest peers, with default settings, train with a fourth that has a certificate of its own and takes full part:
the real peer runs in the attacker's process, over the real transport. At some round it also says what no honest peer
says (`lies`). The honest peers are subprocesses of the installation at PATH, so that two releases can be compared; the
attacker is always this one. After the lie every honest peer is asked for its status, one is killed and started again,
and the run goes to its last round.

`insider` is the attacker, `lies` are all lies, `trial` runs one of them and measures what became of the honest peers.
"""
