"""README.md from nbs/index.ipynb. nbdev would ask Quarto to do it, which a fresh machine does not have."""
import re
from pathlib import Path

from nbdev.config import get_config
from nbdev.process import NBProcessor

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Made from nbs/index.ipynb by `make lib`: change it there. -->\n\n"
HIDDEN = {"hide", "hide_input", "default_exp", "export", "exporti"}


def shown(cell):
    "Is this code cell's source something to read?"
    directives = cell.directives_
    return not ("code-fold:" in directives or HIDDEN & directives.keys() or ["false"] in (directives.get("echo:"), directives.get("include:")))


def text():
    book = get_config(cfg_name="settings.ini", path=ROOT)
    site = f"{book.doc_host}{book.doc_baseurl}/"
    parts = []
    for cell in NBProcessor(ROOT / "nbs" / "index.ipynb").nb.cells:
        source = cell.source.strip()
        if not source:
            continue
        if cell.cell_type == "markdown":
            # Links between notebooks are links between pages of the book, which work on GitHub and on PyPI alike.
            parts.append(re.sub(r"\]\((\w+)\.ipynb(#[\w-]+)?\)", rf"]({site}\1.html\2)", source))
        elif cell.cell_type == "code" and shown(cell):
            parts.append(f"```python\n{source}\n```")
    return NOTE + "\n\n".join(parts) + "\n"


def write():
    path = ROOT / "README.md"
    if not path.exists() or path.read_text() != text():
        path.write_text(text())
