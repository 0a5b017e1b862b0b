"""Code for GPUs only. A machine that serves from its CPU imports nothing that needs a GPU from here.

* `kernels`: Triton kernels (paged decode over plain or INT8 blocks; write-and-quantise; gather). Only this
  module needs triton.
* `decode_attention`: calls these kernels and decides how a decode is split. It imports `kernels` inside the
  functions that launch them, so it can be imported anywhere.
* `libraries`: attention kernels of other projects. `choice`: which of them, or ours, serves a model on this
  GPU.
* `graphs`: CUDA graphs of steps, by their sizes. `step_inputs`: a step's inputs in one pinned buffer, and
  one copy.
* `uploads`: media tensors to the GPU on a stream of their own.

Tried: all of it on a simulated device (tests/unit/cuda, tests/fakes/cuda_device.py), whose tensors are
computed on the CPU, and which refuses what a GPU refuses; the kernels in Triton's interpreter and in its
compiler for sm_80, sm_90 and sm_100. Untried: everything on a GPU.
"""
