"""Text to token ids and back. CPU only, no I/O after loading. The tokenizer and the chat template are
transformers' own.

* `chat`: a conversation as the template gets it.
* `tokenizer`: a conversation to a prompt, placeholders to ranges.
* `detokenizer`: token ids to text, piece by piece.
* `stop`: stop strings over a stream.
* `defaults`: what the model's folder says about drawing and stopping.
"""
