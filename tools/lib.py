"""Notebooks -> library, README and links: what `make lib` does."""
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.chdir(ROOT)

from nbdev.clean import nbdev_clean
from nbdev.doclinks import nbdev_export

import links
import readme


def main():
    if not (ROOT / "nbs").glob("*.ipynb"):
        sys.exit("There are no notebooks in nbs/.")
    links.rewrite()
    nbdev_export()
    nbdev_clean()
    readme.write()


main()
