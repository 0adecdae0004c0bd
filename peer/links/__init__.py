"""Shaped links between network namespaces: named profiles, their making, and their measurement.

`profiles` knows what links there are, `network` makes them, `containers` limits what leaves a container that runs
already, `measure` looks at a link from inside. They need root, Linux and the tools of iproute2; nothing here knows what
is sent over a link. `sotto lab shape` is the command.
"""
