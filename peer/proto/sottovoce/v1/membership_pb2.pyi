from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MembershipChange(_message.Message):
    __slots__ = ("kind", "subject", "issuer", "effective_round", "heard_round", "introduction", "votes", "order", "admission", "equivocation")
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
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    EQUIVOCATION_FIELD_NUMBER: _ClassVar[int]
    kind: MembershipChange.Kind
    subject: int
    issuer: int
    effective_round: int
    heard_round: int
    introduction: Introduction
    votes: _containers.RepeatedScalarFieldContainer[bytes]
    order: bytes
    admission: bytes
    equivocation: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, kind: _Optional[_Union[MembershipChange.Kind, str]] = ..., subject: _Optional[int] = ..., issuer: _Optional[int] = ..., effective_round: _Optional[int] = ..., heard_round: _Optional[int] = ..., introduction: _Optional[_Union[Introduction, _Mapping[str, object]]] = ..., votes: _Optional[_Iterable[bytes]] = ..., order: _Optional[bytes] = ..., admission: _Optional[bytes] = ..., equivocation: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LossVote(_message.Message):
    __slots__ = ("voter", "subject", "round")
    VOTER_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    voter: int
    subject: int
    round: int
    def __init__(self, voter: _Optional[int] = ..., subject: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class LossOrder(_message.Message):
    __slots__ = ("name", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("peer", "era", "round")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ERA_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    peer: int
    era: int
    round: int
    def __init__(self, peer: _Optional[int] = ..., era: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("peer", "state", "signed")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SIGNED_FIELD_NUMBER: _ClassVar[int]
    peer: int
    state: Progress
    signed: Progress
    def __init__(self, peer: _Optional[int] = ..., state: _Optional[_Union[Progress, _Mapping[str, object]]] = ..., signed: _Optional[_Union[Progress, _Mapping[str, object]]] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("name", "advertise", "relay", "certificate")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADVERTISE_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    advertise: str
    relay: str
    certificate: bytes
    def __init__(self, name: _Optional[str] = ..., advertise: _Optional[str] = ..., relay: _Optional[str] = ..., certificate: _Optional[bytes] = ...) -> None: ...
