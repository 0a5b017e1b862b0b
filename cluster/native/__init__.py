"""C++ in this product: compiling it (`build`) and loading what fits this CPU (`library`). Knows none of the
sources.

A package keeps its `*.cpp` and `*.h` beside its Python files and passes that folder; it declares the
functions that it calls.
"""
