"""Sottovoce: train one deep-learning model across devices with no server and no shared data."""

__version__ = "0.3.0.dev0"
