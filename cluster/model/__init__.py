"""The two halves of a multimodal model, run with transformers' own unmodified modules.

`encoder`: media tensors to embedding rows. `language`: token ids and embedding rows to logits, with KV in our block
memory. `families`: what differs between model types. `attention`: the function every text backbone calls.
`loading`: only one half of a checkpoint. `sampling`: logits to tokens, reproducible anywhere.
"""
