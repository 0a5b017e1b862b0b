"""Native kernels for x86 CPUs: linears, gated MLPs, norms and paged attention, with torch as the fallback of each.

`build` compiles the C++ sources, `library` loads what fits this CPU. `layer_search` puts whole decoder layers of one call each
into a model where it can (`layer`), `modules` linears, gated MLPs and norms everywhere else.
"""
