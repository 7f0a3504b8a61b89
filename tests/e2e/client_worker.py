"""A client process that takes a lease or a reservation, says so, and waits to be killed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvstore.client import Client
from tests.e2e.test_client_daemon import NAMESPACE, SECONDS, prompt, stored


def main(address: str, step: str) -> None:
    """Do the step; told to hold, end the session but stay in the middle of a copy."""
    client = Client(address)
    namespace = client.open(NAMESPACE)
    if step == "leased":
        keys, _ = stored(namespace)
        assert namespace.match(keys, deadline_seconds=SECONDS).lease
        say(step)
        sys.stdin.readline()
        return
    keys, _ = prompt(namespace, 5)
    reservation = namespace.reserve(namespace.root, keys, deadline_seconds=SECONDS)
    assert reservation.link is not None
    with reservation.link.use():
        say(step)
        if sys.stdin.readline():
            client.close()
            say("holding")
            sys.stdin.readline()


def say(word: str) -> None:
    """Tell the test how far this is."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
