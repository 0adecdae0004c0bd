"""Experiments: studies and races against rivals, sweeps, and what predicts from them."""
