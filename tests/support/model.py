"""The oracle: a dict that says which blocks may and which must be visible."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvstore.retention import SHIPPED_CLASSES
from kvstore.types import HASH_BYTES, TtlMode

CLASSES = {c.name: c for c in SHIPPED_CLASSES}


@dataclass(slots=True)
class Block:
    """One stored block: who follows whom, which class holds it since when, and whether it would survive a
    restart.

    In a flat namespace the blocks that were put `together`, next to one another, also live together.
    """

    parent: bytes
    retention_class: str
    since: float
    durable: bool
    together: list[bytes]


class ModelStore:
    """One namespace. It never evicts: a real store may show less, never more."""

    def __init__(self, root: bytes, *, flat: bool) -> None:
        self.root = root
        self.flat = flat
        self.blocks: dict[bytes, Block] = {}

    def end(self, block: Block) -> float:
        return block.since + CLASSES[block.retention_class].ttl_seconds

    def visible(self, keys: list[bytes], now: float) -> int:
        """How many leading keys are there and alive."""
        for index, key in enumerate(keys):
            block = self.blocks.get(key)
            if block is None or now >= self.end(block):
                return index
        return len(keys)

    def _touch(self, block: Block, by: str, now: float, *, is_write: bool) -> None:
        toucher = CLASSES[by or block.retention_class]
        if toucher.mode is TtlMode.FIXED and not is_write:
            return
        if now + toucher.ttl_seconds >= self.end(block) or (is_write and now >= self.end(block)):
            block.retention_class, block.since = toucher.name, now

    def _path(self, key: bytes) -> list[bytes]:
        path = []
        while key in self.blocks:
            path.append(key)
            key = self.blocks[key].parent
        return path

    def match(self, keys: list[bytes], by: str, now: float) -> int:
        count = self.visible(keys, now)
        for key in keys[:count]:
            for item in self._neighbours(key) if self.flat else [key]:
                self._touch(self.blocks[item], by, now, is_write=False)
        for key in keys[:count] if self.flat else keys[count - 1 : count]:
            self._make_durable(self._neighbours(key) if self.flat else self._path(key))
        return count

    def put(
        self,
        parent: bytes,
        keys: list[bytes],
        stored: list[bool],
        by: str,
        now: float,
        fresh: Collection[bytes] = (),
    ) -> None:
        """Take over a put; `stored` says which blocks the store claims to have now (stored or duplicate),
        `fresh` which of them it did not have before.
        """
        before = parent
        together: list[bytes] = []
        for key, is_there in zip(keys, stored, strict=True):
            if is_there and (key not in self.blocks or key in fresh):
                together.append(key)
                self.blocks[key] = Block(before, by, now, False, together)
            else:
                together = []
            if not is_there:
                self.blocks.pop(key, None)
            before = key
        for key in keys:
            if key in self.blocks:
                for item in self._neighbours(key) if self.flat else self._path(key):
                    self._touch(self.blocks[item], by, now, is_write=True)
        if not self.flat and parent in self.blocks:
            for item in self._path(parent):
                self._touch(self.blocks[item], by, now, is_write=True)
        for key in keys:
            if key in self.blocks:
                self._make_durable(self._neighbours(key) if self.flat else self._path(key))

    def _neighbours(self, key: bytes) -> list[bytes]:
        return [other for other in self.blocks[key].together if other in self.blocks]

    def _make_durable(self, path: list[bytes]) -> None:
        """A run whose last block is held by a class that reaches SSD is written, ancestors included."""
        if path and CLASSES[self.blocks[path[0]].retention_class].reaches_ssd:
            for key in path:
                self.blocks[key].durable = True

    def delete(self, keys: list[bytes]) -> None:
        gone = set(keys[:1] if not self.flat else keys)
        if not self.flat:
            grown = True
            while grown:
                more = {k for k, b in self.blocks.items() if b.parent in gone and k not in gone}
                grown = bool(more)
                gone |= more
        for key in gone:
            self.blocks.pop(key, None)

    def reopen(self) -> None:
        self.blocks = {key: block for key, block in self.blocks.items() if block.durable}


def split_keys(keys: bytes) -> list[bytes]:
    """Unpack a packed keys field."""
    return [keys[i : i + HASH_BYTES] for i in range(0, len(keys), HASH_BYTES)]
