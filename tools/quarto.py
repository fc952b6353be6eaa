"""nbdev's own documentation through Quarto. Where Quarto is missing: says so, and checks what can be checked without it."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.chdir(ROOT)


class OnlyWhatDocsNeed:
    """nbdev runs each cell with an import in it, to fill its API tables. A cell that also does something needs the cells
    before it, which nbdev does not run: those are marked as not to be run. Set up before the processing begins."""

    def __init__(self, nb):
        for cell in nb.cells:
            if cell.cell_type == "code" and not {"export", "exporti"} & cell.directives_.keys():
                lines = [line for line in cell.source.splitlines() if line.strip() and not line.startswith(("#", "import ", "from "))]
                if lines and "show_doc" not in cell.source:
                    cell.directives_["eval:"] = ["false"]

    def __call__(self, cell):
        return cell


def process():
    "What nbdev hands to Quarto: notebooks without directives. nbdev's own command would try to install Quarto, with sudo."
    from nbdev.quarto import nbdev_sidebar, refresh_quarto_yml
    from nbdev.serve import proc_nbs

    refresh_quarto_yml()
    nbdev_sidebar.__wrapped__()
    return Path(proc_nbs(n_workers=0, force=True))      # 0: in this process, which knows the class above


def main():
    from nbdev.processors import FilterDefaults

    FilterDefaults.xtra_procs = lambda self: [OnlyWhatDocsNeed]
    if shutil.which("quarto"):
        from nbdev.quarto import nbdev_docs

        nbdev_docs(n_workers=0)
        print("\nnbdev's documentation: _docs/index.html")
        return
    print("Quarto is not installed (https://quarto.org/docs/get-started/), so nbdev's documentation is not rendered.\n"
          "The book does not need it: `make book`. Checking what can be checked without it:")
    folder = process()
    pages = sorted(p.name for p in folder.glob("*.ipynb"))
    # nbdev's own directives are gone; `#| label:`, `#| code-fold:` and the like are Quarto's and stay for it.
    raw = [p for p in folder.glob("*.ipynb") if re.search(r'"#\s*\|\s*(export|exporti|default_exp|hide)\b', p.read_text())]
    if not pages or raw:
        sys.exit(f"nbdev's processing left directives in {[p.name for p in raw]}" if raw else "nbdev processed no notebook")
    print(f"  nbdev processes {len(pages)} notebooks")
    checked = subprocess.run([Path(sys.executable).parent / "smalldocs", "check", folder], capture_output=True, text=True)
    # nbdev writes output-file into each page; smalldocs does not read it, Quarto does.
    told = [line for line in checked.stdout.splitlines() if "output-file is not read" not in line and "to look at" not in line]
    if told or not checked.stdout:
        sys.exit("\n".join(told) + checked.stderr)
    print("  smalldocs knows every key of _quarto.yml, and every link leads somewhere")


if __name__ == "__main__":
    main()
