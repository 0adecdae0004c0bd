"""Rivals that need packages which Sottovoce does not install, and the studies that run them (see docs/links.md)."""
