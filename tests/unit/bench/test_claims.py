"""The claims of docs/claims.md: the cheap ones are computed here, and the page has a place for each."""

from __future__ import annotations

import pytest

from bench.claims.__main__ import CLAIMS, PAGE, PLOT, main, replaced
from bench.claims.claim import plot
from bench.tables import table
from deploy.simulator.simulation import SCHEDULING


@pytest.mark.parametrize("name", ["kv_int8", "transfer_volume", "memory"])
def test_the_page_has_the_figures_that_are_counted(name: str):
    found = CLAIMS[name].measure()
    assert "\n".join(table(found.columns, found.rows)) in PAGE.read_text()
    assert found.ratio is not None and found.ratio > 1.85


def test_the_kv_of_a_prompt_hides_behind_its_computation():
    hidden = [int(row[-1].rstrip("%")) for row in CLAIMS["layer_pipelining"].measure().rows]
    assert min(hidden) >= 80


def test_answers_wait_for_a_long_prompt_no_longer_than_they_can_bear():
    rows = CLAIMS["chunked_prefill"].measure().rows
    whole, bounded, apart = (float(row[2]) for row in rows)
    assert apart < bounded <= float(rows[1][1]) + 1e3 * SCHEDULING.prompt_pause_s + 2 < whole


def test_every_claim_has_its_place_on_the_page_and_a_published_shape():
    text = PAGE.read_text()
    for name, claim in CLAIMS.items():
        assert f"## {name}\n" in text and f"| [{claim.title}](#{name}) | {claim.published} |" in text
        text = replaced(text, name, [f"| {name}, computed again |"])
        assert f"| {name}, computed again |" in text
    with pytest.raises(ValueError, match="no markers for other"):
        replaced(text, "other", [])


def test_the_drawing_shows_the_claims_that_are_ratios():
    found = {name: CLAIMS[name].measure() for name in ("kv_int8", "memory")}
    assert plot(CLAIMS, found).count("<rect") == 1 + 2 * 2
    ratios = [claim.title for claim in CLAIMS.values() if claim.published_ratio is not None]
    assert all(title in PLOT.read_text() for title in ratios)


def test_a_single_claim_is_printed_and_an_unknown_one_named(capsys: pytest.CaptureFixture[str]):
    before = PAGE.read_text()
    assert main(["kv_int8"]) == 0
    assert "Published: twice as many." in capsys.readouterr().out and PAGE.read_text() == before
    assert main(["kv_int4"]) == 1
    assert "no such claims: kv_int4" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    helped = capsys.readouterr().out
    assert all(name in helped for name in CLAIMS)
