"""Experiments: studies and races against rivals, sweeps, and predictions from them."""
