from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("chunks", "receipt", "credit", "bulletins", "hello", "close")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    BULLETINS_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    receipt: int
    credit: int
    bulletins: _containers.RepeatedCompositeFieldContainer[Bulletin]
    hello: Hello
    close: Close
    def __init__(self, chunks: _Optional[_Iterable[_Union[Chunk, _Mapping[str, object]]]] = ..., receipt: _Optional[int] = ..., credit: _Optional[int] = ..., bulletins: _Optional[_Iterable[_Union[Bulletin, _Mapping[str, object]]]] = ..., hello: _Optional[_Union[Hello, _Mapping[str, object]]] = ..., close: _Optional[_Union[Close, _Mapping[str, object]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("sequence", "data", "offset", "frame_bytes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    data: bytes
    offset: int
    frame_bytes: int
    def __init__(self, sequence: _Optional[int] = ..., data: _Optional[bytes] = ..., offset: _Optional[int] = ..., frame_bytes: _Optional[int] = ...) -> None: ...

class Bulletin(_message.Message):
    __slots__ = ("topic", "data")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    topic: str
    data: bytes
    def __init__(self, topic: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "run", "algorithm", "model_digest", "graph_digest", "run_digest", "num_peers", "index", "name", "nonce", "received", "window_bytes", "chunk_bytes", "heartbeat_ms", "software", "seen_as", "challenge", "certificate", "proof", "progress", "shown", "admission", "start", "meanings", "settings", "machine", "receiver")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class MachineEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GRAPH_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RUN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_PEERS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    SEEN_AS_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    MEANINGS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    run: str
    algorithm: str
    model_digest: str
    graph_digest: str
    run_digest: str
    num_peers: int
    index: int
    name: str
    nonce: int
    received: int
    window_bytes: int
    chunk_bytes: int
    heartbeat_ms: int
    software: str
    seen_as: str
    challenge: bytes
    certificate: bytes
    proof: bytes
    progress: bytes
    shown: bytes
    admission: bytes
    start: StartModel
    meanings: _containers.RepeatedCompositeFieldContainer[Meaning]
    settings: _containers.ScalarMap[str, str]
    machine: _containers.ScalarMap[str, str]
    receiver: int
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., run: _Optional[str] = ..., algorithm: _Optional[str] = ..., model_digest: _Optional[str] = ..., graph_digest: _Optional[str] = ..., run_digest: _Optional[str] = ..., num_peers: _Optional[int] = ..., index: _Optional[int] = ..., name: _Optional[str] = ..., nonce: _Optional[int] = ..., received: _Optional[int] = ..., window_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., software: _Optional[str] = ..., seen_as: _Optional[str] = ..., challenge: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., progress: _Optional[bytes] = ..., shown: _Optional[bytes] = ..., admission: _Optional[bytes] = ..., start: _Optional[_Union[StartModel, _Mapping[str, object]]] = ..., meanings: _Optional[_Iterable[_Union[Meaning, _Mapping[str, object]]]] = ..., settings: _Optional[_Mapping[str, str]] = ..., machine: _Optional[_Mapping[str, str]] = ..., receiver: _Optional[int] = ...) -> None: ...

class Meaning(_message.Message):
    __slots__ = ("kind", "digest", "entries", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    digest: bytes
    entries: bytes
    count: int
    def __init__(self, kind: _Optional[str] = ..., digest: _Optional[bytes] = ..., entries: _Optional[bytes] = ..., count: _Optional[int] = ...) -> None: ...

class StartModel(_message.Message):
    __slots__ = ("digest", "parameters", "buffers")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    parameters: bytes
    buffers: bytes
    def __init__(self, digest: _Optional[bytes] = ..., parameters: _Optional[bytes] = ..., buffers: _Optional[bytes] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("kind", "reason")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Close.Kind]
        GOODBYE: _ClassVar[Close.Kind]
        REFUSED: _ClassVar[Close.Kind]
        VIOLATION: _ClassVar[Close.Kind]
        SUPERSEDED: _ClassVar[Close.Kind]
    KIND_UNSPECIFIED: Close.Kind
    GOODBYE: Close.Kind
    REFUSED: Close.Kind
    VIOLATION: Close.Kind
    SUPERSEDED: Close.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: Close.Kind
    reason: str
    def __init__(self, kind: _Optional[_Union[Close.Kind, str]] = ..., reason: _Optional[str] = ...) -> None: ...
