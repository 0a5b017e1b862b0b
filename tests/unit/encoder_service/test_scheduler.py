from cluster.types.media import Modality
from encoder_service.scheduler import Candidate, select_batch


def candidates(*rows: tuple[str, Modality, int]) -> list[Candidate]:
    return [Candidate(*row) for row in rows]


def test_the_oldest_item_chooses_the_modality():
    ready = candidates(("v", Modality.VIDEO, 64), ("i", Modality.IMAGE, 16), ("w", Modality.VIDEO, 64))
    assert [c.media_hash for c in select_batch(ready, 1000, 8)] == ["v", "w"]


def test_rows_and_items_bound_a_batch():
    ready = candidates(*((str(i), Modality.IMAGE, 16) for i in range(10)))
    assert len(select_batch(ready, 50, 8)) == 3
    assert len(select_batch(ready, 1000, 8)) == 8


def test_an_item_larger_than_the_budget_runs_alone():
    ready = candidates(("big", Modality.VIDEO, 5000), ("next", Modality.VIDEO, 10))
    assert [c.media_hash for c in select_batch(ready, 1000, 8)] == ["big"]


def test_nothing_ready_is_an_empty_batch():
    assert select_batch([], 1000, 8) == []
