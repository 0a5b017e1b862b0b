"""The programs that make `deploy/demo_model`: synthetic data, speech, training, evaluation and examples.

`data` needs numpy only, `speech` adds espeak-ng, the other modules need torch and transformers.
"""
