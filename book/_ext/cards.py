"""Block quotes that begin with a bold label become cards; an exercise gathers its cells into its card.

`> **Exercise 2.1. Scale it.** ...` reads as a quote on GitHub and in Colab, and as a card here. What follows it up to its
last check, hint or solution goes into the same frame.
"""
import re

from docutils import nodes

# First word of the label -> how it looks. Any other label in bold makes a plain note.
KINDS = {
    "exercise": "exercise", "claim": "claim", "warning": "warning", "careful": "warning", "caution": "warning",
    "try": "try", "question": "question", "note": "note", "remember": "note", "summary": "note", "tip": "tip",
    "history": "note", "definition": "note", "promise": "note",
}


def make_cards(app, doctree):
    for quote in list(doctree.findall(nodes.block_quote)):
        first = quote.children[0] if quote.children else None
        while isinstance(first, nodes.paragraph) and first.children and not first.children[0].astext():
            first.remove(first.children[0])     # Markdown's empty text before the bold label
        if isinstance(first, nodes.paragraph) and first.children and isinstance(first.children[0], nodes.strong):
            quote.replace_self(card(quote, first))
    for cell in doctree.findall(nodes.container):
        for name in [c for c in cell["classes"] if c.startswith("tag_label-")]:
            cell["ids"].append(name.removeprefix("tag_label-"))
    for parent in {id(c.parent): c.parent for c in doctree.findall(is_exercise)}.values():
        gather(parent)
    subtitle(doctree)


def card(quote, first):
    strong = first.children[0]
    label = strong.astext().rstrip(".: ")
    kind = KINDS.get(re.match(r"\w*", label)[0].lower(), "note")
    title = nodes.title("", "", *[c.deepcopy() for c in strong.children])
    if isinstance(title.children[-1], nodes.Text):
        title.children[-1] = nodes.Text(title.children[-1].astext().rstrip(".: "))
        title.children[-1].parent = title
    rest = first.children[1:]
    if rest and isinstance(rest[0], nodes.Text):
        rest[0] = nodes.Text(rest[0].astext().lstrip(".: \n"))
    body = [nodes.paragraph("", "", *rest)] if "".join(c.astext() for c in rest).strip() else []
    box = nodes.admonition("", title, *body, *quote.children[1:], classes=["ac-card", f"ac-{kind}"])
    if number := re.match(r"(exercise|claim) ([\d.]+\d)", label.lower()):
        box["ids"].append(f"{number[1]}-{number[2].replace('.', '-')}")
    return box


def is_exercise(node):
    return isinstance(node, nodes.admonition) and "ac-exercise" in node["classes"]


def belongs(node):
    "Is this the kind of thing that ends an exercise: a check, a hint, a solution?"
    if isinstance(node, nodes.raw):
        return "</details>" in node.astext()
    if isinstance(node, nodes.container) and "cell" in node["classes"]:
        return "tag_hide-cell" in node["classes"] or bool(re.search(r"\bcheck\(", node.astext()))
    return False


def gather(parent):
    "Move what belongs to each exercise into a frame around its card."
    children, out = list(parent.children), []
    while children:
        node = children.pop(0)
        if not is_exercise(node):
            out.append(node)
            continue
        ends = next((i for i, c in enumerate(children) if is_exercise(c) or isinstance(c, nodes.section)), len(children))
        last = max((i for i in range(ends) if belongs(children[i])), default=-1)
        out.append(nodes.container("", node, *children[:last + 1], classes=["ac-exercise-frame"]))
        del children[:last + 1]
    parent.children = []
    parent.extend(out)


def subtitle(doctree):
    "The quote right under the page's title is its promise."
    for section in list(doctree.findall(nodes.section))[:1]:
        if len(section) > 1 and isinstance(section[1], nodes.block_quote):
            section[1]["classes"].append("ac-promise")


def code_below(app, doctree, docname):
    "Where code is folded away, what it shows comes first and the fold below."
    for cell in doctree.findall(nodes.container):
        if "tag_hide-input" in cell["classes"] and len(cell) == 2:
            cell.children.reverse()


def setup(app):
    app.connect("doctree-read", make_cards)
    app.connect("doctree-resolved", code_below)     # after MyST-NB has folded the code
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
