from kvstore.rpc.v1 import data_pb2 as _data_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("document", "boot_id")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    document: str
    boot_id: int
    def __init__(self, document: _Optional[str] = ..., boot_id: _Optional[int] = ...) -> None: ...

class NamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("fingerprint", "canonical", "blocks", "host_bytes", "ssd_bytes")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CANONICAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    canonical: bytes
    blocks: int
    host_bytes: int
    ssd_bytes: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., canonical: _Optional[bytes] = ..., blocks: _Optional[int] = ..., host_bytes: _Optional[int] = ..., ssd_bytes: _Optional[int] = ...) -> None: ...

class NamespacesReply(_message.Message):
    __slots__ = ("namespaces", "boot_id")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    boot_id: int
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ..., boot_id: _Optional[int] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("namespace", "keys", "hash_prefix", "limit")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HASH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    hash_prefix: bytes
    limit: int
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., hash_prefix: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class InspectReply(_message.Message):
    __slots__ = ("runs", "visible_blocks", "reason", "boot_id")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[_data_pb2.RunInfo]
    visible_blocks: int
    reason: _data_pb2.MissReason
    boot_id: int
    def __init__(self, runs: _Optional[_Iterable[_Union[_data_pb2.RunInfo, _Mapping]]] = ..., visible_blocks: _Optional[int] = ..., reason: _Optional[_Union[_data_pb2.MissReason, str]] = ..., boot_id: _Optional[int] = ...) -> None: ...

class SegmentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SegmentInfo(_message.Message):
    __slots__ = ("segment", "path", "bucket", "bytes", "frames", "sealed", "created_at")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    segment: int
    path: str
    bucket: str
    bytes: int
    frames: int
    sealed: bool
    created_at: float
    def __init__(self, segment: _Optional[int] = ..., path: _Optional[str] = ..., bucket: _Optional[str] = ..., bytes: _Optional[int] = ..., frames: _Optional[int] = ..., sealed: bool = ..., created_at: _Optional[float] = ...) -> None: ...

class SegmentsReply(_message.Message):
    __slots__ = ("segments", "boot_id")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentInfo]
    boot_id: int
    def __init__(self, segments: _Optional[_Iterable[_Union[SegmentInfo, _Mapping]]] = ..., boot_id: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("blocks_done", "blocks_total", "bytes_done", "faults", "done", "boot_id")
    BLOCKS_DONE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    blocks_done: int
    blocks_total: int
    bytes_done: int
    faults: _containers.RepeatedCompositeFieldContainer[VerifyFault]
    done: bool
    boot_id: int
    def __init__(self, blocks_done: _Optional[int] = ..., blocks_total: _Optional[int] = ..., bytes_done: _Optional[int] = ..., faults: _Optional[_Iterable[_Union[VerifyFault, _Mapping]]] = ..., done: bool = ..., boot_id: _Optional[int] = ...) -> None: ...

class VerifyFault(_message.Message):
    __slots__ = ("namespace", "key", "tier", "detail")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    key: bytes
    tier: _data_pb2.Tier
    detail: str
    def __init__(self, namespace: _Optional[bytes] = ..., key: _Optional[bytes] = ..., tier: _Optional[_Union[_data_pb2.Tier, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Document(_message.Message):
    __slots__ = ("document", "boot_id")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    document: str
    boot_id: int
    def __init__(self, document: _Optional[str] = ..., boot_id: _Optional[int] = ...) -> None: ...

class RetentionRequest(_message.Message):
    __slots__ = ("change", "undo", "dry_run")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    change: ClassChange
    undo: ClassUndo
    dry_run: bool
    def __init__(self, change: _Optional[_Union[ClassChange, _Mapping]] = ..., undo: _Optional[_Union[ClassUndo, _Mapping]] = ..., dry_run: bool = ...) -> None: ...

class ClassChange(_message.Message):
    __slots__ = ("retention_class", "ttl_seconds", "mode", "quota_bytes")
    RETENTION_CLASS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    retention_class: str
    ttl_seconds: float
    mode: str
    quota_bytes: int
    def __init__(self, retention_class: _Optional[str] = ..., ttl_seconds: _Optional[float] = ..., mode: _Optional[str] = ..., quota_bytes: _Optional[int] = ...) -> None: ...

class ClassUndo(_message.Message):
    __slots__ = ("retention_class",)
    RETENTION_CLASS_FIELD_NUMBER: _ClassVar[int]
    retention_class: str
    def __init__(self, retention_class: _Optional[str] = ...) -> None: ...

class ForecastRequest(_message.Message):
    __slots__ = ("hours",)
    HOURS_FIELD_NUMBER: _ClassVar[int]
    hours: int
    def __init__(self, hours: _Optional[int] = ...) -> None: ...

class HitRateRequest(_message.Message):
    __slots__ = ("window_seconds", "by")
    WINDOW_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    window_seconds: float
    by: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, window_seconds: _Optional[float] = ..., by: _Optional[_Iterable[str]] = ...) -> None: ...

class WhyRequest(_message.Message):
    __slots__ = ("request", "hash_prefix", "namespace")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HASH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    request: str
    hash_prefix: bytes
    namespace: bytes
    def __init__(self, request: _Optional[str] = ..., hash_prefix: _Optional[bytes] = ..., namespace: _Optional[bytes] = ...) -> None: ...

class AdviceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("namespace", "keys", "hash_prefix", "tenant", "retention_class", "dry_run")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HASH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_CLASS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    hash_prefix: bytes
    tenant: str
    retention_class: str
    dry_run: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., hash_prefix: _Optional[bytes] = ..., tenant: _Optional[str] = ..., retention_class: _Optional[str] = ..., dry_run: bool = ...) -> None: ...

class ReceiptsRequest(_message.Message):
    __slots__ = ("receipt",)
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    def __init__(self, receipt: _Optional[str] = ...) -> None: ...
