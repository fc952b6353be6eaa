"""Interactive figures: they answer mouse and keyboard, and every number they show is the library's.

A new figure needs an entry in `WORTH` (what each of its numbers should be in a given state) and a test that steers it.
"""
import inspect
import json
import math
import re

import pytest
import torch

from attention_course import attention_entropy, flash_backward, interactive, scaled_dot_product_attention
from attention_course.masking import causal_mask, padding_mask, window_mask
from attention_course.positions import RotaryPositions, sinusoidal_encoding
from attention_course.tiling import _Plan, _tiles, online_softmax, tiled_attention
from attention_course.translation import BOS, EOS, beam_search

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


def influence(data, state):
    here = data["distances"].index(state["distance"])
    worth = {"distance": state["distance"]}
    if "gain" in state:
        worth["gain"] = state["gain"]
    for k, curve in enumerate(c for c in data["curves"] if c["kind"] != "rnn" or c["gain"] == state.get("gain", c["gain"])):
        worth |= {f"influence-{k}": curve["influence"][here], f"ratio-{k}": curve["influence"][0] / curve["influence"][here]}
    return worth


def mask_of(n, state):
    "The library's mask for what the controls say."
    real, window = state["real"], state["window"] or None
    mask = torch.ones(n, n, dtype=torch.bool) if window is None else window_mask(n, window=window)
    return padding_mask([real], n)[0, 0] & (causal_mask(n, window=window) if state["causal"] else mask)


def mask_builder(data, state):
    scores = float64(data["scores"])
    n, i, mask, unit = len(scores), state["query"], mask_of(len(scores), state), torch.eye(len(scores), dtype=torch.float64)
    _, weights = scaled_dot_product_attention(scores, unit, unit, mask, scale=1.0)    # q · k is the score itself
    worth = {f"weight-{i}-{j}": weights[i, j].item() for i in range(n) for j in range(n)}
    return worth | {**numbers("score", scores[i]), **numbers("row-weight", weights[i]), "real": state["real"], "window": state["window"],
                    "visible": mask.sum().item(), "share": mask.double().mean().item(), "row-visible": mask[i].sum().item()}


def head_explorer(data, state):
    heads = float64(data["texts"][state["text"]]["heads"])
    weights, places = heads[state["head"], state["query"]], torch.arange(heads.shape[-1])
    entropy = attention_entropy(weights).item()
    far = (heads * (places[:, None] - places).abs()).sum(-1).mean(-1)
    return {**numbers("weight", weights), **numbers("distance", far), "top": weights.max().item(), "entropy": entropy, "choices": math.exp(entropy)}


def hands(data, state):
    "What turns: for query and key, or for two rows, the pairs of columns as (up, right)."
    d, places = data["d"], (state["position"], state["position"] + state["offset"])
    if state["kind"] == "sinusoidal":
        return [sinusoidal_encoding(1, d, offset=place, dtype=torch.float64).view(-1, 2).flip(-1) for place in places]
    turn = RotaryPositions(d, base=float(state["base"]), interleaved=data.get("interleaved", False))
    turned = [turn(float64(data[x])[None, None, None], torch.tensor([place])).flatten() for x, place in zip("qk", places)]
    return [x.view(-1, 2) if turn.interleaved else x.view(2, -1).T for x in turned]


def positions(data, state):
    q, k = hands(data, state)
    angle = torch.atan2(k[:, 1], k[:, 0]) - torch.atan2(q[:, 1], q[:, 0])
    between = 180 - torch.remainder((180 - angle.rad2deg()).round(decimals=10), 360)
    cos, sin = RotaryPositions(data["d"], base=float(state["base"]) if state["kind"] == "rotary" else 1e4).tables(torch.tensor([1]), torch.float64)
    worth = {"position": state["position"], "offset": state["offset"], **numbers("period", 2 * math.pi / torch.atan2(sin, cos)[0]),
             **numbers("between", between), **numbers("product", (q * k).sum(-1)), "dot": (q * k).sum().item()}
    if state["kind"] == "rotary" and len(data.get("bases", [])) > 1:
        worth["base"] = state["base"]
    return worth


def tree(data):
    "All that the table of a beam search allows, from top to bottom: tuples of tokens."

    def below(path):
        for token in data["tokens"]:
            if data["table"][" ".join(path)].get(token):
                yield (*path, token)
                if token != data["end"] and len(path) + 1 < data["max_len"]:
                    yield from below((*path, token))

    return list(below(()))


def searched(data, state):
    "A beam search on paper: log-probabilities of what was reached, what became of it, scores, the best, and what the others can reach."
    longest, live, logp, fate, score, best, bound = data["max_len"], [()], {(): 0.0}, {}, {}, None, None
    for n in range(1, state["step"] + 1):
        tried = [path for before in live for path in tree(data) if path[:-1] == before]
        logp |= {path: logp[path[:-1]] + math.log(data["table"][" ".join(path[:-1])][path[-1]]) for path in tried}
        fate |= dict.fromkeys(filter(None, live), "kept") | dict.fromkeys(tried, "cut")
        kept = sorted(tried, key=lambda path: -logp[path])[:state["beam"]]
        score |= {path: logp[path] / n ** state["alpha"] for path in kept if path[-1] == data["end"] or n == longest}
        live = [path for path in kept if path not in score]
        fate |= dict.fromkeys(score, "score") | dict.fromkeys(live, "live")
        best = max(score, key=score.get, default=None)
        bound = max(logp[path] for path in live) / longest ** state["alpha"] if live else None
        if not live or best and score[best] >= bound:
            return logp, fate, score, best, bound, True
    return logp, fate, score, best, bound, False


def beam_tree(data, state):
    logp, _, score, best, bound, over = searched(data, state)
    worth = {name: state[name] for name in ("beam", "alpha", "step")}
    for i, path in enumerate(tree(data), 1):
        if path in logp:
            worth |= {f"p-{i}": data["table"][" ".join(path[:-1])][path[-1]], f"logp-{i}": logp[path]}
        if path in score:
            worth[f"score-{i}"] = score[path]
    known = {"best": score.get(best), "bound": bound, "chance": math.exp(logp[best]) if over else None}
    return worth | {name: number for name, number in known.items() if number is not None}


def state_after(data, read):
    "What is known after so many scores: largest, sum and weighted sum, from the library's attention to them alone."
    if not read:
        return -math.inf, 0.0, 0.0, []
    scores, values = float64(data["scores"])[:read], float64(data["values"])[:read]
    output, lse = tiled_attention(torch.ones(1, 1, dtype=torch.float64), scores[:, None], values[:, None], scale=1.0, return_lse=True, block_k=1)
    top = scores.max().item()
    total = math.exp(lse.item() - top)
    return top, total, total * output.item(), total * online_softmax(scores, block=data["blocks"][0])


def online(data, state):
    read = min(state["step"] * state["block"], len(data["scores"]))
    before, *_ = state_after(data, (state["step"] - 1) * state["block"])
    top, total, summed, parts = state_after(data, read)
    return {**state, **numbers("part", parts), "top": top, "rescale": math.exp(before - top), "total": total, "summed": summed, "average": summed / total}


def tile_schedule(data, state):
    n, window = data["n"], state["window"] or None
    keep = torch.ones(n, n, dtype=torch.bool) if window is None else window_mask(n, window=window)
    keep = keep & causal_mask(n) if state["causal"] else keep
    plan = _Plan([(0, n, 0, n)], state["causal"], window, 1.0, None, state["block_q"], state["block_k"])
    tiles = [keep[rows, part] for rows, keys, _ in _tiles(plan) for part in keys]
    everything = math.ceil(n / state["block_q"]) * math.ceil(n / state["block_k"])
    computed, whole = sum(tile.numel() for tile in tiles), sum(bool(tile.all()) for tile in tiles)
    return {"block_q": state["block_q"], "block_k": state["block_k"], "window": state["window"], "whole": whole, "partly": len(tiles) - whole,
            "skipped": everything - len(tiles), "computed": computed, "visible": keep.sum().item(), "wasted": computed - keep.sum().item(), "useful": keep.sum().item() / computed,
            "loaded": sum(tile.shape[1] for tile in tiles)}


def program_schedule(data, state):
    "Programs in the order in which the kernel's list has them; each goes to the multiprocessor that is free first, or in turn."
    blocks, heads, workers = (state[name] for name in ("block", "head", "worker"))
    todo = [b + 1 for _ in range(heads) for b in range(blocks)]
    todo = sorted(todo, reverse=True) if state["order"] else todo
    free = [0] * workers
    for i, cost in enumerate(todo):
        free[i % workers if state["order"] == 2 else free.index(min(free))] += cost
    even = sum(todo) / workers
    return {"block": blocks, "head": heads, "worker": workers, "end": max(free), "even": even, "busy": even / max(free)}


def passing(n, state):
    "Tiles that pass by a program, as pairs (queries, keys), in order: down a column, or along a row."
    keep = causal_mask(n) if state["causal"] else torch.ones(n, n, dtype=torch.bool)
    held = state["tile"]
    return [(i, held) for i in range(n) if keep[i, held]] if state["sweep"] == 0 else [(held, j) for j in range(n) if keep[held, j]]


def backward_sweeps(data, state):
    "What a kernel multiplies for each tile is read from its source."
    n, kernels = data["n"], (flash_backward._keys_kernel, flash_backward._queries_kernel)
    products = [re.findall(r"(\w+) = tl\.dot\(", inspect.getsource(getattr(kernel, "fn", kernel))) for kernel in kernels]
    visible = int(causal_mask(n).sum()) if state["causal"] else n * n
    step = state["step"]
    return {"tile": state["tile"], "step": step, "met": step, "products": step * len(products[state["sweep"]]), "visible": visible,
            "both": visible * len(sum(products, [])), "once": visible * len(set(sum(products, [])))}


WORTH = {"backward-sweeps": backward_sweeps, "program-schedule": program_schedule, "online-softmax": online, "tile-schedule": tile_schedule, "attention-map": attention_map, "temperature": temperature, "soft-lookup": soft_lookup, "influence": influence,
         "mask-builder": mask_builder, "head-explorer": head_explorer, "positions": positions, "beam-tree": beam_tree}


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
    if re.fullmatch("off|–|0? hidden by .+", plain):     # a window of 0; a weight of 0
        return number == 0
    if power := re.fullmatch("([1-9]\\.\\d)·10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", plain):
        ten = 10.0 ** int(power[2].translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")))
        return abs(number - float(power[1]) * ten) <= 0.0501 * ten
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


def drag(it, slider, name, state, low, high, follow=None):
    "Click near both ends of a slider's track; `follow` checks what else moves."
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    for part in (0.02, 0.5, 0.98):
        it.page.mouse.click(box["x"] + part * box["width"], box["y"] + box["height"] / 2)
        previous, state[name] = state[name], it.shown()[name][0]
        assert low <= state[name] <= high
        follow(it, state, name) if follow else it.agrees(state)
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


def steps(it, slider, name, state, choices):
    "Steer a focused slider that moves through `choices`, one by one."

    def press(key, place):
        spoken = slider.get_attribute("aria-valuetext")
        it.press(key)
        before, state[name] = state[name], choices[place]
        it.agrees(state)
        assert (slider.get_attribute("aria-valuetext") != spoken) == (state[name] != before), key

    press("Home", 0)
    for place in range(1, min(len(choices), 12)):
        press("ArrowRight" if place % 2 else "ArrowUp", place)
    press("End", -1)
    for back in range(1, min(len(choices), 4)):
        press("ArrowLeft" if back % 2 else "ArrowDown", -1 - back)


# --- influence over distance -----------------------------------------------------------


@those("influence")
def test_influence(figure, page_name):
    it = figure(page_name, "influence")
    distances, gains = it.data["distances"], sorted(c["gain"] for c in it.data["curves"] if c["kind"] == "rnn")
    state = {"distance": it.data.get("distance", distances[len(distances) // 2])}
    if len(gains) > 1:
        state["gain"] = it.data.get("gain", gains[len(gains) // 2])

    def exact():    # influences are so small that "equal to nine decimals" says nothing, and "0.000" even less
        for name, (number, text) in it.agrees(state).items():
            assert number == influence(it.data, state)[name] and re.search("[1-9]", text), (name, number, text)

    exact()
    it.enter()
    steps(it, it.node.get_by_role("slider", name="Distance"), "distance", state, distances)
    if len(gains) > 1:
        it.press("Tab")
        steps(it, it.node.locator("#slider-gain"), "gain", state, gains)
        said = it.text("reading")
        it.press("Home" if state["gain"] != gains[0] else "End")
        state["gain"] = it.shown()["gain"][0]
        assert it.text("reading") != said and it.node.locator("[data-value=reading]").get_attribute("aria-live") == "polite"
    exact()


@those("influence")
@pytest.mark.parametrize("view", ["light", "phone"])
def test_influence_can_be_pointed_at(figure, page_name, view):
    it = figure(page_name, "influence", view)
    plot, distances = it.node.locator("svg").first, it.data["distances"]
    plot.scroll_into_view_if_needed()
    box, seen = plot.bounding_box(), []
    for part in (0.99, 0.6, 0.01):
        place = {"x": part * box["width"], "y": box["height"] / 2}
        plot.tap(position=place) if view == "phone" else plot.click(position=place)
        seen.append(it.shown()["distance"][0])
    assert seen[0] == distances[-1] > seen[1] > seen[2] == distances[0]


# --- the mask builder ------------------------------------------------------------------


def hidden_by(n, state, i):
    "For each key of row i, the parts of the mask that hide it."
    causal, window = causal_mask(n), state["window"] or n
    near = causal_mask(n, window=window) | ~causal if state["causal"] else window_mask(n, window=window)
    seen = {"padding": padding_mask([state["real"]], n)[0, 0].expand(n, n), "window": near}
    if state["causal"]:
        seen["causal"] = causal
    return [{part for part, mask in seen.items() if not mask[i, j]} for j in range(n)]


def masked(it, state):
    "All that is shown is the library's, what hides a key is named, and so is the call that makes the mask."
    n, shown = len(it.data["tokens"]), it.agrees(state)
    words = {"padding", "causal", "window"}
    rows = it.node.locator(".row-view tbody tr").evaluate_all("rows => rows.map(row => row.cells[2].textContent)")
    for j, parts in enumerate(hidden_by(n, state, state["query"])):
        cell = shown[f"weight-{state['query']}-{j}"][1]
        assert set(re.findall(r"[a-z]+", cell)) & words == parts and set(re.findall(r"[a-z]+", rows[j])) & words == parts, (j, state)
    mask = mask_of(n, state)
    call = eval(it.text("code"), {"padding_mask": padding_mask, "causal_mask": causal_mask, "window_mask": window_mask})
    assert mask.all() if call is None else torch.equal(call.expand(1, 1, n, n)[0, 0], mask)
    blank = it.node.locator(".map tbody tr").evaluate_all("rows => rows.map(row => row.querySelector('small').checkVisibility())")
    assert blank == [not row.any() for row in mask], "a row says that it sees nothing, and is wrong"
    said = it.text("reading")
    assert ("sees nothing" in said) == (not mask[state["query"]].any()) and f"{mask.sum()} of {n * n}" in said, said


@those("mask-builder")
def test_mask_builder_by_keyboard(figure, page_name):
    it = figure(page_name, "mask-builder")
    n = len(it.data["tokens"])
    state = {name: it.data.get(name) or 0 for name in ("real", "window", "query")} | {"causal": it.data["causal"]}
    masked(it, state)
    it.enter()
    steps(it, it.node.locator("#slider-real"), "real", state, range(n + 1))
    masked(it, state)
    it.press("Tab")
    for _ in range(2):
        it.press("Space")
        state["causal"] = not state["causal"]
        masked(it, state)
    it.press("Tab")
    steps(it, it.node.locator("#slider-window"), "window", state, [*range(1, n + 1), 0])
    it.press("Tab")
    for _ in range(n):
        it.press("ArrowDown")
        state["query"] = (state["query"] + 1) % n
        masked(it, state)
    assert it.node.locator("[data-value=reading]").get_attribute("aria-live") == "polite"


@those("mask-builder")
@pytest.mark.parametrize("view", ["light", "phone"])
def test_mask_builder_combines_its_parts(figure, page_name, view):
    it = figure(page_name, "mask-builder", view)
    n = len(it.data["tokens"])
    for causal in (True, False):
        it.node.get_by_role("checkbox", name="Causal").set_checked(causal)
        for real in (0, n // 2 + 1, n):
            it.node.locator("#slider-real").fill(str(real))
            for window in (1, 2, 0):
                it.node.locator("#slider-window").fill(str((window - 1) % (n + 1)))     # 0, which is off, stands last
                query = (real + window) % n
                cell = it.node.locator(".map tbody tr").nth(query).locator("td").nth(window % n)
                cell.tap() if view == "phone" else cell.click()
                masked(it, {"causal": causal, "real": real, "window": window, "query": query})


# --- the softmax that reads in blocks, and its tiles -----------------------------------


@those("online-softmax")
def test_online_softmax_by_keyboard(figure, page_name):
    it = figure(page_name, "online-softmax")
    n, state = len(it.data["scores"]), {"block": it.data["block"], "step": it.data["step"]}
    it.agrees(state)
    it.enter()
    it.press("Home")
    state["block"] = it.data["blocks"][0]
    it.agrees(state)
    for size in it.data["blocks"][1:]:
        it.press("ArrowRight")
        state = {"block": size, "step": min(state["step"], math.ceil(n / size))}
        it.agrees(state)
    for size in it.data["blocks"][-2::-1]:
        it.press("ArrowLeft")
        state["block"] = size
        it.agrees(state)
        it.press("Tab")
        steps(it, it.node.locator("#slider-step"), "step", state, range(1, math.ceil(n / size) + 1))
        it.press("Home", "Shift+Tab")
        state["step"] = 1
    assert it.node.locator("[data-value=reading]").get_attribute("aria-live") == "polite"


@those("online-softmax")
@pytest.mark.parametrize("view", ["light", "phone"])
def test_online_softmax_by_buttons_says_what_happens(figure, page_name, view):
    it = figure(page_name, "online-softmax", view)
    state, n = {"block": 1, "step": 1}, len(it.data["scores"])
    it.node.locator("#slider-block").fill("0")
    while state["step"] > 1 or it.node.get_by_role("button", name="One block back").is_enabled():
        it.node.get_by_role("button", name="One block back").click()
    for step in range(1, n + 1):
        state["step"] = step
        shown, said = it.agrees(state), it.text("reading")
        assert f"Block {step} of {n}" in said and ("shrinks" in said) == (step > 1 and shown["rescale"][0] == 1)
        assert ("multiplied" in said) == (step > 1 and shown["rescale"][0] < 1) and ("exact" in said) == (step == n)
        forward = it.node.get_by_role("button", name="Next block")
        assert forward.is_enabled() == (step < n)
        if step < n:
            forward.tap() if view == "phone" else forward.click()


@those("tile-schedule")
def test_tile_schedule_by_keyboard(figure, page_name):
    it = figure(page_name, "tile-schedule")
    n, state = it.data["n"], {name: it.data[name] for name in ("block_q", "block_k", "causal", "window")}
    it.agrees(state)
    it.enter()
    steps(it, it.node.locator("#slider-block_q"), "block_q", state, it.data["blocks"])
    it.press("Tab")
    steps(it, it.node.locator("#slider-block_k"), "block_k", state, it.data["blocks"])
    for _ in range(2):
        it.press("Tab", "Space")
        state["causal"] = not state["causal"]
        it.agrees(state)
        it.press("Tab")
        steps(it, it.node.locator("#slider-window"), "window", state, [*range(1, n + 1), 0])
        it.press("Shift+Tab", "Shift+Tab")


@those("tile-schedule")
@pytest.mark.parametrize("view", ["light", "phone"])
def test_tile_schedule_draws_what_it_counts(figure, page_name, view):
    it = figure(page_name, "tile-schedule", view)
    sizes = it.data["blocks"]
    for causal, window, q, k in ((True, 0, 0, 1), (False, 3, 2, 1), (True, 5, 1, 3), (False, 0, 4, 4)):
        it.node.get_by_role("checkbox", name="Causal").set_checked(causal)
        for name, place in (("window", (window - 1) % (it.data["n"] + 1)), ("block_q", q), ("block_k", k)):
            it.node.locator(f"#slider-{name}").fill(str(place))
        shown = it.agrees({"causal": causal, "window": window, "block_q": sizes[q], "block_k": sizes[k]})
        drawn = it.node.locator("svg.map").evaluate("map => Object.fromEntries(['computed', 'skipped', 'whole', 'part', 'idle'].map(c => [c, map.querySelectorAll(`.${c}`).length]))")
        assert drawn["computed"] == shown["whole"][0] + shown["partly"][0] and drawn["skipped"] == shown["skipped"][0]
        assert drawn["whole"] + drawn["part"] == shown["visible"][0] and sum(drawn.values()) - drawn["computed"] - drawn["skipped"] == shown["computed"][0]


# --- which program runs where ------------------------------------------------------------


@those("program-schedule")
def test_program_schedule_by_keyboard(figure, page_name):
    it = figure(page_name, "program-schedule")
    state = {name: it.data[name] for name in ("block", "head", "worker", "order")}
    it.agrees(state)
    it.enter()
    for name, choices in (("block", "blocks"), ("head", "heads"), ("worker", "workers")):
        steps(it, it.node.locator(f"#slider-{name}"), name, state, it.data[choices])
        it.press("Tab")
    for order in (1, 2, 0):
        it.press("ArrowRight")
        state["order"] = order
        it.agrees(state)


@those("program-schedule")
@pytest.mark.parametrize("view", ["light", "phone"])
def test_program_schedule_draws_all_programs_and_none_beyond_the_end(figure, page_name, view):
    it = figure(page_name, "program-schedule", view)
    for order, name in enumerate(("First rows first", "Longest first", "Longest first, dealt out beforehand")):
        it.node.get_by_role("radio", name=name, exact=True).check()
        for block, head, worker in ((0, 0, 0), (3, 5, 4), (2, 1, 2)):
            for which, place in (("block", block), ("head", head), ("worker", worker)):
                it.node.locator(f"#slider-{which}").fill(str(place))
            chosen = {"block": it.data["blocks"][block], "head": it.data["heads"][head], "worker": it.data["workers"][worker]}
            it.agrees({**chosen, "order": order})
            drawn = it.node.locator("svg.chart").evaluate("""chart => {
                const bars = [...chart.querySelectorAll('.program')].map(bar => bar.getBBox())
                const end = chart.querySelector('.end').getBBox().x
                return { bars: bars.length, beyond: bars.filter(b => b.x + b.width > end + 0.5).length, end, width: chart.clientWidth }
            }""")
            assert drawn["bars"] == chosen["block"] * chosen["head"]
            assert drawn["beyond"] == 0 and drawn["end"] <= drawn["width"]


# --- two sweeps over the tiles -------------------------------------------------------------


@those("backward-sweeps")
def test_backward_sweeps_by_keyboard(figure, page_name):
    it = figure(page_name, "backward-sweeps")
    n, state = it.data["n"], {name: it.data[name] for name in ("causal", "sweep", "tile", "step")}
    it.agrees(state)
    it.enter()
    it.press("Tab", "Tab", "Home")
    state["step"] = 0
    it.agrees(state)
    for causal, sweep in ((state["causal"], state["sweep"]), (state["causal"], 1 - state["sweep"]), (not state["causal"], state["sweep"])):
        if state["sweep"] != sweep:
            it.press("Shift+Tab", "Shift+Tab", "ArrowRight", "Tab", "Tab")
        if state["causal"] != causal:
            it.press("Tab", "Space", "Shift+Tab")
        state |= {"causal": causal, "sweep": sweep}
        it.agrees(state)
        it.press("Shift+Tab")
        steps(it, it.node.locator("#slider-tile"), "tile", state, range(n))
        for tile in (0, n - 1):
            it.press("Home" if tile == 0 else "End", "Tab")
            state["tile"] = tile
            steps(it, it.node.locator("#slider-step"), "step", state, range(len(passing(n, state)) + 1))
            it.press("Home", "Shift+Tab")
            state["step"] = 0
        it.press("Tab")
    assert it.node.locator("[data-value=reading]").get_attribute("aria-live") == "polite"


@those("backward-sweeps")
@pytest.mark.parametrize("view", ["light", "phone"])
def test_backward_sweeps_visit_the_tiles_that_are_visible(figure, page_name, view):
    it = figure(page_name, "backward-sweeps", view)
    n = it.data["n"]
    for causal, sweep, tile, step in ((True, 0, 1, 2), (True, 0, n - 1, 1), (True, 1, 1, 1), (True, 1, n - 1, n), (False, 0, n - 1, 0), (False, 1, 0, n)):
        state = {"causal": causal, "sweep": sweep, "tile": tile, "step": step}
        path = passing(n, state)
        it.node.get_by_role("checkbox", name="Causal").set_checked(causal)
        it.node.get_by_role("radio", name=("Keys’ kernel", "Queries’ kernel")[sweep], exact=True).check()
        it.node.locator("#slider-tile").fill(str(tile))
        it.node.locator("#slider-step").fill(str(step))
        it.agrees(state)
        drawn = it.node.locator("svg.map").evaluate("""map => [...map.querySelectorAll('rect')].map(
            r => [r.classList[0], Math.floor(r.x.baseVal.value), Math.floor(r.y.baseVal.value)])""")
        kinds = {(y, x): kind for kind, x, y in drawn if 0 <= x < n and 0 <= y < n}
        assert [kinds[at] for at in path] == ["met"] * (step - 1) + ["now"] * (step > 0) + ["later"] * (len(path) - step)
        rest = [(i, j) for i in range(n) for j in range(n) if (i, j) not in path]
        assert all(kinds[i, j] == ("skipped" if causal and j > i else "other") for i, j in rest)
        margins = {(axis, place): kind for kind, x, y in drawn for axis, place in ((0, y) if x < 0 else (1, x),) if (x < 0 or y < 0)}
        held, other = (1, 0) if sweep == 0 else (0, 1)
        assert [at for at, kind in margins.items() if kind == "holds"] == [(held, tile)]
        assert [at for at, kind in margins.items() if kind == "now"] == ([(other, path[step - 1][other])] if step else [])
        said, done = it.text("reading"), [kind for kind, *_ in drawn if kind in ("sum", "written")]
        assert f"Program {tile} holds tile {tile} of the {('keys and values', 'queries')[sweep]}" in said
        passes = f"Tile {path[step - 1][other]} of the {('queries', 'keys and values')[sweep]} passes by" if step else "will pass by"
        assert passes in said and it.node.locator("#slider-step").get_attribute("max") == str(len(path))
        assert (f"number {step} of {len(path)}" in said) == (step > 0) and ("written, once" in said) == (step == len(path))
        assert done == ["written" if step == len(path) else "sum"] * (2 - sweep)
    longest = {"causal": True, "sweep": 0, "tile": 0, "step": n}
    it.node.get_by_role("checkbox", name="Causal").check()
    it.node.get_by_role("radio", name="Keys’ kernel", exact=True).check()
    it.node.locator("#slider-tile").fill("0")
    it.node.locator("#slider-step").fill(str(n))
    it.agrees(longest)
    it.node.locator("#slider-tile").fill(str(n - 2))
    it.agrees(longest | {"tile": n - 2, "step": 2})


# --- the head explorer -----------------------------------------------------------------


@those("head-explorer")
def test_head_explorer_by_keyboard(figure, page_name):
    it = figure(page_name, "head-explorer")
    texts, heads = it.data["texts"], len(it.data["names"])
    state = {name: it.data.get(name, 0) for name in ("text", "head", "query")}
    it.agrees(state)
    it.enter()
    if len(texts) > 1:
        for _ in texts:     # once round
            it.press("ArrowRight")
            state["text"] = (state["text"] + 1) % len(texts)
            state["query"] = min(state["query"], len(texts[state["text"]]["tokens"]) - 1)
            it.agrees(state)
        it.press("Tab")
    readings = set()
    for _ in range(heads):
        it.press("ArrowRight")
        state["head"] = (state["head"] + 1) % heads
        it.agrees(state)
        assert it.node.get_by_role("group", name="Pick a head").get_by_role("radio").nth(state["head"]).is_checked()
        readings.add(it.text("reading"))
    assert len(readings) == heads, "the sentence that screen readers hear does not follow"
    it.press("Tab")
    tokens = texts[state["text"]]["tokens"]
    for _ in tokens:
        it.press("ArrowRight")
        state["query"] = (state["query"] + 1) % len(tokens)
        it.agrees(state)
        assert it.text("reading").startswith(f"{it.data['names'][state['head']]}: {tokens[state['query']].strip()}"), it.text("reading")
    assert it.node.locator("[data-value=reading]").get_attribute("aria-live") == "polite"


@those("head-explorer")
@pytest.mark.parametrize("view", ["light", "phone"])
def test_head_explorer_by_pointer(figure, page_name, view):
    it = figure(page_name, "head-explorer", view)
    act = "tap" if view == "phone" else "click"
    for text, content in enumerate(it.data["texts"]):
        if len(it.data["texts"]) > 1:
            getattr(it.node.get_by_role("group", name="The text").get_by_role("radio").nth(text), act)()
        for head in range(len(it.data["names"])):
            getattr(it.node.get_by_role("group", name="Pick a head").get_by_role("radio").nth(head), act)()
            query = head % len(content["tokens"])
            getattr(it.node.get_by_role("group", name="Pick the token").get_by_role("radio").nth(query), act)()
            it.agrees({"text": text, "head": head, "query": query})


@those("head-explorer")
def test_the_small_maps_are_the_heads(figure, page_name):
    "The middle of each square of each map is as opaque as its weight says."
    it = figure(page_name, "head-explorer")
    drawn = it.node.evaluate("""figure => [...figure.querySelector('.ac-mount').shadowRoot.querySelectorAll('canvas')].map(canvas =>
        [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data].filter((_, i) => i % 4 === 3))""")
    for opacity, weights in zip(drawn, it.data["texts"][it.data.get("text", 0)]["heads"], strict=True):
        size, n = math.isqrt(len(opacity)), len(weights)
        for i in range(n):
            for j in range(n):
                at = int((i + 0.5) * size / n) * size + int((j + 0.5) * size / n)
                assert abs(opacity[at] - 255 * min(1, weights[i][j] ** 0.5)) < 2, (i, j)


# --- positions -------------------------------------------------------------------------


def placed(it):
    "The state that the figure begins in."
    bases = it.data.get("bases", [it.data.get("base", 10000)])
    return {"position": it.data["position"], "offset": it.data["offset"], "kind": it.data.get("kind", "sinusoidal"),
            "base": it.data.get("base", 10000 if 10000 in bases else bases[0])}


def follow(it, state, moved):
    "After a slider moved: no position lies below 0, so the other slider follows; all numbers, and the hands, are the library's."
    shown = it.shown()
    state[moved] = int(shown[moved][0])
    state["offset" if moved == "position" else "position"] = max(
        state["offset" if moved == "position" else "position"], -state[moved])
    turned(it, state)


def turned(it, state):
    it.agrees(state)
    both = hands(it.data, state)
    longest = max(x.norm(dim=-1).max().item() for x in both)
    for name, rows in zip(("mine", "other"), both):
        paths = it.node.locator(f"li path.{name}").evaluate_all("paths => paths.map(path => path.getAttribute('d'))")
        drawn = float64([[float(x) for x in re.fullmatch(r"M0 0L(\S+) (\S+)", path).groups()] for path in paths])
        assert torch.allclose(drawn, torch.stack([rows[:, 1], -rows[:, 0]], dim=-1) * 40 / longest, atol=1e-6), (name, state)


def marked(it):
    return it.node.locator("circle.mark").evaluate("mark => [mark.getAttribute('cx'), mark.getAttribute('cy')].map(x => Math.round(1e6 * x))")


@those("positions")
def test_positions_by_keyboard(figure, page_name):
    it = figure(page_name, "positions")
    state = placed(it)
    turned(it, state)
    place, offset = it.node.get_by_role("slider", name="Position"), it.node.get_by_role("slider", name="Offset")
    it.enter()
    for _ in range(2 if "q" in it.data else 1):
        if "q" in it.data:
            it.press("ArrowRight")
            state["kind"] = "rotary" if state["kind"] == "sinusoidal" else "sinusoidal"
            turned(it, state)
            it.press("Tab")
        for slider, name in ((place, "position"), (offset, "offset")):
            slider.focus()
            for key in ("Home", "ArrowRight", "ArrowUp", "PageUp", "End", "ArrowLeft", "PageDown"):
                before, spoken = state[name], slider.get_attribute("aria-valuetext")
                it.press(key)
                follow(it, state, name)
                assert (slider.get_attribute("aria-valuetext") != spoken) == (state[name] != before), key
                assert (state[name] > before) == (key in ("ArrowRight", "ArrowUp", "PageUp", "End")) or state[name] == before, key
        if state["kind"] == "rotary" and len(it.data.get("bases", [])) > 1:
            it.press("Tab")
            steps(it, it.node.locator("#slider-base"), "base", state, it.data["bases"])
        if "q" in it.data:
            it.node.get_by_role("radio", checked=True).focus()
    assert it.node.locator("[data-value=reading]").get_attribute("aria-live") == "polite"


@those("positions")
def test_the_dot_product_stays_when_the_position_moves(figure, page_name):
    it = figure(page_name, "positions")
    state, readings, seen = placed(it), set(), []
    for place in (state["position"], it.data["max_position"], max(0, -state["offset"])):
        it.node.locator("#slider-position").fill(str(place))
        follow(it, state, "position")
        seen.append((it.shown()["dot"][0], marked(it)))
        readings.add(it.text("reading"))
        assert str(place) in it.text("reading") and str(place + state["offset"]) in it.text("reading")
    assert len(readings) > 1 and all(dot == pytest.approx(seen[0][0], abs=1e-9) and mark == seen[0][1] for dot, mark in seen)
    it.node.locator("#slider-offset").press("End" if state["offset"] < it.data["max_offset"] else "Home")
    follow(it, state, "offset")
    assert marked(it) != seen[0][1]


@those("positions")
@pytest.mark.parametrize("view", ["light", "phone"])
def test_positions_by_pointer(figure, page_name, view):
    it = figure(page_name, "positions", view)
    state, reach = placed(it), it.data["max_offset"]
    for kind in ("sinusoidal", "rotary") if "q" in it.data else ("sinusoidal",):
        if "q" in it.data:
            button = it.node.get_by_role("radio", name=kind)
            button.tap() if view == "phone" else button.click()
        state["kind"] = kind
        plot = it.node.locator("svg.plot")
        plot.scroll_into_view_if_needed()
        box, seen = plot.bounding_box(), []
        for part in (0.99, 0.7, 0.02):
            spot = {"x": part * box["width"], "y": box["height"] / 2}
            plot.tap(position=spot) if view == "phone" else plot.click(position=spot)
            follow(it, state, "offset")
            seen.append(state["offset"])
        assert seen[0] == reach > seen[1] > seen[2] == -reach
        # The curve is the library's: its heights are these dot products, to scale.
        heights = it.node.locator("polyline.curve").evaluate("curve => [...curve.points].map(point => point.y)")
        dots = [positions(it.data, {**state, "position": reach, "offset": k})["dot"] for k in range(-reach, reach + 1)]
        assert torch.corrcoef(float64([heights, dots]))[0, 1] == pytest.approx(-1, abs=1e-6)
        drag(it, it.node.locator("#slider-offset"), "offset", state, -reach, reach, follow)
        drag(it, it.node.locator("#slider-position"), "position", state, 0, it.data["max_position"], follow)


# --- the beam ----------------------------------------------------------------------------


def grown(it, state):
    "The numbers are those on paper, and so is what became of each hypothesis, and the answer."
    it.agrees(state)
    logp, fate, score, best, _, over = searched(it.data, state)
    boxes = it.node.locator(".tree > div").evaluate_all("boxes => boxes.map(box => [box.firstChild.textContent, box.innerText])")
    for path, (token, text) in zip(tree(it.data), boxes, strict=True):
        found = re.findall("kept|live|cut|score", text.removeprefix(token))
        assert token == path[-1] and found == ([fate[path]] if path in fate else []), (path, text, state)
    assert it.node.locator(".answer").count() == over == it.node.locator("[data-value=answer]").is_visible()
    said = it.text("reading")
    if state["step"]:
        n = max(len(path) for path in logp)
        assert f"step {n}" in said.lower() and ("ended" in said) == (n < state["step"]), said
        for path in fate:
            assert (f"“{' '.join(path)}”" in said) == (len(path) == n and fate[path] != "cut"), (path, said)
    if over:
        assert it.text("answer") == " ".join([it.data["start"], *(token for token in best if token != it.data["end"])])


class Scripted(torch.nn.Module):
    "A model that says what the table says."

    def __init__(self, data):
        super().__init__()
        self.table, self.words = data["table"], {EOS: data["end"]}
        self.words |= dict(enumerate((token for token in data["tokens"] if token != data["end"]), start=4))

    def padding(self, src):
        return None

    def encode(self, src, src_mask=None):
        return src[..., None].double()

    def new_cache(self):
        raise AssertionError("not asked for")

    def decode(self, tgt, memory, memory_mask=None, tgt_mask=None, *, cache=None, positions=None):
        logits = torch.full((*tgt.shape, 4 + len(self.words)), -math.inf, dtype=torch.float64)
        for row, ids in zip(logits[:, -1], tgt.tolist()):
            assert ids[0] == BOS
            row[EOS] = 0.0      # for what has ended and only fills the batch
            if EOS not in ids:
                probabilities = self.table[" ".join(self.words[i] for i in ids[1:])]
                row[list(self.words)] = float64([probabilities.get(word, 0) for word in self.words.values()]).log()
        return logits


@those("beam-tree")
def test_the_beam_on_paper_is_the_librarys(figure, page_name):
    data = figure(page_name, "beam-tree").data
    model, longest = Scripted(data), data["max_len"]

    def search(**options):
        found = beam_search(model, torch.tensor([[4, EOS]]), use_cache=False, **options)[0]
        return {tuple(model.words[i] for i in hypothesis.ids): hypothesis for hypothesis in found}

    for beam in range(1, 5):
        for alpha in (0.0, 0.6, 1.1, 1.2, 2.0):
            state = {"beam": beam, "alpha": alpha, "step": longest}
            logp, fate, score, best, _, over = searched(data, state)
            assert over
            ((path, hypothesis),) = search(beam=beam, alpha=alpha, max_len=longest).items()
            assert path == best and hypothesis.score == pytest.approx(score[best]) and hypothesis.log_probability == pytest.approx(logp[best])
            # What stays at each step: what the library has after so many tokens, if it is asked for all.
            for n in range(1, max(map(len, fate)) + 1):
                stays = {path: hypothesis.log_probability for path, hypothesis in search(beam=beam, alpha=alpha, n_best=99, max_len=n).items() if len(path) == n}
                assert stays == pytest.approx({path: logp[path] for path in fate if len(path) == n and fate[path] != "cut"}), (state, n)


@those("beam-tree")
def test_beam_tree_by_keyboard(figure, page_name):
    it = figure(page_name, "beam-tree")
    state = {"beam": it.data.get("beam", 1), "alpha": it.data.get("alpha", 0), "step": it.data.get("step", 0)}
    grown(it, state)
    it.enter()
    choices = {"beam": range(1, 5), "step": range(it.data["max_len"] + 1), "alpha": [i / 10 for i in range(21)]}
    for name, values in choices.items():
        steps(it, it.node.locator(f"#slider-{name}"), name, state, values)
        grown(it, state)
        it.press("Tab")
    assert it.node.locator("[data-value=reading]").get_attribute("aria-live") == "polite"


@those("beam-tree")
@pytest.mark.parametrize("view", ["light", "phone"])
def test_beam_tree_grows_as_on_paper(figure, page_name, view):
    it, answers = figure(page_name, "beam-tree", view), {}
    longest = it.data["max_len"]
    for beam in range(1, 5):
        it.node.locator("#slider-beam").fill(str(beam - 1))
        for alpha in (0, 1.2) if view == "light" else (0,):
            it.node.locator("#slider-alpha").fill(str(round(10 * alpha)))
            for step in range(longest + 1):
                it.node.locator("#slider-step").fill(str(step))
                grown(it, {"beam": beam, "alpha": alpha, "step": step})
            answers[beam, alpha] = it.shown()["chance"][0]
    assert answers[2, 0] > answers[1, 0], "the lesson: greedy misses what a beam of two finds"
    overlaps = it.node.locator(".tree > .box").evaluate_all("""boxes => boxes.map(box => box.getBoundingClientRect()).filter((a, i, all) => all.some((b, j) =>
        i < j && a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)).length""")
    assert not overlaps


# --- data that no figure can show --------------------------------------------------------

NEAR = {"distances": [1, 2], "curves": [{"label": "RNN", "kind": "rnn", "gain": 0.9, "influence": [1, 0.1]}]}
ONLINE = {"scores": [0, 1, 2], "values": [1, 2, 3], "blocks": [1, 2], "block": 2, "step": 1}
TILES = {"n": 5, "blocks": [1, 2, 4], "block_q": 2, "block_k": 4, "causal": True, "window": 0}
PROGRAMS = {"blocks": [2, 4], "heads": [1, 2], "workers": [2, 3], "block": 4, "head": 2, "worker": 3, "order": 0}
SWEEPS = {"n": 4, "causal": True, "sweep": 0, "tile": 1, "step": 3}
MASK = {"tokens": ["a", "b"], "scores": [[0, 1], [1, 0]], "real": 2, "causal": True, "window": 0, "query": 0}
HEADS = {"texts": [{"tokens": ["a", "b"], "heads": [[[1, 0], [0.5, 0.5]]]}], "names": ["one"], "text": 0, "head": 0, "query": 1}

CLOCKS = {"d": 4, "max_position": 9, "max_offset": 5, "position": 3, "offset": -3}
BEAM = {"tokens": [".", "a", "b"], "end": ".", "start": "", "max_len": 2, "table": {"": {"a": 0.7, "b": 0.3}, "a": {".": 1}, "b": {"a": 0.5, ".": 0.5}}}


@pytest.mark.parametrize("name, data, complaint", [
    ("influence", NEAR, None),
    ("influence", {**NEAR, "distances": [2, 1]}, "must rise"),
    ("influence", {**NEAR, "distances": [1, 2, 3]}, "holds 2 numbers, but needs 3"),
    ("influence", {**NEAR, "curves": [{**NEAR["curves"][0], "influence": [1, 0]}]}, "must be above 0"),
    ("influence", {**NEAR, "gain": 0.8}, "one of the gains"),
    ("influence", {**NEAR, "curves": NEAR["curves"] * 2}, "the same gain"),
    ("online-softmax", ONLINE, None),
    ("online-softmax", {**ONLINE, "values": [1]}, "holds 1 numbers, but needs 3"),
    ("online-softmax", {**ONLINE, "block": 4}, "one of the blocks"),
    ("online-softmax", {**ONLINE, "step": 3}, "whole number from 1 to 2"),
    ("online-softmax", {**ONLINE, "scores": [0] * 13, "values": [0] * 13}, "more than the twelve"),
    ("tile-schedule", TILES, None),
    ("tile-schedule", {**TILES, "n": 40}, "whole number from 1 to 32"),
    ("tile-schedule", {**TILES, "blocks": [2, 1]}, "whole numbers that rise"),
    ("tile-schedule", {**TILES, "block_q": 3}, "“block_q” must be one of the blocks"),
    ("tile-schedule", {**TILES, "window": 6}, "whole number from 0 to 5"),
    ("program-schedule", PROGRAMS, None),
    ("program-schedule", {**PROGRAMS, "heads": [2, 1]}, "whole numbers that rise"),
    ("program-schedule", {**PROGRAMS, "worker": 4}, "“worker” must be one of the workers"),
    ("program-schedule", {**PROGRAMS, "blocks": [4, 40]}, "at most 12 blocks"),
    ("program-schedule", {**PROGRAMS, "order": 3}, "0, 1 or 2"),
    ("backward-sweeps", SWEEPS, None),
    ("backward-sweeps", {**SWEEPS, "n": 9}, "whole number from 2 to 8"),
    ("backward-sweeps", {**SWEEPS, "causal": 1}, "“causal” must be true or false"),
    ("backward-sweeps", {**SWEEPS, "sweep": 2}, "“sweep” must be 0 or 1"),
    ("backward-sweeps", {**SWEEPS, "tile": 4}, "whole number from 0 to 3"),
    ("backward-sweeps", {**SWEEPS, "step": 4}, "“step” must be a whole number from 0 to 3"),
    ("backward-sweeps", {**SWEEPS, "causal": False, "step": 4}, None),
    ("mask-builder", MASK, None),
    ("mask-builder", {**MASK, "window": None}, None),
    ("mask-builder", {**MASK, "tokens": ["a"] * 9}, "more than the eight"),
    ("mask-builder", {**MASK, "scores": [[0, 1]]}, "one row per token"),
    ("mask-builder", {**MASK, "real": 3}, "whole number from 0 to 2"),
    ("mask-builder", {**MASK, "query": 2}, "whole number from 0 to 1"),
    ("head-explorer", {**HEADS, "causal": True}, None),
    ("head-explorer", {**HEADS, "names": ["one", "two"]}, "one map per name"),
    ("head-explorer", {**HEADS, "query": 2}, "no index"),
    ("head-explorer", {**HEADS, "texts": [{"tokens": ["a", "b"], "heads": [[[1, 0.5], [0.5, 0.5]]]}]}, "sum to 1"),
    ("head-explorer", {**HEADS, "texts": [{"tokens": ["a", "b"], "heads": [[[0, 1], [0, 1]]]}], "causal": True}, "looks ahead"),
    ("positions", CLOCKS, None),
    ("positions", {**CLOCKS, "d": 5}, "must be even"),
    ("positions", {**CLOCKS, "offset": -4}, "whole number from -3 to 5"),
    ("positions", {**CLOCKS, "q": [1, 2, 3, 4]}, "“k” must be a list"),
    ("positions", {**CLOCKS, "q": [0] * 4, "k": [0] * 4, "kind": "rotary", "base": 50}, None),
    ("positions", {**CLOCKS, "kind": "rotary"}, "with “q” and “k”"),
    ("positions", {**CLOCKS, "bases": [100, 10]}, "must be above 0 and rise"),
    ("positions", {**CLOCKS, "bases": [10, 100], "base": 20}, "one of the bases"),
    ("beam-tree", BEAM, None),
    ("beam-tree", {**BEAM, "max_len": 3}, "no row for “b a”"),
    ("beam-tree", {**BEAM, "end": "?"}, "holds the “end”"),
    ("beam-tree", {**BEAM, "beam": 5}, "whole number from 1 to 4"),
    ("beam-tree", {**BEAM, "alpha": 0.55}, "one of 0, 0.1"),
    ("beam-tree", {**BEAM, "table": {**BEAM["table"], "a": {".": 0.9}}}, "must sum to 1"),
    ("beam-tree", {**BEAM, "table": {**BEAM["table"], "a": {"?": 1}}}, "is not in “tokens”"),
])
def test_bad_data_is_named_in_the_figure(contexts, name, data, complaint):
    page = contexts("light").new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_content(interactive(name, data, alt="What can be seen and done.")._repr_html_())
    alerts = page.get_by_role("alert").all_inner_texts()
    page.close()
    assert not errors
    assert not alerts if complaint is None else complaint in alerts[0], alerts
