"""What exports use of onnxruntime."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

class SessionOptions:
    intra_op_num_threads: int
    log_severity_level: int

class NodeArg:
    name: str

class InferenceSession:
    def __init__(self, path: str, options: SessionOptions, *, providers: Sequence[str]) -> None: ...
    def get_inputs(self) -> list[NodeArg]: ...
    def run(self, outputs: None, inputs: Mapping[str, npt.NDArray[np.generic]]) -> list[npt.NDArray[np.generic]]: ...
