"""The book as a whole: when chapters run anew, and which buttons pages carry."""
import os

from docutils import nodes


def take_state(app, config):
    "A changed package re-executes every chapter: its cache has a folder of its own (set by tools/book.py)."
    config.nb_execution_cache_path = os.environ.get("BOOK_CACHE", "")
    # Jupyter Book always loads sphinx-thebe, whose script would be in each page twice. There is no live kernel here.
    app.registry.css_files = [css for css in app.registry.css_files if "thebe" not in css[0]]
    for event in ("env-before-read-docs", "doctree-resolved", "builder-inited", "html-page-context"):
        for listener in list(app.events.listeners.get(event, [])):
            if listener.handler.__module__.startswith("sphinx_thebe"):
                app.disconnect(listener.id)


def note_code(app, doctree):
    runs = any("import setup" in c.astext() for c in doctree.findall(nodes.container) if "cell" in c["classes"])
    app.env.metadata[app.env.docname]["course_runs"] = runs


def buttons(app, pagename, templatename, context, doctree):
    "Only pages with a setup cell can run in Colab."
    if not app.env.metadata.get(pagename, {}).get("course_runs"):
        context["header_buttons"] = [b for b in context.get("header_buttons", []) if b.get("label") != "launch-buttons"]


def setup(app):
    app.connect("config-inited", take_state, priority=900)
    app.connect("doctree-read", note_code)
    app.connect("html-page-context", buttons, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
