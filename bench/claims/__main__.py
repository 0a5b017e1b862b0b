"""Published shapes of disaggregated serving, each with our figure next to it.

    python -m bench.claims            all of them; writes the tables of docs/claims.md and its plot
    python -m bench.claims NAME …     some of them; prints only

Nothing is timed here. Figures that were timed stand in the READMEs of the benchmarks that took them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench import REPOSITORY
from bench.arguments import parser_of
from bench.claims import async_ttft, media_prefix, mixes, served, sizes, steps
from bench.claims.claim import Claim, plot
from bench.tables import table

MODULES = (async_ttft, mixes, steps, media_prefix, served, sizes)
CLAIMS: dict[str, Claim] = {name: claim for module in MODULES for name, claim in module.CLAIMS.items()}
PAGE, PLOT = REPOSITORY / "docs" / "claims.md", REPOSITORY / "docs" / "images" / "claims.svg"


def replaced(text: str, name: str, lines: Sequence[str]) -> str:
    """The page with these lines between the markers of that name. Raises ValueError without markers."""
    before, begin, rest = text.partition(f"<!-- begin: {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not begin or not end:
        raise ValueError(f"the page has no markers for {name}")
    return "\n".join([before + begin, *lines, "", end + after])


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLAIMS)}")
    names = parser.parse_args(arguments).names
    if unknown := sorted(set(names) - set(CLAIMS)):
        print(f"no such claims: {', '.join(unknown)}; there are {', '.join(CLAIMS)}", file=sys.stderr)
        return 1
    found, text, rows = {}, PAGE.read_text(), []
    for name in names or CLAIMS:
        claim, each = CLAIMS[name], CLAIMS[name].measure()
        lines = [f"Ours, {claim.how}: {each.ours}.", "", *table(each.columns, each.rows)]
        print(f"## {name}: {claim.title}\nPublished: {claim.published}.", *lines, "", sep="\n", flush=True)
        found[name], text = each, text if names else replaced(text, name, lines)
        rows.append((f"[{claim.title}](#{name})", claim.published, each.ours, claim.how))
    if not names:
        PAGE.write_text(replaced(text, "summary", table(("claim", "published", "ours", "how"), rows)))
        PLOT.write_text(plot(CLAIMS, found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
