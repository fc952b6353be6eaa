"""The built book in a real browser: Debian's or anybody's Chromium, driven by Playwright (which brings no browser of its own).

Each page is loaded once in each view, and what the tests want to know about it is collected in one go (`look`): so a new
chapter costs seconds. Every other host is out of reach, and asking for one is a finding.

    make browser
    CHROMIUM=/path/to/chromium     the browser, if it is not found by itself
    BOOK_HTML=/path/to/html        another built book than book/_build/html
"""
import configparser
import json
import os
import re
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import axe_playwright_python
import pytest
import yaml
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
HTML = Path(os.environ.get("BOOK_HTML", ROOT / "book" / "_build" / "html"))
LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")
AXE = next(Path(axe_playwright_python.__file__).parent.rglob("axe.min.js")).read_text(encoding="utf-8")

parser = configparser.ConfigParser()
parser.read(ROOT / "settings.ini")
SETTINGS = parser["DEFAULT"]


def entries(node):
    "The files of a table of contents, in reading order."
    if isinstance(node, list):
        return [file for part in node for file in entries(part)]
    files = [node["file"]] if "file" in node else []
    return files + [file for key in ("parts", "chapters", "sections") for file in entries(node.get(key, []))]


toc = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text(encoding="utf-8"))
CONTENTS = [toc["root"], *entries(toc)]
PAGES = [*CONTENTS, "search"]

VIEWS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "has_touch": True, "is_mobile": True},
}
NARROWEST = 340     # the phone is made this narrow too, to look for sideways scrolling

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]


def missing(reason):
    "On a developer's machine a reason to skip, in CI one to fail."
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"       # one connection for many files

    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def site():
    "The address of the book on this machine's loopback."
    if not (HTML / "index.html").is_file():
        missing(f"there is no book in {HTML}: run `make book` first")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(HTML)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture(scope="session")
def chromium():
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not found or not Path(found).is_file():
        missing(f"no Chromium ({found or 'none on PATH'}): install it (Debian: apt install chromium fonts-noto-cjk) or set CHROMIUM=/path/to/it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def contexts(chromium):
    "One browser window per view, opened when it is first needed."
    made = {}

    def context(view):
        if view not in made:
            made[view] = chromium.new_context(**VIEWS[view])
            made[view].set_default_timeout(20_000)
        return made[view]

    return context


def visit(context, site, address):
    "Open a page, wait until it is drawn; returns it and a list that collects what goes wrong on it, as `(kind, what)`."
    page, wrong = context.new_page(), []
    page.on("console", lambda m: wrong.append(("console", f"{m.text} {m.location.get('url', '')}")) if m.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(("error", str(error))))
    page.on("response", lambda r: wrong.append(("missing", f"{r.status} {r.url}")) if r.status >= 400 else None)
    page.on("requestfailed", lambda r: wrong.append(("missing", f"{r.failure} {r.url}")) if r.url.startswith(site) else None)

    def asked(url):
        if urlsplit(url).scheme not in ("data", "blob", "about") and not url.startswith(site):
            wrong.append(("other host", url))

    page.on("request", lambda request: asked(request.url))
    page.on("websocket", lambda socket: asked(socket.url))
    page.goto(site + address, wait_until="load")
    page.evaluate("async () => { await window.MathJax?.startup?.promise; await document.fonts.ready }")
    return page, wrong


@pytest.fixture(scope="session")
def look(site, contexts):
    "`look(page, view)`: what there is to see, looked at once."
    seen = {}

    def look(name, view):
        if (name, view) not in seen:
            page, wrong = visit(contexts(view), site, f"{name}.html")
            page.wait_for_timeout(150)      # late errors
            facts = page.evaluate(f"{LOOK}.facts()")
            if view == "phone":
                page.set_viewport_size({"width": NARROWEST, "height": 844})
                page.wait_for_timeout(100)
                facts["narrowest"] = page.evaluate(f"{LOOK}.sideways()")
            if view in ("light", "dark"):
                facts["wrong"] = list(wrong)    # before axe, which reads style sheets by itself
                page.evaluate(AXE)
                facts["axe"] = page.evaluate(AUDIT)
            facts.setdefault("wrong", wrong)
            page.close()
            seen[name, view] = facts
        return seen[name, view]

    return look


# Code and drawings are left out, which takes axe from a minute to seconds on a long chapter: their one risk is contrast, and
# look.js measures that. `preload` would fetch style sheets at wrong addresses.
AUDIT = """() => axe.run({ exclude: [['pre'], ['.ac-figure svg']] }, { preload: false, resultTypes: ['violations'] }).then(
    result => result.violations.flatMap(v => v.nodes.map(node => [v.id, v.impact, node.target.flat(9).join(' '), node.html.slice(0, 200)])))"""


@pytest.fixture
def opened(site, contexts):
    "`opened('index')`: a page to click and type on; afterwards nothing may have gone wrong on it."
    pages = []

    def open_page(name, view="light"):
        pages.append(visit(contexts(view), site, name if "." in name else f"{name}.html"))
        return pages[-1][0]

    yield open_page
    for page, wrong in pages:
        page.close()
        assert not wrong


def cells(name, kind):
    "Sources of a notebook's cells; none for pages that are not notebooks."
    path = ROOT / "nbs" / f"{name}.ipynb"
    if not path.exists():
        return []
    return ["".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


def prose(name):
    "A notebook's Markdown without its code."
    return re.sub(r"(?s)```.*?```|`[^`\n]*`", "", "\n\n".join(cells(name, "markdown")))
