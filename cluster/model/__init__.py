"""The two halves of a multimodal model, run with transformers' own unmodified modules.

* `encoder`: media tensors to embedding rows, by the calls in `media_calls`.
* `language`: token ids and embedding rows to logits, with KV in our block memory. `language_parts`: loads,
  probes and chooses what it computes with. `positions`: rotary positions of a prompt.
* `layers`: replaces decoder layers by kernels of a device. `cpu`, `cuda`: the kernels.
* `support`: which models can run. What differs between model types stands in `cluster.config.families`.
* `attention`: the function that every text backbone calls, with a backend for torch, one for CPUs and one for
  CUDA.
* `probe`: what a backbone needs from attention.
* `loading`: one half of a checkpoint. `sharding`: a rank's share of it. `parallel`: one model over several
  GPUs.
* `sampling`: logits to tokens, reproducible anywhere. `changes`: changes of logits before a token is
  drawn.

Importing the package prepares torchvision, because transformers' model classes import it when it is
installed.
"""

from importlib.util import find_spec

from cluster.media.torchvision_compat import ensure_torchvision

if find_spec("torchvision") is not None:
    ensure_torchvision()
