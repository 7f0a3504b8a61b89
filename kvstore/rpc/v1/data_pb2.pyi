from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MatchMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MATCH_MODE_UNSPECIFIED: _ClassVar[MatchMode]
    MATCH_MODE_PROBE: _ClassVar[MatchMode]
    MATCH_MODE_LEASE: _ClassVar[MatchMode]
    MATCH_MODE_BITMAP: _ClassVar[MatchMode]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HBM: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]
    TIER_SHARED: _ClassVar[Tier]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_NEVER_STORED: _ClassVar[MissReason]
    MISS_REASON_FORGOTTEN: _ClassVar[MissReason]
    MISS_REASON_EXPIRED: _ClassVar[MissReason]
    MISS_REASON_EVICTED: _ClassVar[MissReason]
    MISS_REASON_CORRUPT: _ClassVar[MissReason]
    MISS_REASON_IDENTITY_MISMATCH: _ClassVar[MissReason]
    MISS_REASON_PART_MISSING: _ClassVar[MissReason]
    MISS_REASON_IN_FLIGHT: _ClassVar[MissReason]
    MISS_REASON_THROTTLED: _ClassVar[MissReason]
    MISS_REASON_TIER_DOWN: _ClassVar[MissReason]
    MISS_REASON_SLOWER_THAN_RECOMPUTE: _ClassVar[MissReason]
    MISS_REASON_DELETED: _ClassVar[MissReason]
    MISS_REASON_DAEMON_GONE: _ClassVar[MissReason]
    MISS_REASON_DEADLINE: _ClassVar[MissReason]
    MISS_REASON_BREAKER_OPEN: _ClassVar[MissReason]

class PutOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_OUTCOME_UNSPECIFIED: _ClassVar[PutOutcome]
    PUT_OUTCOME_RESERVED: _ClassVar[PutOutcome]
    PUT_OUTCOME_STORED_HOST: _ClassVar[PutOutcome]
    PUT_OUTCOME_STORED_SSD: _ClassVar[PutOutcome]
    PUT_OUTCOME_DUPLICATE: _ClassVar[PutOutcome]
    PUT_OUTCOME_IN_FLIGHT: _ClassVar[PutOutcome]
    PUT_OUTCOME_PART_PENDING: _ClassVar[PutOutcome]
    PUT_OUTCOME_THROTTLED: _ClassVar[PutOutcome]
    PUT_OUTCOME_EXPIRED: _ClassVar[PutOutcome]
    PUT_OUTCOME_REFUSED: _ClassVar[PutOutcome]

class AckTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACK_TIER_UNSPECIFIED: _ClassVar[AckTier]
    ACK_TIER_HOST: _ClassVar[AckTier]
    ACK_TIER_SSD: _ClassVar[AckTier]

class ReleaseOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_OUTCOME_UNSPECIFIED: _ClassVar[ReleaseOutcome]
    RELEASE_OUTCOME_USED: _ClassVar[ReleaseOutcome]
    RELEASE_OUTCOME_UNUSED: _ClassVar[ReleaseOutcome]
    RELEASE_OUTCOME_CORRUPT: _ClassVar[ReleaseOutcome]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_ARGUMENT: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_NAMESPACE: _ClassVar[ErrorCode]
    ERROR_CODE_LAYOUT_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_LEASE_EXPIRED: _ClassVar[ErrorCode]
    ERROR_CODE_OVERLOADED: _ClassVar[ErrorCode]
    ERROR_CODE_TIER_UNAVAILABLE: _ClassVar[ErrorCode]
    ERROR_CODE_DATA_CORRUPT: _ClassVar[ErrorCode]
    ERROR_CODE_SHUTTING_DOWN: _ClassVar[ErrorCode]
    ERROR_CODE_PERMISSION_REFUSED: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE_EXCEEDED: _ClassVar[ErrorCode]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_SESSION: _ClassVar[Purpose]
    PURPOSE_PAYLOAD: _ClassVar[Purpose]
MATCH_MODE_UNSPECIFIED: MatchMode
MATCH_MODE_PROBE: MatchMode
MATCH_MODE_LEASE: MatchMode
MATCH_MODE_BITMAP: MatchMode
TIER_UNSPECIFIED: Tier
TIER_HBM: Tier
TIER_HOST: Tier
TIER_SSD: Tier
TIER_SHARED: Tier
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_NEVER_STORED: MissReason
MISS_REASON_FORGOTTEN: MissReason
MISS_REASON_EXPIRED: MissReason
MISS_REASON_EVICTED: MissReason
MISS_REASON_CORRUPT: MissReason
MISS_REASON_IDENTITY_MISMATCH: MissReason
MISS_REASON_PART_MISSING: MissReason
MISS_REASON_IN_FLIGHT: MissReason
MISS_REASON_THROTTLED: MissReason
MISS_REASON_TIER_DOWN: MissReason
MISS_REASON_SLOWER_THAN_RECOMPUTE: MissReason
MISS_REASON_DELETED: MissReason
MISS_REASON_DAEMON_GONE: MissReason
MISS_REASON_DEADLINE: MissReason
MISS_REASON_BREAKER_OPEN: MissReason
PUT_OUTCOME_UNSPECIFIED: PutOutcome
PUT_OUTCOME_RESERVED: PutOutcome
PUT_OUTCOME_STORED_HOST: PutOutcome
PUT_OUTCOME_STORED_SSD: PutOutcome
PUT_OUTCOME_DUPLICATE: PutOutcome
PUT_OUTCOME_IN_FLIGHT: PutOutcome
PUT_OUTCOME_PART_PENDING: PutOutcome
PUT_OUTCOME_THROTTLED: PutOutcome
PUT_OUTCOME_EXPIRED: PutOutcome
PUT_OUTCOME_REFUSED: PutOutcome
ACK_TIER_UNSPECIFIED: AckTier
ACK_TIER_HOST: AckTier
ACK_TIER_SSD: AckTier
RELEASE_OUTCOME_UNSPECIFIED: ReleaseOutcome
RELEASE_OUTCOME_USED: ReleaseOutcome
RELEASE_OUTCOME_UNUSED: ReleaseOutcome
RELEASE_OUTCOME_CORRUPT: ReleaseOutcome
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID_ARGUMENT: ErrorCode
ERROR_CODE_UNKNOWN_NAMESPACE: ErrorCode
ERROR_CODE_LAYOUT_MISMATCH: ErrorCode
ERROR_CODE_LEASE_EXPIRED: ErrorCode
ERROR_CODE_OVERLOADED: ErrorCode
ERROR_CODE_TIER_UNAVAILABLE: ErrorCode
ERROR_CODE_DATA_CORRUPT: ErrorCode
ERROR_CODE_SHUTTING_DOWN: ErrorCode
ERROR_CODE_PERMISSION_REFUSED: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_DEADLINE_EXCEEDED: ErrorCode
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_SESSION: Purpose
PURPOSE_PAYLOAD: Purpose

class Error(_message.Message):
    __slots__ = ("code", "message", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    retry_after_ms: int
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("request_id", "hello", "open", "match", "touch", "prefetch", "cancel", "renew", "release", "delete", "list", "reserve", "commit", "abort", "ping")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    hello: HelloRequest
    open: OpenRequest
    match: MatchRequest
    touch: TouchRequest
    prefetch: PrefetchRequest
    cancel: CancelRequest
    renew: RenewRequest
    release: ReleaseRequest
    delete: DeleteRequest
    list: ListRequest
    reserve: ReserveRequest
    commit: CommitRequest
    abort: AbortRequest
    ping: PingRequest
    def __init__(self, request_id: _Optional[int] = ..., hello: _Optional[_Union[HelloRequest, _Mapping]] = ..., open: _Optional[_Union[OpenRequest, _Mapping]] = ..., match: _Optional[_Union[MatchRequest, _Mapping]] = ..., touch: _Optional[_Union[TouchRequest, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., renew: _Optional[_Union[RenewRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., delete: _Optional[_Union[DeleteRequest, _Mapping]] = ..., list: _Optional[_Union[ListRequest, _Mapping]] = ..., reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ..., ping: _Optional[_Union[PingRequest, _Mapping]] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("request_id", "boot_id", "error", "hello", "open", "match", "touch", "prefetch", "cancel", "renew", "release", "delete", "list", "reserve", "commit", "abort", "ping", "progress")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    boot_id: int
    error: Error
    hello: HelloReply
    open: OpenReply
    match: MatchReply
    touch: TouchReply
    prefetch: PrefetchReply
    cancel: CancelReply
    renew: RenewReply
    release: ReleaseReply
    delete: DeleteReply
    list: ListReply
    reserve: ReserveReply
    commit: CommitReply
    abort: AbortReply
    ping: PingReply
    progress: ProgressEvent
    def __init__(self, request_id: _Optional[int] = ..., boot_id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., hello: _Optional[_Union[HelloReply, _Mapping]] = ..., open: _Optional[_Union[OpenReply, _Mapping]] = ..., match: _Optional[_Union[MatchReply, _Mapping]] = ..., touch: _Optional[_Union[TouchReply, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchReply, _Mapping]] = ..., cancel: _Optional[_Union[CancelReply, _Mapping]] = ..., renew: _Optional[_Union[RenewReply, _Mapping]] = ..., release: _Optional[_Union[ReleaseReply, _Mapping]] = ..., delete: _Optional[_Union[DeleteReply, _Mapping]] = ..., list: _Optional[_Union[ListReply, _Mapping]] = ..., reserve: _Optional[_Union[ReserveReply, _Mapping]] = ..., commit: _Optional[_Union[CommitReply, _Mapping]] = ..., abort: _Optional[_Union[AbortReply, _Mapping]] = ..., ping: _Optional[_Union[PingReply, _Mapping]] = ..., progress: _Optional[_Union[ProgressEvent, _Mapping]] = ...) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("protocol", "purpose", "token")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    purpose: Purpose
    token: str
    def __init__(self, protocol: _Optional[int] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., token: _Optional[str] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "client", "want_mapping")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    WANT_MAPPING_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    client: str
    want_mapping: bool
    def __init__(self, protocol: _Optional[int] = ..., client: _Optional[str] = ..., want_mapping: bool = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "session", "arena_path", "arena_bytes", "arena_id", "lock_path", "server", "message_bytes_max", "byte_port")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    LOCK_PATH_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTE_PORT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    session: int
    arena_path: str
    arena_bytes: int
    arena_id: int
    lock_path: str
    server: str
    message_bytes_max: int
    byte_port: int
    def __init__(self, protocol: _Optional[int] = ..., session: _Optional[int] = ..., arena_path: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., arena_id: _Optional[int] = ..., lock_path: _Optional[str] = ..., server: _Optional[str] = ..., message_bytes_max: _Optional[int] = ..., byte_port: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("canonical", "fingerprint", "root")
    CANONICAL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    canonical: bytes
    fingerprint: bytes
    root: bytes
    def __init__(self, canonical: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ..., root: _Optional[bytes] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("fingerprint", "siblings", "boot_id")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    siblings: _containers.RepeatedScalarFieldContainer[str]
    boot_id: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., siblings: _Optional[_Iterable[str]] = ..., boot_id: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("namespace", "keys", "mode", "owner", "retention_class", "exact_only", "parts", "lease_seconds", "no_load", "release")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RETENTION_CLASS_FIELD_NUMBER: _ClassVar[int]
    EXACT_ONLY_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NO_LOAD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    mode: MatchMode
    owner: str
    retention_class: str
    exact_only: bool
    parts: _containers.RepeatedScalarFieldContainer[int]
    lease_seconds: float
    no_load: bool
    release: _containers.RepeatedCompositeFieldContainer[ReleaseRequest]
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., mode: _Optional[_Union[MatchMode, str]] = ..., owner: _Optional[str] = ..., retention_class: _Optional[str] = ..., exact_only: bool = ..., parts: _Optional[_Iterable[int]] = ..., lease_seconds: _Optional[float] = ..., no_load: bool = ..., release: _Optional[_Iterable[_Union[ReleaseRequest, _Mapping]]] = ...) -> None: ...

class TierRun(_message.Message):
    __slots__ = ("tier", "count")
    TIER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    count: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., count: _Optional[int] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("part", "first", "slots", "generations", "lengths", "digests")
    PART_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    part: int
    first: int
    slots: bytes
    generations: bytes
    lengths: bytes
    digests: bytes
    def __init__(self, part: _Optional[int] = ..., first: _Optional[int] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., digests: _Optional[bytes] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("blocks", "boundaries", "reason", "lease", "lease_seconds", "tiers", "ready", "extents", "bitmap", "boot_id")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    boundaries: _containers.RepeatedScalarFieldContainer[int]
    reason: MissReason
    lease: int
    lease_seconds: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierRun]
    ready: bool
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    bitmap: bytes
    boot_id: int
    def __init__(self, blocks: _Optional[int] = ..., boundaries: _Optional[_Iterable[int]] = ..., reason: _Optional[_Union[MissReason, str]] = ..., lease: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierRun, _Mapping]]] = ..., ready: bool = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., bitmap: _Optional[bytes] = ..., boot_id: _Optional[int] = ...) -> None: ...

class ProgressEvent(_message.Message):
    __slots__ = ("lease", "extents", "done", "blocks", "reason")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease: int
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    done: bool
    blocks: int
    reason: MissReason
    def __init__(self, lease: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., done: bool = ..., blocks: _Optional[int] = ..., reason: _Optional[_Union[MissReason, str]] = ...) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("namespace", "keys", "retention_class")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_CLASS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    retention_class: str
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., retention_class: _Optional[str] = ...) -> None: ...

class TouchReply(_message.Message):
    __slots__ = ("blocks", "boot_id")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    boot_id: int
    def __init__(self, blocks: _Optional[int] = ..., boot_id: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("namespace", "keys", "deadline_seconds", "retention_class")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_CLASS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    deadline_seconds: float
    retention_class: str
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., deadline_seconds: _Optional[float] = ..., retention_class: _Optional[str] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("prefetch", "blocks", "resident", "loading", "reason", "boot_id")
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    prefetch: int
    blocks: int
    resident: int
    loading: int
    reason: MissReason
    boot_id: int
    def __init__(self, prefetch: _Optional[int] = ..., blocks: _Optional[int] = ..., resident: _Optional[int] = ..., loading: _Optional[int] = ..., reason: _Optional[_Union[MissReason, str]] = ..., boot_id: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("prefetch",)
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    prefetch: int
    def __init__(self, prefetch: _Optional[int] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("found", "boot_id")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    found: bool
    boot_id: int
    def __init__(self, found: bool = ..., boot_id: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("leases", "lease_seconds")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedScalarFieldContainer[int]
    lease_seconds: float
    def __init__(self, leases: _Optional[_Iterable[int]] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("ended", "boot_id")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ended: _containers.RepeatedScalarFieldContainer[int]
    boot_id: int
    def __init__(self, ended: _Optional[_Iterable[int]] = ..., boot_id: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease", "used", "outcome")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    lease: int
    used: int
    outcome: ReleaseOutcome
    def __init__(self, lease: _Optional[int] = ..., used: _Optional[int] = ..., outcome: _Optional[_Union[ReleaseOutcome, str]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("found", "boot_id")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    found: bool
    boot_id: int
    def __init__(self, found: bool = ..., boot_id: _Optional[int] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("namespace", "keys", "all")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    all: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., all: bool = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("blocks", "boot_id")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    boot_id: int
    def __init__(self, blocks: _Optional[int] = ..., boot_id: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("namespace", "cursor", "limit")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    cursor: str
    limit: int
    def __init__(self, namespace: _Optional[bytes] = ..., cursor: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class RunInfo(_message.Message):
    __slots__ = ("parent", "keys", "tiers", "host_blocks", "ssd_blocks", "retention_class", "written_at", "touched_at", "expires_at", "bytes", "provenance", "leased")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_CLASS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_AT_FIELD_NUMBER: _ClassVar[int]
    TOUCHED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    parent: bytes
    keys: bytes
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    host_blocks: int
    ssd_blocks: int
    retention_class: str
    written_at: float
    touched_at: float
    expires_at: float
    bytes: int
    provenance: int
    leased: bool
    def __init__(self, parent: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ..., host_blocks: _Optional[int] = ..., ssd_blocks: _Optional[int] = ..., retention_class: _Optional[str] = ..., written_at: _Optional[float] = ..., touched_at: _Optional[float] = ..., expires_at: _Optional[float] = ..., bytes: _Optional[int] = ..., provenance: _Optional[int] = ..., leased: bool = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("runs", "cursor", "boot_id")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunInfo]
    cursor: str
    boot_id: int
    def __init__(self, runs: _Optional[_Iterable[_Union[RunInfo, _Mapping]]] = ..., cursor: _Optional[str] = ..., boot_id: _Optional[int] = ...) -> None: ...

class PartBlocks(_message.Message):
    __slots__ = ("part", "first", "count")
    PART_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    part: int
    first: int
    count: int
    def __init__(self, part: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class OutcomeRun(_message.Message):
    __slots__ = ("outcome", "count")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    outcome: PutOutcome
    count: int
    def __init__(self, outcome: _Optional[_Union[PutOutcome, str]] = ..., count: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("namespace", "parent", "keys", "put_id", "parts", "retention_class", "provenance", "token_ids")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_CLASS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    parent: bytes
    keys: bytes
    put_id: bytes
    parts: _containers.RepeatedCompositeFieldContainer[PartBlocks]
    retention_class: str
    provenance: int
    token_ids: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., put_id: _Optional[bytes] = ..., parts: _Optional[_Iterable[_Union[PartBlocks, _Mapping]]] = ..., retention_class: _Optional[str] = ..., provenance: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reservation", "outcomes", "extents", "seconds", "boot_id")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    outcomes: _containers.RepeatedCompositeFieldContainer[OutcomeRun]
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    seconds: float
    boot_id: int
    def __init__(self, reservation: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[OutcomeRun, _Mapping]]] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., seconds: _Optional[float] = ..., boot_id: _Optional[int] = ...) -> None: ...

class PartDigests(_message.Message):
    __slots__ = ("part", "first", "lengths", "digests")
    PART_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    part: int
    first: int
    lengths: bytes
    digests: bytes
    def __init__(self, part: _Optional[int] = ..., first: _Optional[int] = ..., lengths: _Optional[bytes] = ..., digests: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("reservation", "blocks", "parts", "ack")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    blocks: int
    parts: _containers.RepeatedCompositeFieldContainer[PartDigests]
    ack: AckTier
    def __init__(self, reservation: _Optional[int] = ..., blocks: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PartDigests, _Mapping]]] = ..., ack: _Optional[_Union[AckTier, str]] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("outcomes", "boot_id")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[OutcomeRun]
    boot_id: int
    def __init__(self, outcomes: _Optional[_Iterable[_Union[OutcomeRun, _Mapping]]] = ..., boot_id: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("reservation",)
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    def __init__(self, reservation: _Optional[int] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("found", "boot_id")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    found: bool
    boot_id: int
    def __init__(self, found: bool = ..., boot_id: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("header", "chunk")
    class Header(_message.Message):
        __slots__ = ("reserve", "digests", "ack")
        RESERVE_FIELD_NUMBER: _ClassVar[int]
        DIGESTS_FIELD_NUMBER: _ClassVar[int]
        ACK_FIELD_NUMBER: _ClassVar[int]
        reserve: ReserveRequest
        digests: _containers.RepeatedCompositeFieldContainer[PartDigests]
        ack: AckTier
        def __init__(self, reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., digests: _Optional[_Iterable[_Union[PartDigests, _Mapping]]] = ..., ack: _Optional[_Union[AckTier, str]] = ...) -> None: ...
    class Chunk(_message.Message):
        __slots__ = ("part", "block", "offset", "data")
        PART_FIELD_NUMBER: _ClassVar[int]
        BLOCK_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        part: int
        block: int
        offset: int
        data: bytes
        def __init__(self, part: _Optional[int] = ..., block: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PutRequest.Header
    chunk: PutRequest.Chunk
    def __init__(self, header: _Optional[_Union[PutRequest.Header, _Mapping]] = ..., chunk: _Optional[_Union[PutRequest.Chunk, _Mapping]] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("outcomes", "boot_id")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[OutcomeRun]
    boot_id: int
    def __init__(self, outcomes: _Optional[_Iterable[_Union[OutcomeRun, _Mapping]]] = ..., boot_id: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("lease", "parts", "payload", "first", "blocks")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    payload: bool
    first: int
    blocks: int
    def __init__(self, lease: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ..., payload: bool = ..., first: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("progress", "chunk", "boot_id")
    class Chunk(_message.Message):
        __slots__ = ("part", "block", "offset", "data")
        PART_FIELD_NUMBER: _ClassVar[int]
        BLOCK_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        part: int
        block: int
        offset: int
        data: bytes
        def __init__(self, part: _Optional[int] = ..., block: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    progress: ProgressEvent
    chunk: FetchReply.Chunk
    boot_id: int
    def __init__(self, progress: _Optional[_Union[ProgressEvent, _Mapping]] = ..., chunk: _Optional[_Union[FetchReply.Chunk, _Mapping]] = ..., boot_id: _Optional[int] = ...) -> None: ...
