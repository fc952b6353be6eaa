"""Chapter 01: cells against torch's and against plain arithmetic, influence against torch's own Jacobian."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from attention_course import influence, lstm_cell, rnn_cell, unroll

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
LEADS = [(), (3,), (2, 3), (2, 1, 3)]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rnn_weights(d_in=5, d=4, dtype=torch.float64, blocks=1):
    return [normal(*s, seed=9 + i, dtype=dtype) / 2 for i, s in enumerate([(blocks * d, d_in), (blocks * d, d), (blocks * d,), (blocks * d,)])]


def rnn_inputs(*lead, d_in=5, d=4, dtype=torch.float64):
    return [normal(*lead, d_in, dtype=dtype), normal(*lead, d, seed=1, dtype=dtype), *rnn_weights(d_in, d, dtype)]


def lstm_inputs(*lead, d_in=5, d=4, dtype=torch.float64):
    state = (normal(*lead, d, seed=1, dtype=dtype), normal(*lead, d, seed=2, dtype=dtype))
    return [normal(*lead, d_in, dtype=dtype), state, *rnn_weights(d_in, d, dtype, 4)]


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def mixtures(x, h, w_ih, w_hh, b_ih, b_hh):
    "One row of inputs, one number of the result at a time."
    lists = [t.double().tolist() for t in (x, h, w_ih, w_hh, b_ih, b_hh)]
    x, h, w_ih, w_hh, b_ih, b_hh = lists
    return [sum(a * b for a, b in zip(x, u)) + sum(a * b for a, b in zip(h, w)) + p + q for u, w, p, q in zip(w_ih, w_hh, b_ih, b_hh)]


def rnn_by_hand(x, h, *weights):
    rows = zip(x.reshape(-1, x.shape[-1]), h.reshape(-1, h.shape[-1]))
    return torch.tensor([[math.tanh(z) for z in mixtures(a, b, *weights)] for a, b in rows], dtype=torch.float64).reshape(h.shape)


def lstm_by_hand(x, state, *weights):
    h, c = state
    d, hs, cs = h.shape[-1], [], []
    for a, b, old in zip(x.reshape(-1, x.shape[-1]), h.reshape(-1, d), c.double().reshape(-1, d).tolist()):
        z = mixtures(a, b, *weights)
        cell = [sigmoid(z[d + k]) * old[k] + sigmoid(z[k]) * math.tanh(z[2 * d + k]) for k in range(d)]
        cs.append(cell)
        hs.append([sigmoid(z[3 * d + k]) * math.tanh(cell[k]) for k in range(d)])
    return [torch.tensor(t, dtype=torch.float64).reshape(h.shape) for t in (hs, cs)]


# --- right values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_cells_equal_arithmetic_by_hand_in_every_dtype_with_any_leading_axes(lead, dtype):
    inputs = rnn_inputs(*lead, dtype=dtype)
    new = rnn_cell(*inputs)
    assert new.dtype == dtype and new.shape == inputs[1].shape
    torch.testing.assert_close(new.double(), rnn_by_hand(*inputs), atol=TOLERANCE[dtype], rtol=0)
    inputs = lstm_inputs(*lead, dtype=dtype)
    for got, want in zip(lstm_cell(*inputs), lstm_by_hand(*inputs)):
        assert got.dtype == dtype and got.shape == want.shape
        torch.testing.assert_close(got.double(), want, atol=2 * TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_cells_and_gradients_equal_torchs_cells(bias):
    x, h, c = normal(3, 5).requires_grad_(), normal(3, 4, seed=1).requires_grad_(), normal(3, 4, seed=2).requires_grad_()
    for module, ours, start in (
        (nn.RNNCell(5, 4, bias=bias, dtype=torch.float64), lambda *w: (rnn_cell(x, h, *w),), h),
        (nn.LSTMCell(5, 4, bias=bias, dtype=torch.float64), lambda *w: lstm_cell(x, (h, c), *w), (h, c)),
    ):
        weights, theirs = list(module.parameters()), module(x, start)
        theirs = theirs if isinstance(theirs, tuple) else (theirs,)
        leaves = [x, h, *weights] + ([c] if len(theirs) == 2 else [])
        mine = ours(*weights)
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
        got, want = (torch.autograd.grad(sum(t.sin().sum() for t in ts), leaves) for ts in (mine, theirs))
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("n", [1, 17, 64])
@pytest.mark.parametrize("kind", ["rnn", "lstm"])
def test_unrolled_cells_equal_torchs_layers_also_from_a_state_of_their_own(kind, n):
    x, h, c = normal(2, n, 5), normal(2, 4, seed=1), normal(2, 4, seed=2)
    if kind == "rnn":
        module, cell, start, theirs = nn.RNN(5, 4, batch_first=True, dtype=torch.float64), rnn_cell, h, h[None]
    else:
        module, cell, start, theirs = nn.LSTM(5, 4, batch_first=True, dtype=torch.float64), lstm_cell, (h, c), (h[None], c[None])
    outputs, last = unroll(cell, x, start, *module.parameters())
    wanted, final = module(x, theirs)
    torch.testing.assert_close(outputs, wanted, atol=1e-12, rtol=0)
    for a, b in zip(last if kind == "lstm" else (last,), final if kind == "lstm" else (final,)):
        torch.testing.assert_close(a, b[0], atol=1e-12, rtol=0)


def test_an_outputs_past_is_all_it_knows():
    x = normal(6, 5).requires_grad_()
    outputs, _ = unroll(rnn_cell, x, torch.zeros(4, dtype=torch.float64), *rnn_weights())
    (gradient,) = torch.autograd.grad(outputs[2].sum(), x)
    assert (gradient[3:] == 0).all() and (gradient[:3] != 0).any(-1).all()


def test_biases_may_be_left_out_one_by_one():
    x, h, w_ih, w_hh, b_ih, b_hh = rnn_inputs(3)
    for a, b in ((None, None), (b_ih, None), (None, b_hh)):
        zeros = [torch.zeros_like(b_ih) if t is None else t for t in (a, b)]
        torch.testing.assert_close(rnn_cell(x, h, w_ih, w_hh, a, b), rnn_cell(x, h, w_ih, w_hh, *zeros))
    x, state, w_ih, w_hh, b_ih, _ = lstm_inputs(3)
    for a, b in zip(lstm_cell(x, state, w_ih, w_hh, b_ih), lstm_cell(x, state, w_ih, w_hh, None, b_ih)):
        torch.testing.assert_close(a, b)


def test_any_function_of_input_and_state_can_be_unrolled():
    x = normal(2, 7, 3)
    sums, last = unroll(lambda x, s: s + x, x, torch.zeros(2, 3, dtype=torch.float64))
    torch.testing.assert_close(sums, x.cumsum(1))
    torch.testing.assert_close(last, x.sum(1))


def test_gradients_by_finite_differences():
    inputs = [t.requires_grad_() for t in rnn_inputs(2)]
    assert torch.autograd.gradcheck(rnn_cell, inputs) and torch.autograd.gradgradcheck(rnn_cell, inputs)
    x, (h, c), *weights = lstm_inputs(2)
    leaves = [t.requires_grad_() for t in (x, h, c, *weights)]
    assert torch.autograd.gradcheck(lambda x, h, c, *w: lstm_cell(x, (h, c), *w), leaves)
    text = normal(4, 5, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(lambda text, h, *w: unroll(rnn_cell, text, h[0], *w)[0], [text, *inputs[1:]])


# --- awkward inputs -------------------------------------------------------------------------------------------------


def test_inputs_are_never_modified():
    x, (h, c), *weights = lstm_inputs(3)
    before = [t.clone() for t in (x, h, c, *weights)]
    lstm_cell(x, (h, c), *weights)
    unroll(lstm_cell, x[:, None], (h, c), *weights)
    assert all(torch.equal(a, b) for a, b in zip((x, h, c, *weights), before))
    inputs = rnn_inputs(3)
    before = [t.clone() for t in inputs]
    rnn_cell(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before))


def test_empty_in_empty_out():
    inputs = rnn_inputs(0)
    assert rnn_cell(*inputs).shape == (0, 4)
    assert all(t.shape == (0, 4) for t in lstm_cell(*lstm_inputs(0)))
    outputs, state = unroll(rnn_cell, normal(0, 6, 5), normal(0, 4), *rnn_weights())
    assert outputs.shape == (0, 6, 4) and state.shape == (0, 4)
    h, c = normal(2, 4), normal(2, 4, seed=1)  # no positions: the state stays
    outputs, state = unroll(lstm_cell, normal(2, 0, 5), (h, c), *rnn_weights(blocks=4))
    assert outputs.shape == (2, 0, 4) and state[0] is h and state[1] is c
    outputs, state = unroll(rnn_cell, normal(0, 5), h[0], *rnn_weights())
    assert outputs.shape == (0, 4) and torch.equal(state, h[0])


def test_strides_do_not_matter():
    x, h, *weights = rnn_inputs(3)
    strided = [t.T.contiguous().T if t.ndim == 2 else torch.stack([t, t], -1)[..., 0] for t in (x, h, *weights)]
    assert not strided[0].is_contiguous()
    torch.testing.assert_close(rnn_cell(*strided), rnn_cell(x, h, *weights), atol=1e-12, rtol=0)
    torch.testing.assert_close(rnn_cell(x[:1].expand(3, -1), h[:1].expand(3, -1), *weights), rnn_cell(x[:1], h[:1], *weights).expand(3, -1))


def test_large_mixtures_saturate_and_stay_finite():
    x, h, *weights = rnn_inputs(3)
    assert (rnn_cell(1e6 * x, h, *weights).abs() <= 1).all()
    new_h, new_c = lstm_cell(1e6 * lstm_inputs(3)[0], *lstm_inputs(3)[1:])
    assert new_h.isfinite().all() and new_c.isfinite().all()


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16], ids=str)
def test_under_autocast_a_state_keeps_its_dtype_so_that_a_network_can_be_unrolled(cast):
    x, h = normal(2, 9, 5, dtype=torch.float32), torch.zeros(2, 4)
    with torch.autocast("cpu", cast):
        outputs, _ = unroll(rnn_cell, x, h, *rnn_weights(dtype=torch.float32))
        gated, (_, c) = unroll(lstm_cell, x, (h, h), *rnn_weights(dtype=torch.float32, blocks=4))
    assert outputs.dtype == gated.dtype == c.dtype == torch.float32
    torch.testing.assert_close(outputs, unroll(rnn_cell, x, h, *rnn_weights(dtype=torch.float32))[0], atol=0.1, rtol=0)


def test_shapes_can_be_asked_of_the_meta_device():
    x, (h, c), *weights = lstm_inputs(2)
    new = lstm_cell(x.to("meta"), (h.to("meta"), c.to("meta")), *(w.to("meta") for w in weights))
    assert all(t.shape == (2, 4) and t.is_meta for t in new)


@pytest.mark.usefixtures("no_shape_check")
def test_cells_compile_in_one_graph_for_varying_batches(compiled):
    fixed = rnn_weights(5, 4)
    fast = compiled(lambda x, h, c, *w: (rnn_cell(x, h, *fixed), *lstm_cell(x, (h, c), *w)))
    for batch in (2, 5, 7, 7):
        x, (h, c), *weights = lstm_inputs(batch)
        for a, b in zip(fast(x, h, c, *weights), (rnn_cell(x, h, *fixed), *lstm_cell(x, (h, c), *weights))):
            torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("no_shape_check")
def test_an_unrolled_network_compiles_in_one_graph():
    torch._dynamo.reset()
    x, h, weights = normal(2, 6, 5), normal(2, 4, seed=1), rnn_weights()
    compiled = torch.compile(lambda x, h: unroll(rnn_cell, x, h, *weights), backend="eager", fullgraph=True)
    for a, b in zip(compiled(x, h), unroll(rnn_cell, x, h, *weights)):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("no_shape_check")
def test_maps_over_a_batch_with_vmap():
    x, h, *weights = rnn_inputs(3)
    torch.testing.assert_close(torch.func.vmap(lambda x, h: rnn_cell(x, h, *weights))(x, h), rnn_cell(x, h, *weights))


@pytest.mark.usefixtures("no_shape_check")
def test_exports_with_a_dynamic_batch():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(rnn_weights(blocks=4))

        def forward(self, x, h, c):
            return lstm_cell(x, (h, c), *self.weights)

    x, (h, c), *_ = lstm_inputs(3)
    axes = {0: torch.export.Dim("batch")}
    exported = torch.export.export(Step(), (x, h, c), dynamic_shapes=(axes, axes, axes)).module()
    x, (h, c), *_ = lstm_inputs(6)
    for a, b in zip(exported(x, h, c), Step()(x, h, c)):
        torch.testing.assert_close(a, b)


def test_functions_copy_and_pickle():
    for f in (rnn_cell, lstm_cell, unroll, influence):
        assert copy.deepcopy(f) is f and pickle.loads(pickle.dumps(f)) is f


# --- a clear no -----------------------------------------------------------------------------------------------------

SHAPE_ERRORS = {
    "state of another width": ({"h": normal(3, 6)}, r"h has shape \(3, 6\); with x \(3, 5\) and w_hh \(4, 4\) it must have \(3, 4\)"),
    "state of another batch": ({"h": normal(2, 4)}, r"h has shape \(2, 4\).*must have \(3, 4\)"),
    "state without the batch": ({"h": normal(4)}, r"h has shape \(4,\).*must have \(3, 4\)"),
    "input of another width": ({"x": normal(3, 6)}, r"w_ih has shape \(4, 5\); with x \(3, 6\).*it must have \(4, 6\)"),
    "input transposed": ({"w_ih": normal(5, 4)}, r"w_ih has shape \(5, 4\).*must have \(4, 5\)"),
    "state matrix not square": ({"w_hh": normal(4, 3)}, r"x has shape \(3, 5\) and w_hh \(4, 3\); expected \(\.\.\., d_in\) and \(d, d\)"),
    "state matrix with one axis": ({"w_hh": normal(4)}, r"w_hh \(4,\)"),
    "gates in a plain cell": ({"w_hh": normal(16, 4)}, r"w_hh \(16, 4\); expected"),
    "scalar input": ({"x": normal()}, r"x has shape \(\)"),
    "bias": ({"b_ih": normal(5)}, r"b_ih has shape \(5,\).*must have \(4,\)"),
    "second bias": ({"b_hh": normal(1, 4)}, r"b_hh has shape \(1, 4\).*must have \(4,\)"),
}


def rnn_named(**changes):
    return dict(zip(("x", "h", "w_ih", "w_hh", "b_ih", "b_hh"), rnn_inputs(3))) | changes


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("case", SHAPE_ERRORS)
def test_wrong_shapes_are_named(case):
    changes, message = SHAPE_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        rnn_cell(**rnn_named(**changes))


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": (normal(3, 4), normal(3, 5))}, r"c has shape \(3, 5\).*must have \(3, 4\)"),
        ({"state": (normal(2, 4), normal(3, 4))}, r"h has shape \(2, 4\).*must have \(3, 4\)"),
        ({"w_hh": normal(4, 4)}, r"w_hh \(4, 4\); expected \(\.\.\., d_in\) and \(4 \* d, d\)"),
        ({"w_ih": normal(4, 5)}, r"w_ih has shape \(4, 5\).*must have \(16, 5\)"),
        ({"b_ih": normal(4)}, r"b_ih has shape \(4,\).*must have \(16,\)"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_shapes_of_an_lstm_are_named(changes, message):
    given = dict(zip(("x", "state", "w_ih", "w_hh", "b_ih", "b_hh"), lstm_inputs(3))) | changes
    with pytest.raises(ValueError, match=message):
        lstm_cell(**given)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("name", ["x", "h", "w_ih", "w_hh", "b_ih", "b_hh"])
def test_wrong_types_dtypes_and_devices_are_named(name):
    good = rnn_named()
    with pytest.raises(TypeError, match=f"{name} is a list; expected a tensor"):
        rnn_cell(**good | {name: good[name].tolist()})
    with pytest.raises(TypeError, match=f"{name} is torch.int64; expected floating point"):
        rnn_cell(**good | {name: good[name].long()})
    with pytest.raises(TypeError, match=r"is torch.float\d\d but x is torch.float\d\d; they must agree"):
        rnn_cell(**good | {name: good[name].float()})
    with pytest.raises(ValueError, match="is on .* but x is on"):
        rnn_cell(**good | {name: good[name].to("meta")})


@pytest.mark.usefixtures("no_shape_check")
def test_an_lstm_asks_for_the_pair_of_its_states():
    x, (h, c), *weights = lstm_inputs(3)
    for state in (h, (h,), (h, c, c), None):
        with pytest.raises(TypeError, match=r"state is .*; expected the pair \(h, c\)"):
            lstm_cell(x, state, *weights)
    with pytest.raises(TypeError, match="c is a NoneType; expected a tensor"):
        lstm_cell(x, (h, None), *weights)


@pytest.mark.usefixtures("no_shape_check")
def test_unroll_asks_for_a_sequence():
    for x in (normal(5), [[1.0]], None):
        with pytest.raises(ValueError, match=r"expected a tensor of shape \(\.\.\., n, d_in\)"):
            unroll(rnn_cell, x, normal(4), *rnn_weights())
    with pytest.raises(ValueError, match=r"h has shape \(3, 4\)"):  # the cell speaks for itself
        unroll(rnn_cell, normal(2, 6, 5), normal(3, 4), *rnn_weights())


# --- influence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_influence_is_the_size_of_torchs_jacobian(dtype):
    weights = rnn_weights(dtype=dtype)
    w_q = normal(5, 3, dtype=dtype)
    functions = {
        "recurrent": lambda x: unroll(rnn_cell, x, x.new_zeros(4), *weights)[0],
        "attention": lambda x: (x @ w_q @ (x @ w_q).T).softmax(-1) @ x,
        "one number": lambda x: x.sin().sum(-1, keepdim=True).cumsum(0),
    }
    x = normal(7, 5, seed=3, dtype=dtype)
    for f in functions.values():
        jacobian = torch.autograd.functional.jacobian(lambda x: f(x)[-1], x)  # (d_out, n, d)
        found = influence(f, x)
        assert found.dtype == torch.float64 and found.shape == (7,) and not found.requires_grad
        torch.testing.assert_close(found, jacobian.double().norm(dim=(0, 2)), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_influence_works_for_torchs_layers_and_leaves_their_gradients_alone():
    rnn, x = nn.RNN(5, 4), normal(6, 5, dtype=torch.float32)
    found = influence(lambda x: rnn(x)[0], x)
    assert (found > 0).all()
    assert all(p.grad is None for p in rnn.parameters()) and x.grad is None and not x.requires_grad


def test_positions_that_are_ignored_have_no_influence():
    x = normal(5, 3)
    found = influence(lambda x: x.flip(0), x).tolist()
    assert math.isclose(found[0], math.sqrt(3)) and found[1:] == [0, 0, 0, 0]
    assert influence(lambda x: torch.ones(5, 2), x).tolist() == [0] * 5  # nothing depends on x
    weight = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)
    assert influence(lambda x: torch.zeros_like(x) @ weight, x).tolist() == [0] * 5  # on something, but not on x


def test_influence_can_be_asked_for_where_gradients_are_off_and_of_leaves():
    x = normal(4, 3).requires_grad_()
    with torch.no_grad():
        found = influence(lambda x: 2 * x.cumsum(0), x)
    torch.testing.assert_close(found, torch.full((4,), 2 * math.sqrt(3), dtype=torch.float64))
    assert x.grad is None


def test_an_influence_too_small_for_the_squares_of_float32_is_still_seen():
    x = torch.ones(2, 1)
    found = influence(lambda x: torch.stack([x[0], 1e-30 * x[0] + x[1]]), x)
    assert found[0] == pytest.approx(1e-30, rel=1e-5, abs=0)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("f", "x", "error", "message"),
    [
        (lambda x: x, [[1.0]], TypeError, "x is a list; expected a floating-point tensor"),
        (lambda x: x, torch.ones(3, 2).long(), TypeError, "x is torch.int64"),
        (lambda x: x, torch.ones(1, 3, 2), ValueError, r"x has shape \(1, 3, 2\); expected \(n, d\)"),
        (lambda x: x, torch.ones(0, 2), ValueError, r"x has shape \(0, 2\); expected \(n, d\), at least one position"),
        (lambda x: x[-1], torch.ones(3, 2), ValueError, r"f\(x\) is \(2,\) for x \(3, 2\); expected \(3, d_out\)"),
        (lambda x: x[:2], torch.ones(3, 2), ValueError, r"f\(x\) is \(2, 2\)"),
        (lambda x: (x, x), torch.ones(3, 2), ValueError, r"f\(x\) is a tuple"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_influence_refuses_what_has_no_last_output(f, x, error, message):
    with pytest.raises(error, match=message):
        influence(f, x)


def test_influence_under_inference_mode_and_beyond_the_range_of_squares():
    expected = torch.full((3,), 2**0.5, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(influence(lambda x: x.cumsum(0), torch.ones(3, 2, dtype=torch.float64)), expected)
    for factor in (1e-200, 1e200):  # whose squares float64 cannot hold
        faint = influence(lambda x, factor=factor: x.cumsum(0) * factor, torch.ones(3, 2, dtype=torch.float64))
        torch.testing.assert_close(faint / factor, expected)
