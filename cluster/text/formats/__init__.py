"""How families of models write reasoning and calls of tools, for checkpoints that do not say it themselves.

One file for each way to write, with these fields:

when       texts that the chat template of such a model contains
template   transformers' response template (`transformers.utils.chat_parsing`), from which its parser is made
calls      how a call is written, for answers that must contain one; absent: a grammar cannot say it
reasoning  how reasoning is written, for the same answers
id_chars   length of a call's id, where the chat template accepts no other

`ORDER` says which file comes first where several fit.
"""

ORDER = (
    "qwen_xml",
    "glm",
    "harmony",
    "mistral_args",
    "mistral",
    "deepseek_fenced",
    "deepseek",
    "hermes",
    "llama3",
    "thinking",
)
