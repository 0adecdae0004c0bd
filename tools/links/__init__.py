"""Shaped links between network namespaces: named profiles, how they are made, and what they turn out to be.

`profiles` knows what links there are, `network` makes them, `measure` looks at them from inside. `tools/shape.py` is
the command.
"""
