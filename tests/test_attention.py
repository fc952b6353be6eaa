"""Chapter 02: the readable attention and its entropy, against independent arithmetic and against faults reported elsewhere."""

import copy
import math
import pickle
import re

import pytest
import torch
import torch.nn.functional as F

from attention_course import (
    attention_entropy, flash_attention, flash_backend, fused_attention, scaled_dot_product_attention, tiled_attention,
)  # fmt: skip

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(b=2, h=3, n_q=5, n_k=7, d=8, d_v=6, dtype=torch.float64, n_kv_heads=None, seed=0):
    kv = h if n_kv_heads is None else n_kv_heads
    return normal(b, h, n_q, d, seed=seed, dtype=dtype), normal(b, kv, n_k, d, seed=seed + 1, dtype=dtype), normal(b, kv, n_k, d_v, seed=seed + 2, dtype=dtype)


def g01():
    "q, k, v of the reported cases, and the lower triangle that may be attended to."
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4, 8, dtype=torch.float64) for _ in range(3))
    return q, k, v, torch.ones(4, 4, dtype=torch.bool).tril()


def by_hand(q, k, v, keep=None, scale=None):
    "Plain Python in double precision, one number at a time: shares no code with the library or with torch's attention."
    lead, n_q, n_k = q.shape[:-2], q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    keep = torch.ones(*lead, n_q, n_k, dtype=torch.bool) if keep is None else keep.expand(*lead, n_q, n_k)
    flat = [x.double().reshape(-1, *x.shape[-2:]).tolist() for x in (q, k, v)] + [keep.reshape(-1, n_q, n_k).tolist()]
    outputs = []
    for queries, keys, values, seen in zip(*flat):
        for query, row in zip(queries, seen):
            scores = [scale * sum(a * b for a, b in zip(query, key)) for key, ok in zip(keys, row) if ok]
            top = max(scores, default=0)
            shares = [math.exp(s - top) for s in scores]
            visible = [value for value, ok in zip(values, row) if ok]
            outputs.append([sum(s * value[c] for s, value in zip(shares, visible)) / sum(shares) if shares else 0.0 for c in range(v.shape[-1])])
    return torch.tensor(outputs, dtype=torch.float64).reshape(*lead, n_q, v.shape[-1])


# --- right values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 17, 63, 64, 65, 127])
def test_equals_arithmetic_by_hand_in_every_dtype_and_length(n, dtype):
    q, k, v = qkv(1, 1, 3, n, 16, 5, dtype=dtype)
    output, weights = scaled_dot_product_attention(q, k, v)
    assert output.dtype == weights.dtype == dtype
    torch.testing.assert_close(output.double(), by_hand(q, k, v), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3), (1, 2, 2, 2)], ids=str)
def test_any_leading_axes(lead):
    q, k, v = normal(*lead, 4, 8), normal(*lead, 6, 8, seed=1), normal(*lead, 6, 3, seed=2)
    output, weights = scaled_dot_product_attention(q, k, v)
    assert output.shape == (*lead, 4, 3) and weights.shape == (*lead, 4, 6)
    torch.testing.assert_close(output, by_hand(q, k, v), atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", ["boolean", "additive"])
@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (7,), (5, 1), (2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7), (3, 1, 1), ()], ids=str)
def test_every_mask_shape_that_broadcasts(shape, form):
    q, k, v = qkv()
    keep = normal(*shape, seed=9) > -0.3
    mask = keep if form == "boolean" else torch.zeros(shape, dtype=torch.float64).masked_fill(~keep, -math.inf)
    output, weights = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(output, by_hand(q, k, v, keep), atol=1e-12, rtol=0)
    assert (weights[~keep.expand_as(weights)] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_an_additive_mask_of_any_float_dtype_is_added_to_the_scores(dtype):
    q, k, v = qkv(dtype=torch.float32)
    bias = normal(5, 7, seed=5).to(dtype)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), bias.double())
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, bias)[0].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
def test_grouped_heads_equal_explicit_repetition_and_so_do_gradients(n_kv_heads):
    q, k, v = qkv(h=6, n_kv_heads=n_kv_heads)
    grouped = [x.clone().requires_grad_() for x in (q, k, v)]
    full = [x.clone().requires_grad_() for x in (q, k, v)]
    index = torch.tensor([h * n_kv_heads // 6 for h in range(6)])
    a = scaled_dot_product_attention(*grouped)[0]
    b = scaled_dot_product_attention(full[0], full[1][:, index], full[2][:, index])[0]
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    a.square().sum().backward()
    b.square().sum().backward()
    for x, y in zip(grouped, full):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-11, rtol=0)


@pytest.mark.usefixtures("no_shape_check")  # an int is as good as a float
def test_scale_multiplies_the_scores():
    q, k, v = qkv()
    for scale in (0.0, 0.3, 2, -1.0):
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, scale=scale)[0], by_hand(q, k, v, scale=scale), atol=1e-12, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_by_finite_differences(masked):
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 3, 4, 3, 2))
    keep = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool) if masked else None
    assert torch.autograd.gradcheck(lambda *x: scaled_dot_product_attention(*x, keep), (q, k, v))
    assert torch.autograd.gradgradcheck(lambda *x: scaled_dot_product_attention(*x, keep)[0], (q, k, v))


def test_a_learned_additive_bias_receives_its_gradient():
    q, k, v = qkv(1, 1, 3, 4, 3, 2)
    bias = normal(3, 4, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(lambda b: scaled_dot_product_attention(q, k, v, b), (bias,))


def test_dropout_acts_on_the_output_and_not_on_the_returned_weights():
    q, k, v = qkv(1, 1, 4, 200, 4, 1)
    v = torch.ones_like(v)
    clean, weights = scaled_dot_product_attention(q, k, v)
    torch.manual_seed(0)
    runs = torch.stack([scaled_dot_product_attention(q, k, v, dropout_p=0.25)[0] for _ in range(300)])
    assert (runs != clean).any()
    torch.testing.assert_close(runs.mean(0), clean, atol=0.03, rtol=0)  # the rest is scaled up: same on average
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.25)[1], weights)
    assert (scaled_dot_product_attention(q, k, v, dropout_p=1.0)[0] == 0).all()


# --- awkward inputs -------------------------------------------------------------------------------------------------


def test_inputs_and_mask_are_never_modified():
    inputs = (*qkv(), torch.ones(5, 7, dtype=torch.bool).tril())
    before = [x.clone() for x in inputs]
    scaled_dot_product_attention(*inputs, dropout_p=0.5)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before))


def test_strides_do_not_matter():
    q, k, v = qkv(d=8, d_v=8)
    expected = scaled_dot_product_attention(q, k, v)[0]
    transposed = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    sliced = [torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v)]
    for strided in (transposed, sliced):
        assert not strided[0].is_contiguous()
        torch.testing.assert_close(scaled_dot_product_attention(*strided)[0], expected, atol=1e-12, rtol=0)


def test_expanded_inputs_and_masks():
    q, k, v = (x[:1].expand(4, -1, -1, -1) for x in qkv())
    mask = torch.ones(1, 7, dtype=torch.bool).expand(5, 7)
    output, _ = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(output, by_hand(q, k, v), atol=1e-12, rtol=0)


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_does_not_lower_the_precision_of_scores(cast):
    q, k, v = qkv(dtype=torch.float32)
    q, k = 20 * q, 20 * k  # products beyond the range of float16, and far beyond the precision of bfloat16
    with torch.autocast("cpu", cast):
        output, weights = scaled_dot_product_attention(q, k, v)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), by_hand(q, k, v), atol=1e-4, rtol=0)


def test_shapes_can_be_asked_of_the_meta_device():
    q, k, v = (x.to("meta") for x in qkv())
    output, weights = scaled_dot_product_attention(q, k, v, torch.ones(5, 7, dtype=torch.bool, device="meta"))
    assert output.shape == (2, 3, 5, 6) and weights.shape == (2, 3, 5, 7)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("masked", [False, True])
def test_compiles_in_one_graph_for_varying_lengths(masked, compiled):
    def f(q, k, v, mask):
        output, weights = scaled_dot_product_attention(q, k, v, mask)
        return output, attention_entropy(weights)

    fast = compiled(f)
    for n in (5, 9, 9, 6):
        q, k, v = qkv(n_q=n, n_k=n)
        mask = torch.ones(n, n, dtype=torch.bool).tril() if masked else None
        for a, b in zip(fast(q, k, v, mask), f(q, k, v, mask)):
            torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("no_shape_check")
def test_compiles_in_one_graph_for_a_scale_that_varies():
    q, k, v = qkv()
    torch._dynamo.reset()
    compiled = torch.compile(lambda s: scaled_dot_product_attention(q, k, v, scale=s)[0], backend="eager", fullgraph=True)
    for scale in (0.1, 0.7, 2.0):
        torch.testing.assert_close(compiled(scale), scaled_dot_product_attention(q, k, v, scale=scale)[0])


@pytest.mark.usefixtures("no_shape_check")
def test_maps_over_a_batch_with_vmap():
    q, k, v = qkv()
    mapped = torch.func.vmap(lambda *x: scaled_dot_product_attention(*x)[0])(q, k, v)
    torch.testing.assert_close(mapped, scaled_dot_product_attention(q, k, v)[0])


@pytest.mark.usefixtures("no_shape_check")
def test_exports_with_dynamic_batch_and_length():
    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return scaled_dot_product_attention(q, k, v)[0]

    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    axes = {0: batch, 2: length}
    exported = torch.export.export(Attend(), qkv(n_q=5, n_k=5), dynamic_shapes=(axes, axes, axes)).module()
    for b, n in ((1, 5), (3, 9), (2, 2)):
        inputs = qkv(b=b, n_q=n, n_k=n)
        torch.testing.assert_close(exported(*inputs), Attend()(*inputs))


def test_functions_copy_and_pickle():
    for f in (scaled_dot_product_attention, attention_entropy):
        assert copy.deepcopy(f) is f and pickle.loads(pickle.dumps(f)) is f


# --- a clear no -----------------------------------------------------------------------------------------------------

ok = torch.zeros(2, 3, 5, 8)
SHAPE_ERRORS = {
    "width": (ok, torch.zeros(2, 3, 5, 7), ok, r"same width.*\(2, 3, 5, 7\)"),
    "no width": (torch.zeros(2, 5, 0), torch.zeros(2, 5, 0), torch.zeros(2, 5, 4), r"at least 1"),
    "values too few": (ok, ok, torch.zeros(2, 3, 4, 8), r"k and v must agree"),
    "batch": (ok, torch.zeros(3, 3, 5, 8), torch.zeros(3, 3, 5, 8), r"q \(2, 3, 5, 8\), k \(3, 3, 5, 8\)"),
    "batch of three axes": (torch.zeros(4, 5, 8), torch.zeros(2, 5, 8), torch.zeros(2, 5, 8), r"q \(4, 5, 8\), k \(2, 5, 8\)"),
    "missing axis": (ok, torch.zeros(3, 5, 8), torch.zeros(3, 5, 8), r"k \(3, 5, 8\)"),
    "heads": (ok, torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8), r"multiple of k's heads"),
    "more key heads": (ok, torch.zeros(2, 6, 5, 8), torch.zeros(2, 6, 5, 8), r"multiple of k's heads"),
    "no key heads": (ok, torch.zeros(2, 0, 5, 8), torch.zeros(2, 0, 5, 8), r"multiple of k's heads"),
    "one axis": (torch.zeros(8), ok, ok, r"q has shape \(8,\)"),
}


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("case", SHAPE_ERRORS)
def test_wrong_shapes_are_named(case):
    q, k, v, message = SHAPE_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(q, k, v)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (ok.long(), "torch.int64; expected floating point"),
        (ok.bool(), "torch.bool; expected floating point"),
        (ok.to(torch.complex64), "torch.complex64; expected"),
        (ok.to(torch.float8_e4m3fn), "torch.float8_e4m3fn; expected floating point of 16, 32 or 64 bits"),
        (ok.double(), "they must agree"),
        (ok.half(), "they must agree"),
        ([[1.0]], "is a list; expected a tensor"),
        (None, "is a NoneType; expected a tensor"),
        (ok.numpy(), "is a ndarray; expected a tensor"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_dtypes_are_named(wrong, message, position):
    inputs = [ok, ok, ok]
    inputs[position] = wrong
    with pytest.raises(TypeError, match=message) as error:
        scaled_dot_product_attention(*inputs)
    assert re.match(r"[qkv] is ", str(error.value))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("attend", [scaled_dot_product_attention, fused_attention, tiled_attention, flash_attention, flash_backend])
def test_sparse_and_nested_tensors_are_named(attend):
    for position, name in enumerate(("q", "k", "v", "mask")[: 3 if attend is flash_backend else 4]):
        inputs = [normal(2, 5, 8)] * 3
        for wrong in (normal(2, 5, 8).to_sparse(), torch.nested.nested_tensor([normal(5, 8)]), torch.nested.nested_tensor([normal(5, 8)], layout=torch.jagged)):
            with pytest.raises(TypeError, match=rf"^{name} is a tensor of layout (torch.sparse_coo|nested); expected a dense one"):
                attend(*inputs[:position], wrong, *inputs[position + 1 :])
    starts = torch.tensor([0, 5], dtype=torch.int32)
    packed = {"cu_seqlens_q": starts.to_sparse(), "cu_seqlens_k": starts}
    for options in (packed, {"alibi_slopes": torch.ones(2).to_sparse()}) if attend in (tiled_attention, flash_attention) else ():
        with pytest.raises(TypeError, match=rf"^{next(iter(options))} is a tensor of layout torch.sparse_coo; expected a dense one"):
            attend(*[normal(1, 2, 5, 8)] * 3, **options)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_wrong_devices_are_named(position):
    inputs = [ok, ok, ok, torch.ones(5, 5, dtype=torch.bool)]
    inputs[position] = inputs[position].to("meta")
    with pytest.raises(ValueError, match="is on .* but q is on"):
        scaled_dot_product_attention(*inputs)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("shape", [(7, 5), (5, 7, 1), (2, 5, 7), (1, 2, 3, 5, 7), (3, 7), (0, 7)], ids=str)
def test_masks_that_do_not_broadcast_are_named(shape):
    with pytest.raises(ValueError, match=re.escape(f"mask has shape {shape}; it must broadcast to the scores' shape (2, 3, 5, 7)")):
        scaled_dot_product_attention(*qkv(), torch.ones(shape, dtype=torch.bool))


@pytest.mark.usefixtures("no_shape_check")
def test_a_mask_of_padding_without_its_axes_is_told_the_shape_it_needs():
    with pytest.raises(ValueError, match=r"a mask of padding has shape \(batch, 1, 1, n_k\)"):
        scaled_dot_product_attention(*qkv(), torch.ones(2, 7, dtype=torch.bool))


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(scale=math.inf), ValueError),
        (dict(scale=math.nan), ValueError),
        (dict(scale=10**400), ValueError),
        (dict(scale="1"), TypeError),
        (dict(scale=True), TypeError),
        (dict(scale=torch.tensor(0.5)), TypeError),
        (dict(dropout_p=True), TypeError),
        (dict(dropout_p=-0.1), ValueError),
        (dict(dropout_p=1.5), ValueError),
        (dict(dropout_p=math.nan), ValueError),
        (dict(mask=[[True]]), TypeError),
        (dict(mask=True), TypeError),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, error):
    with pytest.raises(error, match=next(iter(options))):
        scaled_dot_product_attention(*qkv(), **options)


# --- what a mask hides -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["boolean", "additive"])
def test_a_hidden_key_may_be_no_number_or_overflow(form):
    q, k, v, _ = g01()
    keep = torch.tensor([True, True, True, False])
    mask = keep if form == "boolean" else torch.zeros(4, dtype=torch.float64).masked_fill(~keep, -math.inf)
    clean, _ = scaled_dot_product_attention(q, k, v, mask)
    k2 = k.clone()
    for content in (math.nan, 1e308):  # the score is NaN; the score overflows. A hidden value has to be finite: 0 * NaN is NaN
        k2[..., 3, :] = content
        assert torch.equal(scaled_dot_product_attention(q, k2, v, mask)[0], clean)


def test_scores_beyond_the_range_of_float16():
    q = torch.full((2, 256), 20.0, dtype=torch.float16)  # q·k = 102,400 > 65,504
    output, weights = scaled_dot_product_attention(q, q, q)
    assert torch.equal(output, q) and (weights == 0.5).all()


# --- entropy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_g69_entropy_of_rows_with_zeros(dtype):
    rows = torch.tensor([[0.5, 0.5, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=dtype)
    expected = torch.tensor([math.log(2), 0, 0], dtype=torch.float64)
    entropy = attention_entropy(rows)
    assert entropy.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(entropy.double(), expected, atol=1e-7, rtol=0)
    assert not entropy[1:].signbit().any()  # 0, not -0


def test_g69_entropy_of_a_causal_map_counts_what_is_visible():
    zeros = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
    _, weights = scaled_dot_product_attention(zeros, zeros, zeros, torch.ones(4, 4, dtype=torch.bool).tril())
    expected = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64).log()
    torch.testing.assert_close(attention_entropy(weights)[0, 0], expected, atol=1e-12, rtol=0)


def test_entropy_stays_between_0_and_the_logarithm_of_the_count():
    for seed, scale in ((0, 0.01), (1, 1.0), (2, 100.0)):
        weights = (scale * normal(50, 9, seed=seed)).softmax(-1)
        entropy = attention_entropy(weights)
        assert (entropy >= 0).all() and (entropy <= math.log(9) + 1e-12).all()


def test_the_gradient_of_the_entropy_survives_zeros_and_is_right_elsewhere():
    scores = normal(3, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: attention_entropy(s.softmax(-1)), (scores,))
    q, k, v = (x.requires_grad_() for x in qkv())
    keep = torch.ones(5, 7, dtype=torch.bool).tril()
    attention_entropy(scaled_dot_product_attention(q, k, v, keep)[1]).sum().backward()
    assert q.grad.isfinite().all() and k.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (2, 0, 4), (0,)], ids=str)
def test_the_entropy_of_nothing(shape):
    entropy = attention_entropy(torch.zeros(shape))
    assert entropy.shape == shape[:-1] and (entropy == 0).all()


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (torch.tensor(1.0), ValueError, "scalar"),
        (torch.tensor([0.5, -0.5]), ValueError, "down to -0.5"),
        (torch.tensor([[0.5, 0.5], [3.0, 2.0]]), ValueError, r"sum to up to 5; .* \(are these scores\?\)"),
        (torch.ones(2, 2).to(torch.float8_e4m3fn), TypeError, "float8"),
        (torch.tensor([1, 0]), TypeError, "torch.int64"),
        ([0.5, 0.5], TypeError, "list"),
    ],
    ids=str,
)
def test_entropy_refuses_what_is_no_row_of_weights(weights, error, message):
    with pytest.raises(error, match=message):
        attention_entropy(weights)
