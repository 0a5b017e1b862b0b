"""Benchmarks, load generators and audits: README.md says which command measures what. No service imports this
package.
"""

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
DEMO_MODEL = REPOSITORY / "deploy" / "demo_model"
EXAMPLES = DEMO_MODEL / "examples"
