"""Notebooks -> library, README and links: what `make lib` does."""
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.chdir(ROOT)

from nbdev.clean import nbdev_clean
from nbdev.doclinks import nbdev_export

import links
import readme


def main():
    if not any((ROOT / "nbs").glob("*.ipynb")):
        sys.exit("There are no notebooks in nbs/.")
    before = made()
    links.rewrite()
    nbdev_export()
    nbdev_clean()
    readme.write()
    for path, text in made().items():
        if path in before and before[path] != text:
            kept = ROOT / "build" / f"{path.name}.before"
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(before[path], encoding="utf-8")
            print(f"{path.relative_to(ROOT)} was made anew (what it was: {kept.relative_to(ROOT)})")


def made():
    "What the notebooks are made into, and nobody should edit by hand."
    package = ROOT / "attention_course"
    paths = [p for p in package.rglob("*.py") if p.name not in ("__init__.py", "_modidx.py")] + [ROOT / "README.md"]
    return {p: p.read_text(encoding="utf-8") for p in paths if p.exists()}


main()
