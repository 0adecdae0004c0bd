"""An operator's work with peers from outside: start, resize, inspect, export, tune."""
