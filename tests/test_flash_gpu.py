"""What only a GPU can show about the kernel of chapter 13: `pytest -m gpu` there.

Wherever it makes sense the same test runs at a tiny size in Triton's interpreter, so that it is known to work before there is a GPU.
Features in all combinations stand in tests/test_flash_attention.py, which runs on a GPU, too.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attention_course import flash_attention, flash_backend, flash_forward, tiled_attention

pytest.importorskip("triton", minversion="3.4")
HERE = torch.cuda.is_available()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no GPU")]
interpreted = pytest.mark.skipif(HERE, reason="kernels are compiled here")
# Absolute, for values of about 1: one rounding of the weights and one of the result.
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HALVES = [torch.float16, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


@pytest.fixture(params=[pytest.param("cpu", marks=interpreted, id="interpreter"), pytest.param("cuda", marks=on_gpu, id="gpu")])
def place(request):
    "Where, and how large: `pick` takes the first of two values on a GPU."
    gpu = request.param == "cuda"
    return SimpleNamespace(device=request.param, gpu=gpu, pick=lambda large, tiny: large if gpu else tiny)


def gpu_only(test):
    for mark in on_gpu:
        test = mark(test)
    return test


def normal(device, *shape, dtype=torch.float16, seed=0):
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def qkv(device, b, h, n_q, d, kv=None, n_k=None, d_v=None, dtype=torch.float16):
    k_shape = (b, kv or h, n_k or n_q)
    return normal(device, b, h, n_q, d, dtype=dtype), normal(device, *k_shape, d, dtype=dtype, seed=1), normal(device, *k_shape, d_v or d, dtype=dtype, seed=2)


def kernel(q, k, v, *args, **asked):
    return flash_attention(q, k, v, *args, backend="triton", **asked)


def right(q, k, v, **asked):
    return tiled_attention(q.double(), k.double(), v.double(), **asked)


def check(output, expected, dtype):
    assert torch.isfinite(output).all()
    assert (output - expected).abs().max() < BOUNDS[dtype]


# --- is it right -----------------------------------------------------------------------------------------------------


@gpu_only
@pytest.mark.checkout
@each_dtype
@pytest.mark.parametrize("feature", range(13))
def test_every_feature_is_right_at_sizes_that_fill_no_tile(feature, dtype):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
    import gpu

    (row,) = gpu.matrix({"feature": list(gpu.FEATURES)[feature], "dtype": str(dtype)[6:]}, None)
    assert "error" not in row and row["checks"] == 2 * len(gpu.REAL.odd), row


SIZES = [(n, d) for n in (1, 7, 64, 127, 128, 129, 1000) for d in (16, 33, 40, 64, 80, 96, 128, 192, 256)]


@gpu_only
@each_dtype
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", sorted({d for _, d in SIZES}))
def test_every_length_and_width_is_right(d, causal, dtype):
    for n in sorted({n for n, _ in SIZES}):
        q, k, v = qkv("cuda", 2, 2, n, d, dtype=dtype)
        output, lse = kernel(q, k, v, causal=causal, return_lse=True)
        expected, expected_lse = right(q, k, v, causal=causal, return_lse=True)
        check(output, expected, dtype)
        check(lse, expected_lse, dtype)


@each_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_whole_tiles_are_right(place, causal, dtype):
    "Lengths and widths that every tile divides: the paths without any bounds."
    for d in place.pick((64, 128, 256), (16,)):
        q, k, v = qkv(place.device, 1, 2, place.pick(2048, 128), d, dtype=dtype)
        check(kernel(q, k, v, causal=causal), right(q, k, v, causal=causal), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_many_keys_are_added_up_in_float32(place, dtype):
    "All weights are alike and all values 1: a sum in half precision would stop growing at 2,048."
    n = place.pick(50_000, 300)
    q, k = torch.zeros(1, 1, 2, 16, dtype=dtype, device=place.device), torch.zeros(1, 1, n, 16, dtype=dtype, device=place.device)
    output, lse = kernel(q, k, torch.ones_like(k), return_lse=True)
    assert (output == 1).all() and (lse - math.log(n)).abs().max() < 1e-4


# --- the copying engine, and what is written ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_descriptors_and_pointers_give_the_same(place, causal, dtype):
    if place.gpu and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("no tensor descriptors on this GPU")
    for n, d in place.pick(((4096, 128), (1000, 64), (33, 80), (257, 256)), ((20, 16), (33, 24))):
        q, k, v = qkv(place.device, 1, 4, n, d, kv=2, dtype=dtype)
        asked = dict(reach=(None, 0 if causal else None), scale=d**-0.5, want_lse=True)
        found = [flash_forward._launch(q, k, v, **asked, tma=tma) for tma in (True, False)]
        for a, b in zip(*found):
            torch.testing.assert_close(a, b, atol=BOUNDS[dtype] / 8, rtol=0)
        check(found[0][0], right(q, k, v, causal=causal), dtype)


@pytest.mark.parametrize("d", [33, 80, 16])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_nothing_is_written_beside_the_output_and_all_of_it_is(place, d, dtype, monkeypatch):
    "The output becomes a part of something larger, full of a number that must stay around it and vanish within."
    outside, made = 77.0, []
    new_empty, empty = torch.Tensor.new_empty, torch.empty

    def larger(x, *shape, **options):
        if len(shape) != 4:     # of the interpreter's own
            return new_empty(x, *shape, **options)
        whole = torch.full((*shape[:-2], shape[-2] + 5, shape[-1] + 8), outside, dtype=x.dtype, device=x.device)
        made.append((whole, whole[..., 2:-3, 4:-4]))
        return made[-1][1]

    def lse_in_the_middle(*shape, dtype=None, device=None):
        if len(shape) != 3:
            return empty(*shape, dtype=dtype, device=device)
        whole = torch.full((math.prod(shape) + 64,), outside, dtype=dtype, device=device)
        made.append((whole, whole[32:-32].view(shape)))
        return made[-1][1]

    for n, heads_last in ((place.pick(1000, 9), False), (1, False), (place.pick(130, 17), True)):
        q, k, v = qkv(place.device, 1, 3, n, d, dtype=dtype)
        if heads_last:      # the output lies as q does
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
        made.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", larger)
            patch.setattr(flash_forward.torch, "empty", lse_in_the_middle)
            output, lse = flash_forward._launch(q, k, v, reach=(None, 0), scale=d**-0.5, want_lse=True)
        if place.gpu:
            torch.cuda.synchronize()
        assert len(made) == 2
        check(output, right(q, k, v, causal=True), dtype)
        for whole, inside in made:
            assert not (inside == outside).any()
            inside.fill_(outside)
            assert (whole == outside).all(), "something was written beside the output"


# --- sizes beyond 32 and 16 bits -----------------------------------------------------------------------------------------


def room(gigabytes):
    if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of memory that is free")


@gpu_only
@pytest.mark.parametrize("tma", [True, False])
def test_rows_beyond_two_to_the_31_numbers(tma):
    room(6)
    row = (1 << 30) + 64
    memory = torch.empty(2 * row + 64, dtype=torch.float16, device="cuda")
    far = memory.as_strided((1, 1, 3, 64), (0, 0, row, 1))
    near = normal("cuda", 1, 1, 3, 64)
    far.copy_(near)
    for back, ahead in ((None, None), (None, 0)):
        a, b = (flash_forward._launch(x, x, x, reach=(back, ahead), scale=0.125, tma=tma and torch.cuda.get_device_capability()[0] in (9, 10))[0] for x in (far, near))
        assert torch.equal(a, b)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32, device="cuda")
    a, b = (kernel(x, x, x, cu_seqlens_q=starts, cu_seqlens_k=starts) for x in (far, near))
    assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_more_heads_than_65535(place, causal):
    "And on a GPU more than 2^31 numbers in each tensor. A grid's axes y and z end at 65,535."
    n, d, many = place.pick((256, 128, 70_000), (4, 16, 7))
    if place.gpu:
        room(30)
    q = normal(place.device, 1, many, n, d)
    assert not place.gpu or q.numel() > 2**31
    k, v = q.flip(-1), q.flip(-2)
    output = kernel(q, k, v, causal=causal)
    for head in (0, 1, many // 2, many - 2, many - 1):
        part = slice(head, head + 1)
        check(output[:, part], right(q[:, part], k[:, part], v[:, part], causal=causal), torch.float16)


@gpu_only
def test_many_batches_of_short_sequences():
    q, k, v = qkv("cuda", 70_000, 1, 5, 16)
    check(kernel(q, k, v), right(q, k, v), torch.float16)


# --- the same each time, and in any stream, graph and device ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_ten_runs_give_the_same_bits(place, dtype):
    q, k, v = qkv(place.device, 2, 4, place.pick(2000, 20), place.pick(128, 16), kv=2, dtype=dtype)
    first = kernel(q, k, v, causal=True, return_lse=True)
    for _ in range(place.pick(10, 1)):
        torch.empty_like(q).fill_(math.nan)     # memory that the next output may get
        assert all(torch.equal(a, b) for a, b in zip(first, kernel(q, k, v, causal=True, return_lse=True)))


@gpu_only
@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"causal": True, "return_lse": True}, {"softcap": 2.0, "window": 50}], ids=str)
def test_a_call_can_be_captured_in_a_graph(asked):
    q, k, v = qkv("cuda", 1, 4, 300, 64)
    kernel(q, k, v, **asked)        # seen before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(q, k, v, **asked)
    for seed in (5, 6):
        for x in (q, k, v):
            x.copy_(normal("cuda", *x.shape, seed=seed))
        graph.replay()
        expected = kernel(q, k, v, **asked)
        for a, b in zip(found, expected) if isinstance(found, tuple) else [(found, expected)]:
            assert torch.equal(a, b)


@gpu_only
def test_packed_calls_can_be_captured_too():
    starts = torch.tensor([0, 70, 70, 300], dtype=torch.int32, device="cuda")
    q, k, v = qkv("cuda", 1, 4, 300, 64)
    expected = kernel(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
    graph.replay()
    assert torch.equal(found, expected)


@gpu_only
@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"return_lse": True}, {"packed": True}, {"padding": True}, {"slopes": True}], ids=str)
def test_a_call_never_waits_for_the_gpu(asked):
    q, k, v = qkv("cuda", 1, 4, 300, 64)
    options = {name: value for name, value in asked.items() if name in ("causal", "return_lse")}
    if "packed" in asked:
        starts = torch.tensor([0, 70, 70, 300], dtype=torch.int32, device="cuda")
        options |= dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
    if "padding" in asked:
        options["mask"] = torch.arange(300, device="cuda")[None, None, None] < 200
    if "slopes" in asked:
        options["alibi_slopes"] = torch.ones(4, device="cuda")
    kernel(q, k, v, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(q, k, v, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu_only
def test_it_runs_in_the_stream_that_is_current():
    q, k, v = qkv("cuda", 1, 4, 1000, 64)
    expected = kernel(q, k, v)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)       # in another stream the kernel would see zeros
        output = kernel(late, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(output, expected)


@gpu_only
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_it_runs_on_the_gpu_of_its_tensors():
    q, k, v = qkv("cuda:1", 1, 4, 300, 64)
    with torch.cuda.device(0):
        output = kernel(q, k, v, causal=True)
        check(output, right(q, k, v, causal=True), torch.float16)
        assert output.device == q.device and torch.cuda.current_device() == 0
        with pytest.raises(ValueError, match="k is on cuda:0 but q is on cuda:1"):
            kernel(q, k.to("cuda:0"), v)


@pytest.mark.usefixtures("no_shape_check")
def test_tensors_of_two_devices_are_refused(place):
    q, k, v = qkv(place.device, 1, 2, 5, 16)
    other = place.pick("cpu", "meta")
    for wrong in ((q, k.to(other), v), (q, k, v.to(other))):
        with pytest.raises(ValueError, match=f"is on {other} but q is on {q.device}"):
            kernel(*wrong)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        starts = torch.tensor([0, 5], dtype=torch.int32, device=place.device)
        with pytest.raises(ValueError, match=f"{name} is on {other}"):
            kernel(q, k, v, **(dict(cu_seqlens_q=starts, cu_seqlens_k=starts) | {name: starts.to(other)}))
    with pytest.raises(ValueError, match=f"alibi_slopes is on {other}"):
        kernel(q, k, v, alibi_slopes=torch.ones(2, device=other))
    with pytest.raises(ValueError, match=f"mask is on {other}"):
        kernel(q, k, v, torch.ones(1, 1, 1, 5, dtype=torch.bool, device=other))


@gpu_only
def test_the_kernel_is_what_a_call_takes_by_itself():
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("older than sm_80")
    q, k, v = qkv("cuda", 1, 4, 300, 64)
    assert flash_backend(q, k, v)[0] == "triton"
    assert torch.equal(flash_attention(q, k, v), kernel(q, k, v))


# --- what it costs -----------------------------------------------------------------------------------------------------


@gpu_only
@pytest.mark.parametrize("return_lse", [False, True])
def test_nothing_is_kept_but_the_log_sum_exp(return_lse):
    q, k, v = qkv("cuda", 1, 8, 4096, 64)
    kernel(q, k, v, return_lse=return_lse)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = kernel(q, k, v, return_lse=return_lse)
    extra = torch.cuda.max_memory_allocated() - before - q.nbytes
    assert extra == (4 * 8 * 4096 if return_lse else 0)
    del found


@gpu_only
def test_another_length_compiles_nothing_new():
    "Lengths that fill whole tiles share a kernel, those that do not share another."
    cache = flash_forward._flash_kernel.device_caches[torch.cuda.current_device()][0]
    for lengths in ((1024, 2048, 4096, 3072), (1000, 3001, 77)):
        kernel(*qkv("cuda", 2, 4, lengths[0], 64), causal=True)
        before = len(cache)
        for n in lengths[1:]:
            kernel(*qkv("cuda", 3, 8, n, 64), causal=True)
        assert len(cache) == before
