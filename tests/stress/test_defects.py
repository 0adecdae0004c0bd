"""The fuzzer of meaning finds every defect of the audit once it is put back, and a check can be taken out alone."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from peer.compress.layout import Layout
from peer.errors import RemoteProtocolError
from peer.gossip.mixing import check_layers, whole
from tests.stress.defects import DEFECTS, Defect, put_back, search
from tests.stress.meaning.disabling import disabled

CASES = 3000


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_found(defect: Defect) -> None:
    with put_back(defect):
        _, found = search(defect.algorithm, CASES)
    assert found is not None


@pytest.mark.parametrize("algorithm", sorted({defect.algorithm for defect in DEFECTS}))
def test_nothing_is_found_without_a_defect(algorithm: str) -> None:
    cases, found = search(algorithm, 900)
    assert found is None, found
    assert cases >= 900


def test_one_check_is_taken_out_and_put_back() -> None:
    layout = Layout.of_sizes([2, 3])
    layers = whole(np.zeros(5, np.float32), layout)
    with disabled("peer.gossip.mixing", "layers, the model has"):
        with pytest.raises(ValueError, match="argument 2 is longer"):
            check_layers(layers[:1], layout, 1)
        with pytest.raises(RemoteProtocolError, match="numbers for layer 0"):
            check_layers((layers[1], layers[0]), layout, 1)
    with pytest.raises(RemoteProtocolError, match="the model has 2"):
        check_layers(layers[:1], layout, 1)


@pytest.mark.parametrize("piece", ["no check says this", "peer"])
def test_a_check_has_to_be_the_only_one(piece: str) -> None:
    with pytest.raises(ValueError, match="checks with"), disabled("peer.gossip.mixing", piece):
        pass
