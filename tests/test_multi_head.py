"""Chapter 04: `MultiHeadAttention`, against arithmetic by hand and torch's module. (Reported faults: `test_reported_faults.py`.)"""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import attention_course
from attention_course import (
    MultiHeadAttention, causal_mask, fused_attention, padding_mask, scaled_dot_product_attention,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
FORMS = pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def module(d_model=12, n_heads=3, seed=0, dtype=torch.float64, **options):
    "A module with biases that are not zero, so that a lost one would be seen."
    torch.manual_seed(seed)
    made = MultiHeadAttention(d_model, n_heads, **options).to(dtype)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.3)
    return made


def torch_module(d_model=12, n_heads=3, seed=0, **options):
    torch.manual_seed(seed)
    made = nn.MultiheadAttention(d_model, n_heads, **{"batch_first": True, "dtype": torch.float64, **options})
    with torch.no_grad():
        for p in (made.in_proj_bias, made.out_proj.bias):
            if p is not None:
                p.normal_(std=0.3)
    return made


def keep_some(*shape, seed=9):
    keep = normal(*shape, seed=seed) > -0.3
    keep[..., 0] = True
    return keep


def by_hand(m, x, context=None, keep=None):
    "Head by head and query by query, from the split matrices; shares no code with the library or with torch's attention."
    m = m.split()
    context = x if context is None else context
    rows = []
    for b in range(x.shape[0]):
        q, k, v = (y[b] @ w.weight.T + (0 if w.bias is None else w.bias) for y, w in ((x, m.w_q), (context, m.w_k), (context, m.w_v)))
        merged = torch.zeros(x.shape[1], m.n_heads * m.d_head, dtype=x.dtype)
        for a in range(m.n_heads):
            g = a // (m.n_heads // m.n_kv_heads)
            mine, theirs = slice(a * m.d_head, (a + 1) * m.d_head), slice(g * m.d_head, (g + 1) * m.d_head)
            for i in range(x.shape[1]):
                seen = [j for j in range(context.shape[1]) if keep is None or keep[b, a, i, j]]
                if not seen:
                    continue
                scores = torch.stack([q[i, mine] @ k[j, theirs] for j in seen]) / math.sqrt(m.d_head)
                shares = (scores - scores.max()).exp()
                merged[i, mine] = (shares / shares.sum()) @ torch.stack([v[j, theirs] for j in seen])
        rows.append(merged @ m.w_o.weight.T + (0 if m.w_o.bias is None else m.w_o.bias))
    return torch.stack(rows)


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


# --- right values ---------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "d_head"), [(1, 1, None), (3, 3, None), (6, 2, None), (4, 1, None), (6, 3, 5), (3, 3, 1), (2, 2, 16)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_arithmetic_by_hand(n_heads, n_kv_heads, d_head, bias, fused):
    m = module(12, n_heads, n_kv_heads=n_kv_heads, d_head=d_head, bias=bias, fused=fused)
    x, keep = normal(2, 5, 12), keep_some(2, n_heads, 5, 5)
    with torch.no_grad():
        close(m(x), by_hand(m, x))
        close(m(x, mask=keep), by_hand(m, x, keep=keep))
        close(m(x, causal=True), by_hand(m, x, keep=causal_mask(5).expand(2, n_heads, 5, 5)))


@pytest.mark.parametrize(("n_q", "n_k"), [(3, 7), (7, 3), (1, 1), (1, 9)])
def test_cross_attention_of_another_length_and_width(n_q, n_k):
    m = module(12, 3, d_context=10)
    x, context = normal(2, n_q, 12), normal(2, n_k, 10, seed=1)
    with torch.no_grad():
        close(m(x, context), by_hand(m, x, context))
        keep = causal_mask(n_q, n_k).expand(2, 3, n_q, n_k)
        close(m(x, context, causal=True), by_hand(m, x, context, keep))


@FORMS
def test_a_context_of_the_same_width_is_not_taken_for_x(fused):
    m, x, context = module(fused=fused), normal(2, 4, 12), normal(2, 6, 12, seed=1)
    with torch.no_grad():
        close(m(x, context), by_hand(m, x, context))
        close(m(x, x), m(x))
        close(m(x, x.clone()), m(x))


@FORMS
def test_one_sample_without_a_batch_axis(fused):
    m, x, context = module(fused=fused, n_heads=3), normal(5, 12), normal(7, 12, seed=1)
    for options in ({}, {"causal": True}, {"mask": keep_some(5, 5)}, {"mask": keep_some(3, 5, 5)}, {"mask": keep_some(1, 3, 5, 5)}):
        batched, batched_weights = m(x[None], return_weights=True, **{**options, **({"mask": options["mask"].expand(1, 3, 5, 5)} if "mask" in options else {})})
        output, weights = m(x, return_weights=True, **options)
        assert output.shape == (5, 12) and weights.shape == (3, 5, 5)
        close(output, batched[0])
        close(weights, batched_weights[0])
    close(m(x, context), m(x[None], context[None])[0])


def test_hooks_run_once_also_for_one_sample():
    m, calls = module(), []
    m.register_forward_hook(lambda *_: calls.append(1))
    m(normal(5, 12))
    assert calls == [1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@FORMS
def test_every_dtype(dtype, fused):
    m, x = module(fused=fused), normal(2, 9, 12)
    right = m(x, causal=True)
    output, weights = copy.deepcopy(m).to(dtype)(x.to(dtype), causal=True, return_weights=True)
    assert output.dtype == weights.dtype == dtype
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(output.double(), right, atol=3 * TOLERANCE[dtype], rtol=0)


@FORMS
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast(cast, given, fused):
    m, x = module(fused=fused, dtype=torch.float32), normal(2, 9, 12, dtype=torch.float32)
    right = m(x, causal=True)
    with torch.autocast("cpu", cast):
        output, weights = m(x.to(given), causal=True, return_weights=True)
    assert output.dtype == cast and output.isfinite().all()
    torch.testing.assert_close(output.float(), right, atol=0.1, rtol=0)


def test_gradients_by_finite_differences():
    m = module(4, 2, n_kv_heads=1, d_context=3)
    x, context = normal(1, 2, 4).requires_grad_(), normal(1, 3, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: m(*a), (x, context))
    weights = tuple(p.detach().clone().requires_grad_() for p in m.parameters())
    names = [name for name, _ in m.named_parameters()]
    assert torch.autograd.gradcheck(lambda *p: torch.func.functional_call(m, dict(zip(names, p)), (x.detach(), context.detach())), weights)


def test_gradients_of_gradients():
    m, x = module(4, 2), normal(1, 3, 4).requires_grad_()
    m.attend = lambda q, k, v, mask, *, causal: scaled_dot_product_attention(q, k, v, mask)[0]  # torch's fused kernel has none
    assert torch.autograd.gradgradcheck(m, (x,))


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("mask", "error", "says"),
    [
        (torch.ones(2, 8, 8, dtype=torch.bool), ValueError, r"\(2, 8, 8\).*batch or heads.*\(batch, 1, n_q, n_k\)"),
        (torch.ones(8, 8, 8, dtype=torch.bool), ValueError, "batch or heads"),
        (torch.ones(7, 8, dtype=torch.bool), ValueError, r"\(7, 8\).*\(2, 4, 8, 8\)"),
        (torch.ones(2, 3, 8, 8, dtype=torch.bool), ValueError, r"\(2, 3, 8, 8\)"),
        (torch.ones(1, 2, 4, 8, 8, dtype=torch.bool), ValueError, r"\(1, 2, 4, 8, 8\)"),
        (torch.ones(8, 8, dtype=torch.int64), TypeError, "int64"),
        (torch.ones(8, 8, dtype=torch.bool, device="meta"), ValueError, "meta"),
        ([[True]], TypeError, "list"),
    ],
    ids=range(8),
)
def test_masks_that_do_not_fit_are_refused_in_both_modes(mask, error, says, training):
    m = module(16, 4).train(training)
    for options in ({}, {"causal": True}, {"return_weights": True}):
        with pytest.raises(error, match=says):
            m(normal(2, 8, 16), mask=mask, **options)


@pytest.mark.parametrize("shape", [(7, 5), (5, 5), (7, 7)], ids=str)
def test_a_mask_of_queries_by_keys_is_taken_and_others_are_refused(shape):
    m, x, context = module(8, 2), normal(3, 5, 8), normal(3, 7, 8, seed=1)
    close(m(x, context, keep_some(5, 7)), by_hand(m, x, context, keep_some(5, 7).expand(3, 2, 5, 7)).detach())
    with pytest.raises(ValueError, match=rf"\({shape[0]}, {shape[1]}\).*\(3, 2, 5, 7\)"):
        m(x, context, torch.ones(shape, dtype=torch.bool))


@FORMS
def test_heads_never_splice_into_the_time_axis(fused):
    m, x = module(8, 2, fused=fused), normal(3, 5, 8).requires_grad_()
    output = m(x, causal=True)
    for sample in range(3):
        for i in range(5):
            (gradient,) = torch.autograd.grad(output[sample, i].sum(), x, retain_graph=True)
            reached = (gradient != 0).any(-1)
            assert reached.nonzero().tolist() == [[sample, j] for j in range(i + 1)]


@FORMS
def test_a_sample_of_padding_only_gives_the_bias_and_no_nan(fused):
    m, x = module(fused=fused), normal(3, 5, 12).requires_grad_()
    output, weights = m(x, mask=padding_mask([5, 0, 2]), return_weights=True)
    close(output[1], m.w_o.bias.expand(5, 12))
    assert (weights[1] == 0).all()
    output.square().sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in m.parameters())
    assert (x.grad[1] == 0).all() and (x.grad[2, :2] != 0).any()
    alone = m(x[2:, :2].detach())
    close(output[2:, :2].detach(), alone.detach())


@pytest.mark.parametrize("n", [1, 4])
def test_a_batch_is_each_sample_alone(n):
    m, x = module(), normal(3, n, 12)
    close(m(x, causal=True), torch.cat([m(x[i : i + 1], causal=True) for i in range(3)]))


@FORMS
def test_causal_with_fewer_and_with_more_queries_than_keys(fused):
    m, x = module(fused=fused), normal(1, 5, 12)
    close(m(x[:, 3:], x, causal=True), m(x, causal=True)[:, 3:])  # the last two of five, as with a cache
    more = m(x, x[:, :2], causal=True)  # the first three stand before all keys
    close(more[:, :3], m.w_o.bias.expand(1, 3, 12))
    close(more[:, 3], m(x[:, 3:4], x[:, :1])[:, 0])


# --- weights --------------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("n_kv_heads", [2, 1])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": padding_mask([4, 0], 4)}, {"mask": padding_mask([4, 2], 4), "causal": True}], ids=range(4))
def test_weights_come_per_head_and_are_those_that_made_the_output(options, n_kv_heads, fused):
    m, x = module(10, 2, n_kv_heads=n_kv_heads, fused=fused), normal(2, 4, 10)
    for training in (True, False):
        output, weights = m.train(training)(x, return_weights=True, **options)
        assert weights.shape == (2, 2, 4, 4)
        sums = weights.sum(-1)
        assert ((sums - 1).abs() < 1e-12).logical_or(sums == 0).all()
        heads = weights @ m.project(x)[2]
        close(m.w_o(heads.transpose(1, 2).flatten(2)), output)
        close(weights.mean(1).sum(-1), sums.mean(1))


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_asking_for_weights_changes_no_bit(dtype, fused):
    m, x = module(fused=fused, dtype=dtype, dropout=0.3).eval(), normal(2, 9, 12, dtype=dtype)
    for options in ({}, {"causal": True}, {"mask": keep_some(9, 9)}):
        assert torch.equal(m(x, return_weights=True, **options)[0], m(x, **options))


def test_in_training_weights_are_those_before_dropout_and_asking_draws_nothing():
    m, x = module(dropout=0.5), normal(2, 9, 12)
    torch.manual_seed(0)
    plain = m(x)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    output, weights = m(x, return_weights=True)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(output, plain)
    assert torch.equal(weights, m.eval()(x, return_weights=True)[1])


# --- any attention --------------------------------------------------------------------------------------------------


@FORMS
def test_the_attention_gets_mask_and_causal_as_they_came_and_dropout_only_if_there_is_any(fused):
    got = []

    def mine(q, k, v, mask, **options):
        got.append((mask, options))
        return fused_attention(q, k, v, mask, causal=options["causal"])

    m, mask = module(attend=mine, dropout=0.25, fused=fused), keep_some(5, 5)
    x = normal(2, 5, 12)
    for training, causal in ((True, True), (True, False), (False, True)):
        m.train(training)(x, mask=mask, causal=causal)
        seen, options = got.pop()
        assert seen is mask and options == {"causal": causal, **({"dropout_p": 0.25} if training else {})}
    m.dropout = 0.0
    m.train()(x)
    assert got.pop() == (None, {"causal": False})


def test_options_set_by_partial():
    m, x = module(), normal(2, 9, 12)
    expected = m(x, mask=causal_mask(9, window=3))
    close(module(attend=partial(fused_attention, window=3))(x, causal=True), expected)


def test_weights_with_another_attention_are_refused_and_with_the_default_named_are_not():
    x = normal(2, 5, 12)
    assert len(module(attend=fused_attention)(x, return_weights=True)) == 2
    for attend in (partial(fused_attention), lambda q, k, v, mask, *, causal: q):
        with pytest.raises(ValueError, match="return_weights=True needs the default attention"):
            module(attend=attend)(x, return_weights=True)


# --- split and fused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_split_and_fused_agree_and_sizes_are_unequal(n_kv_heads, bias):
    three = module(64, 4, n_kv_heads=n_kv_heads, bias=bias)
    one = three.fuse()
    assert three.sizes == one.sizes == (64, 16 * n_kv_heads, 16 * n_kv_heads)
    assert set(dict(one.named_parameters())) == {f"{w}.{p}" for w in ("w_qkv", "w_o") for p in (("weight", "bias") if bias else ("weight",))}
    x, context = normal(2, 5, 64), normal(2, 3, 64, seed=1)
    for a, b in ((three, one), (three, one.split())):
        for args in ((x,), (x, context)):
            inputs = [args[0].clone().requires_grad_() for _ in range(2)]
            outputs = [m(i, *args[1:], causal=True) for m, i in zip((a, b), inputs)]
            close(*outputs)
            for m, output in zip((a, b), outputs):
                m.zero_grad()
                output.square().sum().backward()
            close(inputs[0].grad, inputs[1].grad, atol=1e-11)
            grads = [
                [g for w in ("w_q", "w_k", "w_v") for g in getattr(m, w).weight.grad] if not m.fused else list(m.w_qkv.weight.grad)
                for m in (a, b)
            ]
            close(torch.stack(grads[0]), torch.stack(grads[1]), atol=1e-11)


def test_both_forms_start_alike_from_the_same_seed():
    for options in ({}, {"n_kv_heads": 1}, {"bias": False}):
        torch.manual_seed(3)
        three = MultiHeadAttention(12, 3, **options)
        torch.manual_seed(3)
        one = MultiHeadAttention(12, 3, fused=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(one.split().parameters(), three.parameters()))


@pytest.mark.parametrize("start", [False, True])
def test_conversion_keeps_everything_and_shares_nothing(start):
    attend = partial(fused_attention, window=2)
    m = module(12, 6, n_kv_heads=2, d_head=5, bias=False, dropout=0.2, fused=start, attend=attend, dtype=torch.bfloat16).eval()
    for other in (m.fuse(), m.split()):
        assert (other.d_head, other.n_kv_heads, other.dropout, other.training, other.attend) == (5, 2, 0.2, False, attend)
        assert other.w_o.bias is None and other.w_o.weight.dtype == torch.bfloat16
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
    assert all((p != 0).any() for p in m.parameters())


# --- torch's module -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "fused"), [(None, False), (None, True), (12, False), (12, True), (10, False)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_from_torch_gives_the_same_outputs_weights_and_gradients(bias, width, batch_first, fused):
    theirs = torch_module(bias=bias, kdim=width, vdim=width, batch_first=batch_first)
    ours = MultiHeadAttention.from_torch(theirs, fused=fused)
    x, context = normal(2, 5, 12), normal(2, 7, width or 12, seed=1)
    keep = keep_some(5, 7)
    inputs = [[x.clone().requires_grad_(), context.clone().requires_grad_()] for _ in range(2)]
    output, weights = ours(*inputs[0], keep, return_weights=True)
    given = inputs[1] if batch_first else [y.transpose(0, 1) for y in inputs[1]]
    other, other_weights = theirs(given[0], given[1], given[1], attn_mask=~keep, average_attn_weights=False)
    other = other if batch_first else other.transpose(0, 1)
    close(output, other)
    close(weights, other_weights)
    output.square().sum().backward()
    other.square().sum().backward()
    for a, b in zip(*inputs):
        close(a.grad, b.grad, atol=1e-11)
    if not fused:
        packed = theirs.in_proj_weight
        grads = packed.grad.chunk(3) if packed is not None else [p.grad for p in (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)]
        for w, grad in zip((ours.w_q, ours.w_k, ours.w_v, ours.w_o), (*grads, theirs.out_proj.weight.grad)):
            close(w.weight.grad, grad, atol=1e-11)
        if bias:
            for w, grad in zip((ours.w_q, ours.w_k, ours.w_v, ours.w_o), (*theirs.in_proj_bias.grad.chunk(3), theirs.out_proj.bias.grad)):
                close(w.bias.grad, grad, atol=1e-11)


@pytest.mark.parametrize(("width", "fused"), [(None, False), (None, True), (10, False)])
@pytest.mark.parametrize("bias", [True, False])
def test_to_torch_and_back(bias, width, fused):
    m = module(bias=bias, d_context=width, fused=fused, dropout=0.2).eval()
    theirs = m.to_torch()
    assert theirs.batch_first and theirs.dropout == 0.2 and not theirs.training and theirs.out_proj.weight.dtype == torch.float64
    x, context = normal(2, 5, 12), normal(2, 7, width or 12, seed=1)
    close(theirs(x, context, context, need_weights=False)[0], m(x, context))
    back = MultiHeadAttention.from_torch(theirs, fused=fused)
    assert not back.training and back.dropout == 0.2
    mine, again = m.state_dict(), back.state_dict()
    assert mine.keys() == again.keys() and all(torch.equal(mine[key], again[key]) for key in mine)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"add_bias_kv": True}, "add_bias_kv=True has no counterpart"),
        ({"add_zero_attn": True}, "add_zero_attn=True has no counterpart"),
        ({"kdim": 8, "vdim": 6}, "kdim=8 with vdim=6 has no counterpart"),
        ({"vdim": 6}, "kdim=12 with vdim=6 has no counterpart"),
    ],
)
def test_options_of_torch_without_a_counterpart_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 3, **options))


@pytest.mark.usefixtures("no_shape_check")
def test_from_torch_refuses_another_class_and_one_matrix_for_two_widths():
    with pytest.raises(TypeError, match="module is a Linear; expected an nn.MultiheadAttention"):
        MultiHeadAttention.from_torch(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="fused=True needs d_context=10 to equal d_model=12"):
        MultiHeadAttention.from_torch(torch_module(kdim=10, vdim=10), fused=True)
    with pytest.raises(ValueError, match="fused=True needs d_context=10 to equal d_model=12"):
        module(d_context=10).fuse()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_kv_heads": 1}, "n_kv_heads=1 with n_heads=3"),
        ({"d_head": 5}, "d_head=5 with d_model=12"),
        ({"attend": partial(fused_attention, window=2)}, "attend has no counterpart"),
    ],
)
def test_to_torch_refuses_what_torch_does_not_have(options, says):
    with pytest.raises(ValueError, match=says):
        module(**options).to_torch()


def test_dtype_and_attention_travel_with_from_torch():
    attend = partial(fused_attention, window=2)
    ours = MultiHeadAttention.from_torch(torch_module(dtype=torch.bfloat16, dropout=0.1).eval(), attend=attend)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert ours.attend is attend and ours.dropout == 0.1 and not ours.training


def test_dropout_agrees_with_torch_in_distribution():
    theirs = torch_module(dropout=0.3)
    ours = MultiHeadAttention.from_torch(theirs)
    x = normal(1, 6, 12)
    torch.manual_seed(0)
    with torch.no_grad():
        mine = torch.cat([ours(x) for _ in range(500)])
        other = torch.cat([theirs(x, x, x, need_weights=False)[0] for _ in range(500)])
    spread = other.std(0)
    assert ((mine.mean(0) - other.mean(0)).abs() < 5 * spread / 500**0.5 * 2**0.5 + 1e-9).all()
    torch.testing.assert_close(mine.std(0), spread, rtol=0.2, atol=1e-3)


# --- life of a module -----------------------------------------------------------------------------------------------


@FORMS
def test_names_and_number_of_parameters(fused):
    for n_heads, n_kv_heads, d_head, bias in ((8, 8, None, True), (8, 2, None, False), (4, 1, 3, True)):
        m = MultiHeadAttention(32, n_heads, n_kv_heads=n_kv_heads, d_head=d_head, bias=bias, fused=fused)
        d = d_head or 32 // n_heads
        weights = 32 * d * (2 * n_heads + 2 * n_kv_heads)
        biases = bias * (d * (n_heads + 2 * n_kv_heads) + 32)
        assert sum(p.numel() for p in m.parameters()) == weights + biases
        names = {name.split(".")[0] for name, _ in m.named_parameters()}
        assert names == ({"w_qkv", "w_o"} if fused else {"w_q", "w_k", "w_v", "w_o"})


@FORMS
def test_weights_start_as_glorot_and_bengio_draw_them_and_biases_at_zero(fused):
    m = MultiHeadAttention(256, 4, n_kv_heads=1, fused=fused).split()
    for layer in (m.w_q, m.w_k, m.w_v, m.w_o):
        bound = math.sqrt(6 / sum(layer.weight.shape))
        assert layer.weight.abs().max() <= bound
        assert 0.97 < layer.weight.std() / (bound / 3**0.5) < 1.03
        assert (layer.bias == 0).all()


@FORMS
def test_dropout_acts_in_training_only_and_all_of_it_leaves_the_bias(fused):
    x = normal(2, 5, 12)
    m = module(dropout=0.5, fused=fused)
    clean = m.eval()(x)
    assert torch.equal(clean, module(fused=fused)(x))
    assert not torch.equal(m.train()(x), clean)
    m = module(dropout=1.0, fused=fused)
    close(m(x), m.w_o.bias.expand(2, 5, 12))


@FORMS
def test_copies_pickles_and_state_dicts(fused, tmp_path):
    m, x = module(n_kv_heads=1, fused=fused, attend=partial(fused_attention, window=3)), normal(2, 5, 12)
    expected = m(x)
    torch.save(m.state_dict(), tmp_path / "state.pt")
    loaded = module(n_kv_heads=1, fused=fused, attend=m.attend, seed=5)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), loaded):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            other.w_o.weight.zero_()
    assert torch.equal(m(x), expected)


@FORMS
def test_inputs_and_mask_are_never_modified(fused):
    m = module(fused=fused, dropout=0.2)
    inputs = (normal(2, 5, 12), normal(2, 7, 12, seed=1), keep_some(5, 7))
    before = [y.clone() for y in inputs]
    m(*inputs, causal=True, return_weights=True)[0].sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(inputs, before))


@FORMS
def test_shapes_can_be_asked_of_the_meta_device(fused):
    m = module(fused=fused).to("meta")
    x = torch.empty(2, 5, 12, dtype=torch.float64, device="meta")
    output, weights = m(x, causal=True, return_weights=True)
    assert output.shape == (2, 5, 12) and weights.shape == (2, 3, 5, 5)
    with torch.device("meta"):
        assert MultiHeadAttention(12, 3, fused=fused).w_o.weight.is_meta
    assert m.split().w_q.weight.is_meta and m.to_torch().out_proj.weight.is_meta


def test_its_description_names_its_options():
    assert "n_heads=4, n_kv_heads=2, d_head=3" in repr(MultiHeadAttention(12, 4, n_kv_heads=2))


@pytest.mark.usefixtures("no_shape_check")
@FORMS
@pytest.mark.parametrize("options", [{}, {"causal": True, "return_weights": True}], ids=["plain", "all"])
def test_compiles_in_one_graph_for_varying_lengths(options, fused, compiled):
    m = module(n_kv_heads=1, fused=fused).eval()
    fast = compiled(m)
    for n in (5, 9, 9, 6):
        x = normal(2, n, 12)
        for got, right in zip(*(y if isinstance(y, tuple) else (y,) for y in (fast(x, **options), m(x, **options)))):
            close(got, right)


@pytest.mark.usefixtures("no_shape_check")
@FORMS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_exports_with_dynamic_batch_and_length(causal, masked, fused):
    m = module(dtype=torch.float32, fused=fused).eval()
    batch, n = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("n", min=2, max=512)

    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = m

        def forward(self, x, mask=None):
            return self.inner(x, mask=mask, causal=causal)

    def inputs(b, length):
        x = normal(b, length, 12, seed=b, dtype=torch.float32)
        return (x, padding_mask(torch.arange(b) % length + 1, length)) if masked else (x,)

    shapes = ({0: batch, 1: n}, {0: batch, 3: n}) if masked else ({0: batch, 1: n},)
    program = torch.export.export(Call(), inputs(3, 7), dynamic_shapes={"x": shapes[0], **({"mask": shapes[1]} if masked else {})})
    for b, length in ((3, 7), (5, 11), (2, 2)):
        close(program.module()(*inputs(b, length)), Call()(*inputs(b, length)), atol=1e-5)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("sizes", "options", "error", "says"),
    [
        ((512, 6), {}, ValueError, "d_model=512 is not divisible by n_heads=6"),
        ((10, 3), {}, ValueError, "d_model=10 is not divisible by n_heads=3"),
        ((8, 0), {}, ValueError, "n_heads=0; expected at least 1"),
        ((8, -2), {}, ValueError, "n_heads=-2; expected at least 1"),
        ((64, 8), {"n_kv_heads": 3}, ValueError, "n_heads=8 is not divisible by n_kv_heads=3"),
        ((64, 4), {"n_kv_heads": 8}, ValueError, "n_heads=4 is not divisible by n_kv_heads=8"),
        ((64, 4), {"n_kv_heads": 0}, ValueError, "n_kv_heads=0; expected at least 1"),
        ((0, 1), {}, ValueError, "d_model=0"),
        ((8, 2), {"d_head": 0}, ValueError, "d_head=0"),
        ((8, 2), {"d_context": -1}, ValueError, "d_context=-1"),
        ((8.0, 2), {}, TypeError, "d_model is a float; expected a whole number"),
        ((8, True), {}, TypeError, "n_heads is a bool"),
        ((8, 2), {"d_head": 4.0}, TypeError, "d_head is a float"),
        ((8, 2), {"fused": True, "d_context": 6}, ValueError, "fused=True needs d_context=6 to equal d_model=8"),
        ((8, 2), {"dropout": 1.5}, ValueError, "dropout=1.5; expected a number from 0 to 1"),
        ((8, 2), {"dropout": math.nan}, ValueError, "dropout=nan"),
        ((8, 2), {"dropout": True}, TypeError, "dropout is a bool"),
        ((8, 2), {"dropout": "0.1"}, TypeError, "dropout is a str"),
        ((8, 2), {"attend": "flash"}, TypeError, "attend is a str; expected a function"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused_at_construction(sizes, options, error, says):
    with pytest.raises(error, match=says):
        MultiHeadAttention(*sizes, **options)


def test_heads_that_do_not_add_up_to_d_model_are_fine_when_asked_for():
    m = module(10, 3, d_head=4)
    assert m(normal(2, 5, 10)).shape == (2, 5, 10)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("x", "context", "error", "says"),
    [
        (normal(2, 5, 11), None, ValueError, r"x has shape \(2, 5, 11\); expected \(batch, length, 12\)"),
        (normal(12), None, ValueError, r"x has shape \(12,\)"),
        (normal(1, 2, 5, 12), None, ValueError, r"x has shape \(1, 2, 5, 12\)"),
        (normal(2, 5, 12), normal(2, 5, 12), ValueError, r"context has shape \(2, 5, 12\); expected \(batch, length, 10\)"),
        (normal(2, 5, 12), normal(3, 5, 10), ValueError, r"x has shape \(2, 5, 12\) but context \(3, 5, 10\); their batches must agree"),
        (normal(2, 5, 12), normal(5, 10), ValueError, "their batches must agree"),
        (normal(2, 5, 12), normal(1, 5, 10), ValueError, "their batches must agree"),
        (normal(2, 5, 12, dtype=torch.float32), normal(2, 5, 10), TypeError, "x is torch.float32 but the module is torch.float64"),
        (normal(2, 5, 12), normal(2, 5, 10, dtype=torch.float16), TypeError, "context is torch.float16 but the module is torch.float64"),
        (torch.zeros(2, 5, 12, dtype=torch.int64), normal(2, 5, 10), TypeError, "x is torch.int64; expected floating point"),
        (normal(2, 5, 12).to("meta"), normal(2, 5, 10), ValueError, "x is on meta but the module is on cpu"),
        ([[0.0] * 12], normal(2, 5, 10), TypeError, "x is a list; expected a tensor"),
    ],
    ids=range(12),
)
def test_calls_that_do_not_fit_are_refused_in_both_modes(x, context, error, says):
    m = module(12, 3, d_context=10)
    for training in (True, False):
        with pytest.raises(error, match=says):
            m.train(training)(x, normal(2, 5, 10) if context is None else context)


@pytest.mark.usefixtures("no_shape_check")
def test_self_attention_of_a_module_made_for_another_width_is_refused():
    with pytest.raises(ValueError, match=r"context has shape \(2, 5, 12\); expected \(batch, length, 10\)"):
        module(12, 3, d_context=10)(normal(2, 5, 12))


@pytest.mark.usefixtures("no_shape_check")
def test_autocast_does_not_excuse_double_precision():
    m = module(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="x is torch.float64 but the module is torch.float32"):
        m(normal(2, 5, 12))
    with pytest.raises(TypeError, match="x is torch.float16 but the module is torch.float32"):
        m.to("meta")(normal(2, 5, 12, dtype=torch.float16).to("meta"))


@pytest.mark.usefixtures("no_shape_check")
def test_a_causal_that_is_no_flag_is_refused():
    with pytest.raises(TypeError, match="causal is a int"):
        module()(normal(2, 5, 12), causal=1)


def test_the_name_is_public():
    assert "MultiHeadAttention" in attention_course.__all__


@pytest.mark.parametrize("returned", ["tuple", "layout", "length"])
def test_an_attend_that_returns_something_else_is_refused(returned):
    def attend(q, k, v, mask=None, *, causal=False):
        output = fused_attention(q, k, v, mask, causal=causal)
        return {"tuple": (output, None), "layout": output.transpose(1, 2), "length": output[:, :, :1]}[returned]

    says = "attend returned a tuple" if returned == "tuple" else r"attend returned shape .*; expected \(batch, n_heads, n_q, d_head\), here \(2, 3, 5, 4\)"
    with pytest.raises((TypeError, ValueError), match=says):
        module(attend=attend)(normal(2, 5, 12))


@pytest.mark.parametrize("convert", ["fuse", "split", "to_torch"])
def test_a_bias_on_some_projections_only_is_not_lost_in_silence(convert):
    for missing in ("w_o", "w_q"):
        m = module()
        getattr(m, missing).bias = None
        with pytest.raises((TypeError, ValueError), match="bias"):
            getattr(m, convert)()


@pytest.mark.parametrize("convert", ["fuse", "split", "to_torch"])
def test_a_replaced_projection_is_not_converted_in_silence(convert):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 5 * super().forward(x)

    m = module()
    m.w_k = Scaled(12, 12).double()
    with pytest.raises(TypeError, match="w_k is a Scaled; only nn.Linear can be converted"):
        getattr(m, convert)()


def test_a_replaced_output_projection_of_torchs_is_not_converted_in_silence():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 5 * super().forward(x)

    theirs = torch_module()
    theirs.out_proj = Scaled(12, 12).double()
    with pytest.raises(TypeError, match="out_proj is a Scaled; only nn.Linear can be converted"):
        MultiHeadAttention.from_torch(theirs)


def test_conversions_draw_no_random_numbers_and_keep_what_is_frozen():
    m = module().requires_grad_(False)
    theirs = torch_module().requires_grad_(False)
    state = torch.get_rng_state()
    made = m.fuse(), m.fuse().split(), m.to_torch(), MultiHeadAttention.from_torch(theirs)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(p.requires_grad for other in made for p in other.parameters())
    assert all(p.requires_grad for p in module().fuse().parameters())
    with torch.device("meta"):
        assert m.fuse().w_o.weight.device.type == "cpu"


def test_an_attend_with_parameters_is_neither_shared_nor_cast():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, q, k, v, mask=None, *, causal=False):
            return self.factor * fused_attention(q, k, v, mask, causal=causal)

    m = module(attend=Attend()).half()
    m.attend.float()
    other = m.fuse().eval()
    assert other.attend is not m.attend and m.attend.training
    assert m.attend.factor.dtype == other.attend.factor.dtype == torch.float32
    attend = Attend()
    assert MultiHeadAttention.from_torch(torch_module(), attend=attend).attend is attend and attend.factor.dtype == torch.float32


@pytest.mark.usefixtures("no_shape_check")
def test_flags_are_true_or_false():
    for options in ({"fused": "no"}, {"bias": 1}):
        with pytest.raises(TypeError, match=f"{next(iter(options))} is a .*; expected True or False"):
            MultiHeadAttention(12, 3, **options)
    with pytest.raises(TypeError, match="return_weights is a str"):
        module()(normal(2, 5, 12), return_weights="no")


def test_an_adapter_may_stand_in_for_the_output_projection():
    m = module()
    before, m.w_o = m.w_o, nn.Sequential(m.w_o)
    x = normal(2, 5, 12)
    torch.testing.assert_close(m(x), before(fused_attention(*m.project(x)).transpose(1, 2).flatten(2)))
