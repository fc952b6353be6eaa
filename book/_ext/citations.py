"""Links into the bibliography look like citations, and say what they cite when pointed at."""
from docutils import nodes

PAGE = "bibliography"


def remember(app, doctree):
    "What each entry of the bibliography says, by the anchor of its heading."
    if app.env.docname == PAGE:
        app.env.course_sources = {
            anchor: paragraph.astext()
            for section in doctree.findall(nodes.section)
            if (paragraph := next((c for c in section.children if isinstance(c, nodes.paragraph)), None))
            for anchor in {*section["ids"], section.get("slug", "")}
        }


def dress(app, doctree, docname):
    sources = getattr(app.env, "course_sources", {})
    for link in doctree.findall(nodes.reference):
        page, _, anchor = link.get("refuri", "").partition("#")
        if page == f"{PAGE}.html" and anchor and docname != PAGE:
            link["classes"].append("ac-cite")
            if anchor in sources:
                link["reftitle"] = sources[anchor]


def setup(app):
    app.connect("doctree-read", remember)
    app.connect("doctree-resolved", dress)
    return {"version": "1", "env_version": 1, "parallel_read_safe": False, "parallel_write_safe": True}
