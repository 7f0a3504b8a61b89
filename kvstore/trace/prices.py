"""What hits are worth: prices of compute, storage and tokens, and the bill of a stretch of traffic.

Prefill alone is priced: output tokens cost and earn the same whatever the cache does. No currency: all prices
are in the same one.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from kvstore.errors import InvalidArgument
from kvstore.quantities import GIB

HOUR_SECONDS = 3600.0
MONTH_SECONDS = 30 * 24 * HOUR_SECONDS
MILLION = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices of a deployment. Units: money per accelerator-hour, per GiB and month of 30 days, per GiB
    bought once, per million input tokens; speed in tokens that one accelerator prefills in a second.
    """

    gpu_hour: float
    prefill_tokens_per_gpu_second: float
    ssd_gib_month: float = 0.0
    host_gib_month: float = 0.0
    ssd_gib_bought: float = 0.0
    host_gib_bought: float = 0.0
    input_token_million: float = 0.0
    input_token_cached_million: float = 0.0

    def gpu_hours(self, tokens: float) -> float:
        """Return the accelerator-hours that it takes to prefill so many tokens."""
        return tokens / self.prefill_tokens_per_gpu_second / HOUR_SECONDS

    def bill(
        self,
        *,
        input_tokens: int,
        hit_tokens: int,
        seconds: float,
        ssd_bytes: float = 0.0,
        host_bytes: float = 0.0,
    ) -> Bill:
        """Return what a stretch of traffic costs and earns with storage of so many bytes provisioned."""
        missed, gib = input_tokens - hit_tokens, (ssd_bytes / GIB, host_bytes / GIB)
        months = seconds / MONTH_SECONDS
        return Bill(
            seconds=seconds,
            gpu_hours=self.gpu_hours(missed),
            gpu_hours_saved=self.gpu_hours(hit_tokens),
            gpu_cost=self.gpu_hours(missed) * self.gpu_hour,
            gpu_cost_saved=self.gpu_hours(hit_tokens) * self.gpu_hour,
            storage_cost=(gib[0] * self.ssd_gib_month + gib[1] * self.host_gib_month) * months,
            storage_bought=gib[0] * self.ssd_gib_bought + gib[1] * self.host_gib_bought,
            revenue=(missed * self.input_token_million + hit_tokens * self.input_token_cached_million)
            / MILLION,
        )


@dataclass(frozen=True, slots=True)
class Bill:
    """A stretch of traffic in money. Units: wall seconds, accelerator-hours of prefill, money."""

    seconds: float
    gpu_hours: float
    gpu_hours_saved: float
    gpu_cost: float
    gpu_cost_saved: float
    storage_cost: float
    storage_bought: float
    revenue: float

    @property
    def cost(self) -> float:
        """Compute and the running cost of the storage."""
        return self.gpu_cost + self.storage_cost

    @property
    def margin(self) -> float:
        """The share of the revenue that is left; -inf when there is none."""
        return (self.revenue - self.cost) / self.revenue if self.revenue else -math.inf

    @property
    def revenue_per_gpu_hour(self) -> float:
        """What an accelerator-hour of prefill earns; inf when every token hits."""
        return self.revenue / self.gpu_hours if self.gpu_hours else math.inf

    @property
    def cost_per_gpu_hour(self) -> float:
        """What an accelerator-hour of prefill costs, with the storage that saves others."""
        return self.cost / self.gpu_hours if self.gpu_hours else math.inf

    @property
    def payback_seconds(self) -> float:
        """How long until the compute saved has paid for the storage bought; inf: never."""
        saved = self.gpu_cost_saved - self.storage_cost
        if not self.storage_bought:
            return 0.0
        return self.storage_bought / saved * self.seconds if saved > 0 else math.inf


def read_prices(path: Path) -> Prices:
    """Read prices from a TOML file of `name = number` lines.

    Errors: InvalidArgument, naming the file, the key and what is known.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidArgument(f"prices {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidArgument(f"prices {path}: no TOML: {error}") from error
    known = [field.name for field in fields(Prices)]
    for key, value in document.items():
        if key not in known:
            raise InvalidArgument(f"prices {path}: {key!r} is unknown; known: {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InvalidArgument(f"prices {path}: {key} must be a number >= 0, got {value!r}")
    for key in ("gpu_hour", "prefill_tokens_per_gpu_second"):
        if not document.get(key):
            raise InvalidArgument(f"prices {path}: {key} must be given, and be > 0")
    return Prices(**{key: float(value) for key, value in document.items()})
