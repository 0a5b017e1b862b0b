"""C++ in this product: the CPU variants it is compiled for and which of them a process uses (`variants`),
compiling it (`build`) and loading it (`library`). Knows none of the sources.

A package keeps its `*.cpp` and `*.h` next to its Python files and passes that folder; it declares the
functions that it calls.
"""
