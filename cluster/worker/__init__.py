"""What every worker process shares: the engine's thread (`loop`), its answers (`outbox`), its sockets (`shell`)."""
