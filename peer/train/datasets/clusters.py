"""Points around centres, as many as are wanted: data of which 100,000 peers can have a share each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peer.random import SHARED, Purpose, stream

CENTRES_OF_A_CLASS = 4
"""Several, so that no hyperplane separates the classes."""

_BLOCK = 1 << 15
"""Points that are drawn at once."""


def clusters(
    split: int, size: int, *, features: int, classes: int, spread: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return (points: float32[size, features], labels: int64[size]), always the same; a longer set begins with the
    shorter one. `split`: 0 to train, 1 to test.

    Coordinates of centres are standard normal, those of a point lie around its centre with the standard deviation
    `spread`.
    """
    centres = stream(0, SHARED, Purpose.SIMULATION, round=1).normals(CENTRES_OF_A_CLASS * classes * features)
    table = centres.reshape(CENTRES_OF_A_CLASS * classes, features)
    points, labels = np.empty((size, features), np.float32), np.empty(size, np.int64)
    for number, first in enumerate(range(0, size, _BLOCK)):
        part = slice(first, min(first + _BLOCK, size))
        count = part.stop - part.start
        chosen = stream(0, SHARED, Purpose.SIMULATION, 2 + 2 * split, number).integers(count, len(table))
        noise = stream(0, SHARED, Purpose.SIMULATION, 3 + 2 * split, number).normals(count * features)
        points[part] = table[chosen] + spread * noise.reshape(count, features)
        labels[part] = chosen % classes
    return points, labels
