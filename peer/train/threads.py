"""Threads and torch: one computes, since another number of threads sums in another order and gives other bits."""

from __future__ import annotations

import contextlib
import threading

import torch

GENERATOR = threading.RLock()
"""Held from seeding torch's generator until the last draw from it: all threads of a process have one, and a process may
run several peers."""


def use_one_thread() -> None:
    """Make torch compute in one thread in this process; parallelism is by process."""
    torch.set_num_threads(1)
    with contextlib.suppress(RuntimeError):
        # Torch refuses to change this one after its first parallel work; nothing of ours uses inter-op threads.
        torch.set_num_interop_threads(1)
