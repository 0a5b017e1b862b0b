"""Frames survive any cutting of the byte stream; anything else is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.rpc.frames import FrameBuffer, FrameError, decode_message, encode_message, frame
from cluster.types.messages import Cancel, Hello


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(0, 7000), max_size=40))
def test_payloads_come_out_whole_and_in_order_however_the_stream_is_cut(payloads, cuts):
    stream = b"".join(frame(payload) for payload in payloads)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    buffer = FrameBuffer()
    out = [
        bytes(payload)
        for start, stop in itertools.pairwise(edges)
        for payload in buffer.feed(stream[start:stop])
    ]
    assert out == payloads


def test_a_message_is_the_same_after_the_wire():
    (payload,) = FrameBuffer().feed(bytes(encode_message(Hello(1, "door"))))
    assert decode_message(payload) == Hello(1, "door")


def test_a_frame_over_the_cap_is_refused_before_its_bytes_arrive():
    with pytest.raises(FrameError, match="over the limit"):
        list(FrameBuffer(max_frame_bytes=10).feed((11).to_bytes(4, "little")))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", bytes(encode_message(Cancel("r")))[4:-1]])
def test_what_is_not_a_message_is_refused(payload):
    with pytest.raises(FrameError, match="not a message"):
        decode_message(payload)
