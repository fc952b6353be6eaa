"""A new chapter from the pattern that all chapters share: `make new CHAPTER=05_positions`."""
import configparser
import json
import re
import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PATTERN = [
    ("markdown", "# {title}\n\n> One sentence: what the reader can do after this chapter."),
    ("markdown", "[Run in Colab](https://colab.research.google.com/github/{user}/{repo}/blob/{tag}/nbs/{chapter}.ipynb) · "
                 "[Source]({git_url}/blob/{tag}/nbs/{chapter}.ipynb) · about 40 minutes · needs [chapter 02](02_attention.ipynb)\n\n"
                 "At the end of this chapter you can\n\n- do one thing,\n- and another."),
    ("code", "#| default_exp {module}"),
    ("code", "try:\n    import attention_course\nexcept ModuleNotFoundError:  # a fresh Colab: its torch stays as it is\n"
             '    %pip install -q "{pypi_name}[plots] @ git+{git_url}@{tag}"\nfrom attention_course import setup\n\ndevice = setup(seed=0)'),
    ("markdown", "## The question\n\nA picture or an experiment that fails, before any formula."),
    ("code", "#| export\nimport torch\nfrom jaxtyping import Float\nfrom torch import Tensor"),
    ("markdown", "## The first step\n\nProse, then the formula in the letters of the [notation](notation.ipynb), then a short function, "
                 "then a check that can fail, then a figure of what it did."),
    ("code", '#| export\ndef replace_me_{module}(\n    x: Float[Tensor, "*b n d"],  # what it is, in which unit\n'
             ') -> Float[Tensor, "*b n d"]:  # what comes back\n    "One sentence that says what this is."\n    return x'),
    ("code", "#| label: claim-{module}-first\n# Why this could be false, in a sentence.\nx = torch.randn(2, 3, 4)\n"
             "assert torch.equal(replace_me_{module}(x), x)"),
    ("markdown", "## What breaks without it\n\nRemove the idea and measure the damage."),
    ("markdown", "## What it costs\n\nOperations, bytes and memory: predicted, then measured."),
    ("markdown", "## In the wild\n\nWhich systems use it, how torch names it, where this chapter differs from the paper and why."),
    ("markdown", "## Exercises\n\nHow an exercise is made is in CONTRIBUTING.md; [chapter 02](02_attention.ipynb) shows some."),
    ("markdown", "## Summary\n\n- A few lines.\n\nSources: [Vaswani et al., 2017](bibliography.ipynb#vaswani-et-al-2017)."),
]


def notebook(chapter, conf):
    values = dict(conf, chapter=chapter, module=chapter[3:], title=chapter[3:].replace("_", " ").capitalize(), git_url=conf["git_url"])
    cells = []
    for number, (kind, text) in enumerate(PATTERN):
        for key, value in values.items():
            text = text.replace("{" + key + "}", value)
        cell = {"cell_type": kind, "id": sha256(f"{chapter}{number}".encode()).hexdigest()[:8], "metadata": {},
                "source": text.splitlines(keepends=True)}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def insert(path, line, chapter):
    "Put a line among the lines of the other chapters, in their order. The two files are small and keep their comments."
    lines = path.read_text().splitlines(keepends=True)
    pattern = re.compile(re.escape(line).replace("CHAPTER", r"(\d\d_\w+)"))
    start = next(i for i, l in enumerate(lines) if "Chapters" in l)
    end = next(i for i, l in enumerate(lines) if "Appendix" in l)
    found = [(i, m[1]) for i, l in enumerate(lines[:end]) if i > start and (m := pattern.fullmatch(l.rstrip("\n")))]
    after = max((i for i, name in found if name < chapter), default=found[0][0] - 1)
    lines.insert(after + 1, line.replace("CHAPTER", chapter) + "\n")
    path.write_text("".join(lines))


def main(chapter):
    if not re.fullmatch(r"\d\d_[a-z][a-z0-9_]*", chapter):
        sys.exit(f"CHAPTER={chapter!r} is not a chapter's name. Two digits and a module's name:  make new CHAPTER=05_positions")
    path = ROOT / "nbs" / f"{chapter}.ipynb"
    taken = sorted((ROOT / "nbs").glob(f"[0-9][0-9]_{chapter[3:]}.ipynb")) + sorted((ROOT / "nbs").glob(f"{chapter[:3]}*.ipynb"))
    if taken:
        sys.exit(f"{taken[0].relative_to(ROOT)} has that number or that name already.")
    conf = configparser.ConfigParser()
    conf.read(ROOT / "settings.ini")
    path.write_text(notebook(chapter, conf["DEFAULT"]))
    insert(ROOT / "book" / "_toc.yml", "      - file: CHAPTER", chapter)
    insert(ROOT / "_quarto.yml", "          - CHAPTER.ipynb", chapter)
    print(f"nbs/{chapter}.ipynb is there, and in both tables of contents.\nNext: write it, add its names to "
          "attention_course/__init__.py,\nto nbs/reference.ipynb and to the table in nbs/index.ipynb, its claims to "
          "tests/claims.toml;\nthen make lib test book. CONTRIBUTING.md has the details.")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
