"""A live page about a run, a cluster or a peer: `sotto watch`.

A process of its own reads the peers' answers to control calls and their metrics, and serves the page on loopback. Peers
open no port for it, and nothing of it is kept.
"""
