"""Native kernels for x86 CPUs: linears, gated MLPs, norms, paged attention, sampling. Each has torch as its
fallback.

`library` loads the kernels of the C++ sources in this folder (`cluster.native` compiles them). At model load
`layer_search` replaces decoder layers by one native call each where it can (`layer`); elsewhere `modules`
replaces linears, gated MLPs and norms.
"""
