"""A process that bears clients which stop themselves at a named step, to be killed there or resumed.

Reads `ROLE STEP` lines and forks a child for each before anything of gRPC runs. A child that reaches its step
says `PID at STEP` and stops itself (SIGSTOP); resumed, it goes on and says `PID done RESULT`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from kvstore.client import Client, ClientLimits, OpenNamespace, Transport
from kvstore.client import framed_packets as _framed_packets
from kvstore.client import mapped as _mapped
from kvstore.client import session as _session
from kvstore.rpc.v1 import data_pb2 as pb
from tests.torture.workload import (
    BLOCK_BYTES,
    BLOCKS,
    KEPT,
    block,
    prompt_keys,
    store,
    wrong_blocks,
)

# Typed as anything: their insides are replaced.
packets: Any = _framed_packets
mapped: Any = _mapped
session: Any = _session
SECONDS = 60.0
OWN_PROMPT = 500
"""The prompt that victims of a put bring; number 0 is there before."""


def say(text: str) -> None:
    """Tell the test, in one write: children share the pipe."""
    os.write(1, f"{os.getpid()} {text}\n".encode())


class Stops:
    """Stops this process once, at the step it was told."""

    def __init__(self, step: str) -> None:
        self._step = step

    def reach(self, step: str) -> None:
        """Stop if this is the step."""
        if step == self._step:
            self._step = ""
            say(f"at {step}")
            os.kill(os.getpid(), signal.SIGSTOP)

    def install(self) -> None:
        """Put the steps into the client: what is sent, what is answered, and the copies."""
        submit, release, deliver = session.Session.submit, session.Session.release, session.Session._deliver
        copy_in, copy_out = mapped.copy_in, mapped.copy_out
        put, batches, receive = packets.put, packets._batches, packets._blocks
        stops = self

        def submitting(self: Any, request: pb.SessionRequest, *args: Any, **more: Any) -> int:
            number: int = submit(self, request, *args, **more)
            stops.reach(f"{request.WhichOneof('verb')} sent")
            return number

        def releasing(self: Any, request: pb.ReleaseRequest) -> None:
            release(self, request)
            stops.reach("release said")

        def delivering(self: Any, reply: pb.SessionReply) -> None:
            stops.reach(f"{reply.WhichOneof('answer')} answered")
            deliver(self, reply)

        def around(copy: Callable[..., Any], name: str) -> Callable[..., Any]:
            def copying(*args: Any, **more: Any) -> Any:
                stops.reach(f"{name} begun")
                done = copy(*args, **more)
                stops.reach(f"{name} half")
                return done

            return copying

        def putting(*args: Any, **more: Any) -> Any:
            stops.reach("framed put begun")
            return put(*args, **more)

        def sending(*args: Any) -> Iterator[Any]:
            for index, batch in enumerate(batches(*args)):
                stops.reach("framed put half" if index else "framed put header")
                yield batch
            stops.reach("framed put all")

        def receiving(*args: Any) -> Any:
            stops.reach("framed fetch begun")
            following = receive(*args)
            stops.reach("framed fetch half")
            return following

        session.Session.submit = submitting
        session.Session.release = releasing
        session.Session._deliver = delivering
        mapped.copy_in, mapped.copy_out = around(copy_in, "fill"), around(copy_out, "fetch")
        mapped.STEP_BYTES = BLOCK_BYTES
        packets.BATCH_BYTES = BLOCK_BYTES
        packets.put, packets._batches, packets._blocks = putting, sending, receiving


def all_verbs(namespace: OpenNamespace) -> str:
    """Do every verb once."""
    keys, into = prompt_keys(namespace, 0), np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    got = namespace.fetch(match, into, deadline_seconds=SECONDS)
    wrong = wrong_blocks(keys, into, got.blocks)
    namespace.renew(match, 5.0)
    namespace.release(match, used=got.blocks)
    namespace.touch(keys)
    namespace.cancel(namespace.prefetch(keys, deadline_seconds=5.0))
    namespace.list()
    store(namespace, prompt_keys(namespace, OWN_PROMPT))
    namespace.delete(prompt_keys(namespace, OWN_PROMPT + 1))
    if namespace.client.transport is Transport.MAPPED:
        namespace.abort(namespace.reserve(namespace.root, prompt_keys(namespace, OWN_PROMPT + 2)))
    return f"{got.blocks} blocks, {wrong} wrong"


def late_reader(namespace: OpenNamespace, *, verify: bool) -> str:
    """Fetch under a lease that ends while this process is stopped; the slots have other blocks by then."""
    keys, into = prompt_keys(namespace, 0), np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    match = namespace.match(keys, lease_seconds=0.2, deadline_seconds=SECONDS)
    got = namespace.fetch(match, into, deadline_seconds=SECONDS, verify=verify)
    return f"{got.blocks} blocks, {wrong_blocks(keys, into, got.blocks)} wrong, {got.reason}"


def late_writer(namespace: OpenNamespace, stops: Stops) -> str:
    """Write into reserved slots after the session, and with it the reservation, has ended."""
    reservation = namespace.reserve(
        namespace.root, prompt_keys(namespace, OWN_PROMPT), deadline_seconds=SECONDS
    )
    assert reservation.link is not None
    with reservation.link.use() as link:
        arena = link.writable_arena()
        namespace.client.close()
        stops.reach("session over")
        for slot in reservation.extents[0].slots.tolist():
            arena.bytes[slot * 4096 : slot * 4096 + BLOCK_BYTES] = block(b"\xff" * 32)
        stops.reach("written late")
    return "over"


def hoarder(namespace: OpenNamespace, stops: Stops) -> str:
    """Take leases until there are no more, and release none."""
    keys = prompt_keys(namespace, 0)
    leases = 0
    while (match := namespace.match(keys, deadline_seconds=SECONDS, lease_seconds=60.0)).lease:
        leases += 1
    stops.reach("hoarded")
    return f"{leases} leases, {match.reason}"


def child(address: str, role: str, step: str) -> None:
    """Be one client."""
    stops = Stops(step)
    stops.install()
    transport = Transport.FRAMED if role == "framed" else Transport.MAPPED
    client = Client(address, transport=transport, limits=ClientLimits(connect_seconds=SECONDS))
    namespace = client.open(KEPT)
    if role in ("mapped", "framed"):
        result = all_verbs(namespace)
    elif role == "writer":
        result = late_writer(namespace, stops)
    elif role == "hoarder":
        result = hoarder(namespace, stops)
    else:
        result = late_reader(namespace, verify=role == "reader")
    say(f"done {result}")
    client.close()


def main(address: str) -> None:
    """Bear a child per line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        role, _, step = line.strip().partition(" ")
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                child(address, role, step)
            except BaseException as error:
                say(f"failed {error!r}")
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
