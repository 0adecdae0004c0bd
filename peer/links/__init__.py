"""Shaped links between network namespaces: named profiles, how they are made, and what they turn out to be.

`profiles` knows what links there are, `network` makes them, `containers` limits what leaves a container that runs
already, `measure` looks at a link from inside. They need root, Linux and the tools of iproute2; nothing here knows what
is sent over a link. `sotto shape` is the command.
"""
