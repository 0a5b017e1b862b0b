"""The process in which a door has structures compiled before any worker hears of them.

    door → here  VocabularySource, once; then one Order at a time
    here → door  Checked, also when the vocabulary is loaded

Each structure is compiled in a fork of this process, which has the vocabulary: exactly what a worker will do,
with a limit of processor time and of memory. A structure that takes too long, needs too much or crashes the
library ends its fork alone. A regular expression of a few characters can do each of these.

The process imports neither torch nor transformers, opens no file and no address, and knows no secrets. Its
forks are confined as openers of media are (`cluster.media.confinement`). It ends when its socket ends, also
when the door is killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from io import BufferedRWPair

import msgspec

from cluster.errors import ClusterError, StructureError
from cluster.media.confinement import Confinement, virtual_bytes
from cluster.media.program import end_with
from cluster.structure.grammar import compile_structure, loosened_structure
from cluster.structure.matcher import Matcher
from cluster.structure.vocabulary import Vocabulary, VocabularySource
from cluster.types.structure import Structure

HEADER_BYTES = 4  # length of a frame, little endian
CPU_S = 0.7  # of one structure; 2,000 schemas like those that clients send take 5 ms each at most
WALL_S = 10.0  # on a machine that is busy with other work
MAX_BYTES = 1 << 30  # of address space, besides what the vocabulary has
PROBE_TOKENS = (128, 24, 24, 24)  # of the answers that are begun
STACK_BYTES = 4 << 20  # half of what the threads of workers have
NICENESS = 10


class Order(msgspec.Struct, frozen=True):
    structure: Structure
    cpu_s: float = CPU_S


class Checked(msgspec.Struct, frozen=True):
    error: str | None = None  # why it is refused
    text: str | None = None  # of the structure that is held, if that is not the same one: it was loose
    left_out: list[str] = []  # what of it is not held
    is_out_of_time: bool = False  # it may be held if there is more time


def framed(message: VocabularySource | Order | Checked) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


def check(order: Order, vocabulary: Vocabulary) -> Checked:
    """Compiles it in a fork."""
    reading, writing = os.pipe()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _compile_and_exit(order, vocabulary, writing, parent_pid)
    os.close(writing)
    with open(reading, "rb", buffering=0) as pipe:
        has_ended, _, _ = select.select([pipe], [], [], WALL_S)
        answer = pipe.readall() if has_ended else b""
    if not answer:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if answer:
        return msgspec.msgpack.decode(answer, type=Checked)
    if not has_ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF):
        return Checked("it takes too long to compile", is_out_of_time=True)
    return Checked("it needs too much memory or is nested too deeply")


def _compile_and_exit(order: Order, vocabulary: Vocabulary, writing: int, forked_by: int) -> None:
    """Compiles in the fork, which ends here whatever happens."""
    try:
        os.nice(NICENESS)
        max_bytes = virtual_bytes() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what Rust says when it ends a process
        signal.setitimer(signal.ITIMER_PROF, order.cpu_s)  # its signal ends the process
        threading.stack_size(STACK_BYTES)
        end_with(forked_by)
        Confinement()
        thread = threading.Thread(target=_compile, args=(order, vocabulary, writing))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def _compile(order: Order, vocabulary: Vocabulary, writing: int) -> None:
    structure = order.structure
    try:
        held, left_out = loosened_structure(structure, vocabulary) if structure.is_loose else (structure, [])
        root = Matcher(compile_structure(held, vocabulary), vocabulary, (vocabulary.end_id,))
        _probe(root, order.cpu_s / 2)
        checked = Checked(text=held.text if left_out else None, left_out=left_out)
    except ClusterError as refusal:
        checked = Checked(refusal.message[:4096])
    answer = memoryview(msgspec.msgpack.encode(checked))
    while answer:
        answer = answer[os.write(writing, answer) :]


def _probe(root: Matcher, cpu_s: float) -> None:
    """The beginnings of some answers. Raises StructureError if a limit is reached there, or if each token
    takes longer than those before it until there is no time left."""
    dice, began = random.Random(0), time.process_time()
    for max_tokens in PROBE_TOKENS:
        matcher, ends = root.copy(), [time.process_time()]
        while not matcher.is_complete and len(ends) <= max_tokens:
            allowed = matcher.allowed()
            goes_on = allowed[allowed != root.end_id]
            matcher.accept(int(dice.choice(goes_on if len(goes_on) else allowed)))
            ends.append(time.process_time())
            if ends[-1] - began > cpu_s:
                return _check_growth(ends)


def _check_growth(ends: Sequence[float]) -> None:
    """`ends`: when the first token was begun, and when each one was over. Raises StructureError if the later
    half of them took more than twice the time of the earlier one."""
    middle = ends[len(ends) // 2]
    if ends[-1] - middle > 2 * (middle - ends[0]) and len(ends) >= 8:
        raise StructureError("the structure is too complex: it takes longer with every token")


def serve(stream: BufferedRWPair) -> None:
    """Answers until the other end closes."""
    payload = _received(stream)
    if payload is None:
        return
    try:
        vocabulary, answer = Vocabulary(msgspec.msgpack.decode(payload, type=VocabularySource)), Checked()
    except ClusterError as error:
        vocabulary, answer = None, Checked(error.message)
    stream.write(framed(answer))
    stream.flush()
    while vocabulary is not None and (payload := _received(stream)) is not None:
        stream.write(framed(check(msgspec.msgpack.decode(payload, type=Order), vocabulary)))
        stream.flush()


def _received(stream: BufferedRWPair) -> bytes | None:
    header = stream.read(HEADER_BYTES)
    return stream.read(int.from_bytes(header, "little")) if len(header) == HEADER_BYTES else None


def main() -> None:
    door_is_gone = contextlib.suppress(BrokenPipeError, ConnectionResetError)
    with door_is_gone, socket.socket(fileno=int(sys.argv[1])) as end, end.makefile("rwb") as stream:
        serve(stream)


if __name__ == "__main__":
    main()
