"""How families of models write reasoning and calls of tools, for checkpoints that do not say it themselves.

One file for each way to write, with these fields:

when       texts that the chat template of such a model contains
template   transformers' response template (`transformers.utils.chat_parsing`), from which its parser is made
calls      how a call is written, for answers that must contain one; absent: a grammar cannot say it
reasoning  how reasoning is written, for the same answers
id_chars   length of a call's id, where the chat template accepts no other

Patterns take time in proportion to the answer, whatever it consists of: they begin with what is fixed,
repeats have an end and do not give back what they have taken (`{0,64}+`), and an argument without an end is
skipped as a whole (`(*SKIP)(*FAIL)`). White space around what they find is dropped by the parser of answers.
`tests/unit/router/test_parser_costs.py` counts their steps.

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
