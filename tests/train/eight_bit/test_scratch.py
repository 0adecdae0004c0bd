"""Scratch memory is one block for each name, kept until a larger one is asked for."""

from __future__ import annotations

import gc
import weakref

import torch

from peer.train.eight_bit.scratch import scratch

CPU = torch.device("cpu")


def test_a_name_has_one_block_for_all_shapes_and_types() -> None:
    large = scratch("test of one block", (64, 64), torch.float32, CPU)
    assert large.shape == (64, 64)
    for shape, dtype in (((3, 5), torch.int8), ((64, 64), torch.float32), ((7,), torch.int32)):
        found = scratch("test of one block", shape, dtype, CPU)
        assert found.shape == shape
        assert found.dtype == dtype
        assert found.data_ptr() == large.data_ptr()


def test_a_larger_block_takes_the_place_of_a_smaller_one() -> None:
    views = [weakref.ref(scratch("test of growth", (n,), torch.uint8, CPU)) for n in (2, 4)]
    grown = scratch("test of growth", (4096,), torch.uint8, CPU)
    gc.collect()
    assert [view() for view in views] == [None, None]
    assert scratch("test of growth", (8,), torch.uint8, CPU).data_ptr() == grown.data_ptr()
