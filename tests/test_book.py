"""The built book, as files: nothing raw, nothing broken, nothing nameless. (tests/browser looks at it in a browser.)"""
import configparser
import html
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "book" / "_build" / "html"
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))
if not (HTML / "index.html").exists():
    missing = "there is no book in book/_build/html: run `make book` first"
    pytest.fail(missing, pytrace=False) if os.environ.get("CI") else pytest.skip(missing, allow_module_level=True)

parser = configparser.ConfigParser()
parser.read(ROOT / "settings.ini")
SETTINGS = parser["DEFAULT"]
SITE = SETTINGS["doc_host"] + SETTINGS["doc_baseurl"] + "/"


class Page(HTMLParser):
    "What the tests ask of a page: ids, addresses, pictures, meta data, and the text of the article."

    VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
    CODE = {"pre", "code", "dt"}    # a `dt` is a signature

    def __init__(self, path):
        super().__init__()
        self.path, self.ids, self.links, self.images, self.figures, self.meta = path, [], [], [], [], {}
        self.text, self.prose, self.inside, self.scripts, self.code = [], [], 0, [], 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        a = dict(attributes)
        if "id" in a:
            self.ids.append(a["id"])
        for key in ("href", "src"):
            if a.get(key):
                self.links.append((tag, a[key]))
        if tag == "img":
            self.images.append(a)
        if tag == "figure" and "ac-figure" in (a.get("class") or ""):
            self.figures.append("")
        if self.figures and a.get("role") in ("img", "group"):     # a still figure's SVG, an interactive figure as a whole
            self.figures[-1] = self.figures[-1] or a.get("aria-label") or ""
        if tag == "meta":
            self.meta[a.get("property") or a.get("name")] = a.get("content")
        if tag in ("script", "style"):
            self.scripts.append(tag)
        self.code += tag in self.CODE
        if self.inside or tag == "article":
            self.inside += tag not in self.VOID

    def handle_endtag(self, tag):
        if tag in ("script", "style") and self.scripts:
            self.scripts.pop()
        self.code -= tag in self.CODE
        if self.inside and tag not in self.VOID:
            self.inside -= 1

    def handle_data(self, data):
        if self.inside and not self.scripts:
            self.text.append(data)
            if not self.code:
                self.prose.append(data)


PAGES = {p.name: Page(p) for p in sorted(HTML.glob("*.html"))}
CONTENT = [p.stem + ".html" for p in NOTEBOOKS]


@pytest.mark.parametrize("name", CONTENT)
def test_nothing_raw_shows(name):
    text = "".join(PAGES[name].text)
    assert len(text) > 200, "the page is almost empty"
    for raw, what in (
        (r"(?m)^\s*#\s*\|", "a `#|` line"),
        (r"(?m)^\s*# @title", "Colab's `# @title` line"),
        (r"`{3}|:::", "a fence"),
        (r"\{(?:note|admonition|figure|math|ref|doc|cite\S*|eq|numref|exercise|solution|py:\w+|eval-rst)\}", "a directive or role"),
        (r"show_doc\(", "a call of show_doc"),
        (r"Traceback \(most recent call last\)", "a traceback"),
        (r"(?m)^.*/site-packages/.*Warning: ", "a warning, and where it comes from"),
        (r"(?:-?\d\.\d{4}(?:e[+-]\d\d)?[\[\],\s]+){60}", "a screenful of numbers"),
    ):
        found = re.search(raw, text)
        assert not found, f"{what} shows: {text[max(0, found.start() - 60):found.end() + 60]!r}"
    prose = "".join(PAGES[name].prose)  # in code, ** is Python
    bold = re.search(r"(?<!\w)\*\*\w", prose)
    assert not bold, f"bold text that was not closed shows: {prose[max(0, bold.start() - 60):bold.end() + 60]!r}"


@pytest.mark.parametrize("name", CONTENT)
def test_every_picture_says_what_is_to_be_seen(name):
    for image in PAGES[name].images:
        alt = image.get("alt")
        if "logo" in image.get("class", "") or image.get("aria-hidden"):
            continue
        assert alt and not re.search(r"\.(png|svg|jpe?g)$|[0-9a-f]{16}", alt), f"{image.get('src')} has the alt text {alt!r}"
    for said in PAGES[name].figures:
        assert len(said.split()) >= 4, f"a figure is described as {said!r}"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_every_link_inside_the_book_leads_somewhere(name):
    for tag, address in PAGES[name].links:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (HTML / unquote(parts.path)).resolve() if parts.path else PAGES[name].path
        assert target.is_file(), f"<{tag}> leads to {address}, which is not there"
        if parts.fragment and target.suffix == ".html":
            assert unquote(parts.fragment) in PAGES[target.name].ids, f"<{tag}> leads to {address}: the page has no such place"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_asks_no_other_host(name):
    "Links may lead out; scripts, styles and pictures come from the book itself."
    text = PAGES[name].path.read_text(encoding="utf-8")
    loads = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"((?:https?:)?//[^\"]+)", text)
    loads += [a for l in re.findall(r"<link\b[^>]*>", text) if 'rel="canonical"' not in l for a in re.findall(r'href="((?:https?:)?//[^"]+)', l)]
    assert not loads


@pytest.mark.parametrize("name", CONTENT)
def test_ids_are_unique(name):
    ids = PAGES[name].ids
    assert len(ids) == len(set(ids)), {i for i in ids if ids.count(i) > 1}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_colab_button_is_where_a_notebook_can_run(path):
    page = HTML / f"{path.stem}.html"
    address = f"https://colab.research.google.com/github/{SETTINGS['user']}/{SETTINGS['repo']}/blob/{SETTINGS['tag']}/nbs/{path.name}"
    buttons = re.findall(r'<a href="(https://colab[^"]+)"[^>]*class="btn', page.read_text())
    can_run = "from attention_course import setup" in path.read_text()
    assert {html.unescape(b) for b in buttons} == ({address} if can_run else set())


@pytest.mark.parametrize("name", CONTENT)
def test_a_shared_link_has_a_title_a_picture_and_a_description(name):
    meta = PAGES[name].meta
    assert meta["og:title"] and meta["og:site_name"] and meta["og:url"] == SITE + name
    assert meta["og:image"] == SITE + "_static/social-card.png" and (HTML / "_static" / "social-card.png").is_file()
    assert len(meta["description"]) > 40


def test_mathjax_is_our_own():
    assert (HTML / "_static" / "mathjax" / "tex-mml-chtml.js").is_file()
    assert len(list((HTML / "_static" / "mathjax" / "output" / "chtml" / "fonts" / "woff-v2").glob("*.woff"))) > 20


def test_search_and_sitemap_know_every_page():
    index, sitemap = (HTML / "searchindex.js").read_text(), (HTML / "sitemap.xml").read_text()
    for name in CONTENT:
        assert f'"{name.removesuffix(".html")}"' in index
        assert f"<loc>{SITE}{name}</loc>" in sitemap


def test_a_citation_says_what_it_cites():
    found = re.findall(r'<a class="[^"]*\bac-cite\b[^"]*"[^>]*>', (HTML / "02_attention.html").read_text())
    assert found and all('title="' in link for link in found)


def test_an_exercise_is_a_card_with_a_folded_solution():
    text = (HTML / "02_attention.html").read_text()
    frames = text.split('<div class="ac-exercise-frame')[1:]
    assert len(frames) >= 4
    for frame in frames:
        assert "check(" in re.sub(r"<[^>]+>", "", frame) and "<details" in frame and "Solution" in frame


def test_the_reference_has_a_table_for_each_function():
    text = (HTML / "reference.html").read_text()
    assert 'id="attention_course.scaled_dot_product_attention"' in text
    assert 'Float[Tensor, "*b n_q d' in html.unescape(re.sub(r"<[^>]+>", "", text))
