"""What only GPUs need. Nothing here is imported on a machine that serves from its CPU.

`kernels`: Triton kernels (paged decode over plain or INT8 blocks; write-and-quantise; gather). `decode_attention`: their
callers, and how a decode is split. `graphs`: CUDA graphs of the decode step by batch size. `copies`: the step's inputs
as one pinned matrix, one copy.

`kernels` is the only module that needs triton; `decode_attention` imports it inside the functions that launch, so that
everything else imports anywhere.

Tried: the kernels in Triton's interpreter on the CPU, and in its compiler for sm_80 and sm_90; graphs with a stand-in
for the capture. Untried: anything on a GPU.
"""
