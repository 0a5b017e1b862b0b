"""The order in which requests are served: one static key per request, its virtual deadline.

    virtual deadline = arrived_at + priority * aging_s + num_tokens / tokens_per_s

The smallest key goes first. This is earliest deadline first (EDF; Liu and Layland, "Scheduling Algorithms for
Multiprogramming in a Hard-Real-Time Environment", JACM 1973) with a deadline that we choose. The size term
makes it shortest job first among requests that arrive at the same time. The arrival term is ageing, the
classical cure for starvation by priorities: a waiting request gains one class over requests that arrive
`aging_s` later. All requests age at the same speed, so the order of two requests never changes: a key is
computed once, and nothing is sorted again.

No request starves. Let A wait with key K. Every later arrival B has num_tokens >= 0, so B's key is at least
B.arrived_at + min(0, B.priority) * aging_s. B goes before A only if its key is at most K, thus only if

    B.arrived_at <= K + max(0, -lowest_priority) * aging_s

where `lowest_priority` is the smallest number in use (0, unless a client sends a negative one; the door
bounds it). Requests that can overtake A arrive within a bounded time, and that bound does not depend on how
many arrive.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulingPolicy:
    """What the class and the size of a request are worth, in seconds of waiting, and how long answers wait
    for prompts.

    aging_s         how much earlier a request of the next lower class must arrive to go first
    tokens_per_s    the size whose computation is worth a second; about what a worker computes in one
    text_share      0 to 1: the part of every step that is kept for text requests while they can fill it
    prompt_pause_s  what running answers wait for prompts between two tokens, at most: the part of a step that
                    prompts may take. Engines keep it, doors predict by it
    """

    aging_s: float
    tokens_per_s: float
    text_share: float
    prompt_pause_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Ticket:
    """What scheduling knows of a request. Instants are seconds of the caller's clock.

    arrived_at    first arrival; kept when a request returns after a preemption
    num_tokens    tokens to compute here: cached tokens cost nothing, encoding is done elsewhere,
                  a token of media costs as much as any other
    is_text       no media
    priority      class; lower goes sooner
    """

    request_id: str
    arrived_at: float
    num_tokens: int
    is_text: bool = True
    priority: int = 0


OrderKey = tuple[float, float]


def virtual_deadline(ticket: Ticket, policy: SchedulingPolicy) -> float:
    """When the request should be done, in seconds of the ticket's clock. The smallest goes first. It never
    changes."""
    return ticket.arrived_at + ticket.priority * policy.aging_s + ticket.num_tokens / policy.tokens_per_s


def order_key(ticket: Ticket, policy: SchedulingPolicy) -> OrderKey:
    """(virtual deadline, arrival): equal deadlines go in order of arrival."""
    return virtual_deadline(ticket, policy), ticket.arrived_at
