"""One request on its way: which tokens are computed, which pages hold them, who holds the pages."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from kvstore.client import Match, Ticket
from kvstore.engine.hbm import Claimed, Held
from kvstore.engine.loading import Load
from kvstore.engine.request import Answer, Request, Usage
from kvstore.engine.windows import WindowRows
from kvstore.types import HASH_BYTES, BlockHash, key_at

NOTHING = Held(0, ())


@dataclass(slots=True, eq=False)
class Running:
    """A request's state. Only the engine's thread touches it.

    Tokens [0, computed) have their keys and values; those of [computed, len(ids)) are still to be computed.

        0 ......... held.pages ......... | arriving or claimed | scratch |
        | published, found by others     | filled by this step | the tail of a block |

    `keys` names the full blocks of `ids`; the daemon has the first `saved` of them, as far as is known, and
    was `asked` for them, which renews them; the first `worth` of what it has come sooner than computed.

    With window layers, `window` goes with `computed`; a chunk ends at token `resumable`, behind which an
    equal prompt will go on, and `checkpoint` holds the last block boundary that it is worth to go on from.
    """

    request: Request
    ids: list[int]
    submitted_at: float
    on_token: Callable[[int], None]
    answer: Future[Answer] = field(default_factory=Future)
    keys: bytes = b""
    held: Held = NOTHING
    computed: int = 0
    scratch: int = 0
    claimed: Claimed | None = None
    load: Load | None = None
    loading_pages: Claimed | None = None
    lookup: Ticket[Match] | None = None
    worth: int | None = None
    may_load: bool = True
    logits: torch.Tensor | None = None
    saved: int = 0
    asked: bool = False
    window: WindowRows = field(default_factory=WindowRows)
    resumable: int = 0
    checkpoint: tuple[int, WindowRows] | None = None
    usage: Usage = field(default_factory=Usage)

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.ids) - len(self.request.prompt)

    def parent(self, block: int, root: BlockHash) -> BlockHash:
        """Return the key before a block."""
        return key_at(self.keys, block - 1) if block else root

    def keys_of(self, first: int, stop: int) -> bytes:
        """Return the keys of blocks [first, stop)."""
        return self.keys[first * HASH_BYTES : stop * HASH_BYTES]

    def pages(self) -> list[int]:
        """Return the pages of this step in block order."""
        pages = list(self.held.pages)
        for claimed in (self.loading_pages, self.claimed):
            if claimed is not None:
                pages += claimed.pages
        return [*pages, self.scratch]
