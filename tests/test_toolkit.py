"""Chapter 00: figures, seeds and the training loop. (`check` has tests of its own in test_exercises.py.)"""

import json
import random
import re

import pytest
import torch

from attention_course import PALETTE, heatmap, interactive, kept_bytes, measured, setup, show, time_ratio, train

plt = pytest.importorskip("matplotlib.pyplot")
plt.switch_backend("agg")

MAP = {"labels": ["a", "b"], "scores": [1.0, 2.0], "temperature": 1.0, "min": 0.1, "max": 10.0}


def draw():
    fig, ax = plt.subplots(figsize=(3, 2))
    ax.plot([0, 1, 4], color=PALETTE["blue"])
    ax.set(xlabel="x <&> y", ylabel="y")
    return fig


def test_setup_seeds_all_generators_and_says_where_it_runs(capsys):
    numpy = pytest.importorskip("numpy")

    def numbers(seed):
        device = setup(seed)
        return device, random.random(), numpy.random.rand(), torch.rand(()).item()

    assert numbers(3) == numbers(3) != numbers(4)
    assert numbers(3)[0].type in ("cpu", "cuda")
    assert re.search(r"^attention_course \S+ · torch \S+ · .+ · seed 3$", capsys.readouterr().out, flags=re.M)


def test_a_figure_takes_the_ink_of_the_page_and_keeps_its_words():
    page = show(draw(), alt='Say "what" is <seen>', caption="Look & see")._repr_html_()
    assert '<svg role="img" aria-label="Say &quot;what&quot; is &lt;seen&gt;"' in page
    assert "<figcaption>Look &amp; see</figcaption>" in page
    assert "currentColor" in page and "#000000" not in page and "#ffffff" not in page
    assert "x &lt;&amp;&gt; y</text>" in page  # text, not outlines
    assert PALETTE["blue"].lower() in page.lower()


def test_a_figure_is_closed_and_the_same_figure_gives_the_same_file():
    before = plt.get_fignums()
    pages = [show(draw(), alt="A line.")._repr_html_() for _ in range(2)]
    assert pages[0] == pages[1]
    assert plt.get_fignums() == before


def test_two_figures_on_a_page_do_not_share_ids():
    one, two = (set(re.findall(r'\bid="([^"]+)"', show(draw(), alt=alt)._repr_html_())) for alt in ("A.", "B."))
    assert one and not one & two


@pytest.mark.parametrize("alt", ["", "  "])
def test_a_figure_without_alt_text_is_refused(alt):
    with pytest.raises(ValueError, match="alt is empty"):
        show(plt.figure(), alt=alt)
    with pytest.raises(ValueError, match="alt is empty"):
        interactive("temperature", MAP, alt=alt)
    plt.close("all")


def test_an_interactive_figure_is_complete_in_itself():
    figure = interactive("temperature", MAP, alt="Bars.", caption="Move it.")
    page = figure._repr_html_()
    assert 'id="fig-temperature" role="group" aria-label="Bars."' in page
    assert not re.search(r"""(src|href)\s*=|https?://(?!www\.w3\.org)|\bimport\s*\(|fetch\(""", page)
    assert page.count("</script>") == 1 and page.endswith("</script>")
    assert repr(figure) == "[figure: Bars.]"


def test_data_cannot_end_the_script():
    label = "</script><!--<script>"
    page = interactive("temperature", {**MAP, "labels": [label, "b"]}, alt="Bars.")._repr_html_()
    assert page.count("</script>") == page.count("<script>") == 1 and "<!--" not in page
    data = re.search(r"FIGURE, (\{.*\})\);", page)[1]
    assert json.loads(data)["labels"][0] == label


def test_interactive_refuses_unknown_figures_and_numbers_that_are_none():
    with pytest.raises(ValueError, match="name='bars' is not a figure; there are attention-map"):
        interactive("bars", {}, alt="Bars.")
    with pytest.raises(ValueError, match="kit"):
        interactive("kit", {}, alt="Bars.")
    for bad in (float("nan"), torch.tensor(float("inf")), object()):
        with pytest.raises(ValueError, match="data must hold finite numbers"):
            interactive("temperature", {"scores": [bad]}, alt="Bars.")
    tensors = interactive("temperature", {**MAP, "scores": torch.tensor([1.0, 2.0])}, alt="Bars.")
    assert tensors._repr_html_() == interactive("temperature", MAP, alt="Bars.")._repr_html_()


@pytest.mark.parametrize("values", [torch.rand(3, 4), torch.randn(12, 9), torch.zeros(2, 2), torch.rand(3, 3, requires_grad=True), torch.rand(2, 2).half()], ids=lambda v: f"{tuple(v.shape)}-{v.dtype}")
def test_heatmaps_name_their_axes(values):
    fig, ax = plt.subplots()
    heatmap(ax, values)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    assert ax.yaxis_inverted()  # the first query on top
    assert bool(ax.texts) == (max(values.shape) <= 8)
    plt.close(fig)


def test_a_heatmap_leaves_hidden_scores_white_and_draws_large_maps_as_one_picture():
    hidden = torch.tensor([[1.0, -torch.inf], [2.0, 0.0]])
    fig, (left, right) = plt.subplots(1, 2)
    heatmap(left, hidden)
    assert left.collections[0].get_clim() == (0, 2)
    assert [t.get_text() for t in left.texts] == ["1.00", "-inf", "2.00", "0.00"]
    heatmap(right, torch.rand(128, 128))
    assert len(show(fig, alt="Two maps.")._repr_html_()) < 200_000


@pytest.mark.usefixtures("no_shape_check")
def test_a_heatmap_takes_lists_and_refuses_names_that_do_not_fit():
    ax = plt.figure().gca()
    heatmap(ax, [[0.0, -0.0], [0.5, 0.5]], queries="ab", keys=["x", "y"])
    assert ax.texts[1].get_text() == "0.00"  # not -0.00
    with pytest.raises(ValueError, match=r"keys has 4 names, but values has shape \(2, 3\)"):
        heatmap(ax, torch.zeros(2, 3), keys=list("abcd"))
    plt.close("all")


def test_only_a_matplotlib_figure_can_be_shown():
    with pytest.raises(TypeError, match="fig is a Axes; expected a matplotlib figure"):
        show(plt.figure().gca(), alt="Axes.")
    plt.close("all")


@pytest.mark.parametrize("shape", [(2, 3, 4), (3,), (0, 3)], ids=str)
def test_a_heatmap_needs_two_axes(shape):
    with pytest.raises(ValueError, match=re.escape(f"values has shape {shape}")):
        heatmap(plt.figure().gca(), torch.zeros(shape))
    plt.close("all")


def test_train_minimises_and_reports_the_loss_before_each_step():
    torch.manual_seed(0)
    weight = torch.randn(3, requires_grad=True)
    start = weight.detach().clone()
    x, y = torch.randn(64, 3), torch.randn(64)
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    history = train([weight], lambda: (x @ weight - y).square().mean(), steps=800)
    assert len(history) == 800
    assert history[0] == pytest.approx((x @ start - y).square().mean().item())
    torch.testing.assert_close(weight.detach(), best, atol=1e-2, rtol=0)


def test_train_stops_at_a_loss_that_is_not_finite():
    weight = torch.ones((), requires_grad=True)
    with pytest.raises(FloatingPointError, match="nan at step 0"):
        train([weight], lambda: weight * float("nan"), steps=3)


@pytest.mark.usefixtures("no_shape_check")
def test_measured_hands_over_the_rows_and_says_where_they_are_from():
    found = measured("multi_head-cpu")
    assert found["rows"] and all(row["ratio"] > 0 for row in found["rows"])
    for part in (found["hardware"]["name"], f"threads: {found['threads']}", "torch " + found["versions"]["torch"], found["date"]):
        assert part in found["line"]
    found["rows"].clear()
    assert measured("multi_head-cpu")["rows"]  # a reader who changes the rows changes a copy


@pytest.mark.parametrize("name", ["abacus", "", "../pyproject", "multi_head-cpu.json"])
def test_what_was_not_measured_is_refused_with_what_was(name):
    with pytest.raises(ValueError, match=re.escape(f"name={name!r} was not measured; there are ") + ".*multi_head-cpu"):
        measured(name)


def test_times_are_taken_in_turn_after_a_first_call_that_does_not_count(monkeypatch):
    now, calls = [0.0], []

    def lasting(name, seconds):
        durations = iter(seconds)

        def call():
            calls.append(name)
            now[0] += next(durations)

        return call

    monkeypatch.setattr("attention_course.toolkit.perf_counter", lambda: now[0])
    found = time_ratio(lasting("a", [99, 6, 4, 8]), lasting("b", [99, 2, 2, 2]), runs=3)
    assert found == (3, 2, 4) and calls == ["a", "b"] * 4


def test_kept_bytes_counts_each_storage_once_and_nothing_without_gradients():
    x = torch.ones(10, 10, dtype=torch.float64, requires_grad=True)
    assert kept_bytes(lambda: x * x) == kept_bytes(lambda: x.T * x) == 800
    assert kept_bytes(lambda: x.exp().sin()) == 800  # the sine keeps what the exponential keeps
    assert kept_bytes(lambda: x.sin().sin()) == 1600
    assert kept_bytes(lambda: x.detach().exp()) == kept_bytes(lambda: x + 1) == 0
