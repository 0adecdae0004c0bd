from typing import Self

from torch import Tensor

class CompressionInfo:
    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Self: ...

class SerializedTensor:
    def SerializeToString(self) -> bytes: ...

class Uniform8BitQuantization:
    def compress(self, tensor: Tensor, info: CompressionInfo) -> SerializedTensor: ...
