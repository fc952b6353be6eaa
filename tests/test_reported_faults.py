"""Faults that were reported in public about other attentions, each ruled out in every attention of the library.

The numbers are those of the reports; `variants.py` is the table of attentions. What concerns one function alone stands in its own file.
"""

import ast
import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import attention_course
from attention_course import attention_entropy
from attention_course.attention import scaled_dot_product_attention
from attention_course.masking import causal_mask, combine_masks, fused_attention, mask_from_torch, padding_mask, to_additive
from attention_course.multi_head import MultiHeadAttention
from attention_course.tiling import tiled_attention
from test_attention import SHAPE_ERRORS, g01, ok
from variants import DTYPES, HALVES, OURS, draw, reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
GROUPED = [v for v in OURS if "grouped" in v.features]
OWN_WIDTH = [v for v in OURS if "d_v" in v.features]
KNOW_WEIGHTS = [v for v in OURS if v.weights]
AVERAGED = [v for v in OURS if v.name in ("einsum_weights", "module_weights")]  # output = returned weights times values
SINGLE = {"einsum": scaled_dot_product_attention, "fused": fused_attention, "tiled": tiled_attention}

each_variant = pytest.mark.parametrize("variant", OURS, ids=str)
each_form = pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
both_kinds = pytest.mark.parametrize("form", ["boolean", "additive"])
each_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
unchecked = pytest.mark.usefixtures("no_shape_check")


def written(keep, form, dtype=torch.float64):
    "The same mask, boolean or additive."
    return keep if form == "boolean" else torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, -math.inf)


def right(q, k, v, keep=None, scale=None):
    everything = torch.ones(*q.shape[:3], k.shape[-2], dtype=torch.bool)
    return reference(q, k, v, everything if keep is None else everything & keep, scale=scale)["output"]


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a.double(), b.double(), atol=atol, rtol=0)


def made(*sizes, seed=0, fused=False, **options):
    "A module in double precision with random weights and biases."
    torch.manual_seed(seed)
    module = MultiHeadAttention(*sizes, fused=fused, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return module


def computed(module, x, context=None, keep=None):
    "What a module should give, from its matrices alone: output and weights."
    context = x if context is None else context
    sizes = [module.n_heads * module.d_head, *[module.n_kv_heads * module.d_head] * 2]
    if module.fused:
        weights, biases = module.w_qkv.weight.split(sizes), module.w_qkv.bias.split(sizes)
    else:
        weights, biases = zip(*((layer.weight, layer.bias) for layer in (module.w_q, module.w_k, module.w_v)))
    parts = [y @ w.T + b for y, w, b in zip((x, context, context), weights, biases)]
    q, k, v = (torch.stack(part.split(module.d_head, dim=-1), dim=1) for part in parts)
    everything = torch.ones(*q.shape[:3], k.shape[-2], dtype=torch.bool)
    result = reference(q, k, v, everything if keep is None else everything & keep)
    merged = torch.cat(result["output"].unbind(1), dim=-1)
    return merged @ module.w_o.weight.T + module.w_o.bias, result["weights"]


# --- masks: G01 to G05, G07 ------------------------------------------------------------------------------------------


@each_variant
def test_g01_true_means_may_attend(variant):
    q, k, v, keep = g01()
    output = variant.run(q, k, v, keep)
    close(output, right(q, k, v, keep))
    assert torch.equal(output[..., 0, :], v[..., 0, :])
    for j in range(1, 4):
        k2, v2 = k.clone(), v.clone()
        k2[..., j, :], v2[..., j, :] = 100.0, -100.0
        assert torch.equal(variant.run(q, k2, v2, keep)[..., :j, :], output[..., :j, :])
    assert torch.equal(variant.run(q, k, v, mask_from_torch(~keep)), output)  # there True hides
    opposite = variant.run(q, k, v, ~keep)
    assert (opposite - output).abs().max() > 1 and (opposite[..., 3, :] == 0).all()


@unchecked
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64, torch.float8_e4m3fn], ids=str)
@each_variant
def test_g02_a_mask_of_another_dtype_is_refused_and_never_added(variant, dtype):
    q, k, v, keep = g01()
    for causal in (False, True):
        with pytest.raises(TypeError, match=f"{dtype}; expected bool"):
            variant.run(q, k, v, keep.to(dtype), causal=causal)


@unchecked
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "function",
    [combine_masks, lambda mask: combine_masks(None, mask), lambda mask: to_additive(mask, torch.float32), mask_from_torch,
     lambda mask: mask_from_torch(None, mask)],
    ids=["combine_masks", "combine_masks_second", "to_additive", "mask_from_torch", "mask_from_torch_padding"],
)
def test_g02_a_mask_of_another_dtype_is_not_converted_either(function, dtype):
    with pytest.raises(TypeError, match=f"{dtype}; expected"):
        function(torch.ones(4, 4, dtype=dtype))


@pytest.mark.parametrize("padding", ["boolean", "additive"])
@pytest.mark.parametrize("attention", ["boolean", "additive"])
@each_variant
def test_g03_every_mix_of_boolean_and_additive_masks(variant, attention, padding):
    q, k, v = (draw(2, 2, 5, 4, seed=seed) for seed in range(3))
    triangle, real = torch.ones(5, 5, dtype=torch.bool).tril(), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    keep = triangle & real[:, None, None]
    ours = combine_masks(written(triangle, attention), written(real[:, None, None], padding))
    theirs = mask_from_torch(
        ~triangle if attention == "boolean" else written(triangle, "additive"), ~real if padding == "boolean" else written(real, "additive")
    )
    for mask in (ours, theirs):
        close(variant.run(q, k, v, mask), right(q, k, v, keep))
        if variant.weights:
            weights = variant.weights(q, k, v, mask)[1]
            assert (weights[~keep.expand_as(weights)] == 0).all() and (weights[keep.expand_as(weights)] > 0).all()


@each_mode
@each_variant
def test_g04_masks_for_each_head_or_all_in_training_and_evaluation(variant, training):
    q, k, v = (draw(2, 4, 8, 4, seed=seed) for seed in range(3))
    for shape in [(2, 4, 8, 8), (2, 1, 8, 8), (1, 4, 8, 8), (8, 8), (1, 8), (8,), (2, 1, 1, 8), (2, 4, 8, 1)]:
        keep = draw(*shape, seed=3) > 0
        keep = keep | torch.eye(8, dtype=torch.bool) if shape[-2:] == (8, 8) else keep
        expected = right(q, k, v, keep.expand(2, 4, 8, 8))
        close(variant.run(q, k, v, keep, training=training), expected)
        with torch.no_grad():
            close(variant.run(q, k, v, keep, training=training), expected)


@unchecked
@pytest.mark.parametrize("shape", [(8, 8, 8), (2, 8, 8), (8, 7), (3, 4, 8, 8), (2, 3, 8, 8), (1, 2, 4, 8, 8), (0, 8)], ids=str)
@pytest.mark.parametrize("variant", [v for v in OURS if v.whole], ids=str)  # the others cut the mask first
def test_g04_a_shape_that_does_not_fit_is_refused_in_both_modes(variant, shape):
    q, k, v = (draw(2, 4, 8, 4, seed=seed) for seed in range(3))
    for causal, training in itertools.product([False, True], repeat=2):
        with pytest.raises(ValueError, match="mask|shape"):
            variant.run(q, k, v, torch.ones(shape, dtype=torch.bool), causal=causal, training=training)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_g05_the_causal_mask_shows_the_past_and_oneself(n):
    rows = [[j <= i for j in range(n)] for i in range(n)]
    assert causal_mask(n).tolist() == rows
    assert to_additive(causal_mask(n), torch.float32).tolist() == [[0.0 if seen else -math.inf for seen in row] for row in rows]


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@each_variant
def test_g05_the_causal_flag_shows_the_past_and_oneself(variant, n):
    nothing, identity = torch.zeros(1, 1, n, n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)[None, None]
    expected = torch.tensor([[(j <= i) / (i + 1) for j in range(n)] for i in range(n)], dtype=torch.float64)
    close(variant.run(nothing, nothing, identity, causal=True)[0, 0], expected)


@both_kinds
@each_variant
def test_g07_what_a_mask_hides_has_no_influence(variant, form):
    q, k, v, _ = g01()
    mask = written(torch.tensor([True, True, True, False]), form)
    clean = variant.run(q, k, v, mask)
    k2, v2 = k.clone(), v.clone()
    k2[..., 3, :] = v2[..., 3, :] = 1e10
    k2.requires_grad_(), v2.requires_grad_()
    output = variant.run(q, k2, v2, mask)
    assert torch.equal(output, clean)
    output.square().sum().backward()
    assert (k2.grad[..., 3, :] == 0).all() and (v2.grad[..., 3, :] == 0).all()
    assert (k2.grad[..., :3, :] != 0).any() and (v2.grad[..., :3, :] != 0).any()


@each_variant
def test_g07_the_future_has_no_influence(variant):
    q, k, v, _ = g01()
    k, v = k.requires_grad_(), v.requires_grad_()
    for i in range(4):
        output = variant.run(q, k, v, causal=True)
        grads = torch.autograd.grad(output[..., i, :].square().sum(), (k, v))
        for grad in grads:
            assert (grad[..., i + 1 :, :] == 0).all() and (i == 0 or (grad[..., : i + 1, :] != 0).any(-1).all())


# --- numbers: G08 to G10 ---------------------------------------------------------------------------------------------


@both_kinds
@each_variant
def test_g08_a_row_that_sees_nothing_gives_zeros_and_zero_gradients(variant, form):
    for dtype in DTYPES:
        q, k, v, keep = g01()
        q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
        keep[2] = False
        output = variant.run(q, k, v, written(keep, form, dtype))
        assert (output[..., 2, :] == 0).all()
        close(output, right(q, k, v, keep), TOLERANCE[dtype])
        output.square().sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v)) and (q.grad[..., 2, :] == 0).all()
        if variant.weights:
            assert (variant.weights(q, k, v, written(keep, form, dtype))[1][..., 2, :] == 0).all()


@both_kinds
@each_variant
def test_g08_rows_may_be_blind_through_a_mask_and_the_flag_together(variant, form):
    q, k, v, _ = g01()
    keep = torch.tensor([False, False, True, True])  # the first two queries see neither the past nor the future
    output = variant.run(q, k, v, written(keep, form), causal=True)
    assert (output[..., :2, :] == 0).all()
    close(output, right(q, k, v, keep & torch.ones(4, 4, dtype=torch.bool).tril()))


@both_kinds
@each_variant
def test_g08_a_sample_that_is_all_padding_gives_zeros_and_leaves_the_others_alone(variant, form):
    q, k, v = (draw(3, 2, 4, 8, seed=seed).requires_grad_() for seed in range(3))
    mask = written(padding_mask([4, 0, 2]), form)
    output = variant.run(q, k, v, mask, causal=True)
    assert (output[1] == 0).all()
    output.square().sum().backward()
    assert all((x.grad[1] == 0).all() and x.grad.isfinite().all() for x in (q, k, v))
    others = [0, 2]
    close(output[others], variant.run(*(x[others] for x in (q, k, v)), mask[others], causal=True))


@each_form
def test_g08_a_module_adds_its_output_bias_where_nothing_is_seen(fused):
    module = made(8, 2, fused=fused)
    x = draw(2, 3, 8, seed=5)
    for ask in (False, True):
        output = module(x, mask=padding_mask([3, 0]), return_weights=ask)
        output, weights = output if ask else (output, None)
        assert torch.equal(output[1], module.w_o.bias.expand(3, 8))
        assert weights is None or (weights[1] == 0).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@both_kinds
@each_variant
def test_g09_half_precision_with_masks(variant, form, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8).to(dtype) for _ in range(3))
    real = torch.arange(6) < 4
    keep = torch.ones(6, 6, dtype=torch.bool).tril() & real
    output = variant.run(q, k, v, written(real, form, dtype), causal=True)
    assert output.isfinite().all()
    close(output, right(q, k, v, keep), TOLERANCE[dtype])
    if variant.weights:
        assert (variant.weights(q, k, v, written(real, form, dtype), causal=True)[1][..., ~keep] == 0).all()


def stand_ins(source):
    "Lines with a number so low that it can only be meant as minus infinity, or so high that its negative is."
    constants = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.USub, ast.UAdd, ast.operator)
    tree = ast.parse(source)
    harmless = set()  # numbers that are drawn from or compared with are written nowhere
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            harmless.update((node.left, *node.comparators))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.randint":
            harmless.update(node.args)
    harmless |= {part for node in harmless if isinstance(node, (ast.BinOp, ast.UnaryOp)) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if node in harmless:
            continue
        if isinstance(node, ast.Attribute) and node.attr in ("min", "max", "lowest") and "info" in ast.unparse(node.value):
            yield node.lineno, ast.unparse(node), -math.inf if node.attr != "max" else math.inf
        elif isinstance(node, ast.expr) and all(isinstance(part, constants) for part in ast.walk(node)):
            try:
                value = eval(compile(ast.Expression(node), "", "eval"))
            except (TypeError, ArithmeticError):
                continue
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                yield node.lineno, ast.unparse(node), value


def test_g09_no_literal_stands_in_for_minus_infinity():
    known = "x.masked_fill(m, -1e9); (1 - m) * -10000.0; x - 2.0**40 * m; torch.finfo(x.dtype).min; -torch.finfo(x.dtype).max"
    assert {-1e9, -1e4, 2.0**40, -math.inf, math.inf} <= {value for *_, value in stand_ins(known)}
    package = Path(attention_course.__file__).parent
    for path in package.rglob("*.py"):
        if path.parent.name == "_checks" or path.name == "toolkit.py":  # those know the wrong answers by name, this has no attention
            continue
        for line, text, value in stand_ins(path.read_text(encoding="utf-8")):
            message = f"{path.relative_to(package)}:{line}: {text}"
            if (path.name, text) == ("translation.py", "1e+30"):  # as hot as a temperature may be
                continue
            if value == math.inf:  # the largest number of a dtype may be told, in a message, and not computed with
                assert "finfo" in text and path.name == "masking.py", message
            else:
                assert -1e4 < value < 1e8, message


@both_kinds
@pytest.mark.parametrize(("dtype", "scores"), [(torch.float16, [-20, 3]), (torch.float32, [2e4, 0])], ids=str)
@each_variant
def test_g10_no_finite_number_is_low_enough_to_hide_behind(variant, dtype, scores, form):
    q, k = torch.ones(1, 1, 1, 1, dtype=dtype), torch.tensor(scores, dtype=dtype).view(1, 1, 2, 1)
    for shown, v in ((1, [5.0, 7.0]), (0, [0.0, 1.0])):  # the visible value comes back, and nothing of the hidden one
        v = torch.tensor(v, dtype=dtype).view(1, 1, 2, 1)
        output = variant.run(q, k, v, written(torch.tensor([False, True]), form, dtype))
        assert output.item() == v[..., 1, :].item(), shown
    if variant.weights:
        assert variant.weights(q, k, v, written(torch.tensor([False, True]), form, dtype))[1].flatten().tolist() == [0, 1]


@each_variant
def test_g10_the_lowest_float16_number_does_not_overflow_when_added(variant):
    assert torch.tensor(-65504.0).half() + torch.tensor(-16.0).half() == -math.inf  # as it would here, were scores float16
    q, k = torch.ones(1, 1, 1, 1).half(), torch.tensor([-20.0, -20.0]).half().view(1, 1, 2, 1)
    lowest = torch.full((2,), torch.finfo(torch.float16).min, dtype=torch.float16)
    v = torch.tensor([1.0, 3.0]).half().view(1, 1, 2, 1)
    assert variant.run(q, k, v, lowest).item() == 2  # all equally discouraged: their mean, not zeros


# --- causal alignment: G12, G13 --------------------------------------------------------------------------------------


def causal_weights(variant, n_q, n_k, how):
    width = max(n_q, n_k)
    q, k = torch.zeros(1, 1, n_q, width, dtype=torch.float64), torch.zeros(1, 1, n_k, width, dtype=torch.float64)
    v = torch.eye(n_k, width, dtype=torch.float64)[None, None]
    ways = {"flag": dict(causal=True), "mask": dict(mask=causal_mask(n_q, n_k)), "wide window": dict(causal=True, window=99)}
    return variant.run(q, k, v, **ways[how])[0, 0, :, :n_k]


@pytest.mark.parametrize("how", ["flag", "mask", "wide window"])
@each_variant
def test_g12_fewer_queries_than_keys_are_the_newest_tokens(variant, how):
    expected = torch.tensor([[1 / 4] * 4 + [0], [1 / 5] * 5], dtype=torch.float64)
    close(causal_weights(variant, 2, 5, how), expected)


@pytest.mark.parametrize("how", ["flag", "mask", "wide window"])
@each_variant
def test_g13_more_queries_than_keys_the_first_see_nothing(variant, how):
    first = causal_weights(variant, 5, 2, how)
    close(first, torch.tensor([[0, 0], [0, 0], [0, 0], [1, 0], [1 / 2, 1 / 2]], dtype=torch.float64))
    assert torch.equal(first, causal_weights(variant, 5, 2, how)) and (first[:3] == 0).all()


@pytest.mark.parametrize(("n_q", "n_k"), [(5, 2), (2, 5), (1, 5), (5, 1)])
@each_variant
def test_g13_random_values_of_any_two_lengths(variant, n_q, n_k):
    q, k, v = draw(2, 2, n_q, 3, seed=0), draw(2, 2, n_k, 3, seed=1), draw(2, 2, n_k, 3, seed=2)
    keep = torch.tensor([[j <= i + n_k - n_q for j in range(n_k)] for i in range(n_q)])
    close(variant.run(q, k, v, causal=True), right(q, k, v, keep))


# --- heads, scale, weights: G16 to G22 -------------------------------------------------------------------------------


@unchecked
@each_form
@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((512, 6), {}, "d_model=512 .*n_heads=6"),
        ((10, 3), {}, "d_model=10 .*n_heads=3"),
        ((8, 16), {}, "d_model=8 .*n_heads=16"),
        ((8, 0), {}, "n_heads=0"),
        ((8, -2), {}, "n_heads=-2"),
        ((0, 2), {}, "d_model=0"),
        ((64, 8), dict(n_kv_heads=3), "n_heads=8 .*n_kv_heads=3"),
        ((64, 2), dict(n_kv_heads=4), "n_heads=2 .*n_kv_heads=4"),
        ((64, 8), dict(n_kv_heads=0), "n_kv_heads=0"),
        ((64, 8), dict(n_kv_heads=-1), "n_kv_heads=-1"),
        ((64, 8), dict(d_head=0), "d_head=0"),
    ],
    ids=str,
)
def test_g16_head_counts_that_do_not_divide_are_refused_at_construction(sizes, options, message, fused):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(*sizes, fused=fused, **options)


@unchecked
@pytest.mark.parametrize("n_kv_heads", [3, 16, 0])
@pytest.mark.parametrize("name", SINGLE)
def test_g16_query_heads_that_key_heads_do_not_divide(name, n_kv_heads):
    q, k = torch.zeros(1, 8, 2, 4), torch.zeros(1, n_kv_heads, 2, 4)
    with pytest.raises(ValueError, match=rf"multiple of k's heads.*q \(1, 8, 2, 4\), k \(1, {n_kv_heads}, 2, 4\)"):
        SINGLE[name](q, k, k)


@each_form
def test_g16_a_given_width_of_heads_need_not_divide(fused):
    module = made(10, 3, d_head=4, fused=fused)
    x = draw(2, 5, 10, seed=1)
    close(module(x), computed(module, x)[0])


@each_variant
def test_g17_the_scale_divides_by_the_root_of_the_width(variant):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 64, 16, dtype=torch.float64) for _ in range(3))
    close(variant.run(q, k, v), right(q, k, v))
    assert (right(q, k, v, scale=4.0) - right(q, k, v)).abs().max() > 1  # what the reported slip looks like
    if variant.weights:
        assert attention_entropy(variant.weights(q, k, v)[1]).mean() > 3


@each_mode
@pytest.mark.parametrize("kind", ["no mask", "boolean", "additive", "causal", "blind"])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@each_form
def test_g18_weights_are_those_of_each_head_and_explain_the_output(fused, n_kv_heads, kind, training):
    module = made(8, 4, n_kv_heads=n_kv_heads, fused=fused).train(training)
    x, context = draw(2, 4, 8, seed=1), draw(2, 6, 8, seed=2)
    keep = draw(2, 4, 4, 6, seed=3) > -0.5
    keep[..., 0] = True
    if kind == "blind":
        keep[:, :, 1] = False
    causal = torch.tensor([[j <= i + 2 for j in range(6)] for i in range(4)])
    mask = {"boolean": keep, "additive": written(keep, "additive"), "blind": keep}.get(kind)
    visible = causal if kind == "causal" else keep if mask is not None else None
    output, weights = module(x, context, mask, causal=kind == "causal", return_weights=True)
    assert weights.shape == (2, 4, 4, 6)
    expected, their_weights = computed(module, x, context, visible)
    close(output, expected)
    close(weights, their_weights)
    sums = torch.ones(2, 4, 4, dtype=torch.float64)
    if kind == "blind":
        sums[:, :, 1] = 0
    close(weights.sum(-1), sums)
    if n_kv_heads == 4 and kind == "no mask":  # torch's own, averaged over heads
        close(weights.mean(1), module.to_torch()(x, context, context, need_weights=True)[1])


@pytest.mark.parametrize("variant", AVERAGED, ids=str)
def test_g18_weights_are_those_before_dropout(variant):
    q, k, v = (draw(2, 2, 6, 4, seed=seed) for seed in range(3))
    assert torch.equal(variant.run(q, k, v, dropout_p=0.5, training=True), variant.run(q, k, v))


@pytest.mark.parametrize("variant", [v for v in OURS if v.drops and v not in AVERAGED], ids=str)
def test_g18_dropout_drops_its_share_and_scales_the_rest(variant):
    torch.manual_seed(0)
    nothing, ones = torch.zeros(4, 2, 50, 1), torch.ones(4, 2, 200, 1)
    output = variant.run(nothing, torch.zeros_like(ones), ones, dropout_p=0.25, training=True).flatten()
    assert abs(output.mean() - 1) < 0.01 and 0.03 < output.std() < 0.055  # sqrt(0.25 / 0.75 / 200) = 0.041


@pytest.mark.parametrize("variant", [v for v in OURS if v.name.startswith("module")], ids=str)
def test_g18_nothing_is_dropped_in_evaluation(variant):
    q, k, v = (draw(2, 2, 6, 4, seed=seed) for seed in range(3))
    assert torch.equal(variant.run(q, k, v, dropout_p=0.5, training=False), variant.run(q, k, v))


@each_mode
@pytest.mark.parametrize("n_kv_heads", [1, 2])
@each_form
def test_g19_asking_for_weights_changes_nothing_and_the_causal_flag_holds(fused, n_kv_heads, training):
    module = made(8, 2, n_kv_heads=n_kv_heads, fused=fused, dropout=0.2).train(training)
    for n_q in (3, 2):
        x, context = draw(4, n_q, 8, seed=1), None if n_q == 3 else draw(4, 3, 8, seed=2)
        ways = [dict(causal=True), dict(mask=causal_mask(n_q, 3)), dict(mask=to_additive(causal_mask(n_q, 3), torch.float64))]
        outputs = []
        for way in ways:
            torch.manual_seed(0)
            outputs.append(module(x, context, **way))
            torch.manual_seed(0)
            output, weights = module(x, context, **way, return_weights=True)
            outputs.append(output)
            assert (weights[..., ~causal_mask(n_q, 3)] == 0).all()
        torch.manual_seed(0)
        unmasked = module(x, context)
        for output in outputs:
            close(output, outputs[0])
            assert (output - unmasked).abs().max() > 0.01


@unchecked
@each_form
def test_g19_an_attention_without_weights_says_so(fused):
    module = made(8, 2, fused=fused, attend=lambda q, k, v, mask=None, *, causal=False: q)
    with pytest.raises(ValueError, match="return_weights=True"):
        module(draw(1, 3, 8, seed=0), return_weights=True)


@each_form
@pytest.mark.parametrize("batch_first", [True, False])
def test_g20_batch_first_whatever_order_torch_had(batch_first, fused):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=batch_first, dtype=torch.float64)
    ours = MultiHeadAttention.from_torch(theirs, fused=fused)
    x, context, hidden = draw(3, 5, 8, seed=1), draw(3, 7, 8, seed=2), draw(5, 7, seed=3) > 0.5
    hidden[:, 0] = False
    swap = (lambda y: y) if batch_first else (lambda y: y.transpose(0, 1))
    expected = swap(theirs(swap(x), swap(context), swap(context), attn_mask=hidden)[0])
    close(ours(x, context, mask_from_torch(hidden)), expected)
    with pytest.raises(ValueError, match=r"mask has shape \(7, 5\); it must broadcast to the scores' shape \(3, 2, 5, 7\)"):
        ours(x, context, mask_from_torch(hidden.T))


@unchecked
@pytest.mark.parametrize("variant", [v for v in OURS if v.whole], ids=str)
def test_g20_a_mask_that_is_transposed_is_named_with_both_shapes(variant):
    q, k, v = draw(3, 2, 5, 4, seed=0), draw(3, 2, 7, 4, seed=1), draw(3, 2, 7, 4, seed=2)
    close(variant.run(q, k, v, torch.ones(5, 7, dtype=torch.bool)), right(q, k, v))
    with pytest.raises(ValueError, match=r"mask has shape \(7, 5\); it must broadcast to the scores' shape \(3, 2, 5, 7\)"):
        variant.run(q, k, v, torch.ones(7, 5, dtype=torch.bool))


@pytest.mark.parametrize("variant", GROUPED, ids=str)
def test_g21_key_heads_are_repeated_in_groups_and_not_tiled(variant):
    q, k = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 2, 8)
    v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1).expand(1, 2, 2, 8)
    close(variant.run(q, k, v)[0, :, 0, 0], torch.tensor([10.0, 10, 20, 20]), atol=1e-5)


def test_g22_the_fused_projection_is_split_where_key_heads_end():
    fused = made(64, 4, n_kv_heads=2, fused=True)
    assert fused.w_qkv.weight.shape == (128, 64)
    split = fused.split()
    assert [layer.weight.shape[0] for layer in (split.w_q, split.w_k, split.w_v)] == [64, 32, 32]
    x, context = draw(2, 5, 64, seed=1), draw(2, 7, 64, seed=2)
    for y in (None, context):
        expected = computed(fused, x, y)[0]
        for module in (fused, split, split.fuse(), copy.deepcopy(fused), fused.split().split(), fused.fuse()):
            close(module(x, y), expected)
    assert torch.equal(split.fuse().w_qkv.weight, fused.w_qkv.weight) and torch.equal(split.fuse().w_qkv.bias, fused.w_qkv.bias)


@each_form
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_g22_either_form_equals_its_matrices(fused, n_kv_heads):
    module = made(12, 4, n_kv_heads=n_kv_heads, d_head=3, fused=fused)
    x, context = draw(2, 5, 12, seed=1), draw(2, 7, 12, seed=2)
    close(module(x), computed(module, x)[0])
    close(module(x, context), computed(module, x, context)[0])


# --- widths and empty axes: G23, G24 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", OWN_WIDTH, ids=str)
def test_g23_values_keep_their_own_width(variant):
    q, k, v = draw(1, 1, 16, 32, seed=0), draw(1, 1, 16, 32, seed=1), draw(1, 1, 16, 24, seed=2)
    output = variant.run(q, k, v)
    assert output.shape == (1, 1, 16, 24)
    close(output, right(q, k, v))


def test_g23_the_context_of_a_module_may_have_another_width():
    module = made(8, 2, d_context=6)
    x, context = draw(2, 3, 8, seed=1), draw(2, 5, 6, seed=2)
    assert module(x, context).shape == (2, 3, 8)
    close(module(x, context), computed(module, x, context)[0])
    close(module.to_torch()(x, context, context)[0], module(x, context))
    with pytest.raises(ValueError, match="kdim=6 .*vdim=4"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, kdim=6, vdim=4))


@pytest.mark.parametrize(("b", "n_q", "n_k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0), (0, 0, 0), (0, 3, 3)])
@each_variant
def test_g24_empty_in_empty_out(variant, b, n_q, n_k):
    keep = torch.ones(n_q, n_k, dtype=torch.bool)
    ways = dict(), dict(mask=keep), dict(mask=keep.double() - 1), dict(causal=True), dict(mask=keep, causal=True)
    for way, training in itertools.product(ways, [True, False]):
        q, k, v = (draw(b, 3, n, 8, seed=seed).requires_grad_() for seed, n in enumerate((n_q, n_k, n_k)))
        output = variant.run(q, k, v, training=training, **way)
        assert output.shape == (b, 3, n_q, 8)
        assert (output == 0).all()  # whatever is not empty saw nothing
        output.sum().backward()
        assert all(x.grad.shape == x.shape and (x.grad == 0).all() for x in (q, k, v))
        if variant.weights:
            assert variant.weights(q, k, v, training=training, **way)[1].shape == (b, 3, n_q, n_k)


# --- the same every time: G77 ----------------------------------------------------------------------------------------


@each_variant
def test_g77_the_same_seed_gives_the_same_output_and_gradients(variant):
    def run(seed, training=True):
        q, k, v = (draw(2, 2, 9, 4, seed=s, dtype=torch.float32).requires_grad_() for s in range(3))
        torch.manual_seed(seed)
        output = variant.run(q, k, v, causal=True, dropout_p=0.1, training=training)
        output.square().sum().backward()
        return output, q.grad, k.grad, v.grad

    assert all(map(torch.equal, run(0), run(0)))
    assert all(map(torch.equal, run(0, training=False), run(1, training=False)))
    if variant.drops and variant not in AVERAGED:
        assert not torch.equal(run(0)[0], run(1)[0])


@each_form
def test_g77_a_module_never_touches_the_seed(fused):
    def initial(seed):
        torch.manual_seed(seed)
        return MultiHeadAttention(8, 2, fused=fused, dropout=0.1)

    a, b, other = initial(0), initial(0), initial(1)
    assert all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))
    assert not all(map(torch.equal, a.state_dict().values(), other.state_dict().values()))
    assert torch.initial_seed() == 1  # as was set, not by the module
    after = [(initial(seed), torch.rand(3))[1] for seed in (0, 1, 0)]
    assert torch.equal(after[0], after[2]) and not torch.equal(after[0], after[1])
    x = torch.randn(2, 3, 8)
    for ask in (False, True):
        state = torch.get_rng_state()
        a.eval()(x, causal=True, return_weights=ask)
        assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    plain = a.train()(x)
    torch.manual_seed(0)
    assert torch.equal(a(x, return_weights=True)[0], plain)


# --- awkward inputs, in every attention ------------------------------------------------------------------------------


@both_kinds
@each_variant
def test_inputs_and_masks_are_never_modified(variant, form):
    keep = torch.ones(5, 7, dtype=torch.bool).tril()
    keep[2] = False
    inputs = draw(2, 2, 5, 4, seed=0), draw(2, 2, 7, 4, seed=1), draw(2, 2, 7, 4, seed=2), written(keep, form)
    before = [x.clone() for x in inputs]
    for causal in (False, True):
        variant.run(*inputs, causal=causal, dropout_p=0.5)
    assert all(map(torch.equal, inputs, before))


@both_kinds
@each_variant
def test_strides_do_not_matter(variant, form):
    q, k, v = draw(2, 2, 5, 8, seed=0), draw(2, 2, 7, 8, seed=1), draw(2, 2, 7, 8, seed=2)
    keep = draw(2, 2, 5, 7, seed=3) > -0.5
    mask = written(keep, form)
    expected = right(q, k, v, keep)
    transposed = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v, mask)]
    sliced = [torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v, mask)]
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, mask)]
    for strided in (transposed, sliced, swapped):
        close(variant.run(*strided), expected)
    one = [x[:1].expand(3, -1, -1, -1) for x in (q, k, v, mask)]
    close(variant.run(*one), expected[:1].expand(3, -1, -1, -1))


@each_variant
def test_a_padded_batch_equals_each_sample_alone(variant):
    q, k, v = (draw(3, 2, 5, 4, seed=seed) for seed in range(3))
    lengths = [5, 3, 1]
    for causal in (False, True):
        batch = variant.run(q, k, v, padding_mask(lengths), causal=causal)
        for s, n in enumerate(lengths):
            sample = [x[s : s + 1, :, :n] for x in (q, k, v)]
            close(batch[s : s + 1, :, :n], variant.run(*sample, causal=causal))


@unchecked
@each_variant
def test_a_mask_on_another_device_is_named(variant):
    q, k, v, keep = g01()
    for causal in (False, True):
        with pytest.raises(ValueError, match="mask.* is on (meta|cpu)"):
            variant.run(q, k, v, keep.to("meta"), causal=causal)


@unchecked
@pytest.mark.parametrize("mask", [[[True]], True, 1.0], ids=str)
@pytest.mark.parametrize("name", [*SINGLE, "module", "module asked"])
def test_a_mask_that_is_no_tensor_is_named(name, mask):
    x = torch.zeros(1, 4, 8)
    with pytest.raises(TypeError, match=f"mask is a {type(mask).__name__}; expected a tensor"):
        if name in SINGLE:
            SINGLE[name](x, x, x, mask)
        else:
            MultiHeadAttention(8, 2)(x, mask=mask, return_weights=name.endswith("asked"))


@unchecked
@pytest.mark.parametrize("case", SHAPE_ERRORS)
@pytest.mark.parametrize("name", [name for name in SINGLE if name != "einsum"])  # that one has its own test
def test_wrong_shapes_are_named(name, case):
    q, k, v, message = SHAPE_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        SINGLE[name](q, k, v)


@unchecked
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (ok.long(), TypeError, "torch.int64"),
        (ok.double(), TypeError, "they must agree"),
        (ok.to("meta"), ValueError, "is on"),
        (None, TypeError, "NoneType"),
    ],
    ids=["int64", "float64", "meta", "None"],
)
@pytest.mark.parametrize("name", [name for name in SINGLE if name != "einsum"])
def test_wrong_dtypes_and_devices_are_named(name, wrong, error, message, position):
    inputs = [ok, ok, ok]
    inputs[position] = wrong
    with pytest.raises(error, match=message):
        SINGLE[name](*inputs)
