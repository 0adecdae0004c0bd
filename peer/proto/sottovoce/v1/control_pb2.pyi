from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ControlRequest(_message.Message):
    __slots__ = ("arguments", "challenge")
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    arguments: str
    challenge: bytes
    def __init__(self, arguments: _Optional[str] = ..., challenge: _Optional[bytes] = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ("result", "certificate", "proof")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    result: str
    certificate: bytes
    proof: bytes
    def __init__(self, result: _Optional[str] = ..., certificate: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...
