"""Replaces the decoder layers of a text model by kernels of a device. The search is the same for all devices;
their kernels stand behind the protocol `search.LayerKernels`.

1. `parts` recognises a layer by the names and types of its modules.
2. `trial` runs the layer over a small packed step and notes what it adds to its input and how it calls
   attention.
3. `search` builds the candidates that the kernels offer, compares them with the layer over the same step,
   times them where the kernels ask for it, and replaces the layer.

A layer that is not recognised, or with which no candidate agrees, stays as transformers made it. Nothing here
knows a model family or a device. Runs on the thread that loads the model.
"""
