"""The claims ledger is complete and can be applied. `make claims` applies it; this only makes sure that nothing is missing from it."""

import ast
import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("claims", ROOT / "tools" / "claims.py")
claims = importlib.util.module_from_spec(spec)
sys.modules["claims"] = claims
spec.loader.exec_module(claims)

LEDGER = claims.ledger()


def test_every_labelled_cell_stands_in_the_ledger_and_the_other_way_round():
    in_chapters = Counter((notebook, label) for notebook in claims.notebooks() for label in claims.labels(notebook))
    assert max(in_chapters.values()) == 1, "a label stands on two cells"
    listed = {(c["notebook"], c["cell"]) for c in LEDGER}
    assert not set(in_chapters) - listed, f"no entry in tests/claims.toml for {sorted(set(in_chapters) - listed)}"
    assert not listed - set(in_chapters), f"no cell in nbs/ for {sorted(listed - set(in_chapters))}"


@pytest.mark.parametrize("claim", LEDGER, ids=lambda c: c["cell"])
def test_the_change_of_a_claim_hits_one_line_of_the_library_and_leaves_it_python(claim):
    assert set(claim) == {"notebook", "cell", "says", "module", "old", "new"}
    source = (ROOT / "attention_course" / f"{claim['module']}.py").read_text(encoding="utf-8")
    changed, count = claims.change(source, claim["old"], claim["new"])
    assert count == 1, f"{claim['old']!r} stands {count} times in {claim['module']}.py"
    assert changed != source
    ast.parse(changed)


def test_a_labelled_cell_asserts_something():
    for notebook in claims.notebooks():
        for source in claims.cells(notebook):
            if claims.LABEL.search(source):
                assert "assert" in source, f"{notebook}: {source.splitlines()[0]}"
