"""The smallest engine with a process for every rank, forked from a process that has dialled nothing."""

from __future__ import annotations

import multiprocessing
import socket
import sys
from multiprocessing.managers import BaseManager
from typing import TYPE_CHECKING

from kvstore.testing.adapter_suite.harness import Engine
from kvstore.testing.adapter_suite.process import Job, nurse
from kvstore.testing.adapter_suite.toy import ToyEngine, ToyRank


class RankProcess(BaseManager):
    """A process that holds one rank; what is called here happens there."""

    if TYPE_CHECKING:
        rank = ToyRank


RankProcess.register("rank", ToyRank, exposed=("match", "load", "release", "put", "close"))


class EngineOfProcesses(ToyEngine):
    """Its own process computes and decides; the ranks load and save."""

    def start_rank(self, address: str, *, rank: int, patience_seconds: float) -> ToyRank:
        process = RankProcess(ctx=multiprocessing.get_context("fork"))
        process.start()
        self.__dict__.setdefault("processes", []).append(process)
        return process.rank(address, self.namespace, rank=rank, patience_seconds=patience_seconds)

    def close(self) -> None:
        super().close()
        for process in self.__dict__.get("processes", ()):
            process.shutdown()


def open_engine(job: Job) -> Engine:
    """Start an engine of two ranks."""
    weights = "v2" if job["other_model"] else "v1"
    return EngineOfProcesses(
        job["address"], patience_seconds=job["patience_seconds"], weights=weights, ranks=2
    )


if __name__ == "__main__":
    nurse(socket.socket(fileno=int(sys.argv[1])), open_engine)
