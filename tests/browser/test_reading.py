"""What a reader does with the book: search, turn pages, copy, change the theme, work on exercises."""
import re

import pytest

from .conftest import CONTENTS, SETTINGS, cells, prose

pytestmark = pytest.mark.checkout

EXERCISES = {name: re.findall(r"(?m)^> \*\*Exercise ([\d.]*\d)", prose(name)) for name in CONTENTS}
WITH_EXERCISES = [name for name in CONTENTS if EXERCISES[name]]
FIRST = WITH_EXERCISES[0]


# --- search ----------------------------------------------------------------------


def results(page):
    "The pages that a search finds, once it has finished."
    page.locator("#search-results p.search-summary").filter(has_text=re.compile("finished|did not match")).wait_for()
    return page.locator("#search-results ul.search li a").evaluate_all("links => links.map(a => a.getAttribute('href').split(/[?#]/)[0])")


def test_a_reader_can_search_from_any_page(opened):
    page = opened("index")
    page.keyboard.press("Control+k")
    field = page.locator("#pst-search-dialog input[type=search]")
    field.wait_for()
    field.fill("softmax")
    field.press("Enter")
    page.wait_for_url("**/search.html?q=softmax**")
    assert "02_attention.html" in results(page)


def chinese():
    "A Chinese term of the notation page."
    return re.findall(r"(?<![\u4e00-\u9fff])[\u4e00-\u9fff]{2,4}(?![\u4e00-\u9fff])", prose("notation"))[0]


@pytest.mark.parametrize("term, where", [("entropy", "02_attention"), (chinese(), "notation")], ids=["English", "Chinese"])
def test_search_finds_a_term(opened, term, where):
    page = opened(f"search.html?q={term}")
    assert f"{where}.html" in results(page)


# --- moving about -----------------------------------------------------------------


def test_one_can_turn_the_page_and_turn_back(opened):
    page = opened(CONTENTS[0])
    page.locator(".prev-next-area a.right-next").click()
    page.wait_for_url(f"**/{CONTENTS[1]}.html")
    page.locator(".prev-next-area a.left-prev").click()
    page.wait_for_url(f"**/{CONTENTS[0]}.html")


def test_the_contents_open_on_a_phone(opened):
    page = opened("index", "phone")
    link = page.locator(f".bd-sidebar-primary a[href='{FIRST}.html']")
    assert not link.is_visible()
    page.locator("button.primary-toggle:visible").first.tap()
    link.wait_for()
    page.wait_for_timeout(500)      # it slides in
    link.tap()
    page.wait_for_url(f"**/{FIRST}.html")


def test_the_theme_can_be_chosen_and_stays(opened):
    page = opened("index")

    def ground():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    theme = page.locator("html").get_attribute
    seen = {theme("data-theme"): ground()}
    button = page.locator("button.theme-switch-button:visible").first
    for _ in range(3):
        if theme("data-theme") == "dark":
            break
        button.click()
        page.wait_for_timeout(300)
        seen[theme("data-theme")] = ground()
    assert set(seen) == {"light", "dark"} and seen["light"] != seen["dark"]
    dark = seen["dark"]
    page.locator(".prev-next-area a.right-next").click()
    page.wait_for_url(f"**/{CONTENTS[1]}.html")
    assert theme("data-theme") == "dark" and ground() == dark
    page.evaluate("localStorage.clear()")


# --- working with a chapter --------------------------------------------------------


def test_the_colab_button_is_in_reach(opened):
    page = opened(FIRST)
    page.get_by_role("button", name=re.compile("launch", re.I)).first.click()
    link = page.locator("a.dropdown-item[href*='colab.research.google.com'], a.btn[href*='colab.research.google.com']").first
    link.wait_for()
    assert f"/{SETTINGS['user']}/{SETTINGS['repo']}/blob/{SETTINGS['tag']}/" in link.get_attribute("href")


def test_the_copy_button_copies_the_cell(opened):
    page = opened(FIRST)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    cell = page.locator("div.cell_input .highlight", has_text="from attention_course import setup").first
    page.locator("div.cell", has=cell).first.locator("details summary").first.click()  # set-up comes folded
    cell.hover()
    cell.locator("button.copybtn").click()
    page.wait_for_timeout(200)
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == next(c for c in cells(FIRST, "code") if "import setup" in c).strip()


@pytest.mark.parametrize("name", WITH_EXERCISES)
def test_every_exercise_is_a_card_whose_hint_and_solution_open_by_keyboard(opened, name):
    page = opened(name)
    frames = page.locator(".ac-exercise-frame")
    assert frames.count() == len(EXERCISES[name])
    for i, number in enumerate(EXERCISES[name]):
        frame = frames.nth(i)
        assert f"Exercise {number}" in frame.locator(".ac-exercise > .admonition-title").inner_text()
        for what in ("Hint", "Solution"):
            fold = frame.locator("details", has=page.locator("summary", has_text=what))
            assert fold.count() == 1, f"exercise {number} has {fold.count()} folds for its {what.lower()}"
            inside = fold.locator("> :not(summary)").first
            assert not inside.is_visible(), f"the {what.lower()} of exercise {number} lies open"
            fold.locator("summary").focus()
            page.keyboard.press("Enter")
            assert inside.is_visible(), f"Enter does not open the {what.lower()} of exercise {number}"
            page.keyboard.press("Space")
            assert not inside.is_visible(), f"Space does not close the {what.lower()} of exercise {number}"
        assert "check(" in frame.inner_text(), f"exercise {number} has no cell that checks it"
