"""What a service sees of transfer: the same whether its worker is one process or several ranks. Every call
returns at once.

`grant`, `cancel`, `note_writer` and `revoke` of a `BlockTransfer` are the owner's: see `Receiver`. `open` is
the writer's: see `Sender`. `Outgoing` says more of an `OutgoingLease`.
"""

from __future__ import annotations

from kv_transfer.lease.group import GroupOutgoing, GroupTransferEngine
from kv_transfer.lease.outgoing import Outgoing
from kv_transfer.lease.transfer_engine import TransferEngine

OutgoingLease = Outgoing | GroupOutgoing
BlockTransfer = TransferEngine | GroupTransferEngine
