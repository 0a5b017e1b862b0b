"""KV on the wire.

quantisation    int8 and int4: wire layout, numbers, the arithmetic in torch
codec           codes groups between two memories: by codec.cpp, triton_codec or quantisation
wire_memory     the memory next to a KV memory that coded groups are sent from and to
checksum        of bytes scattered in memory, of blocks: checksum.cpp, numpy or torch
native          the C interface of codec.cpp and checksum.cpp
"""
