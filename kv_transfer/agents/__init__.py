"""Transports: the agent protocol, and its implementations over NIXL, over torch.distributed and within one process."""
