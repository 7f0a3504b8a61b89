"""One request on a payload connection and its answer: what it works with, what a failure leaves behind."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvstore.events import Events
from kvstore.rpc.packets import Header
from kvstore.rpc.pipe import Pipe
from kvstore.service.access import Caller
from kvstore.service.limits import Budget
from kvstore.service.verbs import Verbs


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What every exchange of a port works with.

    `generations` is the arena's table; `budget` is for what is held outside of slots. Units: seconds that an
    end may be idle.
    """

    verbs: Verbs
    generations: npt.NDArray[np.uint32]
    events: Events
    budget: Budget
    idle_seconds: float
    stopping: threading.Event


class Then(Enum):
    """Whether both ends still agree on where in the stream they are when an exchange fails.

    GO_ON: the error is the answer, the next request may follow. CLOSE: the error can be told, but what the
    client sends meanwhile cannot be told apart. CUT: nothing can be told any more.
    """

    GO_ON = "go on"
    CLOSE = "close"
    CUT = "cut"


class Exchange(ABC):
    """A request being answered; `then` is right at every moment of it.

    Threads: one.
    """

    def __init__(self, desk: Desk, pipe: Pipe) -> None:
        self._desk = desk
        self._pipe = pipe
        self.then = Then.GO_ON

    @abstractmethod
    def answer(self, header: Header, caller: Caller) -> None:
        """Read the request that begins with a header, and answer it."""
