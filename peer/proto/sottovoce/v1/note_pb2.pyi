from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EvaluationNote(_message.Message):
    __slots__ = ("peer", "round", "split", "correct", "total", "metrics")
    class Split(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SPLIT_UNSPECIFIED: _ClassVar[EvaluationNote.Split]
        TEST: _ClassVar[EvaluationNote.Split]
        HOLDOUT: _ClassVar[EvaluationNote.Split]
    SPLIT_UNSPECIFIED: EvaluationNote.Split
    TEST: EvaluationNote.Split
    HOLDOUT: EvaluationNote.Split
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    peer: int
    round: int
    split: EvaluationNote.Split
    correct: _containers.RepeatedScalarFieldContainer[int]
    total: _containers.RepeatedScalarFieldContainer[int]
    metrics: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, peer: _Optional[int] = ..., round: _Optional[int] = ..., split: _Optional[_Union[EvaluationNote.Split, str]] = ..., correct: _Optional[_Iterable[int]] = ..., total: _Optional[_Iterable[int]] = ..., metrics: _Optional[_Iterable[float]] = ...) -> None: ...

class DivergenceNote(_message.Message):
    __slots__ = ("peer", "round", "reason")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer: int
    round: int
    reason: str
    def __init__(self, peer: _Optional[int] = ..., round: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseNote(_message.Message):
    __slots__ = ("peer", "protocol_max", "software", "said_ms")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    SAID_MS_FIELD_NUMBER: _ClassVar[int]
    peer: int
    protocol_max: int
    software: str
    said_ms: int
    def __init__(self, peer: _Optional[int] = ..., protocol_max: _Optional[int] = ..., software: _Optional[str] = ..., said_ms: _Optional[int] = ...) -> None: ...

class ReplicaNote(_message.Message):
    __slots__ = ("round", "digests")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    round: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class DataNote(_message.Message):
    __slots__ = ("train_digest", "test_digest")
    TRAIN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    train_digest: bytes
    test_digest: bytes
    def __init__(self, train_digest: _Optional[bytes] = ..., test_digest: _Optional[bytes] = ...) -> None: ...

class ClassNote(_message.Message):
    __slots__ = ("peer", "shares", "samples")
    PEER_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    peer: int
    shares: _containers.RepeatedScalarFieldContainer[int]
    samples: int
    def __init__(self, peer: _Optional[int] = ..., shares: _Optional[_Iterable[int]] = ..., samples: _Optional[int] = ...) -> None: ...

class SharesNote(_message.Message):
    __slots__ = ("peer", "digest")
    PEER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    peer: int
    digest: bytes
    def __init__(self, peer: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class ToldNote(_message.Message):
    __slots__ = ("peer", "first_segment", "owners", "digests")
    PEER_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    peer: int
    first_segment: int
    owners: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, peer: _Optional[int] = ..., first_segment: _Optional[int] = ..., owners: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ShareNote(_message.Message):
    __slots__ = ("peer", "round", "weight", "digests")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    peer: int
    round: int
    weight: float
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, peer: _Optional[int] = ..., round: _Optional[int] = ..., weight: _Optional[float] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AverageNote(_message.Message):
    __slots__ = ("peer", "round", "shares", "file")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    peer: int
    round: int
    shares: bytes
    file: bytes
    def __init__(self, peer: _Optional[int] = ..., round: _Optional[int] = ..., shares: _Optional[bytes] = ..., file: _Optional[bytes] = ...) -> None: ...

class ShareChunk(_message.Message):
    __slots__ = ("owner", "index", "asks", "data")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    owner: int
    index: int
    asks: bool
    data: bytes
    def __init__(self, owner: _Optional[int] = ..., index: _Optional[int] = ..., asks: bool = ..., data: _Optional[bytes] = ...) -> None: ...

class RefusalNote(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
