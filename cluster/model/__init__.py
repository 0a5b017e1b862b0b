"""The two halves of a multimodal model, run with transformers' own unmodified modules.

`encoder`: media tensors to embedding rows. `language`: token ids and embedding rows to logits, with KV in our block
memory. `families`: what differs between model types (`media_calls`, `positions`). `attention`: the function every text
backbone calls. `probe`: what a backbone wants from it. `loading`: only one half of a checkpoint. `sampling`: logits to
tokens, reproducible anywhere.

Importing the package prepares torchvision, because transformers' model classes import it when it is installed.
"""

from importlib.util import find_spec

from cluster.media.torchvision_compat import ensure_torchvision

if find_spec("torchvision") is not None:
    ensure_torchvision()
