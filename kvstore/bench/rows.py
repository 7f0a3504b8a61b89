"""The rows of the bench: what each one means, its bar, and how a measured one is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Better(StrEnum):
    """Which way a row improves."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpec:
    """A row before it is measured. `bar` is the floor, or the ceiling where lower is better."""

    name: str
    what: str
    baseline: str
    bar: float | None
    better: Better = Better.HIGHER
    unit: str = "ratio"


@dataclass(frozen=True, slots=True)
class Row:
    """A measured row; `value` is None where it could not be measured, and `detail` then says why."""

    spec: RowSpec
    value: float | None
    detail: str
    bar: float | None = None
    """A bar that depends on the machine; else the row's own."""
    lacks: str = ""
    """The program that the baseline needs and this machine does not have: no failure of ours."""

    @property
    def effective_bar(self) -> float | None:
        """The bar that counts."""
        return self.spec.bar if self.bar is None else self.bar

    @property
    def reaches_bar(self) -> bool | None:
        """Whether the value reaches its bar; None where one of them is missing."""
        bar = self.effective_bar
        if self.value is None or bar is None:
            return None
        return self.value >= bar if self.spec.better is Better.HIGHER else self.value <= bar

    def to_plain(self) -> dict[str, Any]:
        """Return the row as JSON-ready values."""
        return {
            "name": self.spec.name,
            "value": None if self.value is None else round(self.value, 4),
            "better": str(self.spec.better),
            "bar": self.effective_bar,
            "baseline": self.spec.baseline,
            "unit": self.spec.unit,
            "detail": self.detail,
        }


PLAIN_COPY = "plain block-wise numpy copy of the same bytes by one thread, warm buffers"
EMPTY_RPC = "empty unary RPC (health check) on the same daemon"

HOST_HIT = RowSpec(
    name="host_hit",
    what="match, copy out and release 600 blocks of 114,048 B from host memory; no digest, one copy thread",
    baseline=PLAIN_COPY,
    bar=0.9,
)
HOST_HIT_VERIFIED = RowSpec(
    name="host_hit_verified",
    what="the same with every digest checked and the client's default threads",
    baseline=PLAIN_COPY,
    bar=1.0,
)
HOST_HIT_LAYERED = RowSpec(
    name="host_hit_layered",
    what="host_hit into a layer-major destination of 11 layer ranges",
    baseline=PLAIN_COPY,
    bar=0.75,
)
PUT = RowSpec(
    name="put",
    what="put 600 blocks of 114,048 B, digests taken, acknowledged on host, the client's default threads",
    baseline=PLAIN_COPY,
    bar=0.8,
)
PUT_ONE_THREAD = RowSpec(
    name="put_one_thread",
    what="the same with one copy thread, which takes the digests as well",
    baseline=PLAIN_COPY,
    bar=None,
)


def _step(name: str, what: str) -> RowSpec:
    """A step of a hit or a put, as a share of a plain copy: it has no bar of its own."""
    return RowSpec(name=name, what=what, baseline=PLAIN_COPY, bar=None, better=Better.LOWER)


HIT_MATCH = _step("hit_match", "ask for 600 blocks right behind a plain copy, the first step of host_hit")
HIT_FETCH = _step("hit_fetch", "copy them out, the second step")
HIT_RELEASE = _step("hit_release", "give the lease back, the last step: nothing is waited for")
PUT_RESERVE = _step(
    "put_reserve", "ask for the slots of 600 new blocks right behind a plain copy, the first step of put"
)
PUT_FILL = _step("put_fill", "copy the blocks into their slots and take their digests, the second step")
PUT_COMMIT = _step("put_commit", "publish them, the last step")
SSD_READ = RowSpec(
    name="ssd_read",
    what="read records from SSD into the arena and verify them, in process, page cache bypassed",
    baseline="fio (libaio, 1 MiB, depth 16, direct) on the same segment files",
    bar=0.7,
)
SSD_HIT = RowSpec(
    name="ssd_hit",
    what="match, load from SSD, verify, copy out and release 600 blocks through the daemon",
    baseline="the in-process read of ssd_read, the same bytes",
    bar=0.85,
)
SSD_ENCRYPTED = RowSpec(
    name="ssd_encrypted",
    what="write 600 blocks of 114,048 B to SSD, synced, and read them back, AES-256-GCM, in process",
    baseline="the same without encryption",
    bar=None,
)
MATCH_600 = RowSpec(
    name="match_600",
    what="match and release 600 resident blocks on the session",
    baseline=EMPTY_RPC,
    bar=1.5,
    better=Better.LOWER,
)
MATCH_7800 = RowSpec(
    name="match_7800",
    what="match and release 7,800 resident blocks on the session",
    baseline=EMPTY_RPC,
    bar=4.0,
    better=Better.LOWER,
)
MATCH_SCALE = RowSpec(
    name="match_scale",
    what="match_600 with 10M blocks in the index, runs of coding agents",
    baseline="the same with 10,000 blocks",
    bar=1.5,
    better=Better.LOWER,
)
INDEX_BYTES = RowSpec(
    name="index_bytes",
    what="the daemon's memory per block on SSD at a mean run of 64, page cache and arena aside",
    baseline="the daemon with 10,000 blocks",
    bar=10.0,
    better=Better.LOWER,
    unit="B",
)
NO_BASELINE = "nothing: seconds to the first match"
START_CLEAN = RowSpec(
    name="start_clean",
    what="start with 10M blocks on SSD after a clean end",
    baseline=NO_BASELINE,
    bar=5.0,
    better=Better.LOWER,
    unit="s",
)
START_KILLED = RowSpec(
    name="start_killed",
    what="the same after kill -9 with acknowledged writes",
    baseline=NO_BASELINE,
    bar=30.0,
    better=Better.LOWER,
    unit="s",
)
START_REBUILD = RowSpec(
    name="start_rebuild",
    what="the same with the index deleted",
    baseline=NO_BASELINE,
    bar=120.0,
    better=Better.LOWER,
    unit="s",
)
CLIENTS_4 = RowSpec(
    name="clients_4",
    what="host_hit by four processes at once",
    baseline="four processes copying the same bytes as in host_hit",
    bar=0.9,
)
CLIENTS_16 = RowSpec(
    name="clients_16",
    what="match of 600 resident blocks among 16 client processes, its 99th percentile",
    baseline=f"the 99th percentile of an {EMPTY_RPC}, by the same processes",
    bar=3.0,
    better=Better.LOWER,
)
STORM_P99 = RowSpec(
    name="storm_p99",
    what="host_hit_verified while prompts are prefetched from SSD without a pause, its 99th percentile",
    baseline="the same while another process reads the same files, 4 threads of 1 MiB, page cache bypassed",
    bar=None,
    better=Better.LOWER,
)
FRAMED = RowSpec(
    name="framed",
    what="match, receive and release 64 MiB in 1 MiB pieces without mapping the arena",
    baseline="a plain TCP socket on loopback with recv_into, the same pieces",
    bar=0.8,
)
PREFETCH = RowSpec(
    name="prefetch",
    what="match and copy of the first block, after a prompt on SSD was prefetched while its request waited",
    baseline="the same of a prompt that was used from host memory before",
    bar=1.2,
    better=Better.LOWER,
)

FLOP_IDEAL = "the FLOPs of the whole prompt over those of the rest, which still attends to all of it"
TRANSFORMERS = "transformers on the same weights, dtype and number of threads"
ENGINE_PREFILL_HOST = RowSpec(
    name="engine_prefill_host",
    what="first token of 4,096 tokens in the bundled engine, 96 % in host memory, against computing all",
    baseline=FLOP_IDEAL,
    bar=0.8,
)
ENGINE_PREFILL_SSD = RowSpec(
    name="engine_prefill_ssd",
    what="the same with the prefix on SSD",
    baseline=FLOP_IDEAL,
    bar=0.65,
)
ENGINE_HIDDEN = RowSpec(
    name="engine_hidden",
    what="share of the time of loads from host memory that the forward pass did not wait for",
    baseline="the time of the loads",
    bar=0.7,
)
ENGINE_VS_HF_PREFILL = RowSpec(
    name="engine_vs_hf_prefill",
    what="tokens/s of a prefill in the bundled engine without the store",
    baseline=TRANSFORMERS,
    bar=0.9,
)
ENGINE_VS_HF_DECODE = RowSpec(
    name="engine_vs_hf_decode",
    what="tokens/s of decoding in the bundled engine without the store",
    baseline=TRANSFORMERS,
    bar=0.9,
)

COLD_VLLM = "the same engine computing a prompt of the same length that nobody knows"
VLLM_WARM_HOST = RowSpec(
    name="vllm_warm_host",
    what="time to first token in vLLM, 2,133 tokens, 90 % of them in host memory",
    baseline=COLD_VLLM,
    bar=0.4,
    better=Better.LOWER,
)
VLLM_WARM_SSD = RowSpec(
    name="vllm_warm_ssd",
    what="the same from SSD, after daemon and engine were restarted",
    baseline=COLD_VLLM,
    bar=0.5,
    better=Better.LOWER,
)
VLLM_LOOKUP = RowSpec(
    name="vllm_lookup",
    what="how long looking up and leasing a prompt keeps vLLM's scheduler",
    baseline="the time to first token of a miss",
    bar=0.03,
    better=Better.LOWER,
)
VLLM_SAVING = RowSpec(
    name="vllm_saving",
    what="tokens/s of vLLM while everything it computes is saved and written behind",
    baseline="vLLM without a connector",
    bar=0.9,
)
EXPIRY_P999 = RowSpec(
    name="expiry_p999",
    what="match of 600 resident blocks while 1M blocks in 10,000 runs expire, its 99.9th percentile",
    baseline="its median",
    bar=5.0,
    better=Better.LOWER,
)
EXPIRY_MAX = RowSpec(
    name="expiry_max",
    what="the same match, the longest one of a round, the median over the rounds",
    baseline="the same of as many matches of the same store while nothing expires",
    bar=2.0,
    better=Better.LOWER,
)
