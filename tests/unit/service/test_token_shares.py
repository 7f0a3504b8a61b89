"""What is taken by single calls and framed puts counts in the share of the token that came with them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.api import NO_SESSION
from kvstore.core.shares import Share
from kvstore.locks import ClientLocks
from kvstore.rpc import wire
from kvstore.service.access import TRUSTED
from kvstore.service.store import _may_write
from kvstore.types import MatchMode
from tests.e2e import blocks
from tests.fuzz.probes import SPACES, Refused, Servant, _match, keys_of, put_of, root_of, servant


async def stored(world: Servant, tenant: str) -> bytes:
    """Open a tenant's namespace and put its prompt."""
    await world.call(tenant, "Open", wire.open_to_wire(SPACES[tenant], root=root_of(tenant)))
    keys = keys_of(tenant)
    await world.call(tenant, "Put", put_of(tenant, keys, data=lambda block: blocks.payload(keys, block)))
    return keys


def test_leases_of_one_token_are_limited_and_others_keep_theirs(tmp_path: Path) -> None:
    async def play(world: Servant) -> None:
        world.verbs.ladder._leases._share = Share("leases", limit=3)
        for tenant in SPACES:
            match = _match(tenant, await stored(world, tenant), MatchMode.LEASE)
            for _ in range(3):
                assert (await world.call(tenant, "Match", match)).blocks
            with pytest.raises(Refused, match="the limit is 3 leases of one client, 3 are held"):
                await world.call(tenant, "Match", match)

    with servant(tmp_path) as world:
        asyncio.run(play(world))


def test_a_put_of_a_token_is_held_to_its_share(tmp_path: Path) -> None:
    async def play(world: Servant) -> None:
        ladder = world.verbs.ladder
        ladder._putting._pages = Share("reserved pages", limit=2 * blocks.PART.stride_pages)
        keys = await stored(world, "acme")
        assert (await world.call("acme", "Match", _match("acme", keys, MatchMode.PROBE))).blocks == 2
        assert not len(ladder._putting._pages)

    with servant(tmp_path) as world:
        asyncio.run(play(world))


def test_the_daemon_itself_may_write_for_a_token(tmp_path: Path) -> None:
    assert TRUSTED.share == NO_SESSION
    locks = ClientLocks(tmp_path / "clients")
    assert _may_write(locks, -1)
    assert not _may_write(locks, 7)
    locks.close()
