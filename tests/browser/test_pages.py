"""Every page of the book, in each view: nothing missing, nothing raw, nothing too wide, nothing unreadable."""
import re

import pytest

from .conftest import CONTENTS, HTML, NARROWEST, PAGES, SETTINGS, VIEWS, prose

pytestmark = pytest.mark.checkout

everywhere = pytest.mark.parametrize("view", VIEWS)
every_page = pytest.mark.parametrize("name", PAGES)
chapters = pytest.mark.parametrize("name", CONTENTS)
both_colours = pytest.mark.parametrize("view", ["light", "dark"])


def listed(findings):
    return "\n  " + "\n  ".join(map(str, findings))


# --- loading -------------------------------------------------------------------


@everywhere
@every_page
def test_a_page_loads_whole_and_asks_no_other_host(look, name, view):
    wrong = look(name, view)["wrong"]
    assert not wrong, listed(wrong)


@chapters
def test_maths_is_typeset(look, name):
    facts = look(name, "light")
    if re.search(r"\$[^\s$]", prose(name)):
        assert facts["formulas"] > 0, "the notebook has formulas, the page has none"
    assert not facts["unrendered"], "MathJax left these alone"
    assert not facts["broken"], "MathJax could not read these"


@everywhere
@chapters
def test_nothing_raw_is_left_in_the_text(look, name, view):
    "Markup, formulas and directives that reached the reader as characters."
    facts = look(name, view)
    assert facts["text"] > 200, "the page is almost empty"
    assert not facts["raw"], listed(facts["raw"])


# --- what can be seen, and by whom -----------------------------------------------


def says_something(text):
    "A sentence about what is to be seen, not the name of a file."
    return text and len(text) >= 20 and len(text.split()) >= 4 and not re.search(r"(?i)\.(png|svg|jpe?g|gif|webp)\b|[0-9a-f]{16}", text)


@chapters
def test_every_picture_is_described(look, name):
    facts = look(name, "light")
    for image in facts["images"]:
        assert image["loaded"] or image["where"] == "logo", f"{image['src']} shows nothing"
        if image["where"] == "page":
            assert says_something(image["alt"]), f"{image['src']} has the alt text {image['alt']!r}"
    for picture in facts["pictures"]:
        assert says_something(picture["label"]), f"{picture['what']} has the aria-label {picture['label']!r}"


@chapters
def test_every_interactive_figure_is_drawn(look, name):
    assert not look(name, "light")["unmounted"]


@every_page
def test_no_page_scrolls_sideways(look, name):
    for view in VIEWS:
        width = look(name, view)["sideways"]
        assert width["scroll"] <= width["client"], f"{view}: {width['scroll']} px in a window of {width['client']}: {width['wide']}"
    width = look(name, "phone")["narrowest"]
    assert width["client"] == NARROWEST and width["scroll"] <= NARROWEST, f"{width['scroll']} px in {NARROWEST}: {width['wide']}"


@both_colours
@chapters
def test_text_in_figures_and_code_stands_out(look, name, view):
    "WCAG's 4.5 : 1, or 3 : 1 for large text; in drawings the shape under a text counts as its ground."
    assert look(name, view)["theme"] == view
    found = look(name, view)["faint"]["found"]
    assert not found, listed(found[:20])


def test_the_contrast_of_something_was_measured(look):
    assert sum(look(name, "dark")["faint"]["count"] for name in CONTENTS) > 500


@both_colours
@chapters
def test_figures_stand_on_the_page_itself(look, name, view):
    "Themes like to put a light sheet behind HTML outputs in dark mode, on which our light ink cannot be read."
    facts = look(name, view)
    for figure in facts["behind"]:
        assert figure["ground"] == facts["paper"], f"{figure['id']} stands on {figure['ground']}, the page is {facts['paper']}"


def test_dark_is_dark(look):
    assert sum(look("index", "dark")["paper"]) < 150 < 600 < sum(look("index", "light")["paper"])


# --- accessibility -----------------------------------------------------------------

# What axe-core finds in the theme's own parts: rule, how its selector begins or what it contains, and why it stays.
# An entry that is no longer found must go.
ALLOWED = [
]


def allowed(rule, selector):
    return next((entry for entry in ALLOWED if entry[0] == rule and re.search(entry[1], selector)), None)


@both_colours
@every_page
def test_axe_finds_nothing_serious(look, name, view):
    findings = [f for f in look(name, view)["axe"] if f[1] in ("serious", "critical") and not allowed(f[0], f[2])]
    assert not findings, listed(findings[:20])


def test_no_allowance_is_idle(look):
    found = [allowed(rule, selector) for name in PAGES for view in ("light", "dark") for rule, _, selector, _ in look(name, view)["axe"]]
    assert not [entry for entry in ALLOWED if entry not in found]


# --- finding one's way ---------------------------------------------------------------


@chapters
def test_previous_and_next_follow_the_contents(look, name):
    at = CONTENTS.index(name)
    facts = look(name, "light")
    assert facts["previous"] == (f"{CONTENTS[at - 1]}.html" if at else None)
    assert facts["next"] == (f"{CONTENTS[at + 1]}.html" if at + 1 < len(CONTENTS) else None)


@chapters
def test_links_to_colab_open_this_chapter_at_the_tag(look, name):
    ours = f"https://colab.research.google.com/github/{SETTINGS['user']}/{SETTINGS['repo']}/blob/{SETTINGS['tag']}/nbs/{name}.ipynb"
    found = look(name, "light")["colab"]
    assert set(found) <= {ours}
    assert found or not re.match(r"\d\d_", name), "a chapter has a link to Colab"


@chapters
def test_every_code_cell_can_be_copied(look, name):
    facts = look(name, "light")
    assert facts["copy"] == facts["cells"]


@chapters
def test_icon_and_card_are_there(look, name):
    facts = look(name, "light")
    site = SETTINGS["doc_host"] + SETTINGS["doc_baseurl"] + "/"
    assert facts["icon"] and (HTML / re.sub(r"https?://[^/]+/", "", facts["icon"])).is_file()
    assert facts["card"].startswith(site)
    card = (HTML / facts["card"].removeprefix(site)).read_bytes()
    assert card[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(card[i:i + 4], "big") for i in (16, 20))
    assert width >= 1200 and 1.8 < width / height < 2
