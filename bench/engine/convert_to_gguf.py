"""A folder of `models.py` as a GGUF file, by llama.cpp's own converter. Run with a Python that has torch and
transformers.

    python convert_to_gguf.py LLAMA_CPP_SOURCE [arguments of convert_hf_to_gguf.py]

The converter recognises tokenizers by a fingerprint and does not know that of our own vocabulary. This file
registers it with GPT-2's rule for splitting text before BPE. It imports nothing of this repository: it runs
where our packages are not installed.
"""

import runpy
import sys

source = sys.argv.pop(1)
sys.path[:0] = [source, f"{source}/gguf-py"]

from conversion.base import TextModel  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv[0] = f"{source}/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
