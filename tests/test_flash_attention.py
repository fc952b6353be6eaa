"""What `flash_attention` computes, by the kernel of chapter 13, against closed formulas in float64; and the paths around it.

By default features are combined so that every two meet once; `make interpret` runs three times as many combinations, and longer
sequences. Gradients, few queries and all that an operator of torch must bear stand in test_flash_backward.py.
"""

import logging
import math
import os
import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

from attention_course import (
    flash_attention, flash_backend, flash_backward, flash_forward, fused_attention, padding_mask, tiled_attention,
)  # fmt: skip
from attention_course.multi_head import MultiHeadAttention
from kernels import (
    CAPS, DEVICE, DTYPES, HEADS, KEEPS, LAYOUTS, LONG, PACKS, SCALES, SEES, SLOPES, TMA,
    each_case, force, keep_of, kernel, lay, launches, needs_triton, reference, slopes_of, starts_of, unwritten_memory_is_nan,
)  # fmt: skip
from variants import KERNELS, draw, pairwise

# Absolute, for values of about 1: one rounding of the weights and one of the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


# --- the feature matrix ----------------------------------------------------------------------------------------------

LENGTHS = ((1, 1), (7, 7), (64, 64), (65, 65), (129, 129), (2, 5), (5, 2), (1, 64), (17, 33), (64, 16), (40, 150))
WIDTHS = ((16, 16), (33, 33), (40, 40), (80, 80), (64, 64), (16, 48), (48, 16), (128, 128), (192, 24), (1, 256))
TILES = (None, (32, 16, 4, 2), (16, 64, 4, 2))
FACTORS = (LENGTHS, HEADS, WIDTHS, DTYPES, SEES, KEEPS, CAPS, SLOPES, SCALES, LAYOUTS, TMA, TILES)
CASES = [list(case) for case in pairwise(FACTORS)]
if LONG:  # the same table twice more, other values side by side
    CASES += [list(case)[:-1] + [TILES[turn % 3]] for turn in (1, 2) for case in pairwise(tuple(f[turn % len(f):] + f[:turn % len(f)] for f in FACTORS))]
    CASES += [[(300, 300), (1, 2, 1), (64, 64), dtype, sees, None, None, None, None, "plain", tma, None] for dtype in DTYPES for sees in SEES for tma in TMA]


@needs_triton
@each_case(CASES)
def test_the_kernel_equals_the_closed_formula(case, monkeypatch):
    (n_q, n_k), (b, h, kv), (d, d_v), dtype, (causal, window), kept, cap, slopes, scale, layout, tma, tile = case
    q, k, v = (
        lay(draw(*shape, seed=seed, dtype=dtype), layout).to(DEVICE)
        for seed, shape in enumerate([(b, h, n_q, d), (b, kv, n_k, d), (b, kv, n_k, d_v)])
    )
    keep, slopes = keep_of(kept, b, n_k), slopes_of(slopes, b, h)
    asked = dict(causal=causal, window=window, scale=scale, softcap=cap)
    force(monkeypatch, tma=tma, tile=tile)
    before = [x.clone() for x in (q, k, v)]
    on_device = [None if x is None else x.to(DEVICE) for x in (keep, slopes)]
    output, lse = kernel(q, k, v, on_device[0], alibi_slopes=on_device[1], return_lse=True, **asked)
    right, right_lse = reference(q, k, v, keep, slopes=slopes, **asked)

    assert output.dtype == dtype and lse.dtype == torch.float32
    assert output.shape == right.shape and lse.shape == right_lse.shape
    blind = right_lse == -math.inf
    assert torch.equal(lse.cpu() == -math.inf, blind)
    assert (output.cpu()[blind] == 0).all()
    assert (output.cpu() - right).abs().max() < TOLERANCE[dtype]
    assert (lse.cpu() - right_lse)[~blind].abs().amax() < TOLERANCE[dtype] if (~blind).any() else True
    assert all(torch.equal(x, y) for x, y in zip(before, (q, k, v))), "an input was changed"


# --- packed batches --------------------------------------------------------------------------------------------------

@needs_triton
@pytest.mark.parametrize("sees", [(False, None), (True, None), (True, 6), (False, 4)])
@pytest.mark.parametrize("pack", PACKS)
def test_packed_members_are_alone(pack, sees, monkeypatch):
    lengths_q, lengths_k = PACKS[pack]
    starts_q, starts_k = starts_of(lengths_q), starts_of(lengths_k)
    q, k, v = draw(1, 4, sum(lengths_q), 16, seed=0), draw(1, 2, sum(lengths_k), 16, seed=1), draw(1, 2, sum(lengths_k), 16, seed=2)
    slopes = draw(4, seed=3).abs()
    asked = dict(causal=sees[0], window=sees[1])
    force(monkeypatch, tile=(16, 16, 4, 2))
    output, lse = kernel(
        *(x.float().to(DEVICE) for x in (q, k, v)), cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, alibi_slopes=slopes.to(DEVICE),
        return_lse=True, **asked)
    for s in range(len(lengths_q)):
        rows, keys = slice(starts_q[s], starts_q[s + 1]), slice(starts_k[s], starts_k[s + 1])
        right, right_lse = reference(q[:, :, rows], k[:, :, keys], v[:, :, keys], slopes=slopes, **asked)
        torch.testing.assert_close(output[:, :, rows].cpu().double(), right, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse[:, :, rows].cpu().double(), right_lse, atol=1e-5, rtol=0)


@needs_triton
def test_a_neighbour_in_the_pack_cannot_leak():
    q, k, v = (draw(1, 1, 20, 16, seed=seed, dtype=torch.float32).to(DEVICE) for seed in range(3))
    starts = torch.tensor([0, 7, 20], dtype=torch.int32, device=DEVICE)
    alone = kernel(q[:, :, :7], k[:, :, :7], v[:, :, :7])
    k[:, :, 7:], v[:, :, 7:], q[:, :, 7:] = math.nan, math.inf, math.nan
    assert torch.equal(kernel(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts)[:, :, :7], alone)


@needs_triton
def test_starts_may_lie_apart_in_memory():
    "The kernel reads one after the other; a column of a table would send it anywhere."
    q, k, v = (draw(1, 2, 9, 16, seed=seed, dtype=torch.float32).to(DEVICE) for seed in range(3))
    table = torch.tensor([[0, 1], [3, 0], [3, 5], [9, 2]], dtype=torch.int32, device=DEVICE)
    starts = table[:, 0]
    right = kernel(q, k, v, cu_seqlens_q=starts.clone(), cu_seqlens_k=starts.clone())
    assert torch.equal(kernel(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts), right)


# --- what people reported --------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("tma", TMA)
def test_g66_what_lies_beyond_the_tensors_is_not_read(tma, monkeypatch):
    force(monkeypatch, tma=tma, tile=(32, 16, 4, 2))
    for n in (1, 15, 16, 17, 33):
        behind = [torch.full((1, 1, n + 40, 24), math.nan, device=DEVICE) for _ in range(3)]
        q, k, v = (x[:, :, :n, :16] for x in behind)
        for seed, x in enumerate((q, k, v)):
            x.copy_(draw(1, 1, n, 16, seed=seed))
        torch.testing.assert_close(kernel(q, k, v).cpu().double(), reference(q, k, v)[0], atol=1e-5, rtol=0)


@needs_triton
def test_g65_all_columns_count():
    q, k, v = (draw(1, 1, 9, 128, seed=seed, dtype=torch.float32).to(DEVICE) for seed in range(3))
    whole = kernel(q, k, v)
    q[..., 64:] = 0
    assert (kernel(q, k, v) - whole).abs().max() > 0.1
    v[..., 64:] = 0
    assert (kernel(q, k, v)[..., 64:] == 0).all()


@needs_triton
def test_g12_the_queries_are_the_last_positions():
    q, k, v = torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 5, 16), torch.eye(5, 16).view(1, 1, 5, 16)
    rows = kernel(*(x.to(DEVICE) for x in (q, k, v)), causal=True)[0, 0, :, :5].cpu()
    torch.testing.assert_close(rows, torch.tensor([[0.25] * 4 + [0], [0.2] * 5]))


@needs_triton
def test_g13_steps_through_a_cache_equal_one_pass():
    q, k, v = (draw(1, 2, 12, 16, seed=seed, dtype=torch.float32).to(DEVICE) for seed in range(3))
    whole = kernel(q, k, v, causal=True)
    steps = [kernel(q[:, :, i : i + 3], k[:, :, : i + 3], v[:, :, : i + 3], causal=True) for i in range(0, 12, 3)]
    torch.testing.assert_close(torch.cat(steps, -2), whole, atol=1e-6, rtol=0)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cap_comes_before_the_mask_and_does_not_overflow(dtype):
    q = torch.full((1, 1, 4, 16), 100.0, dtype=dtype, device=DEVICE)
    k = torch.full((1, 1, 4, 16), 100.0, dtype=dtype, device=DEVICE)
    k[:, :, 1::2] *= -1  # scores of ±40,000
    v = draw(1, 1, 4, 16, seed=0, dtype=dtype).to(DEVICE)
    output, lse = kernel(q, k, v, softcap=50.0, return_lse=True)
    right, right_lse = reference(q, k, v, softcap=50.0)
    assert (output.cpu() - right).abs().max() < TOLERANCE[dtype] and (lse.cpu() - right_lse).abs().max() < 1e-3
    changed = k.clone()
    changed[:, :, 3] = 7  # the future, under a cap of 1
    now, then = (kernel(q, x, v, softcap=1.0, causal=True)[:, :, :3] for x in (k, changed))
    assert torch.equal(now, then)


@needs_triton
def test_large_scores_stay_finite():
    q, k, v = (draw(1, 1, 20, 16, seed=seed, dtype=torch.float32).to(DEVICE) for seed in range(3))
    output, lse = kernel(1e4 * q, 1e4 * k, v, return_lse=True)
    right, right_lse = reference(1e4 * q, 1e4 * k, v)
    torch.testing.assert_close(output.cpu().double(), right, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.cpu().double(), right_lse, atol=0, rtol=1e-6)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_the_mask_hides_weighs_nothing_however_large(dtype):
    q, k, v = (draw(1, 1, 9, 16, seed=seed, dtype=dtype).to(DEVICE) for seed in range(3))
    keep = padding_mask([6], 9).to(DEVICE)
    right = kernel(q[:, :, :6], k[:, :, :6], v[:, :, :6])
    k[:, :, 6:], v[:, :, 6:] = torch.finfo(dtype).max / 64, torch.finfo(dtype).max
    torch.testing.assert_close(kernel(q, k, v, keep)[:, :, :6], right, atol=1e-3, rtol=0)


@needs_triton
def test_every_query_head_reads_the_keys_of_its_group():
    q, v = torch.zeros(1, 6, 3, 16, device=DEVICE), torch.zeros(1, 2, 3, 16, device=DEVICE)
    v[:, 1] = 1
    assert kernel(q, v, v)[0, :, 0, 0].tolist() == [0, 0, 0, 1, 1, 1]


@needs_triton
def test_one_axis_of_programs_holds_more_heads_than_65535(launches):
    "An axis y or z of a grid ends at 65,535, which the interpreter would not notice."
    launches.dry = True
    q = torch.empty(70_000, 1, 1, 16, device=DEVICE)
    kernel(q, q, q)
    assert [(name, grid) for name, grid, _ in launches] == [("flash", (70_000,))]


@needs_triton
@pytest.mark.parametrize("together", [1, 2, 4])
def test_any_order_of_programs_covers_all_blocks(together, monkeypatch):
    "Heads go in sets whose keys fit the cache; here 1, 2 or 4 of 5, the last set smaller."
    q, k, v = (draw(1, 5, 40, 16, seed=seed, dtype=torch.float32).to(DEVICE) for seed in range(3))
    force(monkeypatch, tile=(16, 16, 4, 2))
    monkeypatch.setattr(flash_forward, "_l2_bytes", lambda _: together * 2 * 40 * 32 * 4)
    torch.testing.assert_close(kernel(q, k, v, causal=True).cpu().double(), reference(q, k, v, causal=True)[0], atol=1e-5, rtol=0)


@needs_triton
def test_a_minus_sign_that_is_not_in_memory_counts():
    "torch flips the sign of z.conj().imag when it is read, not when it is made."
    q, k, v, slopes = (torch.complex(x, x).conj().imag for x in (*(draw(1, 2, 9, 16, seed=s).float().to(DEVICE) for s in range(3)), torch.ones(2, device=DEVICE)))
    assert q.is_neg() and torch.equal(kernel(q, k, v, alibi_slopes=slopes), kernel(*(x.resolve_neg() for x in (q, k, v)), alibi_slopes=slopes.resolve_neg()))


@needs_triton
def test_ten_runs_agree_to_the_bit():
    q, k, v = (draw(1, 2, 70, 16, seed=seed, dtype=torch.float16).to(DEVICE) for seed in range(3))
    first = kernel(q, k, v, causal=True)
    assert all(torch.equal(kernel(q, k, v, causal=True), first) for _ in range(9 if DEVICE == "cuda" else 1))


# --- shapes ----------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_any_leading_axes(lead):
    q, k, v = draw(*lead, 5, 16, seed=0), draw(*lead, 7, 16, seed=1), draw(*lead, 7, 8, seed=2)
    keep = draw(*lead[:-1], *[1] * len(lead[-1:]), 1, 7, seed=4) > 0
    keep[..., :1] = True
    args = [x.float().to(DEVICE) for x in (q, k, v)]
    for asked in ({}, {"causal": True}, {"alibi_slopes": torch.ones(lead).to(DEVICE)} if lead else {}):
        for mask in (None, keep.to(DEVICE)):
            output, lse = kernel(*args, mask, return_lse=True, **asked)
            right, right_lse = tiled_attention(*args, mask, return_lse=True, **asked)
            torch.testing.assert_close(output, right, atol=1e-5, rtol=0)
            torch.testing.assert_close(lse, right_lse, atol=1e-5, rtol=0)


@needs_triton
@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (2, 2, 0, 0)], ids=str)
def test_empty_tensors(shape):
    b, h, n_q, n_k = shape
    q, k = torch.ones(b, h, n_q, 16, device=DEVICE), torch.ones(b, h, n_k, 16, device=DEVICE)
    output, lse = kernel(q, k, k, return_lse=True)
    assert output.shape == q.shape and (output == 0).all() and lse.shape == q.shape[:-1] and (lse == -math.inf).all()
    assert kernel(*(x.bfloat16() for x in (q, k, k))).dtype == torch.bfloat16


@needs_triton
def test_the_output_lies_in_memory_as_the_queries_do():
    x = draw(2, 5, 3 * 16, seed=0, dtype=torch.float32).to(DEVICE).view(2, 5, 3, 16).transpose(1, 2)
    assert kernel(x, x, x).transpose(1, 2).is_contiguous()  # (batch, length, heads · width) without a copy
    assert kernel(x.contiguous(), x, x).is_contiguous()


def test_a_module_takes_it(no_shape_check):
    torch.manual_seed(0)
    plain = MultiHeadAttention(32, 4, n_kv_heads=2)
    flash = MultiHeadAttention(32, 4, n_kv_heads=2, attend=flash_attention)
    flash.load_state_dict(plain.state_dict())
    x, mask = torch.randn(2, 9, 32), padding_mask([9, 4])
    for asked in ({}, {"causal": True}, {"mask": mask}, {"mask": mask, "causal": True}):
        a, b = plain(x, **asked), flash(x, **asked)
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
        for y, z in zip(torch.autograd.grad(a.sum(), plain.parameters()), torch.autograd.grad(b.sum(), flash.parameters())):
            torch.testing.assert_close(y, z, atol=1e-5, rtol=0)


# --- which path ------------------------------------------------------------------------------------------------------

small = [draw(1, 2, 5, 16, seed=seed, dtype=torch.float32) for seed in range(3)]
STARTS = torch.tensor([0, 2, 5], dtype=torch.int32)
SPECIAL = {
    "softcap": dict(softcap=2.0), "alibi_slopes": dict(alibi_slopes=torch.ones(2)), "return_lse": dict(return_lse=True),
    "cu_seqlens_q": dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS),
}


def test_on_a_cpu_torch_does_what_it_can_and_tiles_the_rest():
    path, why = flash_backend(*small)
    assert path == "torch" and "CPU" in why
    for name, asked in SPECIAL.items():
        asked = {key: value for key, value in asked.items() if key != "cu_seqlens_k"}
        path, why = flash_backend(*small, **asked)
        assert path == "tiled" and name in why


@pytest.mark.parametrize("backend", ["auto", "torch", "tiled", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("asked", [{}, dict(causal=True), dict(window=2), dict(causal=True, window=2), dict(scale=-0.3)], ids=str)
def test_all_paths_agree(backend, asked):
    torch.testing.assert_close(flash_attention(*small, backend=backend, **asked).double(), reference(*small, **asked)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SPECIAL)
def test_what_torch_cannot_do_is_said_when_torch_is_asked(name):
    with pytest.raises(ValueError, match=rf"backend='torch'.*{name}.*'tiled'"):
        flash_attention(*small, backend="torch", **SPECIAL[name])
    a, b = flash_attention(*small, **SPECIAL[name]), tiled_attention(*small, **SPECIAL[name])
    assert all(torch.equal(x, y) for x, y in zip(a, b)) if isinstance(a, tuple) else torch.equal(a, b)


@pytest.mark.parametrize(("capability", "path"), [((7, 0), "torch"), ((7, 5), "torch"), ((8, 0), "triton"), ((8, 6), "triton"), ((8, 9), "triton"),
                                                  ((9, 0), "triton"), ((10, 0), "triton"), ((10, 3), "triton"), ((12, 0), "triton"), ((13, 0), "triton")])
@needs_triton
def test_gpus_before_sm_80_go_to_torch(capability, path, monkeypatch, no_shape_check):
    class OnGpu:
        device, is_cuda, dtype, shape, requires_grad = torch.device("cuda", 0), True, torch.float16, (1, 2, 5, 16), False

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(flash_backward, "_interpreting", lambda: False)
    monkeypatch.setattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda x: False)
    x = OnGpu()
    found, why = flash_backward._choose("auto", x, x, x, "")
    assert found == path
    if path == "torch":
        assert f"sm_{capability[0]}{capability[1]}" in why and "sm_80" in why
        with pytest.raises(ValueError, match=r"backend='triton'.*sm_80 or newer"):
            flash_backward._choose("triton", x, x, x, "")
        assert flash_backward._choose("auto", x, x, x, "softcap")[0] == "tiled"
    arch = 10 * capability[0] + capability[1]
    if path == "triton":
        for dtype in (torch.float16, torch.float32):
            for width in (16, 32, 64, 128, 256):
                for extras in (False, True):
                    rows, keys, warps, stages = flash_forward._tile(arch, dtype, width, extras)
                    assert min(rows, keys) >= 16 and warps in (4, 8) and stages >= 1
                    if arch not in (80, 90, 100, 103):  # 99 KB of shared memory: keys and values of all stages
                        assert stages * keys * width * 2 * dtype.itemsize <= 99 * 1024


def test_reasons(monkeypatch):
    def why(*args):
        return flash_backward._why_not_triton(*args)

    if KERNELS:
        assert why(*small) == ""
        assert "float64" in why(*(x.double() for x in small))
        assert "257 wide" in why(*(torch.ones(1, 1, 2, 257),) * 3)
        assert why(small[0].clone().requires_grad_(), *small[1:]) == ""
        assert "meta" in why(*(x.to("meta") for x in small))
        with forward_ad.dual_level():
            assert "forward-mode" in why(forward_ad.make_dual(small[0], small[1]), *small[1:])
        with monkeypatch.context() as patch:
            patch.setattr(flash_backward.triton, "__version__", "3.1.0")
            assert "3.1.0 is too old" in why(*small)
        with monkeypatch.context() as patch:
            patch.setattr(flash_backward, "_interpreting", lambda: False)
            assert "TRITON_INTERPRET" in why(*small)
    monkeypatch.setattr(flash_backward, "triton", None)
    assert why(*small) == "triton is not installed"
    with pytest.raises(ValueError, match="backend='triton': triton is not installed"):
        kernel(*small)
    assert torch.equal(flash_attention(*small), fused_attention(*small))


@needs_triton
@pytest.mark.parametrize("name", ["mask", "alibi_slopes"])
def test_a_mask_or_slopes_that_are_mapped_over_are_not_for_the_kernel(name, no_shape_check):
    each = {"mask": torch.tensor([True, False]).expand(3, 1, 1, 1, 2), "alibi_slopes": torch.ones(3, 2)}[name].to(DEVICE)
    x = small[0][:, :, :2].to(DEVICE)
    with pytest.raises(ValueError, match="backend='triton': torch.func is at work"):
        torch.vmap(lambda y: kernel(x, x, x, **{name: y}))(each)
    torch.testing.assert_close(torch.vmap(lambda y: flash_attention(x, x, x, **{name: y}))(each)[2], flash_attention(x, x, x, **{name: each[2]}))


@needs_triton
@pytest.mark.parametrize("cap", [1.0, 1e2, 1e4, 1e6, 1e30])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_a_cap_far_above_the_scores_changes_them_little_and_one_below_them_much(cap, size):
    q, k, v = (size * x.to(DEVICE) if i < 2 else x.to(DEVICE) for i, x in enumerate(small))
    output, lse = kernel(q, k, v, softcap=cap, return_lse=True)
    right, right_lse = reference(q, k, v, softcap=cap)
    bound = 1e-6 * max(1, min(size**2, cap))  # scores as large as that have no more digits
    assert (lse.cpu() - right_lse).abs().max() < bound and (output.cpu() - right).abs().max() < 4 * bound


@pytest.mark.usefixtures("no_shape_check")
def test_what_a_call_refuses_its_path_refuses():
    for asked in (dict(softcap=-1.0), dict(alibi_slopes=torch.ones(3)), dict(return_lse=1), dict(backend="cuda")):
        said = []
        for f in (flash_backend, flash_attention):
            with pytest.raises((TypeError, ValueError)) as error:
                f(*small, **asked)
            said.append(str(error.value))
        assert said[0] == said[1]


def test_the_log_says_once_why_another_path_is_taken(caplog):
    flash_backward._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="attention_course"):
        for _ in range(3):
            flash_attention(*small)
        assert len(caplog.records) == 1 and "torch's attention" in caplog.text and "CPU" in caplog.text
        flash_attention(*small, softcap=2.0)
        assert len(caplog.records) == 2 and "tiled_attention" in caplog.text and "softcap" in caplog.text
        flash_attention(*small, backend="torch")
        flash_attention(*small, backend="tiled")
        assert len(caplog.records) == 2, "what was asked for is no news"


def test_it_compiles_and_maps_by_way_of_torch(compiled):
    f = compiled(lambda q, k, v: flash_attention(q, k, v, causal=True))
    torch.testing.assert_close(f(*small), fused_attention(*small, causal=True))


def test_vmap():
    stacked = [torch.stack([x, 2 * x]) for x in small]
    torch.testing.assert_close(torch.vmap(flash_attention)(*stacked), flash_attention(*stacked))


def test_without_triton_everything_else_works():
    code = """
import sys
sys.modules["triton"] = None  # as where it is not installed
import torch
from attention_course import flash_attention, flash_backend
x = torch.ones(1, 2, 3, 16)
assert (flash_attention(x, x, x, softcap=2.0) == 1).all() and (flash_attention(x, x, x) == 1).all()
assert flash_backend(x, x, x) == ("torch", "triton is not installed")
try:
    flash_attention(x, x, x, backend="triton")
except ValueError as error:
    assert "triton is not installed" in str(error)
else:
    raise AssertionError
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# --- what is refused -------------------------------------------------------------------------------------------------

q, k, v = small
REFUSED = {
    "other device": (dict(k=k.to("meta")), ValueError, "k is on meta but q is on cpu"),
    "mixed dtypes": (dict(v=v.half()), TypeError, "v is torch.float16 but q is torch.float32"),
    "head counts": (dict(q=torch.ones(1, 3, 5, 16)), ValueError, "multiple of k's heads"),
    "width": (dict(k=torch.ones(1, 2, 5, 8)), ValueError, "same width"),
    "window 0": (dict(window=0), ValueError, "window=0; expected at least 1"),
    "window -3": (dict(window=-3), ValueError, "window=-3"),
    "window 2.0": (dict(window=2.0), TypeError, "window is a float"),
    "causal 1": (dict(causal=1), TypeError, "causal is a int"),
    "dropout": (dict(dropout_p=0.1), ValueError, "dropout_p=0.1.*fused_attention"),
    "a causal mask": (dict(mask=torch.ones(5, 5, dtype=torch.bool)), ValueError, r"mask has shape \(5, 5\); expected \(1, 1, 1, n_k\), padding alone"),
    "a mask for each head": (dict(mask=torch.ones(1, 2, 1, 5, dtype=torch.bool)), ValueError, "padding alone.*fused_attention"),
    "an added mask": (dict(mask=torch.zeros(1, 1, 1, 5)), ValueError, "mask is torch.float32; expected bool.*fused_attention"),
    "a mask of integers": (dict(mask=torch.ones(1, 1, 1, 5, dtype=torch.long)), TypeError, "mask is torch.int64"),
    "a mask of another length": (dict(mask=torch.ones(1, 1, 1, 4, dtype=torch.bool)), ValueError, r"mask has shape \(1, 1, 1, 4\)"),
    "softcap 0": (dict(softcap=0.0), ValueError, "softcap=0.0; expected a positive finite number"),
    "softcap nan": (dict(softcap=math.nan), ValueError, "softcap=nan"),
    "slopes for other heads": (dict(alibi_slopes=torch.ones(3)), ValueError, r"alibi_slopes has shape \(3,\)"),
    "slopes that learn": (dict(alibi_slopes=torch.ones(2, requires_grad=True)), ValueError, "alibi_slopes requires a gradient"),
    "starts of queries alone": (dict(cu_seqlens_q=STARTS), ValueError, "cu_seqlens_q is given and cu_seqlens_k is not"),
    "starts of 64 bits": (dict(cu_seqlens_q=STARTS.long(), cu_seqlens_k=STARTS), TypeError, "cu_seqlens_q is torch.int64"),
    "starts beyond the end": (dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS + 1), ValueError, "cu_seqlens_k is"),
    "starts and a mask": (dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, mask=torch.ones(1, 1, 1, 5, dtype=torch.bool)), ValueError, "mask cannot"),
    "backend": (dict(backend="cuda"), ValueError, "backend='cuda'; expected 'auto', 'triton', 'torch' or 'tiled'"),
    "backend None": (dict(backend=None), ValueError, "backend=None"),
    "no number": (dict(scale="1"), TypeError, "scale is a str"),
}


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("backend", ["auto", "triton", "tiled", "torch"])
@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_named(name, backend):
    asked, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        flash_attention(**{"q": q, "k": k, "v": v, "backend": backend} | asked)
