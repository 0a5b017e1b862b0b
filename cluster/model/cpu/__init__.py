"""Native kernels for x86 CPUs: linears, gated MLPs, norms and paged attention, with torch as the fallback of each.

`build` compiles the C++ sources, `library` loads what fits this CPU, `modules` puts the linears and norms into a model.
"""
