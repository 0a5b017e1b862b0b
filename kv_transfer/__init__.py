"""Moving blocks between processes under leases. Knows memory blocks; knows no model and no service.

agents    transports
codecs    KV in fewer bytes while it travels; checksums
lease     the protocol between the owner of memory and its writer
"""
