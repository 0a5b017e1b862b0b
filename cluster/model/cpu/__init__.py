"""Native kernels for x86 CPUs: linears, gated MLPs, norms, paged attention, sampling. Each has torch as its
fallback.

`library` loads the kernels of the C++ sources in this folder (`cluster.native` compiles them). At model load
`cluster.model.layers` replaces decoder layers by one native call each (`layer`) where `layer_search` says
that it can; elsewhere `modules` replaces linears, gated MLPs and norms.
"""
