"""Which arena pages are whose: slabs lent to a slot size, slots handed out of slabs. Pure accounting, no
memory touched.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.api import U32Array

SLAB_PAGES_MAX = 16384
SLABS_WANTED = 64


class _Loan:
    """One unit of adjacent slabs lent to a stride: which of its slots are free."""

    __slots__ = ("first_page", "free", "free_count", "slabs", "stride_pages")

    def __init__(self, *, first_page: int, slabs: range, pages: int, stride_pages: int) -> None:
        self.first_page = first_page
        self.slabs = slabs
        self.stride_pages = stride_pages
        self.free: npt.NDArray[np.bool_] = np.empty(pages // stride_pages, np.bool_)
        self.free.fill(True)
        self.free_count = len(self.free)

    def take(self, wanted: int) -> U32Array:
        if self.free_count == len(self.free):
            # Of a fresh loan nothing is to be looked for; of large puts most are.
            count = min(wanted, self.free_count)
            self.free[:count] = False
            self.free_count -= count
            end = self.first_page + count * self.stride_pages
            return np.arange(self.first_page, end, self.stride_pages, dtype=np.uint32)
        picked = self.free.nonzero()[0][:wanted]
        self.free[picked] = False
        self.free_count -= len(picked)
        return (self.first_page + picked * self.stride_pages).astype(np.uint32)


class SlabAllocator:
    """Lends slabs of pages to slot sizes and takes them back when empty, so that a second model finds room.

    Units: pages of 4 KiB; slots are addressed by their first page. Not thread-safe: the ladder's lock
    guards it.
    """

    def __init__(self, *, first_page: int, total_pages: int) -> None:
        usable = total_pages - first_page
        self.first_page = first_page
        self.slab_pages = max(1, min(SLAB_PAGES_MAX, usable // SLABS_WANTED))
        self.slab_count = usable // self.slab_pages
        self.used_pages = 0
        self._free_slabs: npt.NDArray[np.bool_] = np.ones(self.slab_count, np.bool_)
        self._owner: list[_Loan | None] = [None] * self.slab_count
        self._loans: dict[int, list[_Loan]] = {}

    @property
    def usable_pages(self) -> int:
        """Pages that can be lent at all."""
        return self.slab_count * self.slab_pages

    def allocate(self, count: int, *, stride_pages: int) -> U32Array:
        """Hand out up to `count` slots, as contiguous as possible; fewer when there is no room.

        Shapes: u32[<= count].
        """
        taken: list[U32Array] = []
        missing = count
        loans = self._loans.setdefault(stride_pages, [])
        for loan in sorted(loans, key=lambda item: -item.free_count):
            if not missing or not loan.free_count:
                break
            if loan.free_count < len(loan.free) and loan.free_count < missing and self._free_slabs.any():
                break
            taken.append(self._take(loan, missing))
            missing -= len(taken[-1])
        while missing and (fresh := self._lend(stride_pages)) is not None:
            taken.append(self._take(fresh, missing))
            missing -= len(taken[-1])
        for loan in loans:
            if not missing:
                break
            if loan.free_count:
                taken.append(self._take(loan, missing))
                missing -= len(taken[-1])
        return np.concatenate(taken) if taken else np.zeros(0, np.uint32)

    def _take(self, loan: _Loan, wanted: int) -> U32Array:
        slots = loan.take(wanted)
        self.used_pages += len(slots) * loan.stride_pages
        return slots

    def _lend(self, stride_pages: int) -> _Loan | None:
        need = -(-stride_pages // self.slab_pages)
        first = self._adjacent_free(need)
        if first is None:
            return None
        slabs = range(first, first + need)
        loan = _Loan(
            first_page=self.first_page + first * self.slab_pages,
            slabs=slabs,
            pages=need * self.slab_pages,
            stride_pages=stride_pages,
        )
        for slab in slabs:
            self._free_slabs[slab] = False
            self._owner[slab] = loan
        self._loans[stride_pages].append(loan)
        return loan

    def _adjacent_free(self, need: int) -> int | None:
        if need == 1:
            first = int(self._free_slabs.argmax()) if self.slab_count else 0
            return first if self.slab_count and self._free_slabs[first] else None
        if need > self.slab_count:
            return None
        windows = np.asarray(np.lib.stride_tricks.sliding_window_view(self._free_slabs, need).all(axis=1))
        first = int(np.argmax(windows))
        return first if windows[first] else None

    def free(self, slots: U32Array) -> None:
        """Take slots back; slabs that become empty can be lent to any size again."""
        slab_of = (slots.astype(np.int64) - self.first_page) // self.slab_pages
        slabs = sorted(set(slab_of.tolist()))
        for slab in slabs:
            loan = self._owner[slab]
            assert loan is not None, f"slab {slab} is not lent"
            mine = slots[slab_of == slab]
            index = (mine.astype(np.int64) - loan.first_page) // loan.stride_pages
            assert not loan.free[index].any(), "slot freed twice"
            loan.free[index] = True
            loan.free_count += len(index)
            self.used_pages -= len(index) * loan.stride_pages
        for slab in slabs:
            loan = self._owner[slab]
            if loan is not None and loan.free_count == len(loan.free):
                self._give_back(loan)

    def _give_back(self, loan: _Loan) -> None:
        self._loans[loan.stride_pages].remove(loan)
        for slab in loan.slabs:
            self._free_slabs[slab] = True
            self._owner[slab] = None

    def emptiest_slab(self, *, other_than: int) -> tuple[int, int, int] | None:
        """Return first and end page of the loan of another slot size with the fewest slots in use, and how
        many those are; None when there is none.
        """
        best: _Loan | None = None
        for stride, loans in self._loans.items():
            if stride == other_than:
                continue
            for loan in loans:
                if best is None or len(loan.free) - loan.free_count < len(best.free) - best.free_count:
                    best = loan
        if best is None:
            return None
        end = best.first_page + len(best.slabs) * self.slab_pages
        return best.first_page, end, len(best.free) - best.free_count

    def fits(self, *, stride_pages: int) -> bool:
        """Say whether a slot of this size could ever be handed out."""
        return -(-stride_pages // self.slab_pages) <= self.slab_count
