"""Host memory as the framed path sees it, which moves payload inside the daemon instead of lending slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.api import Extent
from kvstore.core.administration import Administration
from kvstore.layout import Part
from kvstore.namespace import Namespace


class Views(Administration):
    """What may be read or written for a client that has a lease or a reservation, but no mapping."""

    def images(self, extent: Extent, part: Part) -> tuple[memoryview, ...]:
        """Return writable views of an extent's slots; the caller holds the lease or reservation."""
        return self._host.images(extent.slots, stride_pages=part.stride_pages)

    def lease_namespace(self, lease: int) -> Namespace:
        """Return the namespace that a lease reads from, for who was handed nothing but the lease.

        Errors: LeaseExpired.
        """
        with self._lock:
            return self._leases.get(lease).state.namespace

    @contextmanager
    def sending(self, lease: int) -> Iterator[None]:
        """Keep what a lease covers where it is until the body is done, also when the lease ends meanwhile.

        A reader copies and then looks whether the slot changed hands; what is sent straight out of a slot is
        gone by then, to somebody who must not see what another tenant put there. The body must end soon.

        Errors: LeaseExpired.
        """
        with self._lock:
            items = self._leases.get(lease).all_items
            for item in items:
                self._catalog.hold(item.frame, item.start + item.count)
        try:
            yield
        finally:
            with self._decision():
                for item in items:
                    self._catalog.unhold(item.frame, item.start + item.count)
