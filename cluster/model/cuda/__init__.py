"""Code for GPUs only. A machine that serves from its CPU imports nothing that needs a GPU from here.

* `attention_kernels` with `attention_runs`, `layer_kernels`, `draw_kernels`, `filter_kernels`,
  `coded_kernels`: Triton kernels of attention over blocks, of the rest of a layer, of draws
  without filters and with them, and of products with weights that are codes. Only these modules need triton.
  `ptx`: what some of them contain.
* `paged_attention`, `layer_calls`, `draw`, `coded_products`: launch these kernels. They import them inside
  the functions that do, so they can be imported anywhere.
* `coded_choice`: which linears keep their codes.
* `libraries`: attention kernels of other projects. `choice`: whether our kernels serve a model on this GPU,
  and which library computes long chunks of its prompts.
* `graphs`: CUDA graphs of steps, by their sizes. `step_inputs`: a step's inputs in one pinned buffer, and
  one copy.
* `capture`: how CUDA graphs are recorded.
* `recorded_calls`: CUDA graphs of encoder calls, by the form of their inputs. `constants`: what such a call
  computes of its integers alone, which a recording takes over.
* `uploads`: media tensors to the GPU on a stream of their own.

Tried: all of it on a simulated device (tests/unit/cuda, tests/fakes/cuda_device.py), whose tensors are
computed on the CPU, and which refuses what a GPU refuses; the kernels in Triton's interpreter and in its
compiler for sm_80, sm_90 and sm_100; an H100 (bench/gpu/README.md), in bfloat16 for heads of 64 and 128
channels, in float32 for the demo model and for products with codes, experts, packed towers, adapters and
mixers of tiny models. Untried on a GPU: most forms of attention in float16, flash-attn's libraries.
"""
