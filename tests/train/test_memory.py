"""Where the tensors of a model lie."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from peer.train.memory import ALIGNMENT, own_memory_


def test_tensors_of_a_model_get_memory_that_nothing_else_holds() -> None:
    whole = torch.arange(24.0)
    model = nn.Module()
    model.plain = nn.Parameter(torch.randn(3, 4))
    model.anchor = model.plain.detach()
    model.view = nn.Parameter(whole[1:13].view(3, 4))
    model.turned = nn.Parameter(torch.randn(4, 3).T)
    model.foreign = nn.Parameter(torch.from_numpy(whole.numpy()[12:].copy()))
    model.one, model.other = nn.Parameter(whole), nn.Parameter(whole)
    model.register_buffer("kept", torch.ones(2))
    before = {name: (each.data_ptr(), each.detach().clone()) for name, each in model.state_dict().items()}
    own_memory_(model, torch.device("cpu"))
    after = model.state_dict()
    assert not {each.data_ptr() for each in after.values()} & {place for place, _ in before.values()}
    assert model.anchor.data_ptr() == before["plain"][0]
    assert len({each.untyped_storage().data_ptr() for each in after.values()}) == len(after)
    for name, each in after.items():
        assert each.data_ptr() % ALIGNMENT == 0
        assert torch.equal(each, before[name][1])
        assert each.untyped_storage().nbytes() == each.nbytes


_FAULTS_OF_A_THREAD = """
import resource
import threading
from peer.train.memory import keep_freed

def faults():
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        b'x' * 100_000_000
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

keep_freed()
thread = threading.Thread(target=faults)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("said", [{}, {"MALLOC_MMAP_THRESHOLD_": "65536"}])
def test_large_memory_that_a_thread_freed_is_there_again_unless_the_environment_has_it_given_back(said: dict[str, str]):
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ran = subprocess.run(
        [sys.executable, "-c", _FAULTS_OF_A_THREAD], env={**plain, **said}, check=True, capture_output=True, text=True
    )
    *_, again = map(int, ran.stdout.split())
    assert (again > 1000) == bool(said)
