"""Chapter 12: softmax and attention by tiles, against dense formulas and against faults reported elsewhere.

Lengths, masks, dtypes and gradients of attention stand in test_equivalence.py too; here is what only tiles have.
"""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from attention_course import (
    MultiHeadAttention,
    alibi_bias,
    alibi_slopes,
    causal_mask,
    combine_masks,
    fused_attention,
    kept_bytes,
    merge_partials,
    online_softmax,
    padding_mask,
    scaled_dot_product_attention,
    tiled_attention,
    tiling,
    window_mask,
)

inf = math.inf
HALVES = [torch.float16, torch.bfloat16]
BLOCKS = [(1, 1), (4, 3), (3, 5), (16, 16), (64, 64), (100, 7)]
unchecked = pytest.mark.usefixtures("no_shape_check")
each_block = pytest.mark.parametrize("blocks", BLOCKS, ids=str)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(b=2, h=4, kv=2, n_q=9, n_k=11, d=5, d_v=3, dtype=torch.float64):
    return normal(b, h, n_q, d, dtype=dtype), normal(b, kv, n_k, d, seed=1, dtype=dtype), normal(b, kv, n_k, d_v, seed=2, dtype=dtype)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def dense(q, k, v, mask=None, *, causal=False, window=None, scale=None, softcap=None, slopes=None):
    "Output and log-sum-exp with all scores at once, in the order in which the features act; autograd does the rest."
    served = [head * k.shape[1] // q.shape[1] for head in range(q.shape[1])]
    n_q, n_k = q.shape[-2], k.shape[-2]
    scores = q @ k[:, served].mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    distance = ((torch.arange(n_q)[:, None] + n_k - n_q) - torch.arange(n_k)).abs()
    if slopes is not None:
        scores = scores - slopes[..., None, None] * distance
    keep = torch.ones(n_q, n_k, dtype=torch.bool)
    if causal:
        keep = causal_mask(n_q, n_k)
    if window is not None:
        keep = keep & window_mask(n_q, n_k, window=window)
    if mask is not None:
        keep = combine_masks(mask, keep)
    if keep.dtype == torch.bool:
        scores = scores.masked_fill(~keep, -inf)
    else:
        scores = (scores + keep.to(scores)).masked_fill(keep == -inf, -inf)
    blind = (scores == -inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    lse = scores.masked_fill(blind, 0).logsumexp(-1).masked_fill(blind[..., 0], -inf)
    return weights @ v[:, served], lse


# --- the softmax --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 3, 7, 10, 64, 2**40])
@pytest.mark.parametrize("shape", [(10,), (2, 10), (2, 3, 1), (0, 4), (3, 0)], ids=str)
def test_the_online_softmax_is_the_softmax_for_every_block(shape, block):
    scores = 30 * normal(*shape)
    close(online_softmax(scores, block=block), scores.softmax(-1), atol=1e-15)


@pytest.mark.parametrize("block", [1, 3, 64])
def test_the_online_softmax_of_hidden_scores(block):
    scores = normal(4, 7)
    scores[0], scores[1, :5], scores[2, 3:] = -inf, -inf, -inf
    scores.requires_grad_()
    weights = online_softmax(scores, block=block)
    assert (weights[0] == 0).all() and (weights[1, :5] == 0).all()
    close(weights[1:], scores[1:].softmax(-1))
    (grad,) = torch.autograd.grad((weights * normal(4, 7, seed=1)).sum(), scores)
    (right,) = torch.autograd.grad((scores[1:].softmax(-1) * normal(4, 7, seed=1)[1:]).sum(), scores)
    assert (grad[0] == 0).all()
    close(grad[1:], right[1:])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_online_softmax_of_halves_is_rounded_once(dtype):
    scores = (300 * normal(5, 40)).to(dtype)
    assert torch.equal(online_softmax(scores, block=8), scores.float().softmax(-1).to(dtype))
    rising = torch.arange(2000.0).to(torch.float16)[None]  # each block has a new maximum, and exp overflows without it
    assert torch.equal(online_softmax(rising, block=16), rising.float().softmax(-1).half())


def test_the_online_softmax_passes_on_what_is_no_number():
    assert online_softmax(torch.tensor([0.0, math.nan, 1.0]), block=1).isnan().all()


# --- attention: every feature, every block ----------------------------------------------------------------------------

FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=3),
    "causal window": dict(causal=True, window=4),
    "zero scale": dict(scale=0.0),
    "negative scale": dict(scale=-0.4, causal=True),
    "softcap": dict(softcap=1.5),
    "softcap causal window": dict(softcap=0.7, causal=True, window=5),
    "alibi": dict(slopes=alibi_slopes(4).double()),
    "alibi for each sample": dict(slopes=normal(2, 4, seed=9).abs(), causal=True),
    "all": dict(softcap=2.0, slopes=alibi_slopes(4).double(), causal=True, window=6, scale=0.9),
}
MASKS = {
    "none": None,
    "padding": padding_mask([11, 6]),
    "for each head": normal(4, 1, 11, seed=8) > -0.3,
    "blind row": torch.arange(9)[:, None] != 4,
    "bias": normal(2, 1, 9, 11, seed=7),
    "a bias of rows": normal(9, 1, seed=7),
    "bias and -inf": normal(4, 9, 11, seed=7).masked_fill(normal(4, 9, 11, seed=6) < 0, -inf),
    "scalar": torch.tensor(0.5, dtype=torch.float64),
}


def combinations():
    "Every feature under every mask and with every block, every mask with every block; not all three at once."
    for i, feature in enumerate(FEATURES):
        for j, mask in enumerate(MASKS):
            yield feature, mask, BLOCKS[(i + j) % len(BLOCKS)]


@pytest.mark.parametrize(("feature", "mask", "blocks"), list(combinations()), ids=str)
def test_output_lse_and_gradients_are_those_of_the_dense_formula(feature, mask, blocks):
    options, mask = dict(FEATURES[feature]), MASKS[mask]
    learned = mask is not None and mask.is_floating_point()
    inputs = [x.requires_grad_() for x in qkv()] + ([mask.clone().requires_grad_()] if learned else [])
    rest = [] if learned or mask is None else [mask]
    output, lse = dense(*inputs, *rest, **options)
    options["alibi_slopes"] = options.pop("slopes", None)
    got, got_lse = tiled_attention(*inputs, *rest, **options, return_lse=True, block_q=blocks[0], block_k=blocks[1])
    close(got, output)
    close(got_lse, lse)
    seen = lse != -inf
    loss = (output * normal(*output.shape, seed=3)).sum() + (lse * normal(*lse.shape, seed=4))[seen].sum()
    got_loss = (got * normal(*output.shape, seed=3)).sum() + (got_lse * normal(*lse.shape, seed=4))[seen].sum()
    for a, b in zip(torch.autograd.grad(got_loss, inputs), torch.autograd.grad(loss, inputs)):
        close(a, b)


@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_by_finite_differences(feature):
    options = dict(FEATURES[feature])
    slopes = options.pop("slopes", None)
    options["alibi_slopes"] = None if slopes is None else slopes[..., :2] if slopes.ndim == 1 else slopes[:1, :2]
    inputs = [x.requires_grad_() for x in (*qkv(1, 2, 1, 3, 4, d=2, d_v=2), normal(2, 1, 4, seed=5))]
    run = lambda *x: tiled_attention(*x, **options, block_q=2, block_k=3)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradcheck(lambda *x: tiled_attention(*x, return_lse=True, block_k=2, softcap=2.0, window=9)[1], inputs)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3), (1, 2, 2, 2), (0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("masked", ["none", "full", "last axis", "scalar", "learned"])
def test_any_leading_axes(lead, masked):
    q, k, v = normal(*lead, 4, 8), normal(*lead, 6, 8, seed=1), normal(*lead, 6, 3, seed=2)
    masks = {"none": None, "full": normal(*lead, 4, 6, seed=3) > -0.5, "last axis": torch.arange(6) < 4, "scalar": torch.tensor(True)}
    masks["learned"] = normal(*lead[-1:], 4, 6, seed=3).requires_grad_()
    output, lse = tiled_attention(q, k, v, masks[masked], block_q=3, block_k=4, return_lse=True)
    assert output.shape == (*lead, 4, 3) and lse.shape == (*lead, 4)
    right = scaled_dot_product_attention(q, k, v, masks[masked])[0]
    close(output, right)
    if masked == "learned":
        (a,), (b,) = (torch.autograd.grad((x * normal(*x.shape, seed=5)).sum(), masks[masked]) for x in (output, right))
        close(a, b)


def test_slopes_without_an_axis_for_the_batch_and_with_more_axes():
    q, k, v = normal(4, 7, 3), normal(4, 9, 3, seed=1), normal(4, 9, 3, seed=2)
    right = fused_attention(q, k, v, alibi_bias(4, 7, 9, dtype=torch.float64))
    close(tiled_attention(q, k, v, alibi_slopes=alibi_slopes(4), block_k=4), right)
    q, k, v = (x.expand(2, 3, *x.shape) for x in (q, k, v))
    close(tiled_attention(q, k, v, alibi_slopes=alibi_slopes(4).expand(2, 3, 4), block_q=2), right.expand(2, 3, -1, -1, -1))


@unchecked
@pytest.mark.parametrize("scale", [0, 0.0, -0.7, 3, 1e-30, 10**30])
def test_every_finite_scale(scale):
    q, k, v = qkv(kv=4)
    for causal in (False, True):
        close(tiled_attention(q, k, v, causal=causal, scale=scale), dense(q, k, v, causal=causal, scale=float(scale))[0])


@unchecked
def test_a_module_attends_by_tiles():
    torch.manual_seed(0)
    theirs = MultiHeadAttention(12, 4, n_kv_heads=2).double()
    ours = MultiHeadAttention(12, 4, n_kv_heads=2, attend=tiled_attention).double()
    ours.load_state_dict(theirs.state_dict())
    x = normal(2, 70, 12)
    close(ours(x, mask=padding_mask([70, 3]), causal=True), theirs(x, mask=padding_mask([70, 3]), causal=True))


# --- what is computed, and what is kept --------------------------------------------------------------------------------


def visits(monkeypatch, *args, **options):
    "The tiles whose scores are computed, as (first query, first key)."
    seen, scores = [], tiling._scores
    monkeypatch.setattr(tiling, "_scores", lambda *a: (seen.append((a[4].start, a[5].start)), scores(*a))[1])
    output = tiled_attention(*args, **options)
    monkeypatch.undo()
    return seen, output


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=5), dict(causal=True, window=5), dict(causal=True, window=1)], ids=str)
@pytest.mark.parametrize(("n_q", "n_k"), [(16, 16), (13, 13), (3, 21), (21, 3), (1, 30), (10, 17)])
@pytest.mark.parametrize(("block_q", "block_k"), [(4, 4), (3, 5), (5, 2), (64, 4)])
def test_tiles_are_visited_if_and_only_if_something_is_visible(options, n_q, n_k, block_q, block_k, monkeypatch):
    q, k, v = qkv(1, 1, 1, n_q, n_k)
    keep = torch.ones(n_q, n_k, dtype=torch.bool)
    if "causal" in options:
        keep &= causal_mask(n_q, n_k)
    if "window" in options:
        keep &= window_mask(n_q, n_k, window=options["window"])
    expected = [(i, j) for i in range(0, n_q, block_q) for j in range(0, n_k, block_k) if keep[i : i + block_q, j : j + block_k].any()]
    seen, _ = visits(monkeypatch, q, k, v, block_q=block_q, block_k=block_k, **options)
    assert seen == expected


def test_tiles_between_packed_sequences_are_not_visited(monkeypatch):
    q, k, v = normal(1, 2, 9, 4), normal(1, 2, 9, 4, seed=1), normal(1, 2, 9, 4, seed=2)
    starts = int32(0, 4, 4, 9)
    seen, _ = visits(monkeypatch, q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, block_q=2, block_k=2)
    assert seen == [(0, 0), (2, 0), (2, 2), (4, 4), (6, 4), (6, 6), (8, 4), (8, 6), (8, 8)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_what_is_kept_for_the_gradients_grows_with_the_length_only(dtype):
    def kept(n):
        inputs = [normal(1, 2, n, 16, seed=s, dtype=dtype).requires_grad_() for s in range(3)]
        return kept_bytes(lambda: tiled_attention(*inputs, causal=True))

    assert kept(512) == 2 * kept(256)
    wide = max(4, torch.finfo(dtype).bits // 8)
    assert kept(512) == 2 * 512 * (16 * 3 * torch.finfo(dtype).bits // 8 + 17 * wide)  # q, k, v; output and log-sum-exp


def test_no_tensor_is_larger_than_inputs_or_tiles():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            result = f(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    self.size = max(self.size, x.untyped_storage().nbytes() // x.element_size())
            return result

    n, d = 150, 4
    q, k, v = (normal(1, 1, n, d, seed=s).requires_grad_() for s in range(3))
    mask = normal(1, 1, 1, n, seed=4).requires_grad_()
    with Largest() as largest:
        output = tiled_attention(q, k, v, mask, causal=True, block_q=32, block_k=16, alibi_slopes=torch.ones(1), softcap=3.0)
        output.sum().backward()
    assert largest.size == n * d


@pytest.mark.parametrize("kind", ["boolean", "additive", "causal"])
def test_what_is_hidden_may_be_so_large_that_its_score_overflows(kind):
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 1, 6, 6, dtype=torch.float32))
    large = k.detach().clone()
    large[..., 4:, :] = 1e30
    mask = torch.arange(6) < 4
    mask = {"boolean": mask, "additive": torch.zeros(6).masked_fill(~mask, -inf), "causal": None}[kind]
    run = lambda k: tiled_attention(1e20 * q, k, v, mask, causal=kind == "causal", block_k=5)[..., :4, :]
    output = run(large.requires_grad_())
    assert torch.equal(output, run(k))
    if kind == "causal":
        return  # the last queries do see those keys
    (grad,) = torch.autograd.grad(output.sum(), large)
    assert grad.isfinite().all() and (grad[..., 4:, :] == 0).all()


# --- packed sequences --------------------------------------------------------------------------------------------------

PACKS = {
    "alike": ([0, 4, 9, 10], [0, 4, 9, 10]),
    "other lengths": ([0, 2, 5, 6], [0, 7, 8, 12]),
    "more queries": ([0, 6, 9], [0, 2, 9]),
    "nobody here or there": ([0, 0, 5, 5], [0, 3, 3, 9]),
    "nobody at either end": ([0, 0, 3, 6, 6], [0, 0, 4, 5, 5]),
    "one": ([0, 7], [0, 9]),
    "none": ([0], [0]),
    "only empty ones": ([0, 0, 0], [0, 0, 0]),
}


@pytest.mark.parametrize("blocks", [(1, 1), (3, 5), (64, 64)], ids=str)
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(causal=True, window=2), dict(window=3, softcap=1.0), dict(causal=True, alibi=True)], ids=str)
@pytest.mark.parametrize("pack", PACKS)
def test_packed_sequences_are_each_by_itself(pack, options, blocks):
    starts, key_starts = PACKS[pack]
    q, k, v = (x.requires_grad_() for x in qkv(1, 4, 2, starts[-1], key_starts[-1]))
    options = dict(options)
    slopes = alibi_slopes(4).double() if options.pop("alibi", False) else None
    cu = dict(cu_seqlens_q=int32(*starts), cu_seqlens_k=int32(*key_starts))
    output, lse = tiled_attention(q, k, v, **cu, **options, alibi_slopes=slopes, return_lse=True, block_q=blocks[0], block_k=blocks[1])
    parts = [
        dense(q[..., a:b, :], k[..., c:d, :], v[..., c:d, :], **options, slopes=slopes) if d > c else (q[..., a:b, :3] * 0, torch.full((1, 4, b - a), -inf, dtype=torch.float64))
        for a, b, c, d in zip(starts, starts[1:], key_starts, key_starts[1:])
    ]
    assert output.shape == (1, 4, starts[-1], 3) and lse.shape == (1, 4, starts[-1])
    if not parts:
        return
    right, right_lse = (torch.cat(x, dim=axis) for x, axis in zip(zip(*parts), (2, 2)))
    close(output, right)
    close(lse, right_lse)
    upstream = normal(*output.shape, seed=3)
    for a, b in zip(torch.autograd.grad((output * upstream).sum(), (q, k, v)), torch.autograd.grad((right * upstream).sum(), (q, k, v), allow_unused=True)):
        close(a, torch.zeros_like(a) if b is None else b)


def test_packed_queries_without_keys_give_zeros():
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2, 5, 9))
    output, lse = tiled_attention(q, k, v, cu_seqlens_q=int32(0, 0, 5, 5), cu_seqlens_k=int32(0, 3, 3, 9), return_lse=True)
    assert (output == 0).all() and (lse == -inf).all()
    output.sum().backward()
    assert all((x.grad == 0).all() for x in (q, k, v))


def test_one_packed_sequence_does_not_leak_into_the_next():
    q, k, v = qkv(1, 2, 2, 9, 9)
    starts = int32(0, 4, 9)
    clean = tiled_attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, block_q=16, block_k=16)
    for x in (q, k, v):
        x[..., 4:, :] = math.nan
    output = tiled_attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, block_q=16, block_k=16)
    assert torch.equal(output[..., :4, :], clean[..., :4, :]) and output[..., 4:, :].isnan().all()


# --- nothing to see ----------------------------------------------------------------------------------------------------


@each_block
def test_rows_that_see_nothing_are_zero_also_in_gradients_and_their_lse_moves_nothing(blocks):
    q, k, v = (x.requires_grad_() for x in qkv(n_q=9, n_k=4))  # the first five stand before all keys
    output, lse = tiled_attention(q, k, v, causal=True, return_lse=True, block_q=blocks[0], block_k=blocks[1])
    assert (output[..., :5, :] == 0).all() and (lse[..., :5] == -inf).all() and lse[..., 5:].isfinite().all()
    stacked = torch.stack([lse, lse - 1]).logsumexp(0)  # whose gradient at -inf is no number
    (output.sum() + stacked.sum()).backward()
    assert (q.grad[..., :5, :] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=2), dict(softcap=1.0, return_lse=True)], ids=str)
@pytest.mark.parametrize(("b", "n_q", "n_k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 1, 0), (0, 0, 0)])
def test_empty_in_empty_out(b, n_q, n_k, options):
    q, k, v = (x.requires_grad_() for x in qkv(b=b, n_q=n_q, n_k=n_k))
    for mask in (None, torch.ones(n_q, n_k, dtype=torch.bool), torch.zeros(n_q, n_k, dtype=torch.float64, requires_grad=True)):
        output = tiled_attention(q, k, v, mask, **options)
        output, lse = output if isinstance(output, tuple) else (output, torch.zeros(b, 4, n_q))
        assert output.shape == (b, 4, n_q, 3) and lse.shape == (b, 4, n_q) and ((output == 0).all() or n_k)
        output.sum().backward()
        assert all((x.grad == 0).all() for x in (q, k))


def test_no_heads_at_all():
    q, k, v = qkv(h=0, kv=0)
    assert tiled_attention(q, k, v, causal=True).shape == (2, 0, 9, 3)


# --- dtypes and transforms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_computed_in_float32_with_every_feature(dtype):
    options = dict(causal=True, softcap=5.0, scale=0.3)
    q, k, v = qkv(n_q=70, n_k=90, d=16, d_v=8, dtype=dtype)
    output, lse = tiled_attention(q, k, v, **options, alibi_slopes=alibi_slopes(4), return_lse=True)
    right, right_lse = dense(q.double(), k.double(), v.double(), **options, slopes=alibi_slopes(4).double())
    assert output.dtype == dtype and lse.dtype == torch.float32
    close(lse.double(), right_lse, atol=5e-6)
    assert (output == right.to(dtype)).double().mean() > 0.98
    large = torch.full((1, 1, 2, 256), 20.0, dtype=dtype)  # q·k = 102,400, beyond float16
    assert torch.equal(tiled_attention(large, large, large), large)


def test_double_precision_is_kept_throughout():
    q, k, v = qkv(n_q=200, n_k=200)
    output, lse = tiled_attention(q, k, v, return_lse=True, alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    assert output.dtype == lse.dtype == torch.float64
    close(lse, dense(q, k, v, slopes=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))[1], atol=1e-13)


@pytest.mark.parametrize("cast", HALVES, ids=str)
def test_autocast_does_not_lower_the_precision_in_either_pass(cast):
    q, k, v = (x.requires_grad_() for x in qkv(dtype=torch.float32))
    with torch.autocast("cpu", cast):
        output = tiled_attention(q, k, v, causal=True)
        grads = torch.autograd.grad(output.square().sum(), (q, k, v))
    exact = dense(q.double(), k.double(), v.double(), causal=True)[0]
    assert output.dtype == torch.float32
    close(output.double(), exact, atol=1e-6)
    for a, b in zip(grads, torch.autograd.grad(exact.square().sum(), (q, k, v))):
        close(a, b, atol=1e-5)


def test_a_second_derivative_is_refused_and_says_who_has_it():
    q, k, v = (x.requires_grad_() for x in qkv())
    (grad,) = torch.autograd.grad(tiled_attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; scaled_dot_product_attention has"):
        grad.sum().backward()


@unchecked
def test_transforms_of_functions():
    q, k, v = normal(3, 2, 9, 4), normal(3, 2, 9, 4, seed=1), normal(3, 2, 9, 4, seed=2)
    run = lambda q, k, v: tiled_attention(q, k, v, causal=True, block_q=4, block_k=3)
    close(torch.func.vmap(run)(q, k, v), run(q, k, v))
    loss = lambda *x: run(*x).square().sum()
    close(torch.func.vmap(torch.func.grad(loss))(q, k, v), torch.func.grad(lambda *x: fused_attention(*x, causal=True).square().sum())(q, k, v))


@unchecked
@pytest.mark.parametrize("one", range(5))
def test_one_input_alone_may_be_mapped_over(one):
    "Whatever is written into must have room for all: with and without gradients, of which the others get the sum."
    inputs = [*qkv(n_q=9, n_k=9), normal(4, 9, 9, seed=5), normal(4, seed=6).abs()]
    stacked = torch.stack([inputs[one], 2 * inputs[one], 0 * inputs[one]])
    axes = tuple(0 if i == one else None for i in range(5))

    def run(q, k, v, mask, slopes):
        return tiled_attention(q, k, v, mask, alibi_slopes=slopes, causal=True, softcap=3.0, return_lse=True, block_q=4, block_k=3)

    def each(f):
        return [f(*(x if i == one else y for i, y in enumerate(inputs))) for x in stacked]

    for a, b in zip(torch.func.vmap(run, axes)(*inputs[:one], stacked, *inputs[one + 1 :]), zip(*each(run))):
        close(a, torch.stack(b))
    grad = torch.func.grad(lambda *x: run(*x)[0].square().sum(), argnums=(0, 1, 2, 3))
    for a, b in zip(torch.func.vmap(grad, axes)(*inputs[:one], stacked, *inputs[one + 1 :]), zip(*each(grad))):
        close(a, torch.stack(b))


@unchecked
def test_all_rows_of_the_jacobian_at_once():
    inputs = [*qkv(1, 2, 1, 3, 4, d=2, d_v=2), normal(2, 1, 4, seed=5)]
    ours, theirs = (torch.func.jacrev(f, argnums=(0, 1, 2, 3))(*inputs) for f in (tiled_attention, lambda *x: scaled_dot_product_attention(*x)[0]))
    for a, b in zip(ours, theirs):
        close(a, b)


def test_compiles_in_one_graph():
    "In an interpreter of its own: the wrappers that check shapes in tests cannot be traced."
    code = """
import torch
from attention_course import fused_attention, tiled_attention
run = torch.compile(lambda q, k, v: tiled_attention(q, k, v, causal=True, block_q=4, block_k=8), backend="eager", fullgraph=True)
q, k, v = (torch.randn(2, 3, 9, 4, requires_grad=True) for _ in range(3))
for f in (run, lambda q, k, v: fused_attention(q, k, v, causal=True)):
    output = f(q, k, v)
    print([round(x.square().sum().item(), 3) for x in (output, *torch.autograd.grad(output.square().sum(), (q, k, v)))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours, theirs = map(json.loads, done.stdout.split("\n")[:2])
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_the_same_numbers_each_time():
    q, k, v = (x.requires_grad_() for x in qkv(dtype=torch.float32, n_q=100, n_k=100))
    runs = [torch.autograd.grad(tiled_attention(q, k, v, causal=True).sum(), (q, k, v)) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))


def test_inputs_are_never_modified():
    inputs = [*qkv(), normal(9, 11, seed=5), alibi_slopes(4)]
    before = [x.clone() for x in inputs]
    for x in inputs[:4]:
        x.requires_grad_()
    tiled_attention(*inputs[:4], alibi_slopes=inputs[4], softcap=1.0).sum().backward()
    assert all(map(torch.equal, inputs, before))


# --- merging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[0, 11], [0, 4, 11], [0, 1, 2, 3, 11], [0, 0, 5, 5, 11, 11]], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_the_keys_merge_to_the_whole(cuts, causal):
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = causal_mask(9, 11) if causal else torch.ones(9, 11, dtype=torch.bool)
    mask[3] = False
    pairs = list(zip(cuts, cuts[1:]))
    parts = [tiled_attention(q, k[..., a:b, :], v[..., a:b, :], mask[:, a:b], return_lse=True) for a, b in pairs]
    output, lse = merge_partials(*zip(*parts))
    right, right_lse = dense(q, k, v, mask)
    close(output, right)
    close(lse, right_lse)
    assert (output[..., 3, :] == 0).all() and (lse[..., 3] == -inf).all()
    seen = right_lse != -inf
    loss, got = ((o * normal(*o.shape, seed=3)).sum() + l[seen].square().sum() for o, l in ((right, right_lse), (output, lse)))
    for a, b in zip(torch.autograd.grad(got, (q, k, v)), torch.autograd.grad(loss, (q, k, v))):
        close(a, b)


def test_the_gradient_of_merging_by_finite_differences_with_a_blind_part():
    outputs = [normal(2, 3, 4, seed=s).requires_grad_() for s in range(3)]
    lses = [normal(2, 3, seed=s + 3) for s in range(3)]
    lses[1][:, 0] = -inf
    hidden = [x == -inf for x in lses]
    free = [x.masked_fill(h, 0).requires_grad_() for x, h in zip(lses, hidden)]

    def run(*parts):
        return merge_partials(parts[:3], [x.masked_fill(h, -inf) for x, h in zip(parts[3:], hidden)])

    assert torch.autograd.gradcheck(run, (*outputs, *free))


def test_a_blind_part_weighs_nothing_whatever_it_holds_and_all_blind_is_zero():
    good, lse = normal(2, 3, 4).requires_grad_(), normal(2, 3)
    none = torch.full_like(lse, -inf).requires_grad_()
    rubbish = torch.full_like(good, math.nan)
    output, merged = merge_partials([rubbish, good, rubbish], [none, lse, none])
    close(output, good)
    close(merged, lse)
    output.sum().backward()
    assert torch.equal(good.grad, torch.ones_like(good)) and (none.grad == 0).all()
    output, merged = merge_partials([rubbish, rubbish], [none, none])
    assert (output == 0).all() and (merged == -inf).all()


def test_merging_is_safe_far_from_zero_and_in_halves():
    outputs, lses = [torch.tensor([[1.0]]), torch.tensor([[3.0]])], [torch.tensor([1000.0]), torch.tensor([1000.0])]
    output, lse = merge_partials(outputs, lses)
    assert output.item() == 2 and abs(lse.item() - 1000 - math.log(2)) < 1e-4
    output, lse = merge_partials([x.half() for x in outputs], lses)
    assert output.dtype == torch.float16 and lse.dtype == torch.float32 and output.item() == 2


def test_merging_in_any_order_and_grouping():
    parts = [(normal(5, 4, seed=s), normal(5, seed=s + 9)) for s in range(4)]
    whole = merge_partials(*zip(*parts))
    pairs = [merge_partials(*zip(*parts[2:])), merge_partials(*zip(*parts[:2]))]
    for a, b in zip(merge_partials(*zip(*pairs)), whole):
        close(a, b)


# --- a clear no --------------------------------------------------------------------------------------------------------

x = torch.zeros(1, 2, 5, 4)
cu = int32(0, 2, 5)
packed = dict(cu_seqlens_q=cu, cu_seqlens_k=cu)


@unchecked
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(causal=1), TypeError, "causal is a int; expected True or False"),
        (dict(return_lse=None), TypeError, "return_lse is a NoneType"),
        (dict(window=0), ValueError, "window=0; expected at least 1"),
        (dict(window=2.0), TypeError, "window is a float"),
        (dict(block_q=0), ValueError, "block_q=0; expected at least 1"),
        (dict(block_k=1.5), TypeError, "block_k is a float"),
        (dict(scale=math.nan), ValueError, "scale=nan"),
        (dict(scale=inf), ValueError, "scale=inf"),
        (dict(mask=torch.ones(5, 5).long()), TypeError, "mask is torch.int64; expected bool"),
        (dict(mask=torch.ones(4, 5)), ValueError, r"mask has shape \(4, 5\); it must broadcast to the scores' shape \(1, 2, 5, 5\)"),
        (dict(mask=torch.ones(5, 5, device="meta")), ValueError, "mask is on meta but q is on cpu"),
        (dict(softcap=0), ValueError, "softcap=0; expected a positive finite number"),
        (dict(softcap=-1.0), ValueError, "softcap=-1.0; expected a positive"),
        (dict(softcap=inf), ValueError, "softcap=inf; expected a positive finite number"),
        (dict(softcap=math.nan), ValueError, "softcap=nan"),
        (dict(softcap=1e300), ValueError, "softcap=1e\\+300; expected a positive finite number, 1e-30 to 1e30"),  # inf in float32
        (dict(softcap=5e-324), ValueError, "softcap=5e-324; expected a positive finite number, 1e-30 to 1e30"),  # 0 in float32
        (dict(softcap=True), TypeError, "softcap is a bool; expected a number"),
        (dict(softcap=torch.tensor(3.0)), TypeError, "softcap is a Tensor"),
        (dict(alibi_slopes=[0.5, 0.25]), TypeError, "alibi_slopes is list; expected a floating-point tensor"),
        (dict(alibi_slopes=torch.tensor([1, 2])), TypeError, "alibi_slopes is torch.int64; expected a floating-point tensor"),
        (dict(alibi_slopes=torch.ones(3)), ValueError, r"alibi_slopes has shape \(3,\); expected \(2,\) or \(1, 2\), one for each head"),
        (dict(alibi_slopes=torch.ones(2, 1)), ValueError, r"alibi_slopes has shape \(2, 1\)"),
        (dict(alibi_slopes=torch.ones(2, device="meta")), ValueError, "alibi_slopes is on meta but q is on cpu"),
        (dict(alibi_slopes=torch.ones(2, requires_grad=True)), ValueError, "alibi_slopes requires a gradient.*fused_attention"),
        (dict(cu_seqlens_q=cu), ValueError, "cu_seqlens_q is given and cu_seqlens_k is not"),
        (dict(cu_seqlens_k=cu), ValueError, "cu_seqlens_k is given and cu_seqlens_q is not"),
        (packed | dict(cu_seqlens_q=[0, 5]), TypeError, "cu_seqlens_q is list; expected a tensor of dtype int32"),
        (packed | dict(cu_seqlens_k=cu.long()), TypeError, "cu_seqlens_k is torch.int64; expected a tensor of dtype int32"),
        (packed | dict(cu_seqlens_k=cu[None]), ValueError, r"cu_seqlens_k has shape \(1, 3\); expected \(members \+ 1,\)"),
        (packed | dict(cu_seqlens_q=int32()), ValueError, r"cu_seqlens_q has shape \(0,\)"),
        (packed | dict(cu_seqlens_q=cu.to("meta")), ValueError, "cu_seqlens_q is on meta but q is on cpu"),
        (packed | dict(cu_seqlens_q=int32(0, 5)), ValueError, r"shapes \(2,\) and \(3,\)"),
        (packed | dict(cu_seqlens_q=int32(1, 2, 5)), ValueError, r"cu_seqlens_q is \[1, 2, 5\]; expected to rise from 0 to the total length, 5"),
        (packed | dict(cu_seqlens_k=int32(0, 2, 4)), ValueError, r"cu_seqlens_k is \[0, 2, 4\]"),
        (packed | dict(cu_seqlens_k=int32(0, 6, 5)), ValueError, r"cu_seqlens_k is \[0, 6, 5\]"),
        (packed | dict(mask=torch.ones(5, 5)), ValueError, "mask cannot be used with cu_seqlens_q.*fused_attention"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        tiled_attention(x, x, x, **options)


@unchecked
def test_starts_without_numbers_to_read_are_named():
    meta = [y.to("meta") for y in (x, cu)]
    with pytest.raises(ValueError, match="cu_seqlens_q is on meta or mapped over by vmap; its numbers must be readable"):
        tiled_attention(*meta[:1] * 3, cu_seqlens_q=meta[1], cu_seqlens_k=meta[1])
    with pytest.raises(ValueError, match="cu_seqlens_k is on meta or mapped over by vmap"):
        torch.func.vmap(lambda starts: tiled_attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=starts))(cu[None])


@unchecked
@pytest.mark.parametrize("lead", [(), (2,), (2, 2), (1, 1, 2)], ids=str)
def test_packed_sequences_need_a_batch_of_one(lead):
    q = torch.zeros(*lead, 5, 4)
    with pytest.raises(ValueError, match=r"with cu_seqlens_q it must be \(1, heads, total length, width\)"):
        tiled_attention(q, q, q, **packed)


@unchecked
def test_slopes_need_an_axis_for_heads():
    q = torch.zeros(5, 4)
    with pytest.raises(ValueError, match="q has no axis for heads"):
        tiled_attention(q, q, q, alibi_slopes=torch.ones(1))


def test_slopes_that_are_parameters_are_fine_where_nothing_is_learned():
    slopes = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        assert tiled_attention(x, x, x, alibi_slopes=slopes).shape == x.shape


@unchecked
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: online_softmax([1.0]), TypeError, "scores is list; expected a floating-point tensor"),
        (lambda: online_softmax(torch.tensor([1])), TypeError, "scores is torch.int64"),
        (lambda: online_softmax(torch.tensor(1.0)), ValueError, "scores is a scalar"),
        (lambda: online_softmax(torch.ones(3), block=0), ValueError, "block=0; expected at least 1"),
        (lambda: online_softmax(torch.ones(3), block=2.0), TypeError, "block is a float"),
        (lambda: merge_partials([], []), ValueError, "got 0 outputs and 0 lses; expected as many, and at least one"),
        (lambda: merge_partials([x], []), ValueError, "got 1 outputs and 0 lses"),
        (lambda: merge_partials([x, 1], [x[..., 0], x[..., 0]]), TypeError, r"outputs\[1\] is int; expected a floating-point tensor"),
        (lambda: merge_partials([x, x.double()], [x[..., 0], x[..., 0]]), TypeError, r"outputs\[1\] is torch.float64 but outputs\[0\] is torch.float32"),
        (lambda: merge_partials([x, x[..., :3]], [x[..., 0], x[..., 0]]), ValueError, r"outputs\[1\] has shape \(1, 2, 5, 3\)"),
        (lambda: merge_partials([x], [x]), ValueError, r"lses\[0\] has shape \(1, 2, 5, 4\)"),
        (lambda: merge_partials([x], [x[..., 0].to("meta")]), ValueError, r"lses\[0\] is on meta but outputs\[0\] is on cpu"),
        (lambda: merge_partials([x[0, 0, 0]], [x[0, 0, 0, 0]]), ValueError, r"outputs\[0\] has shape \(4,\)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_merged_or_normalised_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- faults reported elsewhere -----------------------------------------------------------------------------------------


@each_block
@pytest.mark.parametrize("backwards", [False, True])
def test_g12_fewer_queries_than_keys_and_g13_more_for_every_block(blocks, backwards):
    for n_q, n_k, rows in ((2, 5, [[0.25] * 4 + [0], [0.2] * 5]), (5, 2, [[0, 0]] * 3 + [[1, 0], [0.5, 0.5]])):
        q, k, v = torch.zeros(1, 1, n_q, 3), torch.zeros(1, 1, n_k, 3), torch.eye(n_k)[None, None]
        output, lse = tiled_attention(q, k, v, causal=True, return_lse=True, block_q=blocks[0], block_k=blocks[1])
        close(output[0, 0], torch.tensor(rows), atol=1e-7)
        seen = torch.tensor([sum(x > 0 for x in row) for row in rows])
        close(lse[0, 0], seen.float().log(), atol=1e-6)


@pytest.mark.parametrize("width", [16, 32, 33, 40, 64, 80, 96, 128, 192, 256])
def test_g65_every_width_is_used_to_its_last_channel(width):
    q, k, v = qkv(1, 2, 2, 20, 20, width, width)
    output = tiled_attention(q, k, v, block_q=8, block_k=8)
    close(output, dense(q, k, v)[0])
    for cut in (q, k, v):
        less = cut.clone()
        less[..., width // 2 :] = 0
        changed = [less if x is cut else x for x in (q, k, v)]
        assert (tiled_attention(*changed) - output).abs().max() > 1e-2


@pytest.mark.parametrize(("n", "block"), [*((n, block) for n in (1, 7, 15, 16, 17, 63, 64, 65, 127, 129) for block in (16, 64, 200)), (1000, 128)])
def test_g66_a_ragged_last_block_reads_nothing_behind_the_tensors(n, block):
    def inside(x):
        "The same numbers as a slice of a larger buffer that is full of NaN, of infinity after that."
        room = torch.full((*x.shape[:2], n + 70, x.shape[-1] + 3), math.nan, dtype=x.dtype)
        room[:, :, n + 30 :] = inf
        room[:, :, :n, : x.shape[-1]] = x
        return room[:, :, :n, : x.shape[-1]].detach()

    plain = [x.requires_grad_() for x in qkv(1, 2, 1, n, n, 8, 8)]
    padded = [inside(x).requires_grad_() for x in plain]
    for causal in (False, True):
        right = dense(*plain, causal=causal)[0]
        output = tiled_attention(*padded, causal=causal, block_q=block, block_k=block)
        close(output, right)
        upstream = normal(*output.shape, seed=5)
        for a, b in zip(torch.autograd.grad((output * upstream).sum(), padded), torch.autograd.grad((right * upstream).sum(), plain)):
            close(a, b)


@each_block
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 64), (16, 64), (17, 33), (64, 16)])
def test_g67_lengths_and_strides_of_queries_and_keys_may_differ(n_q, n_k, blocks):
    q, k, v = qkv(n_q=n_q, n_k=n_k)
    right = dense(q, k, v)[0]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    doubled = [torch.stack([x, x], dim=-2).flatten(-3, -2)[..., ::2, :] for x in (q, k, v)]
    for inputs in ((q, k, v), strided, doubled):
        close(tiled_attention(*inputs, block_q=blocks[0], block_k=blocks[1]), right)


def test_the_soft_cap_holds_large_scores_and_acts_before_the_mask():
    q, k = torch.tensor([[[[1e2]]]]), torch.tensor([[[[1e2], [-1e2]]]])
    v = torch.eye(2)[None, None]
    _, lse = tiled_attention(q, k, v, scale=1.0, softcap=50.0, return_lse=True)
    close(lse, torch.tensor([[[50.0]]]), atol=1e-5)  # scores of ±1e4 become ±50
    q, k, v = (x.requires_grad_() for x in qkv(n_q=11))
    output = tiled_attention(q, k, v, causal=True, softcap=1.0)  # a cap after the mask would let the future in, at -1
    for i in range(11):
        (grad,) = torch.autograd.grad(output[..., i, :].sum(), v, retain_graph=True)
        assert (grad[..., i + 1 :, :] == 0).all() and (grad[..., : i + 1, :] > 0).all()


@pytest.mark.parametrize("window", [1, 2, 11, 12, 100, 2**60])
def test_a_window_includes_both_its_ends(window):
    q, k, v = qkv(n_q=11)
    for causal in (False, True):
        close(tiled_attention(q, k, v, causal=causal, window=window, block_q=4, block_k=3), dense(q, k, v, causal=causal, window=window)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_bias_of_the_lowest_number_gives_no_nan(dtype):
    q, k, v = qkv(dtype=dtype)
    bias = torch.zeros(9, 11, dtype=dtype)
    bias[2], bias[3, 4:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    output = tiled_attention(q, k, v, bias, block_k=3)
    assert output.isfinite().all()
    if dtype != torch.float16:  # absorbed: all keys alike
        served = v[:, [0, 0, 1, 1]].double()
        close(output[..., 2, :].double(), served.mean(-2), atol=1e-2)


@pytest.mark.parametrize(("h", "kv"), [(6, 2), (6, 1), (6, 6), (4, 2)])
def test_key_heads_serve_groups_and_collect_the_gradients_of_their_group(h, kv):
    q, k, v = (x.requires_grad_() for x in qkv(h=h, kv=kv, n_q=20, n_k=20))
    output = tiled_attention(q, k, v, causal=True, block_q=8, block_k=8)
    full_k, full_v = (x.detach().repeat_interleave(h // kv, dim=1).requires_grad_() for x in (k, v))
    right = tiled_attention(q, full_k, full_v, causal=True)
    close(output, right)
    upstream = normal(*output.shape, seed=4)
    d_k, d_v = torch.autograd.grad((output * upstream).sum(), (k, v))
    full = torch.autograd.grad((right * upstream).sum(), (full_k, full_v))
    for a, b in zip((d_k, d_v), full):
        close(a, b.unflatten(1, (kv, h // kv)).sum(2))


# --- the memory that counts ----------------------------------------------------------------------------------------------


def test_what_is_alive_is_counted_once_and_until_nobody_holds_it():
    x = torch.ones(10, 10)
    with tiling._Live() as live:
        a = x + 1
        view = a[2:5].T
        a += 1  # in place: nothing new
        b = a.exp()
        del a
        assert live.alive() == 200  # the view holds the first
        del view, b
        c = (x * 2).sum()  # 100 for a moment, and then one
    assert live.most == 200 and c.item() == 200
    with tiling._Live() as live:
        (x + 1).exp()
        x + 1
    assert live.most == 200


def test_live_numbers_see_what_autograd_keeps():
    x = torch.ones(100, requires_grad=True)
    with tiling._Live() as live:
        y = x.exp().sum()  # exp is kept for the backward pass
        assert live.alive() == 101
        y.backward()


def test_the_fast_memory_refuses_what_does_not_fit_and_what_lies_outside():
    memory, slow = tiling._FastMemory(20), torch.arange(40.0).reshape(4, 10)
    with memory:
        a = memory.load(slow, slice(0, 1))
        b = memory.load(slow, slice(1, 3), slice(2, 7))
        with pytest.raises(MemoryError, match="21 numbers do not fit into a fast memory of 20"):
            a.sum()
        with pytest.raises(MemoryError):
            memory.load(slow, slice(0, 1))
        with pytest.raises(RuntimeError, match="not in fast memory"):
            a.add_(slow[0])
        with pytest.raises(RuntimeError, match="not in fast memory"):
            torch.add(a, other=slow[0])
        b += 1
        memory.store(b, slow, slice(0, 2), slice(0, 5))
        del b
        assert a.sum() == 45
    assert (memory.loaded, memory.stored) == (30, 10)  # what was refused was on its way, too
    assert slow[0, :5].tolist() == [13, 14, 15, 16, 17] and slow[1, :5].tolist() == [23, 24, 25, 26, 27]


@pytest.mark.parametrize(("n_q", "n_k"), [(12, 12), (13, 13), (7, 20), (20, 7)])
@pytest.mark.parametrize(("block_q", "block_k"), [(4, 4), (3, 5), (50, 1)])
def test_all_algorithms_give_right_numbers_and_the_traffic_that_is_counted_on_paper(n_q, n_k, block_q, block_k):
    d, d_v = 4, 3
    q, k, v = normal(n_q, d), normal(n_k, d, seed=1), normal(n_k, d_v, seed=2)
    right, _ = scaled_dot_product_attention(q, k, v)
    rows, columns = -(-n_q // block_q), -(-n_k // block_k)
    flash_1, flash_2, standard = (tiling._FastMemory(10_000) for _ in range(3))
    close(tiling._flash_1(flash_1, q, k, v, block_q, block_k), right)
    close(tiling._flash_2(flash_2, q, k, v, block_q, block_k), right)
    close(tiling._standard_attention(standard, q, k, v, block_q), right)
    state = n_q * (d_v + 2)
    assert flash_1.loaded == n_k * (d + d_v) + columns * (n_q * d + state) and flash_1.stored == columns * state
    assert flash_2.loaded == n_q * d + rows * n_k * (d + d_v) and flash_2.stored == n_q * d_v
    assert standard.loaded == n_q * d + rows * n_k * (d + d_v) + 2 * n_q * n_k and standard.stored == 2 * n_q * n_k + n_q * d_v


def test_the_first_version_survives_a_block_whose_scores_are_far_below():
    q, k, v = torch.full((2, 4), 30.0), torch.cat([torch.full((3, 4), -30.0), torch.full((3, 4), 30.0)]), normal(6, 3, dtype=torch.float32)
    for run in (tiling._flash_1, tiling._flash_2):
        close(run(tiling._FastMemory(1000), q, k, v, 2, 3), v[3:].mean(0).expand(2, 3), atol=1e-6)
