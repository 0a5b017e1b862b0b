"""What every worker process shares: the engine's thread (`loop`), its messages to the doors (`outbox`), its
sockets (`shell`).
"""
