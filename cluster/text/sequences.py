"""Finds given sequences (of characters, or of token ids) in a stream. Pure and frozen: all choices of a
request share one automaton, and each keeps its own node."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

START = 0  # the node of a stream with whose end no sequence begins


class SequenceAutomaton:
    """The automaton of Aho and Corasick (Efficient string matching, 1975). A node is the longest end of the
    stream with which one of the sequences begins.

    Building takes time and memory in proportion to the sequences' total length. A stream of n items takes at
    most 2n steps, however many sequences there are.
    """

    def __init__(self, sequences: Sequence[Sequence[Hashable]]):
        self.edges: dict[tuple[int, Hashable], int] = {}  # (node, item): the node that is one item longer
        self._fallbacks = [START]  # of each node: its longest proper end that is a node
        self._depths = [0]
        self._origins = [0]  # of each node: a sequence that begins with it
        self._complete: dict[int, list[int]] = {}  # node: the sequences that are equal to it
        self._shorter = [START]  # of each node: its longest proper end that is a complete sequence
        nodes = [START] * len(sequences)
        open_sequences = list(range(len(sequences)))
        depth = 0
        while open_sequences:  # level by level, so that a node's ends are there before it
            for i in open_sequences:
                if len(sequences[i]) == depth:
                    self._complete.setdefault(nodes[i], []).append(i)
            open_sequences = [i for i in open_sequences if len(sequences[i]) > depth]
            for i in open_sequences:
                nodes[i] = self._child(nodes[i], sequences[i][depth], i)
            depth += 1

    def step(self, node: int, item: Hashable) -> int:
        """The node of the stream with this item."""
        while (after := self.edges.get((node, item))) is None:
            if node == START:
                return START
            node = self._fallbacks[node]
        return after

    def beginning(self, node: int) -> tuple[int, int]:
        """The index of a sequence, and how many of its first items the node is."""
        return self._origins[node], self._depths[node]

    def longest_match(self, node: int) -> int | None:
        """The first of `matches`."""
        complete = self._complete.get(node) or self._complete.get(self._shorter[node])
        return complete[0] if complete else None

    def matches(self, node: int) -> Iterator[int]:
        """The indices of the sequences with which the stream ends, longest first."""
        if node not in self._complete:
            node = self._shorter[node]
        while True:
            yield from self._complete.get(node, ())
            if node == START:
                return
            node = self._shorter[node]

    def _child(self, node: int, item: Hashable, sequence: int) -> int:
        child = self.edges.get((node, item))
        if child is None:
            fallback = START if node == START else self.step(self._fallbacks[node], item)
            child = self.edges[node, item] = len(self._depths)
            self._fallbacks.append(fallback)
            self._depths.append(self._depths[node] + 1)
            self._origins.append(sequence)
            self._shorter.append(fallback if fallback in self._complete else self._shorter[fallback])
        return child
