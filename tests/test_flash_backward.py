"""Chapter 14: gradients of `flash_attention`, attention of few queries to many keys, and all that an operator of torch must bear.

Right is what closed formulas and autograd say in float64. What chapter 13's kernel computes stands in test_flash_attention.py.
"""

import copy
import math
import os
import subprocess
import sys
from functools import partial
from itertools import cycle, product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from attention_course import (
    flash_attention, flash_backend, flash_backward, flash_forward, padding_mask, tiled_attention,
)  # fmt: skip
from attention_course.flash_backward import _TILES_BACK, _TILES_SPLIT, _few, _split_plan, _tile_back
from attention_course.multi_head import MultiHeadAttention
from attention_course.transformer import KVCache, Transformer, TransformerConfig
from kernels import (
    CAPS, DEVICE, DTYPES, KEEPS, LAYOUTS, LONG, PACKS, SCALES, SEES, SLOPES, TMA,
    each_case, force, keep_of, kernel, lay, launches, needs_triton, reference, slopes_of, starts_of, unwritten_memory_is_nan,
)  # fmt: skip
from variants import draw, pairwise

pytestmark = [needs_triton, pytest.mark.usefixtures("unwritten_memory_is_nan")]
# Relative to the largest number or to 1. Halves are rounded in the output, in the weights and in the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SMALL = (16, 16, 4, 2)
BOTH = dict(keys=SMALL, queries=SMALL)


def tensors(b=1, h=2, kv=None, n_q=20, n_k=None, d=16, d_v=None, dtype=torch.float32, grad=True):
    "q, k, v that need gradients, and gradients that arrive at output and log-sum-exp."
    n_k, kv, d_v = n_k or n_q, kv or h, d_v or d
    q, k, v, d_output = (
        draw(*shape, seed=seed, dtype=dtype).to(DEVICE)
        for seed, shape in enumerate([(b, h, n_q, d), (b, kv, n_k, d), (b, kv, n_k, d_v), (b, h, n_q, d_v)])
    )
    return *(x.requires_grad_(grad) for x in (q, k, v)), d_output, draw(b, h, n_q, seed=4, dtype=torch.float32).to(DEVICE)


def right_gradients(q, k, v, grads, **asked):
    "Of output and log-sum-exp, whichever has a gradient that arrives."
    inputs = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    pairs = [(out, grad.cpu().double()) for out, grad in zip(reference(*inputs, **asked), grads) if grad is not None]
    outputs, arriving = zip(*pairs)
    return torch.autograd.grad(outputs, inputs, arriving, allow_unused=True, materialize_grads=True)


def check(found, right, dtype=torch.float32, factor=1):
    assert found.dtype == dtype and found.shape == right.shape
    if right.numel():
        error = (found.detach().cpu().double() - right.detach()).abs().max() / right.abs().max().clamp(min=1)
        assert error < factor * TOLERANCE[dtype], error


# --- the feature matrix ----------------------------------------------------------------------------------------------

LENGTHS = ((1, 1), (32, 32), (33, 33), (2, 5), (5, 2), (17, 40), (40, 17))
HEADS = ((1, 1, 1), (2, 2, 2), (1, 4, 2), (1, 3, 1))  # batch, heads, key/value heads
WIDTHS = ((16, 16), (8, 8), (20, 20), (16, 24), (24, 8), (1, 16))
ARRIVES = ("plain", "one number for all", "columns apart", "part of a larger one")  # the gradient
LOSS = ("output", "both", "log-sum-exp")
WANT = ("qkv", "q", "k", "v", "kv", "qk", "qv")
TALL, WIDE = (32, 16, 4, 2), (16, 32, 4, 2)
TILES = (None, (SMALL, SMALL), (WIDE, TALL), (TALL, WIDE))  # of the kernel of keys and that of queries
FACTORS = (LENGTHS, HEADS, WIDTHS, DTYPES, SEES, KEEPS, CAPS, SLOPES, SCALES, LAYOUTS, ARRIVES, LOSS, WANT, TMA, TILES)
CASES = pairwise(FACTORS)
if LONG:  # other values side by side
    for turn in (1, 2):
        CASES = CASES + pairwise(tuple(f[turn % len(f) :] + f[: turn % len(f)] for f in FACTORS))
    rest = (None, None, None, None, "plain", "plain", "both", "qkv")
    CASES += [((150, 150), (1, 2, 1), (16, 16), *few, *rest, tma, None) for few in product(DTYPES, SEES) for tma in TMA]


@each_case(CASES)
def test_gradients_equal_those_of_the_closed_formula(case, monkeypatch, launches):
    (n_q, n_k), (b, h, kv), (d, d_v), dtype, (causal, window), kept, cap, slopes, scale, layout, arrives, loss, want, *how = case
    tma, tiles = how
    q, k, v, d_output, d_lse = tensors(b, h, kv, n_q, n_k, d, d_v, dtype, grad=False)
    q, k, v = (lay(x, layout).requires_grad_(name in want) for x, name in zip((q, k, v), "qkv"))
    if arrives == "one number for all":  # as from .sum()
        d_output, d_lse = d_output[:1, :1, :1, :1].expand(d_output.shape), d_lse[:1, :1, :1].expand(d_lse.shape)
    d_output, d_lse = lay(d_output, arrives), lay(d_lse[..., None], arrives)[..., 0]
    keep, slopes = keep_of(kept, b, n_k), slopes_of(slopes, b, h)
    asked = dict(causal=causal, window=window, scale=scale, softcap=cap)
    force(monkeypatch, "_launch_back", tma=tma, tiles=tiles and dict(zip(("keys", "queries"), tiles)))
    before = [x.detach().clone() for x in (q, k, v, d_output, d_lse)]
    on_device = [None if x is None else x.to(DEVICE) for x in (keep, slopes)]
    output, lse = kernel(q, k, v, on_device[0], alibi_slopes=on_device[1], return_lse=True, **asked)
    del launches[:]
    arriving = d_output if loss != "log-sum-exp" else None, d_lse if loss != "output" else None
    outputs, grads = zip(*[(out, grad) for out, grad in zip((output, lse), arriving) if grad is not None])
    found = torch.autograd.grad(outputs, [x for x in (q, k, v) if x.requires_grad], grads)

    right = right_gradients(q, k, v, arriving, keep=keep, slopes=slopes, **asked)
    assert launches.names == ["delta"] + ["keys"] * (want != "q") + ["queries"] * ("q" in want)
    for name, _, options in launches:
        assert name != "keys" or (options["WANT_K"], options["WANT_V"]) == ("k" in want, "v" in want)
    for x, y in zip(found, [y for y, name in zip(right, "qkv") if name in want], strict=True):
        check(x, y, dtype)
    assert all(torch.equal(x, y) for x, y in zip(before, (q, k, v, d_output, d_lse))), "an input was changed"


def tiles_of(kernel):
    "All that the table has, with and without extras."
    cases = product(_TILES_BACK, (torch.float16, torch.float32), (64, 128, 256), (False, True))
    return sorted({_tile_back(kernel, *case)[:2] for case in cases})


@pytest.mark.parametrize(("name", "tile"), [(name, tile) for name in ("keys", "queries") for tile in tiles_of(name)], ids=str)
def test_every_tile_of_the_table_gives_the_same_gradients(name, tile):
    "More than two tiles pass by more than one, with and without an edge in the middle."
    n_q, n_k = ((2 if name == "keys" else 1) * tile[0] + 9, (2 if name == "queries" else 1) * tile[1] + 5)
    q, k, v, d_output, _ = tensors(h=1, n_q=n_q, n_k=n_k, grad=False)
    want = (True, False, False) if name == "queries" else (False, True, True)
    for causal in (False, True):
        output, lse = (x.float().to(DEVICE) for x in reference(q, k, v, causal=causal))
        options = dict(reach=(None, 0 if causal else None), scale=0.25, tiles={name: (*tile, 4, 2)})
        found = flash_backward._launch_back(q, k, v, output, lse, d_output, want=want, **options)
        for wanted, x, y in zip(want, found, right_gradients(q, k, v, (d_output,), causal=causal)):
            assert (x is not None) == wanted
            if wanted:
                check(x, y)


def test_tiles_fit_a_gpu_of_any_generation():
    "Rows of 16 at least for the tensor cores; what passes by, in all its stages, within the shared memory of a block."
    for arch, memory in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 99, 120: 99, 130: 99}.items():
        for dtype in (torch.float16, torch.float32):
            for width in (16, 64, 128, 256):
                table = _TILES_SPLIT[flash_backward._family(arch)]["float32" if dtype == torch.float32 else "half"]
                keys, warps, stages = next(tile for widest, tile in table.items() if width <= widest)
                assert keys >= 16 and warps in (4, 8) and stages * keys * 2 * width * dtype.itemsize <= memory * 1024
                for name, extras in (("keys", False), ("keys", True), ("queries", False), ("queries", True)):
                    rows, keys, warps, stages = _tile_back(name, arch, dtype, width, extras)
                    passing = stages * (rows if name == "keys" else keys)
                    assert min(rows, keys) >= 16 and warps in (4, 8)
                    assert passing * 2 * width * dtype.itemsize <= memory * 1024


@pytest.mark.parametrize("together", [1, 2])
def test_any_order_of_programs_covers_all_blocks(together, monkeypatch):
    "Heads go in sets whose tiles fit the cache; here 1 or 2 of 3, the last set smaller."
    q, k, v, d_output, _ = tensors(h=3, n_q=20)
    monkeypatch.setattr(flash_forward, "_l2_bytes", lambda _: together * 2 * 20 * 32 * 4)
    force(monkeypatch, "_launch_back", tiles=BOTH)
    found = torch.autograd.grad(kernel(q, k, v, causal=True), (q, k, v), d_output)
    for x, y in zip(found, right_gradients(q, k, v, (d_output,), causal=True)):
        check(x, y)


# --- packed batches --------------------------------------------------------------------------------------------------

SOME = [(pack, sees) for pack, sees in zip(PACKS, cycle([(True, None), (False, None), (True, 6), (False, 4)]))]


@pytest.mark.parametrize(("pack", "sees"), [*product(PACKS, [(True, None), (False, 4)])] if LONG else SOME, ids=str)
def test_packed_members_have_the_gradients_that_they_have_alone(pack, sees, monkeypatch):
    lengths_q, lengths_k = PACKS[pack]
    starts_q, starts_k = starts_of(lengths_q), starts_of(lengths_k)
    q, k, v, d_output, d_lse = tensors(h=2, kv=1, n_q=sum(lengths_q), n_k=sum(lengths_k))
    slopes = draw(2, seed=3).abs()
    asked = dict(causal=sees[0], window=sees[1])
    force(monkeypatch, "_launch_back", tiles=BOTH)
    found = torch.autograd.grad(
        kernel(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, alibi_slopes=slopes.to(DEVICE), return_lse=True, **asked),
        (q, k, v), (d_output, d_lse),
    )  # fmt: skip
    for s in range(len(lengths_q)):
        rows, keys = slice(starts_q[s], starts_q[s + 1]), slice(starts_k[s], starts_k[s + 1])
        arriving = d_output[:, :, rows], d_lse[:, :, rows]
        right = right_gradients(q[:, :, rows], k[:, :, keys], v[:, :, keys], arriving, slopes=slopes, **asked)
        for x, y, part in zip(found, right, (rows, keys, keys)):
            check(x[:, :, part], y)


def test_a_neighbour_in_the_pack_cannot_leak_into_gradients():
    q, k, v, d_output, d_lse = tensors(n_q=20, grad=False)
    starts, first = torch.tensor([0, 7, 20], dtype=torch.int32, device=DEVICE), slice(0, 7)
    alone = [x[:, :, first].clone().requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(kernel(*alone, return_lse=True), alone, (d_output[:, :, first], d_lse[:, :, first]))
    k[:, :, 7:], v[:, :, 7:], q[:, :, 7:], d_output[:, :, 7:], d_lse[:, :, 7:] = math.nan, math.inf, math.nan, math.inf, math.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    outputs = kernel(*inputs, cu_seqlens_q=starts, cu_seqlens_k=starts, return_lse=True)
    found = torch.autograd.grad(outputs, inputs, (d_output, d_lse))
    assert all(torch.equal(x[:, :, first], y) for x, y in zip(found, right))


# --- what people reported --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_q, n_k", [(5, 2), (2, 5)])
def test_a_query_that_sees_nothing_has_and_gives_no_gradient(n_q, n_k):
    q, k, v, d_output, d_lse = tensors(n_q=n_q, n_k=n_k)
    mask = None if n_q > n_k else torch.tensor([[[[False] * 4 + [True]]]], device=DEVICE)
    output, lse = kernel(q, k, v, mask, causal=True, return_lse=True)
    blind = lse == -math.inf
    assert blind.sum() == 2 * (3 if n_q > n_k else 1)
    d_lse = d_lse.masked_fill(blind, math.nan)  # as from a loss that is -inf there
    dq, dk, dv = torch.autograd.grad((output, lse), (q, k, v), (d_output, d_lse))
    assert (dq[blind] == 0).all() and (dq[~blind] != 0).any() and all(x.isfinite().all() for x in (dq, dk, dv))
    if mask is not None:
        assert (dk[:, :, :4] == 0).all() and (dv[:, :, :4] == 0).all()


def test_a_batch_that_sees_nothing_at_all_has_no_gradient():
    q, k, v, d_output, d_lse = tensors(b=2, n_q=9)
    outputs = kernel(q, k, v, padding_mask([0, 0], 9).to(DEVICE), return_lse=True)
    assert all((x == 0).all() for x in torch.autograd.grad(outputs, (q, k, v), (d_output, d_lse)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_score_far_beyond_the_cap_moves_nothing_and_overflows_nowhere(dtype):
    q, k, v, d_output, _ = tensors(n_q=4, h=1, dtype=dtype, grad=False)
    q[:], k[:] = 100, 100
    k[:, :, 1::2] *= -1  # scores of ±40,000
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    dq, dk, dv = torch.autograd.grad(kernel(q, k, v, softcap=50.0), (q, k, v), d_output)
    assert (dq == 0).all() and (dk == 0).all()
    check(dv, right_gradients(q, k, v, (d_output,), softcap=50.0)[2], dtype)


@pytest.mark.parametrize("cap", [1.0, 30.0, 1e4, 1e6])
def test_the_cap_bends_gradients_as_it_bends_scores(cap):
    q, k, v, d_output, d_lse = tensors(n_q=9, grad=False)
    q, k, v = (5 * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()
    asked = dict(softcap=cap, causal=True)
    found = torch.autograd.grad(kernel(q, k, v, return_lse=True, **asked), (q, k, v), (d_output, d_lse))
    for x, y in zip(found, right_gradients(q, k, v, (d_output, d_lse), **asked)):
        check(x, y)


@pytest.mark.parametrize("size", [10, 1e3])
def test_large_scores_keep_their_gradients_finite_and_as_many_digits_as_they_have(size):
    q, k, v, d_output, _ = tensors(grad=False)
    q, k, v = (size * q).requires_grad_(), (size * k).requires_grad_(), v.requires_grad_()
    output, lse = kernel(q, k, v, return_lse=True)
    found = torch.autograd.grad(output, (q, k, v), d_output)
    assert all(x.isfinite().all() for x in found)
    error = (found[2].cpu() - right_gradients(q, k, v, (d_output,))[2]).abs().max()
    assert error < lse.abs().max() * 5e-7  # weights are made anew from a log-sum-exp of 24 bits


def test_every_key_head_gathers_from_the_queries_of_its_group():
    q, k, v, d_output, d_lse = tensors(h=6, kv=2, n_q=9)
    full = [q, *(x.repeat_interleave(3, 1).detach().requires_grad_() for x in (k, v))]
    grouped = torch.autograd.grad(kernel(q, k, v, causal=True, return_lse=True), (q, k, v), (d_output, d_lse))
    dq, dk, dv = torch.autograd.grad(kernel(*full, causal=True, return_lse=True), full, (d_output, d_lse))
    for x, y in zip(grouped, (dq, dk.unflatten(1, (2, 3)).sum(2), dv.unflatten(1, (2, 3)).sum(2))):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-6)


def test_the_kernels_of_float32_do_not_round_to_tf32(launches):
    q, k, v, d_output, _ = tensors()
    torch.autograd.grad(kernel(q, k, v), (q, k, v), d_output)
    kernel(q[:, :, :1], k, v)
    asked = {name: options["PRECISION"] for name, _, options in launches if name != "delta"}
    assert asked == dict.fromkeys(("flash", "keys", "queries", "split"), "ieee")


def test_one_axis_of_programs_holds_more_heads_than_65535(launches, monkeypatch):
    "An axis y or z of a grid ends at 65,535, which the interpreter would not notice."
    launches.dry = True
    q = torch.empty(70_000, 1, 1, 16, device=DEVICE, requires_grad=True)
    kernel(q, q, q).sum().backward()
    force(monkeypatch, "_launch_split", multiprocessors=10**6, tile=SMALL[1:])
    k = q.detach().expand(70_000, 1, 40, 16)
    kernel(q.detach(), k, k)
    assert [(name, grid) for name, grid, _ in launches] == [
        *((name, (70_000,)) for name in ("flash", "delta", "keys", "queries")), ("split", (210_000,)), ("merge", (70_000,))
    ]  # fmt: skip


OFFSETS = """
import torch
from attention_course import flash_attention, flash_forward
from functools import partial
attend = partial(flash_attention, backend="triton")

def far(n, row, seed):  # the last row begins beyond 2^31 numbers; 4 GiB, of which n rows are touched
    near = torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(seed)).half()
    rows = torch.empty((n - 1) * row + 16, dtype=torch.float16).as_strided((1, 1, n, 16), (0, 0, row, 1))
    rows.copy_(near)
    return near, rows

near, rows = zip(*(far(3, (1 << 30) + 64, seed) for seed in range(4)))
starts = torch.tensor([0, 1, 3], dtype=torch.int32)
for asked in (dict(), dict(causal=True), dict(cu_seqlens_q=starts, cu_seqlens_k=starts)):
    found = []
    for *inputs, d_output in (near, rows):
        inputs = [x.requires_grad_() for x in inputs]
        output = attend(*inputs, **asked)
        found.append((output, *torch.autograd.grad(output, inputs, d_output)))
    assert all(torch.equal(a, b) for a, b in zip(*found))
q, rows_q, k = near[0].detach(), rows[0].detach(), torch.cat([near[1]] * 8, 2)
assert torch.equal(attend(q, k, k), attend(rows_q, k, k))  # few queries
right = flash_forward._launch(q, q, q, scale=0.25)[0]
flash_forward._output_like = lambda *_: rows_q  # a place to write to
assert torch.equal(flash_forward._launch(q, q, q, scale=0.25)[0], right)
near, rows = zip(*(far(9, (1 << 28) + 64, seed) for seed in range(2)))
assert torch.equal(attend(q[:, :, :1], *near), attend(q[:, :, :1], *rows))
"""


@pytest.mark.skipif(DEVICE != "cpu", reason="tests/test_flash_gpu.py has it for GPUs")
def test_rows_beyond_two_to_the_31_numbers():
    "In a process of its own: with 32-bit offsets it would crash."
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", OFFSETS], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:] or run.returncode


def test_g68_ten_runs_agree_to_the_bit():
    q, k, v, d_output, d_lse = tensors(h=2, kv=1, n_q=9, dtype=torch.float16)

    def run():
        outputs = kernel(q, k, v, causal=True, return_lse=True)
        torch.empty(10_000, device=DEVICE).fill_(7)  # memory that the gradients may get
        return *outputs, *torch.autograd.grad(outputs, (q, k, v), (d_output, d_lse)), kernel(q[:, :, :1], k, v)

    first = run()
    assert all(torch.equal(x, y) for _ in range(9) for x, y in zip(first, run()))


def test_a_second_derivative_names_a_function_that_has_one():
    q, k, v, d_output, _ = tensors(n_q=5)
    (grad,) = torch.autograd.grad(kernel(q, k, v), q, d_output, create_graph=True)
    check(grad, right_gradients(q, k, v, (d_output,))[0])
    with pytest.raises(NotImplementedError, match="flash_attention has no second derivative; scaled_dot_product_attention has"):
        grad.square().sum().backward()
    for second in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        with pytest.raises(NotImplementedError, match="second derivative"):
            second(lambda q: kernel(q, k, v).square().sum(), q, torch.ones_like(q))


def test_a_minus_sign_that_is_not_in_memory_counts_in_a_gradient_that_arrives():
    q, k, v, d_output, d_lse = tensors(n_q=5)
    minus, minus_lse = (torch.complex(x, x).conj().imag for x in (d_output, d_lse))
    assert minus.is_neg()
    outputs = kernel(q, k, v, return_lse=True)
    found = torch.autograd.grad(outputs, (q, k, v), (minus, minus_lse), retain_graph=True)
    right = torch.autograd.grad(outputs, (q, k, v), (-d_output, -d_lse))
    assert all(torch.equal(x, y) for x, y in zip(found, right))


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 2)])
def test_any_leading_axes_have_gradients(lead):
    sizes = (5, 16), (7, 16), (7, 8)
    q, k, v = (draw(*lead, *size, seed=sum(size), dtype=torch.float32).to(DEVICE).requires_grad_() for size in sizes)
    outputs = [f(q, k, v, causal=True, return_lse=True) for f in (kernel, tiled_attention)]
    grads = [torch.autograd.grad((output * output).sum() + lse.exp().sum(), (q, k, v)) for output, lse in outputs]
    for x, y in zip(*grads):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (2, 2, 0, 0)], ids=str)
def test_empty_tensors_have_empty_gradients_or_zeros(shape):
    b, h, n_q, n_k = shape
    q, k = (torch.ones(b, h, n, 16, device=DEVICE, requires_grad=True) for n in (n_q, n_k))
    for x, grad in zip((q, k), torch.autograd.grad(kernel(q, k, k).sum(), (q, k))):
        assert grad.shape == x.shape and (grad == 0).all()
    starts = [torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (n_q, n_k)]
    if b:
        q, k = q[:1].detach().requires_grad_(), k[:1].detach().requires_grad_()
        grads = torch.autograd.grad(kernel(q, k, k, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1]).sum(), (q, k))
        assert all((x == 0).all() for x in grads)


# --- few queries, many keys --------------------------------------------------------------------------------------------

SPLIT_LENGTHS = ((1, 1), (1, 40), (2, 33), (5, 64), (3, 70), (20, 30), (9, 4))
SPLIT_HEADS = ((1, 1, 1), (2, 2, 2), (2, 3, 1), (1, 8, 1), (1, 16, 2))
SPLITS = (None, 1, 6, 10**6)  # multiprocessors: None is this machine's, 10^6 gives a program each block of keys
SPLIT_TILES = (SMALL[1:], (32, 4, 2), None)
SPLIT_FACTORS = (SPLIT_LENGTHS, SPLIT_HEADS, WIDTHS, DTYPES, SEES, KEEPS, CAPS, SLOPES, SCALES, LAYOUTS, SPLITS, SPLIT_TILES)
SPLIT_CASES = pairwise(SPLIT_FACTORS)


@each_case(SPLIT_CASES)
def test_keys_split_among_programs_give_the_closed_formula(case, monkeypatch, launches):
    (n_q, n_k), (b, h, kv), (d, d_v), dtype, (causal, window), kept, cap, slopes, scale, layout, splits, tile = case
    q, k, v, *_ = tensors(b, h, kv, n_q, n_k, d, d_v, dtype, grad=False)
    q, k, v = (lay(x, layout) for x in (q, k, v))
    keep, slopes = keep_of(kept, b, n_k), slopes_of(slopes, b, h)
    asked = dict(causal=causal, window=window, scale=scale, softcap=cap)
    force(monkeypatch, "_launch_split", multiprocessors=splits, tile=tile)
    on_device = [None if x is None else x.to(DEVICE) for x in (keep, slopes)]
    output, lse = kernel(q, k, v, on_device[0], alibi_slopes=on_device[1], return_lse=True, **asked)
    right, right_lse = reference(q, k, v, keep, slopes=slopes, **asked)
    assert launches.names in (["split"], ["split", "merge"])
    blind = right_lse == -math.inf
    assert lse.dtype == torch.float32 and torch.equal(lse.cpu() == -math.inf, blind) and (output.cpu()[blind] == 0).all()
    check(output, right, dtype)
    check(lse.masked_fill(blind.to(DEVICE), 0), right_lse.masked_fill(blind, 0))


def test_a_stretch_of_keys_in_which_nothing_is_seen_has_no_share(monkeypatch):
    "Padding on the left hides whole stretches, from one sample all; a window hides those before it, which are not even read."
    q, k, v, *_ = tensors(b=3, h=1, n_q=1, n_k=80, grad=False)
    keep = padding_mask([80, 20, 0], 80).flip(-1)
    for splits in (1, 6, 10**6):
        force(monkeypatch, "_launch_split", multiprocessors=splits, tile=SMALL[1:])
        for asked in ({}, dict(causal=True, window=20), dict(window=3)):
            output, lse = kernel(q, k, v, keep.to(DEVICE), return_lse=True, **asked)
            right, right_lse = reference(q, k, v, keep, **asked)
            check(output, right)
            assert torch.equal(lse[2].cpu(), right_lse[2].float()) and (output[2] == 0).all()
            check(lse[:2], right_lse[:2])
    k[:, :, :48], v[:, :, :48] = math.nan, math.nan  # a window of 20 begins at key 60, in a block that begins at 48
    assert kernel(q, k, v, causal=True, window=20).isfinite().all()


def test_more_stretches_than_are_merged_at_a_time(monkeypatch):
    q, k, v, *_ = tensors(h=1, n_q=2, n_k=16 * 33 + 3, d_v=8, grad=False)
    force(monkeypatch, "_launch_split", multiprocessors=10**6, tile=SMALL[1:])
    for x, y in zip(kernel(q, k, v, causal=True, return_lse=True), reference(q, k, v, causal=True)):
        check(x, y)


def test_a_stretch_that_only_some_of_the_queries_see_counts_for_those():
    q, k, v, d_output, d_lse = tensors(h=4, kv=1, n_q=4, n_k=40)
    slopes = draw(4, seed=5).abs()
    outputs = kernel(q, k, v, causal=True, window=9, alibi_slopes=slopes.to(DEVICE), return_lse=True)
    asked = dict(causal=True, window=9, slopes=slopes)
    for x, y in zip(outputs, reference(q, k, v, **asked)):
        check(x, y)
    grads = d_output, d_lse
    for x, y in zip(torch.autograd.grad(outputs, (q, k, v), grads), right_gradients(q, k, v, grads, **asked)):
        check(x, y)


def test_few_queries_are_those_that_leave_a_gpu_idle(launches):
    assert _few(1, 8, False) and _few(64, 512, False) and _few(3, 24, False)
    assert not _few(1, 7, False) and not _few(65, 10_000, False) and not _few(3, 23, False) and not _few(1, 1000, True)
    q, k, v, *_ = tensors(n_q=2, n_k=16, grad=False)
    kernel(q, k, v)
    kernel(q, k[:, :, :15], v[:, :, :15])
    kernel(q, k, v, cu_seqlens_q=starts_of([2]), cu_seqlens_k=starts_of([16]))
    assert [name for name in launches.names if name != "merge"] == ["split", "flash", "flash"]


def test_a_plan_covers_all_keys_once_in_whole_blocks_and_fills_the_gpu():
    for block in (16, 64):
        for n_keys in (0, 1, 15, 16, 17, 63, 64, 65, 1000, 4096, 100_000):
            for programs in (1, 2, 7, 131, 132, 133, 1000):
                for multiprocessors in (1, 4, 132):
                    n_splits, chunk = _split_plan(n_keys, block, programs, multiprocessors)
                    assert n_splits >= 1 and chunk >= block and chunk % block == 0
                    assert n_splits * chunk >= n_keys and ((n_splits - 1) * chunk < n_keys or n_splits == 1)
                    room = flash_backward._WAVE * multiprocessors
                    assert n_splits == 1 or n_splits * programs <= room
                    blocks = -(-n_keys // block)
                    if programs <= room and blocks:  # at most half of it stays free, for want of shorter stretches
                        assert 2 * n_splits >= min(blocks, room // programs)


def attending(model, attend):
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, MultiHeadAttention):
            layer.attend = attend
    return model


def test_decoding_token_by_token_equals_the_whole_sequence(launches):
    "With a cache, padding on the left, and gradients through all of it."
    torch.manual_seed(0)
    plain = MultiHeadAttention(32, 2, n_kv_heads=1).to(DEVICE)
    layer = attending(plain, kernel)
    n, first = 12, 9
    x = draw(2, n, 32, seed=1, dtype=torch.float32).to(DEVICE).requires_grad_()
    mask = (torch.arange(n) >= torch.tensor([[0], [3]])).view(2, 1, 1, n).to(DEVICE)
    cache, rows = KVCache(), []
    for start, end in ((0, first), *((i, i + 1) for i in range(first, n))):
        rows.append(layer(x[:, start:end], mask=mask[..., :end], causal=True, cache=cache))
    assert launches.names.count("flash") == 1 and launches.names.count("split") == n - first
    d_output = draw(2, n, 32, seed=2, dtype=torch.float32).to(DEVICE)
    right = plain(x, mask=mask, causal=True)
    right_grads = torch.autograd.grad(right, [x, *plain.parameters()], d_output)
    for output in (torch.cat(rows, 1), layer(x, mask=mask, causal=True)):
        torch.testing.assert_close(output, right, atol=1e-6, rtol=0)
        for a, b in zip(torch.autograd.grad(output, [x, *layer.parameters()], d_output), right_grads):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# --- an operator like torch's own ----------------------------------------------------------------------------------------

OPTIONAL = {
    "nothing": {},
    "padding": dict(keep=torch.tensor([[True, True, False, True]])),
    "slopes": dict(slopes=torch.ones(1, 2)),
    "starts": dict(starts_q=torch.tensor([0, 1, 3], dtype=torch.int32), starts_k=torch.tensor([0, 3, 4], dtype=torch.int32)),
    "reach": dict(back=2, ahead=0),
    "cap": dict(softcap=2.0),
}
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


def of_operator(given, grad):
    q, k, v, d_output, d_lse = tensors(n_q=3, n_k=4, h=2, kv=1, d_v=8, grad=grad)
    call = dict(keep=None, slopes=None, starts_q=None, starts_k=None, back=None, ahead=None, scale=0.3, softcap=None) | given
    return (q, k, v), [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in call.values()], d_output, d_lse


@pytest.mark.parametrize("name", OPTIONAL)
def test_the_operators_are_what_they_say(name):
    "Nothing is changed or returned that was given, and shapes, strides and dtypes are foretold."
    inputs, call, d_output, d_lse = of_operator(OPTIONAL[name], True)
    torch.library.opcheck(flash_backward._flash, (*inputs, *call), test_utils=QUICK)
    inputs = [x.detach() for x in inputs]
    tokens_first = [lay(x, "tokens first") for x in inputs]
    torch.library.opcheck(flash_backward._flash, (*tokens_first, *call), test_utils=QUICK)
    for given, want, lse_too in ((inputs, (True, True, True), None), (tokens_first, (False, True, False), d_lse)):
        saved = flash_backward._flash(*given, *call)
        torch.library.opcheck(flash_backward._flash_backward, (*given, *saved, d_output, lse_too, *call, *want), test_utils=QUICK)


@pytest.mark.slow
def test_the_operators_compile_with_lengths_that_change(no_shape_check):
    together = OPTIONAL["padding"] | OPTIONAL["slopes"] | OPTIONAL["reach"] | OPTIONAL["cap"]
    inputs, call, d_output, d_lse = of_operator(together, True)
    torch.library.opcheck(flash_backward._flash, (*inputs, *call))
    inputs = [x.detach() for x in inputs]
    saved = flash_backward._flash(*inputs, *call)
    torch.library.opcheck(flash_backward._flash_backward, (*inputs, *saved, d_output, d_lse, *call, True, True, False))


def everything(q, k, v, mask, slopes):
    output, lse = kernel(q, k, v, mask, causal=True, window=7, softcap=3.0, alibi_slopes=slopes, return_lse=True)
    return 2 * output + lse[..., None].clamp(min=-9)


def causal(q, k, v, mask, slopes):
    return kernel(q, k, v, causal=True).cos()


@pytest.mark.parametrize("f", [causal, everything])
def test_it_compiles_to_one_graph_for_all_lengths_but_the_first(f, no_shape_check):
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled, slopes = torch.compile(f, backend=counter, fullgraph=True), torch.tensor([0.5, 0.25], device=DEVICE)
    for n_q, n_k in ((5, 5), (12, 20), (2, 30)):
        q, k, v, *_ = tensors(n_q=n_q, n_k=n_k, kv=1)
        mask = (torch.arange(n_k) > 1).expand(1, 1, 1, n_k).to(DEVICE)
        results = [g(q, k, v, mask, slopes) for g in (compiled, f)]
        torch.testing.assert_close(*results, atol=0, rtol=0)
        grads = [torch.autograd.grad(result.square().sum(), (q, k, v)) for result in results]
        assert all(torch.equal(x, y) for x, y in zip(*grads))
    assert counter.frame_count == 2  # for the first length, and for any


def test_autocast_leaves_dtypes_and_numbers_alone():
    for dtype in (torch.float32, torch.float16):
        q, k, v, d_output, _ = tensors(n_q=9, dtype=dtype)
        output = kernel(q, k, v, causal=True)
        right = torch.autograd.grad(output, (q, k, v), d_output)
        with torch.autocast(DEVICE, torch.bfloat16):
            cast = kernel(q, k, v, causal=True)
            inside = torch.autograd.grad(cast, (q, k, v), d_output, retain_graph=True)
        assert torch.equal(cast, output) and cast.dtype == dtype
        for found in (inside, torch.autograd.grad(cast, (q, k, v), d_output)):
            assert all(torch.equal(x, y) for x, y in zip(found, right))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_computes_it_anew(use_reentrant, launches):
    q, k, v, d_output, _ = tensors(n_q=9)
    right = torch.autograd.grad(kernel(q, k, v, causal=True), (q, k, v), d_output)
    del launches[:]
    checkpoint(lambda *x: kernel(*x, causal=True), q, k, v, use_reentrant=use_reentrant).backward(d_output)
    assert launches.names == ["flash", "flash", "delta", "keys", "queries"]
    assert all(torch.equal(x.grad, y) for x, y in zip((q, k, v), right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("asked", [{}, dict(causal=True, window=3, softcap=2.0)], ids=str)
def test_autograd_keeps_inputs_output_and_log_sum_exp_once(dtype, asked):
    q, k, v, *_ = tensors(h=2, kv=1, n_q=9, d_v=8, dtype=dtype)
    kept = {}

    def pack(x):
        kept[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        with torch.no_grad():
            kernel(q, k, v, **asked)
        assert not kept
        output, lse = kernel(q, k, v, **asked, return_lse=True)
    assert kept == {x.data_ptr(): x.nbytes for x in (q, k, v, output, lse)}


def test_what_is_changed_between_the_passes_is_noticed():
    for at in range(3):
        q, k, v, d_output, _ = tensors(n_q=5)
        inputs = [x + 0 for x in (q, k, v)]
        output = kernel(*inputs)
        inputs[at].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward(d_output)


def test_nothing_is_changed_in_place_and_a_graph_can_be_walked_twice():
    q, k, v, d_output, d_lse = tensors(n_q=9)
    mask, slopes = padding_mask([7], 9).to(DEVICE), torch.ones(2, device=DEVICE)
    given = (q, k, v, mask, slopes, d_output, d_lse)
    before = [x.detach().clone() for x in given]
    outputs = kernel(q, k, v, mask, alibi_slopes=slopes, causal=True, softcap=3.0, return_lse=True)
    kept, versions = [x.detach().clone() for x in outputs], [x._version for x in (*given, *outputs)]
    assert not any(versions[: len(given)])
    first, second = (torch.autograd.grad(outputs, (q, k, v), (d_output, d_lse), retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip((*before, *kept, *first), (*given, *outputs, *second)))
    assert versions == [x._version for x in (*given, *outputs)]


def test_a_copy_of_a_module_has_gradients_of_its_own():
    torch.manual_seed(0)
    layer = MultiHeadAttention(32, 4, n_kv_heads=2, attend=kernel).to(DEVICE)
    x = draw(2, 9, 32, seed=0, dtype=torch.float32).to(DEVICE)
    layer(x, causal=True).square().sum().backward()
    twin = copy.deepcopy(layer)
    assert twin.attend.keywords == {"backend": "triton"}
    twin.zero_grad()
    twin(x, causal=True).square().sum().backward()
    for a, b in zip(layer.parameters(), twin.parameters()):
        assert a is not b and torch.equal(a.grad, b.grad)


def test_a_transformer_takes_the_same_steps_with_it(launches):
    "Padding on the right of source and target, the future hidden in the decoder, one token at a time at the end."
    torch.manual_seed(0)
    config = TransformerConfig(11, d_model=32, n_heads=2, n_kv_heads=1, d_ff=32, n_layers=1, dropout=0.0)
    plain = Transformer(config).to(DEVICE)
    models = [plain, attending(plain, kernel)]
    src, tgt = (torch.randint(1, 11, (2, n), generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (9, 7))
    src[0, 6:], tgt[1, 4:] = 0, 0
    losses = [[], []]
    for model, seen in zip(models, losses):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            logits = model(src, tgt[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=0)
            optimizer.zero_grad()
            loss.backward()
            seen.append((loss, *(p.grad.clone() for p in model.parameters())))
            optimizer.step()
    for one, other in zip(*losses):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert launches.names.count("flash") == launches.names.count("keys") == launches.names.count("queries") == 2 * 3
    with torch.no_grad():
        found = []
        for model in models:
            memory, cache = model.encode(src), model.new_cache()
            step = partial(model.decode, memory=memory, memory_mask=model.padding(src), cache=cache)
            found.append(torch.cat([step(tgt[:, i : i + 1]) for i in range(2)], 1))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert "split" in launches.names


@pytest.mark.parametrize("backend", ["auto", "triton", "torch", "tiled"])
def test_slopes_that_want_a_gradient_are_refused_on_every_path(backend):
    q, k, v, *_ = tensors(n_q=5)
    slopes = torch.ones(2, device=DEVICE, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient and would get none"):
        flash_attention(q, k, v, alibi_slopes=slopes, backend=backend)
    if backend != "torch":
        with torch.no_grad():
            flash_attention(q, k, v, alibi_slopes=slopes, backend=backend)


def test_functional_derivatives_take_another_path_and_are_right(no_shape_check):
    q, k, v, d_output, _ = tensors(n_q=5, grad=False)
    right = right_gradients(q, k, v, (d_output,), causal=True)
    for asked in ({}, dict(softcap=1e6)):
        whys = []

        def loss(q, k, v):
            whys.append(flash_backend(q, k, v, **asked)[1])
            return (flash_attention(q, k, v, causal=True, **asked) * d_output).sum()

        for x, y in zip(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), right):
            check(x, y)
        assert "torch.func is at work" in whys[0]
    for f, x in ((torch.func.grad, q), (torch.vmap, q[None])):
        with pytest.raises(ValueError, match="backend='triton': torch.func is at work"):
            f(lambda q: kernel(q, k, v).sum())(x)


def test_a_forward_derivative_is_not_for_the_kernels(no_shape_check):
    q, k, v, *_ = tensors(n_q=5, grad=False)
    tangent = draw(*q.shape, seed=9, dtype=torch.float32).to(DEVICE)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        with pytest.raises(ValueError, match="backend='triton': a forward-mode derivative"):
            kernel(dual, k, v)
        path, why = flash_backend(dual, k, v)
        assert path != "triton" and "forward-mode" in why


def traced(f):
    return torch.compile(f, backend="aot_eager")


def test_compiled_transforms_of_torch_func_take_another_path_and_are_right(monkeypatch, no_shape_check):
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
    monkeypatch.setattr(flash_backward, "_choose", lambda backend, *args: ("tiled" if flash_backward._why_not_triton(*args[:3]) else "triton", ""))
    ours, right = flash_attention, tiled_attention
    torch.testing.assert_close(
        traced(lambda q: torch.func.grad(lambda x: ours(x, k, v).square().sum())(q))(q),
        torch.func.grad(lambda x: right(x, k, v).square().sum())(q), atol=1e-5, rtol=1e-5,
    )  # fmt: skip
    torch.testing.assert_close(traced(lambda q: torch.vmap(lambda x: ours(x, k[0], v[0]))(q))(q), right(q, k, v), atol=1e-5, rtol=1e-5)


def test_a_forward_mode_derivative_is_never_dropped(no_shape_check):
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
    attend = partial(flash_attention, backend="triton")
    with pytest.raises(Exception, match="forward-mode|torch.func"):
        traced(lambda q: torch.func.jvp(lambda x: attend(x, k, v), (q,), (q,)))(q)
    graph = traced(lambda q: attend(q, k, v))
    graph(q)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(Exception, match="forward-mode"):
        graph(torch.autograd.forward_ad.make_dual(q, q))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.ops.attention_course.flash(torch.autograd.forward_ad.make_dual(q, q), k, v, *[None] * 6, 0.3, None)


def test_a_compiled_call_looks_into_a_packed_batch_before_it_runs(no_shape_check):
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
    graph = traced(lambda starts: flash_attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, backend="triton"))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    torch.testing.assert_close(graph(starts), tiled_attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts), atol=1e-5, rtol=1e-5)
    for wrong in ([0, 4, 8], [0, 4, 300], [1, 4, 9], [0, 10, 9]):
        with pytest.raises(ValueError, match=r"cu_seqlens_q is .*; expected to rise from 0 to the total length, 9"):
            graph(torch.tensor(wrong, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("few", [False, True])
def test_what_comes_out_is_laid_out_as_the_fake_says(dtype, few):
    joint = torch.randn(2, 2 if few else 9, 2, 16, dtype=dtype)
    for q in (joint[..., :8].transpose(1, 2), joint[..., ::2].transpose(1, 2), joint[..., :8].permute(0, 2, 1, 3).contiguous()):
        k = torch.randn(2, 2, 20 if few else 9, 8, dtype=dtype)
        call = (q, k, k, *[None] * 6, 0.3, None)
        torch.library.opcheck(flash_backward._flash, call, test_utils="test_faketensor")
