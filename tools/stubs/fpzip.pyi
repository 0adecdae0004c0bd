"""What the tools use of fpzip."""

import numpy as np
import numpy.typing as npt

def compress(data: npt.NDArray[np.float32], precision: int = 0, order: str = "C") -> bytes: ...
def decompress(encoded: bytes, order: str = "C") -> npt.NDArray[np.float32]: ...
