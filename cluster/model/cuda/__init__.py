"""Code for GPUs only. A machine that serves from its CPU imports nothing that needs a GPU from here.

* `kernels`: Triton kernels (paged decode over plain or INT8 blocks; write-and-quantise; gather). Only this
  module needs triton.
* `decode_attention`: calls these kernels and decides how a decode is split. It imports `kernels` inside the
  functions that launch them, so it can be imported anywhere.
* `graphs`: CUDA graphs of the decode step by batch size. `copies`: a step's inputs as one pinned matrix and
  one copy.
* `uploads`: media tensors to the GPU on a stream of their own.

Tried: the kernels in Triton's interpreter on the CPU and in its compiler for sm_80 and sm_90; graphs with a
stand-in for the capture.
Untried: everything on a GPU.
"""
