"""Sweeps: simulated runs over a grid of settings, spread over processes and machines.

`sweep` reads the file that describes a sweep, `cell` simulates one cell of it, `folder` keeps the results and computes
the missing cells. `sotto lab sweep` is the command; studies of real peers on shaped links are in `peer.lab.study`.
"""
