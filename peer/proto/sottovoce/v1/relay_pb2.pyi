from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Piece(_message.Message):
    __slots__ = ("peer", "data", "refusal", "sender")
    PEER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    data: bytes
    refusal: str
    sender: str
    def __init__(self, peer: _Optional[str] = ..., data: _Optional[bytes] = ..., refusal: _Optional[str] = ..., sender: _Optional[str] = ...) -> None: ...
