from collections.abc import Sequence
from contextlib import AbstractContextManager

from hivemind import DHT
from hivemind.compression import Uniform8BitQuantization
from torch import Tensor

class DecentralizedAverager:
    def __init__(
        self,
        averaged_tensors: Sequence[Tensor],
        dht: DHT,
        *,
        prefix: str,
        start: bool,
        compression: Uniform8BitQuantization,
        target_group_size: int,
        min_group_size: int,
    ) -> None: ...
    def get_tensors(self) -> AbstractContextManager[Sequence[Tensor]]: ...
    def step(self, *, timeout: float) -> object: ...
