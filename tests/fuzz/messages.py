"""Requests as a stranger might send them: of the right kind with wrong values, or not even of the right kind.

Everything comes from one seeded generator. `Known` is what the stranger has learnt: namespaces and keys that
exist, and the numbers that the daemon has handed out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvstore.errors import InvalidArgument
from kvstore.namespace import Namespace
from kvstore.rpc.v1 import admin_pb2
from kvstore.rpc.v1 import data_pb2 as pb

UNARY: dict[str, type[Message]] = {
    **{
        f"/kvstore.v1.Data/{verb}": getattr(pb, f"{verb}Request")
        for verb in (
            "Open", "Match", "Touch", "Prefetch", "Cancel", "Renew", "Release", "Delete", "List", "Reserve",
            "Commit", "Abort",
        )
    },
    **{
        f"/kvstore.v1.Admin/{verb}": getattr(admin_pb2, f"{verb}Request")
        for verb in (
            "Status", "Namespaces", "Inspect", "Segments", "Retention", "Forecast", "HitRate", "Why",
            "Advice", "Receipts",
        )
    },
    "/kvstore.v1.Data/Nothing": pb.PingRequest,
}  # fmt: skip
VERBS = tuple(f.name for f in pb.SessionRequest.DESCRIPTOR.oneofs_by_name["verb"].fields)
HUGE_ENTRIES = 70_000
M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class Known:
    """What the stranger knows of the daemon."""

    canonicals: list[bytes]
    fingerprints: list[bytes]
    roots: list[bytes]
    keys: list[bytes]
    numbers: list[int] = field(default_factory=list)
    ever: set[int] = field(default_factory=set)

    def learn(self, number: int) -> None:
        """Remember a number that the daemon handed out; of the oldest only that they were."""
        if number:
            self.ever.add(number)
            self.numbers.append(number)
            del self.numbers[:-64]


class Stranger:
    """Makes messages."""

    def __init__(self, rng: random.Random, known: Known) -> None:
        self.rng = rng
        self.known = known
        self._tame = False

    def request(self, kind: type[M]) -> M:
        """Return a message of a kind, its fields filled at random."""
        message = kind()
        self._tame = self.rng.random() < 0.6
        self._fill(message, depth=0)
        if isinstance(message, pb.DeleteRequest) and self._tame:
            message.keys = message.keys[-32:]
        if isinstance(message, pb.OpenRequest) and self.rng.random() < 0.5:
            message.fingerprint = _fingerprint(message.canonical)
        return message

    def session_request(self) -> pb.SessionRequest:
        """Return a request for a session: any verb in any order."""
        message = pb.SessionRequest(request_id=self._number(64) if self.rng.random() < 0.9 else 0)
        if self.rng.random() < 0.98:
            verb = self.rng.choice(VERBS)
            part = getattr(message, verb)
            part.SetInParent()
            self._tame = self.rng.random() < 0.6
            self._fill(part, depth=1)
        return message

    def put_requests(self) -> list[pb.PutRequest]:
        """Return the messages of a framed put: mostly a header and chunks that nearly fit."""
        rng = self.rng
        requests: list[pb.PutRequest] = []
        if rng.random() < 0.9:
            header = pb.PutRequest(header=self.request(pb.PutRequest.Header))
            if rng.random() < 0.7:
                reserve = header.header.reserve
                reserve.namespace, reserve.parent = rng.choice(self.known.fingerprints), self._hash()
                known = rng.choice(self.known.keys)[: 32 * rng.randint(1, 4)]
                reserve.keys = known if rng.random() < 0.6 else rng.randbytes(len(known))
                if reserve.keys == known:
                    reserve.namespace, reserve.parent = self.known.fingerprints[0], self.known.roots[0]
                del reserve.parts[:]
                reserve.token_ids, reserve.retention_class = b"", ""
                del header.header.digests[:]
                header.header.ack = rng.choice((pb.ACK_TIER_HOST, pb.ACK_TIER_SSD))
            requests.append(header)
        for block in range(rng.randint(0, 5)):
            chunk = pb.PutRequest.Chunk(part=0, block=block, offset=0, data=rng.randbytes(self._size(20_000)))
            if rng.random() < 0.2:
                self._fill(chunk, depth=1)
            requests.append(pb.PutRequest(chunk=chunk))
        if rng.random() < 0.1:
            rng.shuffle(requests)
        return requests

    def wire(self, message: Message) -> bytes:
        """Return the bytes of a message, at times spoiled."""
        data = message.SerializeToString()
        return self.spoiled(data) if self.rng.random() < 0.25 else data

    def spoiled(self, data: bytes) -> bytes:
        """Return other bytes: cut, flipped, doubled, or none of it."""
        rng = self.rng
        how = rng.randrange(5)
        if how == 0:
            return data[: rng.randint(0, len(data))]
        if how == 1 and data:
            flipped = bytearray(data)
            for _ in range(rng.randint(1, 8)):
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        if how == 2:
            return data + data[: rng.randint(0, len(data))]
        if how == 3:
            return rng.randbytes(rng.randint(0, 300))
        at = rng.randint(0, len(data))
        return data[:at] + rng.randbytes(rng.randint(1, 20)) + data[at:]

    def _fill(self, message: Message, *, depth: int) -> None:
        for item in message.DESCRIPTOR.fields:
            if self.rng.random() < (0.02 if self._tame else 0.15):
                continue
            if item.is_repeated:
                self._fill_repeated(message, item, depth)
            elif item.type == FieldDescriptor.TYPE_MESSAGE:
                if depth < 4:
                    part = getattr(message, item.name)
                    part.SetInParent()
                    self._fill(part, depth=depth + 1)
            else:
                setattr(message, item.name, self._value(item))

    def _fill_repeated(self, message: Message, item: Any, depth: int) -> None:
        count = self.rng.choice((0, 0, 0, 1) if self._tame else (0, 0, 1, 1, 2, 3))
        if self.rng.random() < 0.001:
            count = HUGE_ENTRIES
        values: Any = getattr(message, item.name)
        if item.type != FieldDescriptor.TYPE_MESSAGE:
            values.extend(self._value(item) for _ in range(count))
        elif depth < 4:
            for _ in range(count):
                part = values.add()
                if count < HUGE_ENTRIES:
                    self._fill(part, depth=depth + 1)

    def _value(self, item: Any) -> Any:
        if self._tame:
            tame: dict[int, tuple[Any, ...]] = {
                FieldDescriptor.TYPE_STRING: ("", "agent", "chat"),
                FieldDescriptor.TYPE_BOOL: (item.name == "payload",),
                FieldDescriptor.TYPE_ENUM: (1, 2),
                FieldDescriptor.TYPE_DOUBLE: (30.0, 0.5),
                FieldDescriptor.TYPE_UINT32: (0, 1, 2, 5),
            }
            if item.type in tame:
                return self.rng.choice(tame[item.type])
        makers: dict[int, Callable[[], Any]] = {
            FieldDescriptor.TYPE_BYTES: lambda: self._bytes(item.name),
            FieldDescriptor.TYPE_STRING: self._text,
            FieldDescriptor.TYPE_BOOL: lambda: self.rng.random() < 0.3,
            FieldDescriptor.TYPE_ENUM: lambda: self.rng.choice((1, 1, 2, 3, 0, 77, -1, 2**31 - 1)),
            FieldDescriptor.TYPE_DOUBLE: lambda: self.rng.choice(
                (30.0, 0.5, 1e-9, 0.0, -0.0, -1.0, 1e308, float("nan"), float("inf"), float("-inf"))
            ),
            FieldDescriptor.TYPE_UINT32: lambda: self._number(32),
        }
        return makers.get(item.type, lambda: self._number(64))()

    def _number(self, bits: int) -> int:
        rng = self.rng
        if bits == 64 and self.known.numbers and rng.random() < 0.5:
            return rng.choice(self.known.numbers)
        top = 1 << bits
        return rng.choice((0, 0, 1, 1, 2, 3, 16, 65_536, top - 1, top >> 1, rng.randrange(top)))

    def _size(self, usual: int) -> int:
        return self.rng.choice((usual, usual, usual, 0, 1, usual - 1, usual + 1, 16_384))

    def _hash(self) -> bytes:
        rng = self.rng
        keys = rng.choice(self.known.keys)
        return rng.choice((rng.choice(self.known.roots), keys[-32:], rng.randbytes(32)))

    def _text(self) -> str:
        return self.rng.choice(
            ("", "", "agent", "chat", "swa", "handoff", "\u00fc\U0001f600", "x" * 300, "a\x00b", "request-1")
        )

    def _bytes(self, name: str) -> bytes:
        rng = self.rng
        if rng.random() < (0.03 if self._tame else 0.2):
            return rng.randbytes(rng.choice((0, 1, 16, 31, 32, 33, 64, 4096)))
        if name == "canonical":
            return self._canonical()
        if self._tame and name in ("token_ids", "hash_prefix", "lengths", "put_id"):
            return b""
        if self._tame and name in ("namespace", "keys", "parent", "root"):
            if name == "keys":
                return rng.choice(self.known.keys)
            return (self.known.fingerprints if name == "namespace" else self.known.roots)[0]
        if name in ("namespace", "fingerprint"):
            return rng.choice(self.known.fingerprints)
        if name in ("parent", "root"):
            return self._hash()
        if name == "keys":
            keys = rng.choice(self.known.keys)
            return keys[: 32 * rng.randint(0, len(keys) // 32)] + rng.randbytes(32 * rng.choice((0, 0, 1, 5)))
        if name == "token_ids":
            return rng.randbytes(4 * 16 * rng.randint(0, 3))
        return rng.randbytes(rng.choice((0, 4, 8, 16, 32, 64, 96)))

    def _canonical(self) -> bytes:
        rng = self.rng
        document: Any = json.loads(rng.choice(self.known.canonicals))
        values: tuple[Any, ...] = (
            None,
            0,
            -1,
            1.5,
            float("nan"),
            "",
            "x",
            [],
            {},
            True,
            10**30,
            "\ud800",
            [[]],
        )
        node, name = document, rng.choice(list(document))
        for _ in range(rng.randint(0, 5)):
            if not isinstance(node[name], dict | list) or not node[name]:
                break
            node = node[name]
            name = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if rng.random() < 0.7:
            node[name] = rng.choice(values)
        return json.dumps(document).encode()


def _fingerprint(canonical: bytes) -> bytes:
    """Return what the daemon will find to be the name of a canonical form, if it reads it at all."""
    try:
        return Namespace.from_canonical(canonical).fingerprint
    except InvalidArgument:
        return bytes(32)
