"""The only code, with `cluster.app`, that imports Ray: it wraps the plain classes late and carries nothing per token.

`replicas` wraps a worker service, `door` wraps the HTTP door, `hook_router` tells doors who is in the cluster and sends a
call to one chosen replica, `membership` is the door's end of that, `launch` starts a cluster on this machine.
"""
