"""What a 429 says: the text of every kind of refusal for lack of room, in one place. Pure functions that own
nothing; any thread may call them.

    the server is busy: <what was measured>; <the limit>

docs/admission.md lists the texts, and clients and dashboards may match them. So a text changes here, there
and in its test together. Times are seconds.
"""

from __future__ import annotations


def would_wait(wait_s: float, class_name: str, max_wait_s: float, max_planned_s: float) -> str:
    """`max_planned_s`: the longest wait with which a request of this class is queued."""
    return _busy(
        f"the request would wait about {_seconds(wait_s)}",
        f"class '{class_name}' allows {_seconds(max_wait_s)}, "
        f"and {_seconds(max_planned_s)} of predicted wait",
    )


def has_waited(waited_s: float, class_name: str, max_wait_s: float) -> str:
    return _busy(
        f"the request has waited {_seconds(waited_s)}", f"class '{class_name}' allows {_seconds(max_wait_s)}"
    )


def would_miss_target(wait_s: float, class_name: str, target_s: float, max_planned_s: float) -> str:
    """`max_planned_s`: as above, for a first token in time. `target_s`: from arrival to the first token."""
    return _busy(
        f"the request would wait about {_seconds(wait_s)}",
        f"class '{class_name}' allows {_seconds(target_s)} until the first token, which leaves "
        f"{_seconds(max_planned_s)} of predicted wait",
    )


def has_missed_target(waited_s: float, ttft_s: float, class_name: str, target_s: float) -> str:
    """`ttft_s`: predicted from admission to the first token."""
    return _busy(
        f"the request has waited {_seconds(waited_s)} and would need about {_seconds(ttft_s)} more",
        f"class '{class_name}' allows {_seconds(target_s)} until the first token",
    )


def lacks_blocks(num_blocks: int, num_free: int, max_blocks: int) -> str:
    """Follows one of the texts above if the request also waits for decode's memory."""
    return f"; it needs {num_blocks} KV blocks, {num_free} of {max_blocks} are free"


def queue_is_full(num_of_tenant: int, class_name: str, max_queued: int) -> str:
    """`num_of_tenant`: requests of the same tenant and class that wait."""
    return _busy(
        f"{max_queued} requests wait, {num_of_tenant} of them from this client in class '{class_name}'",
        f"the door allows {max_queued}",
    )


def made_room(num_of_tenant: int, class_name: str, max_queued: int) -> str:
    """`num_of_tenant`: as above, this one included."""
    return f"{queue_is_full(num_of_tenant, class_name, max_queued)}, and this one made room for another"


def media_bytes(num_bytes: int, owner: str, max_bytes: int) -> str:
    """`owner`: "door" or "tenant"."""
    return _busy(
        f"the media of the requests in work would have {num_bytes} bytes",
        f"a {owner} holds at most {max_bytes}",
    )


def body_bytes(num_bytes: int, num_free: int, max_bytes: int) -> str:
    """`num_free`: bytes that the door has left for other requests."""
    return _busy(
        f"the bodies of this client's requests in work would have {num_bytes} bytes",
        f"a client holds at most as many as stay free, {num_free} of {max_bytes}",
    )


def kept_bytes(num_bytes: int, num_free: int, max_bytes: int) -> str:
    """`num_free`: bytes that the door has left for other responses."""
    return _busy(
        f"this client's background responses would have {num_bytes} bytes",
        f"a client holds at most as many as stay free, {num_free} of {max_bytes}",
    )


def kept_readers(max_readers: int) -> str:
    return _busy(
        f"{max_readers} readers of this client's background responses are connected",
        f"a client has at most {max_readers}",
    )


def no_slot(work: str, waited_s: float, num_slots: int, max_of_tenant: int) -> str:
    """`work`: what the slots are for, in the plural. `max_of_tenant`: slots that one tenant may have."""
    part = f", {max_of_tenant} of them for one client" if max_of_tenant < num_slots else ""
    return _busy(f"no slot became free within {_seconds(waited_s)}", f"{num_slots} {work} run at once{part}")


def encoder_rows(num_rows: int, max_rows: int) -> str:
    return _busy(
        f"{num_rows} embedding rows would wait for the encoder", f"an encoder's queue has at most {max_rows}"
    )


def _busy(measured: str, limit: str) -> str:
    return f"the server is busy: {measured}; {limit}"


def _seconds(seconds: float) -> str:
    return f"{round(seconds, 1 if seconds >= 1 else 2):g} s"
