"""Answers in a given form: JSON of a schema, a regular expression, one of several choices, a grammar.

llguidance (Rust) does the parsing; here is what turns it into a part of a server. It is imported when the
first request with a structure comes.

* `schema`: what a JSON schema may say. `loosening`: what can be held of one that cannot be held.
* `grammar`: a structure to llguidance's grammar, with limits.
* `calls`: calls of tools to a grammar, by the form in which a model writes them.
* `vocabulary`: the tokens of a model, as grammars see them.
* `matcher`: where one answer is in its grammar; which tokens may follow, and the time that it may take.
* `compiler`: a worker's grammars: compiled on a thread of their own, kept while they are used.
* `masks`: bit masks of the allowed tokens for the rows of a step, filled while the forward runs.
* `checker`, `check_process`: a door has every new structure compiled in a process with limits of time and
  memory before a worker hears of it.

A grammar that cannot be held exactly is refused before anything is generated; no keyword is ignored, but of
tools that are not strict.
"""
