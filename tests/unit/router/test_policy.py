import pytest

from cluster.errors import UnavailableError
from router.policy import LeastWorkPolicy, RequestView, WorkerView


def workers(**queued: int) -> list[WorkerView]:
    return [WorkerView(name, units) for name, units in queued.items()]


def text(num_tokens: int = 64, *hashes: bytes) -> RequestView:
    return RequestView(num_tokens, 16, hashes)


def test_the_least_loaded_worker_of_each_pool_is_chosen():
    request = RequestView(64, 16, (), (("hash", 16),))
    placement = LeastWorkPolicy().place(
        request, workers(e1=100, e2=0), workers(p1=5000, p2=10), workers(d1=3, d2=4)
    )
    assert (placement.encoders, placement.prefill, placement.decode) == (("e2",), "p2", "d1")


def test_a_cached_prefix_outweighs_a_shorter_queue_of_less_work():
    policy = LeastWorkPolicy()
    request = text(64, b"0", b"1", b"2")
    first = policy.place(request, [], workers(p1=0, p2=0), workers(d=0)).prefill
    other = {"p1": "p2", "p2": "p1"}[first]
    assert policy.place(request, [], workers(**{first: 40, other: 0}), workers(d=0)).prefill == first
    assert policy.place(request, [], workers(**{first: 60, other: 0}), workers(d=0)).prefill == other


def test_an_encoded_item_goes_back_to_where_it_is_cached():
    policy = LeastWorkPolicy()
    request = RequestView(64, 16, (), (("hash", 16),))
    first = policy.place(request, workers(e1=0, e2=0), workers(p=0), workers(d=0)).encoders[0]
    other = {"e1": "e2", "e2": "e1"}[first]
    again = policy.place(request, workers(**{first: 1500, other: 0}), workers(p=0), workers(d=0))
    assert again.encoders == (first,), "what is cached needs no device"


def test_what_encoders_say_of_their_caches_is_known_from_then_on():
    policy = LeastWorkPolicy()
    request = RequestView(64, 16, (), (("hash", 16),))
    pools = workers(p=0), workers(d=0)
    policy.media_changed("e2", ["hash"], [])
    assert policy.place(request, workers(e1=0, e2=100), *pools).encoders == ("e2",)
    policy.media_changed("e2", [], ["hash"])
    assert policy.place(request, workers(e1=0, e2=100), *pools).encoders == ("e1",)


def test_items_of_one_request_are_spread_over_encoders():
    request = RequestView(640, 16, (), tuple((f"hash{i}", 16) for i in range(8)))
    placement = LeastWorkPolicy().place(request, workers(e1=0, e2=0), workers(p=0), workers(d=0))
    assert placement.encoders.count("e1") == placement.encoders.count("e2") == 4


def test_two_doors_come_to_the_same_choice():
    request = RequestView(64, 16, (b"block",), (("hash", 16),))
    pools = workers(e1=0, e2=0, e3=0), workers(p1=0, p2=0, p3=0), workers(d1=0, d2=0)
    assert LeastWorkPolicy().place(request, *pools) == LeastWorkPolicy().place(request, *pools)


def test_a_lost_worker_is_forgotten_with_its_cache():
    policy = LeastWorkPolicy()
    request = text(64, b"0", b"1", b"2")
    first = policy.place(request, [], workers(p1=0, p2=0), workers(d=0)).prefill
    other = {"p1": "p2", "p2": "p1"}[first]
    policy.forget(first)
    assert policy.place(request, [], workers(**{first: 10, other: 0}), workers(d=0)).prefill == other


@pytest.mark.parametrize("empty", ["encode", "prefill", "decode"])
def test_an_empty_pool_is_named(empty):
    pools = {name: workers(**{name: 0}) for name in ("encode", "prefill", "decode")} | {empty: []}
    request = RequestView(64, 16, (), (("hash", 16),))
    with pytest.raises(UnavailableError, match=f"no {empty} worker"):
        LeastWorkPolicy().place(request, *pools.values())


def test_text_needs_no_encoder():
    assert LeastWorkPolicy().place(text(), [], workers(p=0), workers(d=0)).encoders == ()
