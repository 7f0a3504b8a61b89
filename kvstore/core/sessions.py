"""What the order by density knows of sessions: paths of requests, where their blocks stand, what left."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from kvstore.core.frames import Node
from kvstore.core.reuse import Birth, Kind, ReuseTable, Signature, signature_of
from kvstore.types import key_at

LONG_PAUSE_SECONDS = 60.0
"""After such a pause a session begins a new spell: until then a program went on, now somebody thought."""
USUAL_SHARE = 0.3
"""Of the usual pause, what the latest makes up."""


class Stand(Birth):
    """A birth with its place in the order: its nodes, those to leave first in front, and its valid entry."""

    __slots__ = ("entry", "places")

    def __init__(self, table: ReuseTable[Stand], at: float, kind: Kind) -> None:
        super().__init__(table, at, kind)
        self.entry = 0
        self.places: OrderedDict[Place, None] = OrderedDict()


@dataclass(slots=True, eq=False)
class Place:
    """What is known of a node: its births (of the body, and of the last block when a request ended there),
    the path that used it last, and the key of what left behind it.
    """

    node: Node
    body: Stand
    tail: Stand | None
    blocks: int
    path: Path
    gone: bytes = b""

    @property
    def body_blocks(self) -> int:
        """The blocks that the body's birth counts."""
        return self.blocks - (self.tail is not None)


@dataclass(slots=True)
class Gone:
    """Blocks that left, to be known again by the key of the first: a body and the last block of a request."""

    body: Stand
    blocks: int
    path: Path
    tail: Stand | None
    tail_key: bytes


@dataclass(slots=True)
class Awaited:
    """A run about to be written: its path, and the key of what of it found no room."""

    path: Path
    gone: bytes = b""


class Path:
    """One request as the order sees it: reads from the deepest node up, then writes below."""

    __slots__ = (
        "blocks",
        "is_shared",
        "last",
        "new_blocks",
        "pause_seconds",
        "spell",
        "stands",
        "usual_pause",
    )

    def __init__(
        self, *, blocks: int = 0, pause_seconds: float = -1.0, usual_pause: float = -1.0, spell: int = 0
    ) -> None:
        self.blocks = blocks
        self.pause_seconds = pause_seconds
        self.usual_pause = usual_pause
        """The mean logarithm of the session's pauses, the latest counting most; negative without any."""
        self.spell = spell
        """How many requests came since the session last paused for long."""
        self.new_blocks = 0
        self.last: Node | None = None
        self.is_shared = False
        """Has reached what many continue: all above it is shared as well."""
        self.stands: dict[tuple[str, Kind], Stand] = {}

    def next(self, pause_seconds: float, *, blocks: int = 0) -> Path:
        """Return the path of the session's next request, after a pause."""
        octaves = math.log2(1.0 + max(0.0, pause_seconds))
        usual = self.usual_pause
        return Path(
            blocks=blocks,
            pause_seconds=pause_seconds,
            usual_pause=octaves if usual < 0 else usual + USUAL_SHARE * (octaves - usual),
            spell=0 if pause_seconds > LONG_PAUSE_SECONDS else self.spell + 1,
        )

    def more(self) -> Path:
        """Return the path of what is written later, of the same session and as part of no new request."""
        return Path(
            blocks=self.blocks,
            pause_seconds=self.pause_seconds,
            usual_pause=self.usual_pause,
            spell=self.spell,
        )

    @property
    def signature(self) -> Signature:
        """What is known of the session."""
        return signature_of(
            pause_seconds=self.pause_seconds,
            usual_pause=self.usual_pause,
            spell=self.spell,
            blocks=self.blocks,
            new_blocks=self.new_blocks,
        )


def key_of(node: Node, index: int) -> bytes:
    """Return the key of one block of a node."""
    for piece in node.slices:
        if index < piece.count:
            return key_at(piece.frame.keys, piece.start + index)
        index -= piece.count
    raise IndexError(index)
