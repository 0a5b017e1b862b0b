"""The writer's half of the coded part of one lease: which groups travel coded, and in which wire blocks.
Agent's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.types.transfer import CodedPart
from kv_transfer.agents.agent import TransferError
from kv_transfer.codecs.pending import Pending
from kv_transfer.codecs.wire_memory import Wire

SEGMENTS_PER_LAYER = 4  # of a wire memory


@dataclass(frozen=True)
class BlockWrite:
    """Block local_ids[i] of one memory goes to block remote_ids[i] of another with the same layout."""

    local_ids: Sequence[int]
    remote_ids: Sequence[int]
    segment_ids: Sequence[int] | None  # None: all


@dataclass(frozen=True, eq=False)
class CodedWrite:
    """A write from wire memory to wire memory, once it is coded."""

    coding: Pending[None]
    write: BlockWrite


class GroupCoding:
    """The first write of a group decides whether the group travels coded, because a group goes layer by
    layer: if one of its layers went raw, all must."""

    def __init__(self, wire: Wire, part: CodedPart):
        self.wire = wire
        self.part = part
        firsts = enumerate(part.first_blocks)
        self._group_of = {first + i: group for group, first in firsts for i in range(wire.blocks_per_group)}
        self._wire_ids: dict[int, int | None] = {}  # of the groups that were begun; None: raw

    def covers(self, place: int) -> bool:
        """Whether this block of the grant travels coded."""
        return place in self._group_of and self._wire_ids.get(self._group_of[place]) is not None

    @property
    def coded_groups(self) -> dict[int, int]:
        """Number of each coded group, ascending, with the wire block that holds it here."""
        return {group: wire_id for group, wire_id in sorted(self._wire_ids.items()) if wire_id is not None}

    def encode(
        self, sources: dict[int, int], segment_ids: Sequence[int] | None
    ) -> tuple[CodedWrite | None, dict[int, int]]:
        """Codes those blocks of a write that travel coded. `sources`: place in the grant → local block.

        Returns what is to be written when it is coded, and the sources that remain raw. Raises TransferError
        if a group was begun coded and the rest of it comes in parts.
        """
        layers = _whole_layers(segment_ids, self.wire.codec.num_layers)
        places: dict[int, list[int]] = {}
        for place in sorted(sources):
            if place in self._group_of:
                places.setdefault(self._group_of[place], []).append(place)
        for group in places:
            is_whole = layers is not None and len(places[group]) == self.wire.blocks_per_group
            if group not in self._wire_ids:
                self._wire_ids[group] = self.wire.try_allocate_to_send() if is_whole else None
            elif self._wire_ids[group] is not None and not is_whole:
                raise TransferError(f"group {group} was begun whole; the rest of it came in parts")
        wire_ids = {group: wire_id for group in places if (wire_id := self._wire_ids[group]) is not None}
        if layers is None or not wire_ids:
            return None, sources
        local_ids = list(wire_ids.values())
        pending = self.wire.encode(
            [[sources[place] for place in places[group]] for group in wire_ids], local_ids, layers
        )
        write = BlockWrite(
            local_ids,
            [self.part.block_ids[group] for group in wire_ids],
            [SEGMENTS_PER_LAYER * layer + i for layer in layers for i in range(SEGMENTS_PER_LAYER)],
        )
        return CodedWrite(pending, write), {
            place: block for place, block in sources.items() if not self.covers(place)
        }

    def free(self) -> None:
        """Frees the wire blocks: the lease is over."""
        self.wire.free(list(self.coded_groups.values()))
        self._wire_ids.clear()


def _whole_layers(segment_ids: Sequence[int] | None, num_layers: int) -> list[int] | None:
    """The layers whose K and V these segments are; None: only one of the two for some layer."""
    if segment_ids is None:
        return list(range(num_layers))
    layers = sorted({segment // 2 for segment in segment_ids})
    return layers if len(segment_ids) == 2 * len(layers) else None
