"""What a process has loaded costs its event loop nothing later."""

import gc

from deploy.serving.replicas import freeze_what_is_loaded


def test_later_collections_do_not_visit_what_was_loaded():
    before = gc.get_freeze_count()
    loaded = [[number] for number in range(1000)]
    freeze_what_is_loaded()
    assert gc.get_freeze_count() - before >= len(loaded)
