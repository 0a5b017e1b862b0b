"""What the tests of this folder find and do not refuse yet, per room (a folder, two levels deep) or per file.

A room or a file that is not named has nothing left. A number may only fall:
`python -m tests.architecture.findings write` lowers it.
"""

# names with a word that the glossary replaces
NAMES: dict[str, int] = {}

# sentences with who, whoever, nobody, somebody, anew, he
RIDDLES: dict[str, int] = {}

# sentences with a word that the glossary replaces
OLD_WORDS: dict[str, int] = {}

# lines over 110 columns
LONG_LINES: dict[str, int] = {
    "bench": 5,
    "bench/encoder": 9,
    "bench/engine": 2,
    "bench/first_steps": 16,
    "bench/fuzz": 3,
    "bench/router": 13,
    "bench/transfer": 6,
    "cluster/worker": 1,
    "deploy/demo_model": 16,
    "kv_transfer/agents": 2,
    "kv_transfer/codecs": 3,
    "kv_transfer/lease": 1,
    "tests/contract": 31,
    "tests/flow": 7,
    "tests/unit": 78,
}

# lines that their comment has broken
COMMENTS: dict[str, int] = {
    "tests/faults": 1,
    "tests/flow": 2,
    "tests/unit": 4,
}

# docstrings that begin without a subject
FRAGMENTS: dict[str, int] = {}

# modules that define one class name
CLASSES: dict[str, int] = {
    "Prompt": 2,
}

# private names of the product that tests reach into
PRIVATES: dict[str, int] = {
    "tests/contract": 3,
    "tests/flow": 7,
    "tests/unit": 3,
}
