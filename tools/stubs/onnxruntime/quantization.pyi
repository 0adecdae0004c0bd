"""What exports use of onnxruntime.quantization."""

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

class QuantFormat(enum.Enum):
    QDQ = ...

class QuantType(enum.Enum):
    QInt8 = ...
    QUInt8 = ...

class _Reader(Protocol):
    def get_next(self) -> Mapping[str, npt.NDArray[np.generic]] | None: ...

def quantize_static(
    model_input: str,
    model_output: str,
    reader: _Reader,
    *,
    quant_format: QuantFormat,
    op_types_to_quantize: Sequence[str],
    activation_type: QuantType,
    weight_type: QuantType,
) -> None: ...
