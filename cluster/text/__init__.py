"""Text in and out of token ids. CPU only, no I/O after loading; the tokenizer and the template are transformers' own.

`chat`: a conversation as the template sees it. `tokenizer`: conversation to prompt, placeholders to ranges.
`detokenizer`: token ids to text, piece by piece. `stop`: stop strings over a stream. `defaults`: what the model's
folder says about drawing and stopping.
"""
