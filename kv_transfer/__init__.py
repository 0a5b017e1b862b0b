"""Moving blocks between processes under leases: `agent` (the protocol), `nixl_agent` and `in_process` (who
speaks it), `receiver` and `sender` (the two halves of a lease), `mover` (the thread that runs them).
"""
