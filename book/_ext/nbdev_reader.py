"""Reads an nbdev notebook for the book: what nbdev says in `#|` lines, MyST-NB hears as cell tags.

The reader of the book sees no `#|` line, no Colab `# @title` line and no hidden cell.
"""
import ast
import re

import nbformat

import api

_DIRECTIVE = re.compile(r"^\s*#\s*\|\s*(?P<key>[\w-]+)\s*(?::|\s|$)\s*(?P<value>.*?)\s*$")
_TITLE = re.compile(r"^\s*#\s*@title\b.*\n?", re.MULTILINE)
_SHOW_DOC = re.compile(r"^\s*show_doc\(\s*(?P<name>[\w.]+)")


def split(source):
    "The directives at the top of a cell as a dict, and the source without them and without Colab's title line."
    lines, found = source.splitlines(), {}
    while lines and (not lines[0].strip() or _DIRECTIVE.match(lines[0])):
        if directive := _DIRECTIVE.match(lines.pop(0)):
            found[directive["key"]] = directive["value"].strip("\"'")
    return found, _TITLE.sub("", "\n".join(lines)).strip("\n")


def _no(directives, key):
    return directives.get(key, "").lower() in ("false", "no")


def _yes(directives, key):
    return key in directives and not _no(directives, key)


def tags(directives):
    "MyST-NB's tags for nbdev's and Quarto's directives."
    solution = directives.get("code-summary", "").startswith("Solution")
    fold = _yes(directives, "code-fold")
    rules = {
        "remove-cell": _yes(directives, "hide") or _no(directives, "include"),
        "remove-input": _yes(directives, "hide_input") or _no(directives, "echo"),
        "remove-output": _yes(directives, "hide_output") or _no(directives, "output"),
        "hide-input": fold and not solution,
        "hide-cell": fold and solution,                 # what a solution prints is part of it
        "skip-execution": _no(directives, "eval") or "cuda" in directives or "notest" in directives,
        "raises-exception": _yes(directives, "error"),
        "label-" + directives.get("label", ""): "label" in directives,    # becomes the cell's id in cards.py
    }
    return [tag for tag, wanted in rules.items() if wanted]


def preliminaries(source):
    "Directives that fold what only gets a chapter ready: set-up and imports. A reader came for the question after them."
    lines = [line for line in source.splitlines() if line.strip()]
    if any("import attention_course" in line for line in lines):
        return {"code-fold": "true", "code-summary": "Set-up"}
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a magic command
        return {}
    imports = bool(statements) and all(isinstance(statement, (ast.Import, ast.ImportFrom)) for statement in statements)
    return {"code-fold": "true", "code-summary": "Imports"} if imports else {}


def display(directives):
    "MyST-NB's per-cell settings: captions, alt texts, and what a folded cell is called."
    settings = {}
    if "fig-cap" in directives:
        settings["figure"] = {"caption": directives["fig-cap"]}
    if "fig-alt" in directives:
        settings["image"] = {"alt": directives["fig-alt"]}
    if _yes(directives, "code-fold"):
        name = directives.get("code-summary", "Code")
        settings["code_prompt_show"] = settings["code_prompt_hide"] = name
    return settings


def read(text):
    notebook = nbformat.reads(text, as_version=4)
    # A chapter shows an API entry beside its code, the reference page is where links to the name lead.
    chapter = "default_exp" in text
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            directives, cell.source = split(cell.source)
            if not cell.source.strip() or "nbdev_export(" in cell.source:
                continue
            if call := _SHOW_DOC.match(cell.source):
                cells.append(nbformat.v4.new_markdown_cell(api.entry(call["name"], index=not chapter)))
                continue
            if "show_doc" in cell.source and "import" in cell.source:
                continue
            directives = preliminaries(cell.source) | directives
            cell.metadata["tags"] = tags(directives)
            if settings := display(directives):
                cell.metadata["mystnb"] = settings
        cells.append(cell)
    notebook.cells = cells
    return notebook


def setup(app):
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
