"""Transports: writing into another process's registered memory, and notifications.

agent               the protocol of all transports, and their errors
factory             the agent that a configuration asks for
nixl_agent          NIXL over UCX
collective_agent    torch.distributed, Gloo or NCCL
  collective_link     one writer's way to one owner: both ends, a thread each
  collective_frames   small messages on its TCP connection
  collective_group    the process group of two that carries the bytes
  regions             registered memories and what lies where in them
in_process          agents of one process, with scripted faults
transport_probe     at start on a GPU: whether NIXL moves its memory, and how fast
"""
