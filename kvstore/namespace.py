"""A namespace: all that changes the bytes of a block. Bytes are shared between equal namespaces only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidArgument, LayoutMismatch
from kvstore.layout import Layout
from kvstore.types import Addressing, Fingerprint

NAMESPACE_VERSION = 1
BLOCK_TOKENS_MAX = 65536
CANONICAL_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Identity and layout of a set of blocks.

    `weights` is a fingerprint of the tensors or an immutable version, never a name. `rope` is the canonical
    text of every positional parameter. `engine` names engine and build, `packing` the attention packing
    (backend, ISA).
    Units: block_tokens in tokens; 1 with flat addressing, where a key is whatever the engine says.
    """

    model: str
    weights: str
    layout: Layout
    block_tokens: int
    dtype: str = ""
    quantisation: str = ""
    rope: str = ""
    engine: str = ""
    packing: str = ""
    adapter: str = ""
    tenant: str = ""
    replay: str = "no"
    addressing: Addressing = Addressing.CHAIN

    def checked(self) -> Namespace:
        """Return self after checking it.

        Errors: InvalidArgument naming the field, the limit and the value.
        """
        for name, value in self.identity().items():
            if name != "block_tokens" and not _is_text(value):
                raise InvalidArgument(f"namespace: {name} must be a text, got {value!r:.80}")
        if not self.model or not self.weights:
            raise InvalidArgument(
                f"namespace: model and weights must not be empty, got {self.model!r} and {self.weights!r}"
            )
        if type(self.block_tokens) is not int or not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise InvalidArgument(
                f"namespace: block_tokens {self.block_tokens!r:.80} is outside 1..{BLOCK_TOKENS_MAX}"
            )
        self.layout.checked()
        return self

    def identity(self) -> dict[str, Any]:
        """Return every field but the layout as JSON-ready values."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "layout"}
        return {key: str(value) if isinstance(value, Addressing) else value for key, value in plain.items()}

    def canonical(self) -> bytes:
        """Return the versioned canonical form that is hashed, stored and sent."""
        document = {
            "version": NAMESPACE_VERSION,
            "identity": self.identity(),
            "layout": self.layout.to_plain(),
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @property
    def fingerprint(self) -> Fingerprint:
        """BLAKE2b-256 of the canonical form."""
        return Fingerprint(
            hashlib.blake2b(self.canonical(), digest_size=32, person=b"kvstore ns v1").digest()
        )

    @staticmethod
    def from_canonical(canonical: bytes) -> Namespace:
        """Rebuild a namespace from its canonical form.

        Errors: InvalidArgument on unknown versions, unknown or missing fields.
        """
        if len(canonical) > CANONICAL_BYTES_MAX:
            raise InvalidArgument(
                f"namespace: a canonical form has at most {CANONICAL_BYTES_MAX} bytes, got {len(canonical)}"
            )
        try:
            document: Mapping[str, Any] = json.loads(canonical)
            if document["version"] != NAMESPACE_VERSION:
                raise InvalidArgument(
                    f"namespace: version {document['version']} is unknown, known is {NAMESPACE_VERSION}"
                )
            identity = dict(document["identity"])
            identity["addressing"] = Addressing(identity["addressing"])
            return Namespace(layout=Layout.from_plain(document["layout"]), **identity).checked()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidArgument(f"namespace: canonical form cannot be read: {error!s:.200}") from error


def _is_text(value: object) -> bool:
    """Say whether a value is a text that every wire can carry: no lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def differences(stored: Namespace, offered: Namespace) -> list[str]:
    """Return one line per field that differs, both sides printed."""
    left, right = stored.identity(), offered.identity()
    left["layout"], right["layout"] = stored.layout.to_plain(), offered.layout.to_plain()
    return [f"{key}: stored {left[key]!r}, offered {right[key]!r}" for key in left if left[key] != right[key]]


def refuse_other_layout(stored: Namespace, offered: Namespace) -> None:
    """Refuse a namespace whose identity is known with other bytes.

    Errors: LayoutMismatch with both sides printed.
    """
    if stored.identity() == offered.identity() and stored.layout != offered.layout:
        lines = "; ".join(differences(stored, offered))
        raise LayoutMismatch(f"namespace {offered.model!r}: same identity, different layout: {lines}")
