"""Interactive figures: they answer mouse and keyboard, and every number they show is the library's.

A new figure needs an entry in `WORTH` (what each of its numbers should be in a given state) and a test that steers it.
"""
import json
import math
import re

import pytest
import torch

from attention_course import attention_entropy, scaled_dot_product_attention

from .conftest import CONTENTS, ROOT, cells

pytestmark = pytest.mark.checkout

# (page, figure), as the notebooks have them. A name without a file is a chapter's example of a slip.
FIGURES = [(page, name) for page in CONTENTS for source in cells(page, "code") for name in re.findall(r'\binteractive\(\s*"([\w-]+)"', source)
           if (ROOT / "attention_course" / "figures" / f"{name}.js").exists()]


def those(name):
    found = [page for page, figure in FIGURES if figure == name]
    return pytest.mark.parametrize("page_name", list(dict.fromkeys(found)))


def numbers(name, values):
    return {f"{name}-{i}": x for i, x in enumerate(values.tolist())}


def float64(rows):
    return torch.tensor(rows, dtype=torch.float64)


# --- what the numbers should be ------------------------------------------------------


def attention_map(data, state):
    q, k, v = (float64(data[x]) for x in "qkv")
    i, j, scale = state["query"], state["key"], data["scale"]
    output, weights = scaled_dot_product_attention(q, k, v, scale=scale)
    entropy = attention_entropy(weights)[i].item()
    scores = q @ k.T * scale
    worth = {**numbers("score", scores[i]), **numbers("weight", weights[i]), **numbers("output", output[i]),
             "entropy": entropy, "choices": math.exp(entropy)}
    if j is not None:
        worth |= {**numbers("query", q[i]), **numbers("key", k[j]), **numbers("product", q[i] * k[j]), "dot": (q[i] @ k[j]).item(),
                  "chosen-score": scores[i, j].item(), **numbers("contribution", weights[i, j] * v[j])}
    return worth


def softened(scores, values):
    "Scores that come from nowhere, so from the mask; output and weights of one query."
    nothing = torch.zeros(len(scores), 1, dtype=torch.float64)
    output, weights = scaled_dot_product_attention(nothing[:1], nothing, values[:, None], scores[None])
    return output[0, 0].item(), weights[0]


def temperature(data, state):
    scores = float64(data["scores"])
    _, weights = softened(scores / state["temperature"], scores)
    entropy = attention_entropy(weights).item()
    return {**numbers("scaled", scores / state["temperature"]), **numbers("weight", weights), "temperature": state["temperature"],
            "entropy": entropy, "choices": math.exp(entropy)}


def soft_lookup(data, state):
    distance = state["query"] - float64(data["keys"])
    output, weights = softened(-distance**2 / 2 / state["temperature"], float64(data["values"]))
    return {"query": state["query"], "temperature": state["temperature"], **numbers("weight", weights), "output": output}


WORTH = {"attention-map": attention_map, "temperature": temperature, "soft-lookup": soft_lookup}


# --- what is shown -------------------------------------------------------------------


class Figure:
    "A figure on an open page."

    def __init__(self, page, name):
        self.page, self.name, self.node = page, name, page.locator(f"#fig-{name}").first
        script = self.node.evaluate("figure => figure.nextElementSibling.textContent")
        # The data as the page has them: the last argument of the script's last call.
        self.data = json.loads(script[script.rindex("FIGURE, ") + len("FIGURE, "):script.rindex(");", 0, script.rindex("}"))])

    def shown(self):
        "All numbers in sight: name -> (number, what the reader reads)."
        found = self.node.evaluate("""figure => [...figure.querySelector('.ac-mount').shadowRoot.querySelectorAll('output[data-exact]')]
            .filter(o => o.checkVisibility()).map(o => [o.dataset.value, o.dataset.exact, o.textContent])""")
        return {name: (float(exact), text) for name, exact, text in found}

    def text(self, value):
        return self.node.locator(f"[data-value={value}]").inner_text()

    def enter(self):
        "Put the keyboard's focus on the figure's first control."
        self.node.evaluate("figure => { figure.tabIndex = -1; figure.focus() }")
        self.page.keyboard.press("Tab")

    def press(self, *keys):
        address = self.page.url
        for key in keys:
            self.page.keyboard.press(key)
        assert self.page.url == address, f"{keys} turned the page"

    def agrees(self, state):
        "Every number in sight is the library's, to rounding; every text is its number, rounded."
        shown, worth = self.shown(), WORTH[self.name](self.data, state)
        assert set(shown) == set(worth), "numbers that nobody expects, or that are missing"
        for name, (number, text) in shown.items():
            assert math.isclose(number, worth[name], rel_tol=1e-9, abs_tol=1e-9), f"{name} is {number}, the library says {worth[name]} ({state})"
            assert reads_as(text, number), f"{name} is {number}, but reads {text!r}"
        return shown


def reads_as(text, number):
    "Is `text` this number, rounded to the digits it has? `<1 %` and `>99 %` are what they say."
    plain = text.replace("\u2212", "-").replace("\u00a0", " ")
    found = re.fullmatch(r"([<>]?)(-?\d+(?:\.(\d+))?)( %)?", plain)
    if not found:
        return False
    value = number * (100 if found[4] else 1)
    if found[1]:
        return 0 < value < float(found[2]) if found[1] == "<" else float(found[2]) < value < 100
    return abs(value - float(found[2])) <= 0.5 * 10 ** -len(found[3] or "") + 1e-9


@pytest.fixture
def figure(opened):
    return lambda page_name, name, view="light": Figure(opened(page_name, view), name)


def test_every_figure_is_known_here():
    assert FIGURES, "no notebook calls `interactive`?"
    unknown = {name for _, name in FIGURES} - set(WORTH)
    assert not unknown, f"say in WORTH what the numbers of {unknown} should be, and steer them in a test"


@pytest.mark.parametrize("page_name", list(dict.fromkeys(page for page, _ in FIGURES)))
def test_a_figure_says_what_it_is_and_what_to_do(look, page_name):
    found = {f["id"]: f for f in look(page_name, "light")["interactive"]}
    assert set(found) == {f"fig-{name}" for page, name in FIGURES if page == page_name}
    for figure in found.values():
        assert figure["role"] == "group" and len(figure["label"]) > 40 and figure["caption"]
        assert figure["controls"] and all(figure["controls"]), f"{figure['id']}: a control without a name"
        assert not figure["focused"], f"{figure['id']} takes the focus when the page opens"


# --- the attention map ---------------------------------------------------------------


@those("attention-map")
def test_attention_map_by_mouse(figure, page_name):
    it = figure(page_name, "attention-map")
    tokens, rows, query, key = it.data["tokens"], it.node.locator("tbody tr"), it.data["query"], it.data.get("key")
    it.agrees({"query": query, "key": key})
    for query, token in enumerate(tokens):
        it.node.get_by_role("radio", name=token).nth(tokens[:query].count(token)).click()
        it.agrees({"query": query, "key": key})
        assert it.text("reading").startswith(f"{token} looks at"), it.text("reading")
    for row in range(len(tokens)):
        if row != key:
            it.node.get_by_role("button").nth(row).click()
            key = row
            it.agrees({"query": query, "key": key})
    it.node.get_by_role("button").nth(key).click()      # once more: not chosen any longer
    it.agrees({"query": query, "key": None})
    # A click anywhere on a row does what its button does.
    rows.nth(0).click(position={"x": rows.nth(0).bounding_box()["width"] - 5, "y": 10})
    it.agrees({"query": query, "key": 0})


@those("attention-map")
def test_attention_map_by_keyboard(figure, page_name):
    it = figure(page_name, "attention-map")
    n, query, key = len(it.data["tokens"]), it.data["query"], it.data.get("key")
    it.enter()
    readings = set()
    for _ in range(n):      # once round
        query = (query + 1) % n
        it.press("ArrowRight")
        it.agrees({"query": query, "key": key})
        readings.add(it.text("reading"))
    assert len(readings) == n, "the sentence that screen readers hear does not follow"
    assert it.node.locator("[data-value=reading]").get_attribute("aria-live") == "polite"
    it.press("ArrowLeft")
    query = (query - 1) % n
    it.agrees({"query": query, "key": key})
    it.press("Tab")         # from the words to the rows
    for row in range(n):
        if row == key:
            it.press("Tab")
            continue
        for stroke in ("Space", "Enter"):
            it.press(stroke)
            key = None if key == row else row
            it.agrees({"query": query, "key": key})
            pressed = it.node.get_by_role("button").evaluate_all("bs => bs.map(b => b.ariaPressed)")
            assert pressed == ["true" if i == key else "false" for i in range(n)]
        it.press("Tab")


@those("attention-map")
def test_attention_map_by_touch(figure, page_name):
    it = figure(page_name, "attention-map", "phone")
    last = len(it.data["tokens"]) - 1
    it.node.get_by_role("radio").nth(last).tap()
    it.agrees({"query": last, "key": it.data.get("key")})
    it.node.get_by_role("button").nth(0).tap()
    it.agrees({"query": last, "key": 0})


# --- sliders ---------------------------------------------------------------------------


def walk(it, slider, name, state, low, high):
    "Steer a focused slider with all its keys; `state` follows."

    def press(key):
        before, spoken = state[name], slider.get_attribute("aria-valuetext")
        it.press(key)
        state[name] = it.shown()[name][0]
        it.agrees(state)
        if state[name] != before:
            assert slider.get_attribute("aria-valuetext") != spoken, f"{key} changes the number, but not what is spoken"
        return before, state[name]

    press("Home")
    assert state[name] == low
    for key in ("ArrowRight", "ArrowUp", "PageUp"):
        before, after = press(key)
        assert after > before, key
    press("End")
    assert state[name] == high
    for key in ("ArrowLeft", "ArrowDown", "PageDown"):
        before, after = press(key)
        assert after < before, key


def drag(it, slider, name, state, low, high):
    "Click near both ends of a slider's track."
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    for part in (0.02, 0.5, 0.98):
        it.page.mouse.click(box["x"] + part * box["width"], box["y"] + box["height"] / 2)
        previous, state[name] = state[name], it.shown()[name][0]
        assert low <= state[name] <= high
        it.agrees(state)
        assert part == 0.02 or state[name] > previous


def press_buttons(it, state):
    for button, value in (("T → 0", it.data["min"]), ("T = 1", 1), ("T large", it.data["max"])):
        node = it.node.get_by_role("button", name=button)
        if button == "T = 1" and not it.data["min"] <= 1 <= it.data["max"]:
            assert node.count() == 0
            continue
        node.click()
        state["temperature"] = value
        it.agrees(state)
        assert node.get_attribute("aria-pressed") == "true"


@those("temperature")
def test_temperature(figure, page_name):
    it = figure(page_name, "temperature")
    state, ends = {"temperature": it.data["temperature"]}, (it.data["min"], it.data["max"])
    slider = it.node.get_by_role("slider")
    it.agrees(state)
    it.enter()
    walk(it, slider, "temperature", state, *ends)
    drag(it, slider, "temperature", state, *ends)
    press_buttons(it, state)
    # Cold: one takes all. Hot: all alike.
    state["temperature"] = it.data["min"]
    it.node.get_by_role("button", name="T → 0").click()
    best = it.data["scores"].count(max(it.data["scores"]))      # more than one, if they tie
    assert abs(it.agrees(state)["entropy"][0] - math.log(best)) < 0.1
    state["temperature"] = it.data["max"]
    it.node.get_by_role("button", name="T large").click()
    assert it.agrees(state)["entropy"][0] > 0.9 * math.log(len(it.data["scores"]))


@those("soft-lookup")
def test_soft_lookup(figure, page_name):
    it = figure(page_name, "soft-lookup")
    keys = it.data["keys"]
    spare = (max(keys) - min(keys)) / 6
    ends = it.data.get("query_min", min(keys) - spare), it.data.get("query_max", max(keys) + spare)
    state = {"query": it.data["query"], "temperature": it.data["temperature"]}
    query, heat = it.node.get_by_role("slider", name="Query"), it.node.get_by_role("slider", name="Temperature")
    it.agrees(state)
    it.enter()
    walk(it, query, "query", state, *ends)
    it.press("Tab")
    walk(it, heat, "temperature", state, it.data["min"], it.data["max"])
    drag(it, query, "query", state, *ends)
    drag(it, heat, "temperature", state, it.data["min"], it.data["max"])
    press_buttons(it, state)
    # Cold at a key, the value of that key comes back.
    it.node.get_by_role("button", name="T → 0").click()
    query.focus()
    it.press("End")
    nearest = it.data["values"][max(range(len(keys)), key=lambda i: keys[i])]
    assert it.shown()["output"][0] == pytest.approx(nearest, abs=1e-6)
