"""Measurements and generators of the authors; `python -m tools.NAME --help` explains each."""
