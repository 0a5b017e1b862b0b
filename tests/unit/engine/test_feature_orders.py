"""The feature store in every order of events that hypothesis thinks of."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types.media_phase import MediaPhase
from tests.unit.engine.feature_parts import SHARED, Parts


class Model(Parts):
    """Records what each request waits for, and checks the invariants after each event."""

    def __init__(self):
        super().__init__()
        self.num_reserved = 0
        self.waiting: set[tuple[str, int]] = set()  # reserved, neither ready nor released
        self.ready: set[tuple[str, int]] = set()
        self.unwanted: set[tuple[str, int]] = set()  # of the waiting ones: the prefix cache may have them

    def arrive(self, name: str, is_wanted: bool) -> None:
        request_id = str(self.num_reserved)
        key = (request_id, 0)
        self.num_reserved += 1
        copy = self.store.copies.newest((name, len(name) * 4))
        can_share = copy is not None and not self.queued and not self.unwanted.issuperset(copy.consumers)
        self.reserve(request_id, len(name) * 4, media_hash=name, is_wanted=is_wanted)
        if not is_wanted:
            assert not self.told[key], "no encoder is asked, and none called off"
            self.unwanted.add(key)
        else:
            assert self.told[key][:1] == [SHARED] or not can_share
        (self.ready if self.store.ready_items(request_id, 1) else self.waiting).add(key)

    def end_lease(self, nth: int, completed: bool) -> None:
        """A writer that stops early leaves rubbish."""
        if self.open_leases:
            lease_id = self.open_leases[nth % len(self.open_leases)]
            num_blocks = len(self.blocks_of[lease_id])  # tells the items of this test apart
            self.memory.segments[0][self.blocks_of[lease_id]] = num_blocks if completed else -1
            told = self.close_lease(lease_id, completed=completed)
            assert len(told) == len(set(told)) and set(told) <= self.waiting, "told twice, or unasked"
            assert completed or not told
            self.waiting -= set(told)
            self.ready |= set(told)

    def want(self, nth: int) -> None:
        if self.unwanted:
            key = sorted(self.unwanted)[nth % len(self.unwanted)]
            self.store.want(key)
            self.unwanted.discard(key)

    def lose_encoder(self, nth: int) -> None:
        keys = sorted(self.waiting | self.ready)
        if keys:
            key = keys[nth % len(keys)]
            self.store.renew(key, self.store.copies[key].lease_id)

    def leave(self, nth: int, has_ended: bool) -> None:
        keys = sorted(self.waiting | self.ready)
        if keys:
            key = keys[nth % len(keys)]
            self.store.release(key, has_ended=has_ended)
            for keys in (self.waiting, self.ready, self.unwanted):
                keys.discard(key)

    def owner_leaves(self, nth: int, has_ended: bool) -> None:
        copies = {copy.lease_id: copy for copy in self.store.copies.values()}
        owned = [copies[lease_id] for lease_id in self.open_leases if lease_id in copies]
        owners = [copy.owner for copy in owned if copy.owner in copy.consumers]
        if owners:
            self.leave(sorted(self.waiting | self.ready).index(owners[nth % len(owners)]), has_ended)

    def check(self) -> None:
        self.pool.check_integrity()
        items, store = self.store.copies, self.store
        assert set(items) == self.waiting | self.ready
        assert all((items[key].phase is MediaPhase.STAGED) == (key in self.ready) for key in items)
        assert all(SHARED not in kinds[1:] for kinds in self.told.values())
        here = {block_id for copy in items.values() for block_id in copy.block_ids}
        fenced = {block_id for lease_id in self.open_leases for block_id in self.blocks_of[lease_id]}
        assert len(here | fenced) == store.num_used_blocks and store.num_open_leases == len(self.open_leases)
        for key in self.ready:
            num_blocks = len(items[key].block_ids)
            assert (
                torch.cat(self.store.rows(key, 0, 4 * num_blocks)).flatten().tolist()
                == [num_blocks] * 4 * num_blocks
            )
        for key in self.waiting:
            copy = items[key]
            is_asked = copy.lease_id in self.open_leases
            if copy.phase is not MediaPhase.STAGING or not self.unwanted.issuperset(copy.consumers):
                assert (copy in self.queued) != is_asked
            # else it may have a lease of a request that has left
        queued = [int(name) for copy in self.queued for name, _ in copy.consumers]
        holding = [int(key[0]) for key, copy in items.items() if copy.block_ids]
        assert max(holding, default=-1) < min(queued, default=1 << 30), "a request waits for a younger one"

    def end_well(self) -> None:
        """Encoders do their work and requests end in any order: all requests get embeddings."""
        for _ in range(2 * self.num_reserved):
            self.want(0)
            self.end_lease(0, True)
            while self.ready:
                self.store.release(self.ready.pop())
            self.check()
        assert not self.waiting


arrivals = st.tuples(st.just("arrive"), st.sampled_from(["a", "bb", "ccc"]), st.booleans())
events = st.one_of(
    arrivals,
    arrivals,
    st.tuples(st.just("end_lease"), st.integers(0, 9), st.booleans()),
    st.tuples(st.sampled_from(["lose_encoder", "want"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(["leave", "owner_leaves"]), st.integers(0, 9), st.booleans()),
)


@settings(max_examples=120)
@given(st.lists(arrivals, min_size=2, max_size=6), st.lists(events, max_size=60))
def test_in_any_order_of_events_nothing_leaks_and_no_request_is_forgotten(first, happened):
    model = Model()
    for name, *values in (*first, *happened):
        getattr(model, name)(*values)
        model.check()
    model.end_well()
    model.let_go()
