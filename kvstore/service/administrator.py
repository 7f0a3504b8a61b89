"""What administrators ask for and change, as JSON-ready documents: the keys of the commands' --json."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvstore.core.ladder import Ladder
from kvstore.core.sweep import HOUR_SECONDS, Amount, Forecast
from kvstore.errors import InvalidArgument
from kvstore.rpc.packing import text_of
from kvstore.rpc.v1 import admin_pb2 as pb
from kvstore.service.class_changes import ClassChanges, pause
from kvstore.service.hit_rate import BY, HitRateDocuments
from kvstore.service.purges import Purges
from kvstore.service.why import Why

FORECAST_HOURS, FORECAST_HOURS_MAX = 24, 24 * 92


class Administrator:
    """One per ladder.

    Threads: any but the event loop; verbs may wait for the disk, and some walk the index.
    Errors: InvalidArgument on what makes no sense, TierUnavailable on what cannot be made durable.
    """

    def __init__(self, ladder: Ladder, *, classes: ClassChanges, purges: Purges) -> None:
        self._ladder = ladder
        self._classes = classes
        self.purges = purges
        self._rates = HitRateDocuments(ladder)
        self._why = Why(ladder)

    def retention(self, request: pb.RetentionRequest) -> dict[str, Any]:
        """Return the classes, or what a change of one does."""
        match request.WhichOneof("action"):
            case "change":
                wanted = request.change
                return self._classes.change(
                    text_of(wanted.retention_class, "retention.retention_class"),
                    ttl_seconds=wanted.ttl_seconds if wanted.HasField("ttl_seconds") else None,
                    mode=wanted.mode,
                    quota_bytes=wanted.quota_bytes if wanted.HasField("quota_bytes") else None,
                    dry_run=request.dry_run,
                )
            case "undo":
                name = text_of(request.undo.retention_class, "retention.retention_class")
                return self._classes.undo(name, dry_run=request.dry_run)
            case _:
                return self._classes.document()

    def forecast(self, request: pb.ForecastRequest) -> dict[str, Any]:
        """Return what expires in which hour, by class."""
        hours = request.hours or FORECAST_HOURS
        if hours > FORECAST_HOURS_MAX:
            raise InvalidArgument(f"forecast.hours: at most {FORECAST_HOURS_MAX}, got {hours}")
        forecast = self._ladder.forecast(hours=hours, pause=pause)
        names = self._ladder.class_table().classes
        return {
            "at": self._ladder.wall(),
            "hour_seconds": HOUR_SECONDS,
            "hours": hours,
            "classes": {name: _of_class(forecast, name) for name in names},
        }

    def hit_rate(self, request: pb.HitRateRequest) -> dict[str, Any]:
        """Return hit rates of the recent past."""
        by = [text_of(name, "hit_rate.by") for name in request.by[: len(BY) + 1]]
        return self._rates.hit_rate(window_seconds=request.window_seconds, by=by)

    def advice(self) -> dict[str, Any]:
        """Return what classes lost, and what would have kept it."""
        return self._rates.advice()

    def purge(self, request: pb.PurgeRequest) -> dict[str, Any]:
        """Remove for good; returns the receipt."""
        return self.purges.purge(request)

    def receipts(self, request: pb.ReceiptsRequest) -> dict[str, Any]:
        """Return the receipts of purges."""
        return self.purges.receipts(text_of(request.receipt, "receipts.receipt"))

    def why(self, request: pb.WhyRequest) -> dict[str, Any]:
        """Return why a request or a block missed."""
        return self._why.document(request)


def _of_class(forecast: Forecast, name: str) -> dict[str, Any]:
    none = Amount()
    return {
        "expired": asdict(forecast.expired.get(name, none)),
        "hours": {str(hour): asdict(amount) for hour, amount in sorted(forecast.hours.get(name, {}).items())},
        "later": asdict(forecast.later.get(name, none)),
    }
