"""Every lie is told to both implementations of the decoder."""

from tests.wire.conftest import implementation

__all__ = ["implementation"]
