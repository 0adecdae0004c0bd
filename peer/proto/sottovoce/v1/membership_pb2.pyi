from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MembershipChange(_message.Message):
    __slots__ = ("kind", "subject", "issuer", "effective_round", "heard_round")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[MembershipChange.Kind]
        JOIN: _ClassVar[MembershipChange.Kind]
        LEAVE: _ClassVar[MembershipChange.Kind]
        LOST: _ClassVar[MembershipChange.Kind]
    KIND_UNSPECIFIED: MembershipChange.Kind
    JOIN: MembershipChange.Kind
    LEAVE: MembershipChange.Kind
    LOST: MembershipChange.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    ISSUER_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_ROUND_FIELD_NUMBER: _ClassVar[int]
    HEARD_ROUND_FIELD_NUMBER: _ClassVar[int]
    kind: MembershipChange.Kind
    subject: int
    issuer: int
    effective_round: int
    heard_round: int
    def __init__(self, kind: _Optional[_Union[MembershipChange.Kind, str]] = ..., subject: _Optional[int] = ..., issuer: _Optional[int] = ..., effective_round: _Optional[int] = ..., heard_round: _Optional[int] = ...) -> None: ...
