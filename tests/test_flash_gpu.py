"""What only a GPU can show about the kernels of chapters 13 and 14: `pytest -m gpu` there.

Wherever it makes sense the same test runs at a tiny size in Triton's interpreter, so that it is known to work before there is a GPU.
Features in all combinations stand in tests/test_flash_attention.py and tests/test_flash_backward.py, which run on a GPU, too.
"""

import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attention_course import MultiHeadAttention, flash_attention, flash_backend, flash_backward, flash_forward, tiled_attention

pytest.importorskip("triton", minversion="3.4")
HERE = torch.cuda.is_available()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no GPU")]
interpreted = pytest.mark.skipif(HERE, reason="kernels are compiled here")
# Absolute, for values of about 1: one rounding of the weights and one of the result.
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Of gradients, as a share of the largest or of 1: the output is rounded, too, and so are the gradients of the scores. Slopes make
# exponents of hundreds, which cost digits of the log-sum-exp.
BOUNDS_BACK = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
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


def arriving(q, v):
    "Gradients of output and log-sum-exp."
    rows = q.shape[:-1]
    return normal(q.device, *rows, v.shape[-1], dtype=q.dtype, seed=3), normal(q.device, *rows, dtype=torch.float32, seed=4)


def both_ways(f, q, k, v, grads, **asked):
    "Output, log-sum-exp, and the gradients of q, k and v."
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    outputs = f(*inputs, **asked, return_lse=True)
    gradients = torch.autograd.grad(outputs, inputs, [grad.to(x.dtype) for grad, x in zip(grads, outputs)])
    return *(x.detach() for x in outputs), *gradients


def check_gradients(found, expected, dtype):
    for x, y in zip(found, expected, strict=True):
        assert torch.isfinite(x).all() and x.dtype == dtype
        assert (x - y).abs().max() < BOUNDS_BACK[dtype] * y.abs().max().clamp(min=1)


def check_both_ways(q, k, v, **asked):
    "Gradients, that is; where nothing is seen the log-sum-exp has none."
    grads = arriving(q, v)
    found, expected = both_ways(kernel, q, k, v, grads, **asked), both_ways(right, q, k, v, grads, **asked)
    check_gradients(found[2:], expected[2:], q.dtype)


# --- is it right -----------------------------------------------------------------------------------------------------


@gpu_only
@pytest.mark.checkout
@each_dtype
@pytest.mark.parametrize("feature", range(13))
def test_every_feature_is_right_at_sizes_that_fill_no_tile(feature, dtype):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
    import gpu

    name = list(gpu.FEATURES)[feature]
    (row,) = gpu.matrix({"feature": name, "dtype": str(dtype)[6:]}, None)
    assert "error" not in row and row["checks"] == 2 * len(gpu.REAL.odd), row
    for lengths in gpu.REAL.odd:
        inputs, options = gpu.feature(name, lengths, dtype)
        check_both_ways(*inputs, **options)


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
        check_both_ways(q, k, v, causal=causal)


@each_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_whole_tiles_are_right(place, causal, dtype):
    "Lengths and widths that every tile divides: the paths without any bounds."
    for d in place.pick((64, 128, 256), (16,)):
        q, k, v = qkv(place.device, 1, place.pick(2, 1), place.pick(2048, 64), d, dtype=dtype)
        check(kernel(q, k, v, causal=causal), right(q, k, v, causal=causal), dtype)
        check_both_ways(q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("extras", [False, True])
def test_every_tile_of_this_gpu_gives_the_right_gradients(place, extras, dtype):
    "Compilers were seen to multiply by a transposed tile wrongly, on Hopper and in some of the shapes only."
    for width in place.pick((64, 128, 256), (16,)):
        for n in place.pick((512, 700, 4096), (40,)):
            for kv in place.pick((1, 2), (1,)):
                asked = dict(softcap=20.0, window=n // 3) if extras else {}
                check_both_ways(*qkv(place.device, 1, 2, n, width, kv=kv, dtype=dtype), causal=True, **asked)


@each_dtype
@pytest.mark.parametrize("n_q", [1, 4])
def test_few_queries_to_many_keys_are_right(place, n_q, dtype):
    "As in decoding: groups of 1, 4 and 8 heads, and lengths of cache that fill no tile."
    for n_k in place.pick((64, 1000, 4096, 30_001), (40,)):
        for kv in place.pick((1, 2, 8), (2,)):
            for d in place.pick((64, 128, 256), (16,)):
                q, k, v = qkv(place.device, 2, 8, n_q, d, kv=kv, n_k=n_k, dtype=dtype)
                for asked in place.pick(({}, {"causal": True}, {"causal": True, "window": n_k // 2}), ({"causal": True},)):
                    output, lse = kernel(q, k, v, **asked, return_lse=True)
                    expected, expected_lse = right(q, k, v, **asked, return_lse=True)
                    check(output, expected, dtype)
                    check(lse, expected_lse, dtype)


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
    for n, d in place.pick(((4096, 128), (1000, 64), (33, 80), (257, 256)), ((33, 24),)):
        q, k, v = qkv(place.device, 1, place.pick(4, 2), n, d, kv=place.pick(2, 1), dtype=dtype)
        asked = dict(reach=(None, 0 if causal else None), scale=d**-0.5)
        found = [flash_forward._launch(q, k, v, **asked, tma=tma) for tma in (True, False)]
        for a, b in zip(*found):
            torch.testing.assert_close(a, b, atol=BOUNDS[dtype] / 8, rtol=0)
        check(found[0][0], right(q, k, v, causal=causal), dtype)
        if d == 256 and place.gpu and torch.cuda.get_device_capability()[0] == 9:
            continue  # descriptors leave too few registers there, and are not used
        grads = arriving(q, v)
        back = [flash_backward._launch_back(q, k, v, *found[1], *grads, **asked, tma=tma) for tma in (True, False)]
        expected = both_ways(right, q, k, v, grads, causal=causal)[2:]
        for gradients in back:
            check_gradients(gradients, expected, dtype)


@pytest.mark.parametrize("d", [33, 80, 16])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_nothing_is_written_beside_the_output_and_all_of_it_is(place, d, dtype, monkeypatch):
    "The output becomes a part of something larger, full of a number that must stay around it and vanish within."
    outside, made = 77.0, []
    new_empty = torch.Tensor.new_empty

    def larger(x, *shape, dtype=None, **options):
        if len(shape) == 4:
            whole = torch.full((*shape[:-2], shape[-2] + 5, shape[-1] + 8), outside, dtype=x.dtype, device=x.device)
            made.append((whole, whole[..., 2:-3, 4:-4]))
        elif len(shape) == 3:  # the log-sum-exp, which has no steps of its own
            whole = torch.full((math.prod(shape) + 64,), outside, dtype=dtype or x.dtype, device=x.device)
            made.append((whole, whole[32:-32].view(shape)))
        else:  # of the interpreter's own
            return new_empty(x, *shape, dtype=dtype, **options)
        return made[-1][1]

    for n, heads_last in ((place.pick(1000, 9), False), (1, False), (place.pick(130, 17), True)):
        q, k, v = qkv(place.device, 1, place.pick(3, 2), n, d, dtype=dtype)
        if heads_last:      # the output lies as q does
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
        made.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", larger)
            patch.setattr(torch, "empty_like", lambda x: larger(x, *x.shape))
            asked, grads = dict(reach=(None, 0), scale=d**-0.5), arriving(q, v)
            output, lse = flash_forward._launch(q, k, v, **asked)
            gradients = flash_backward._launch_back(q, k, v, output, lse, *grads, **asked)
        if place.gpu:
            torch.cuda.synchronize()
        assert len(made) == 6  # output, log-sum-exp, three gradients, delta
        check(output, right(q, k, v, causal=True), dtype)
        check_gradients(gradients, both_ways(right, q, k, v, grads, causal=True)[2:], dtype)
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
    grads = arriving(near, near)
    for asked in ({}, {"causal": True}, {"cu_seqlens_q": starts, "cu_seqlens_k": starts}):
        found = [both_ways(kernel, x, x, x, (arrives, grads[1]), **asked) for x, arrives in ((far, far), (near, near))]
        assert all(torch.equal(a, b) for a, b in zip(*found))
    far_q, near_q = (x[:, :, :1] for x in (far, near))
    a, b = (flash_backward._launch_split(q, x, x, scale=0.125)[0] for q, x in ((far_q, far), (near_q, near)))
    assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_more_heads_than_65535(place, causal):
    "And on a GPU more than 2^31 numbers in each tensor. A grid's axes y and z end at 65,535."
    n, d, many = place.pick((256, 128, 70_000), (4, 16, 4))
    if place.gpu:
        room(30)
    q = normal(place.device, 1, many, n, d)
    assert not place.gpu or q.numel() > 2**31
    k, v = q.flip(-1), q.flip(-2)
    output = kernel(q, k, v, causal=causal)
    heads = [slice(head, head + 1) for head in (0, 1, many // 2, many - 2, many - 1)]
    for part in heads:
        check(output[:, part], right(q[:, part], k[:, part], v[:, part], causal=causal), torch.float16)
    del output
    if place.gpu:
        room(50)
    one, zero = q.new_ones(()).expand(q.shape), torch.zeros((), device=q.device).expand(q.shape[:-1])
    found = both_ways(kernel, q, k, v, (one, zero), causal=causal)
    for part in heads:
        inputs = (x[:, part] for x in (q, k, v))
        expected = both_ways(right, *inputs, (one[:, part], zero[:, part]), causal=causal)
        check_gradients([x[:, part] for x in found[2:]], expected[2:], torch.float16)


def test_heads_side_by_side_whose_rows_lie_beyond_two_to_the_31(place):
    "Output and gradients lie as the inputs do, so that the last rows are written far from where their head begins."
    n, heads, d = place.pick((70_000, 256, 128), (20, 2, 16))
    if place.gpu:
        room(50)
    q = normal(place.device, 1, n, heads, d).transpose(1, 2)
    assert not place.gpu or (n - 1) * heads * d > 2**31
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q.flip(-1), q.flip(-2)))
    grads = q.new_ones(()).expand(q.shape), torch.zeros((), device=q.device).expand(q.shape[:-1])
    output, _, *gradients = both_ways(kernel, q, k, v, grads, causal=True, window=50)
    assert all(x.transpose(1, 2).is_contiguous() for x in (output, *gradients))
    for head in (0, heads - 1):
        part = slice(head, head + 1)
        inputs = (x[:, part] for x in (q, k, v))
        expected = both_ways(right, *inputs, [x[:, part] for x in grads], causal=True, window=50)
        check(output[:, part], expected[0], torch.float16)
        check_gradients([x[:, part] for x in gradients], expected[2:], torch.float16)


@gpu_only
def test_many_batches_of_short_sequences():
    q, k, v = qkv("cuda", 70_000, 1, 5, 16)
    check(kernel(q, k, v), right(q, k, v), torch.float16)
    check_both_ways(q, k, v)
    check(kernel(q[:, :, :1], *(x.repeat(1, 1, 2, 1) for x in (k, v))), right(q[:, :, :1], k, v), torch.float16)


# --- the same each time, and in any stream, graph and device ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_ten_runs_give_the_same_bits(place, dtype):
    "Output, log-sum-exp and gradients; and a single query whose keys are split."
    q, k, v = qkv(place.device, place.pick(2, 1), 4, place.pick(2000, 17), place.pick(128, 16), kv=2, dtype=dtype)
    grads = arriving(q, v)

    def run():
        torch.empty_like(q).fill_(math.nan)     # memory that the next output may get
        return *both_ways(kernel, q, k, v, grads, causal=True), *kernel(q[:, :, -1:], k, v, return_lse=True)

    first = run()
    for _ in range(place.pick(10, 1)):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


def captured(place, f):
    "The results of f in a CUDA graph, and what makes them anew in the same memory; where there is no GPU, the same by hand."
    f()         # seen before: nothing is compiled while a graph is made
    if not place.gpu:
        results = f()
        return results, lambda: [a.copy_(b) for a, b in zip(results, f(), strict=True)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = f()
    return results, graph.replay


def new_numbers(*tensors, seed):
    for i, x in enumerate(tensors):
        x.copy_(normal(x.device, *x.shape, dtype=x.dtype, seed=seed + i))


@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"softcap": 2.0, "window": 50}], ids=str)
def test_a_call_and_its_gradients_can_be_captured_in_a_graph(place, asked):
    q, k, v = qkv(place.device, 1, place.pick(4, 1), place.pick(300, 20), place.pick(64, 16))
    grads = arriving(q, v)
    for f in (lambda: kernel(q, k, v, **asked, return_lse=True), lambda: both_ways(kernel, q, k, v, grads, **asked)):
        results, replay = captured(place, f)
        for seed in place.pick((5, 50), (5,)):
            new_numbers(q, k, v, *grads, seed=seed)
            replay()
            assert all(torch.equal(a, b) for a, b in zip(results, f(), strict=True))


def test_a_step_of_training_can_be_captured_in_a_graph(place):
    "Forward, backward and a step down the slope, replayed: the weights become those of the same loop without a graph."
    torch.manual_seed(0)
    width = place.pick(128, 32)
    layers = [MultiHeadAttention(width, 2, attend=partial(flash_attention, backend="triton")).to(place.device) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x, target = (normal(place.device, 2, place.pick(200, 9), width, dtype=torch.float32, seed=seed) for seed in (0, 1))

    def step(layer):
        loss = (layer(x, causal=True) - target).square().mean()
        gradients = torch.autograd.grad(loss, list(layer.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(layer.parameters(), gradients):
                parameter.sub_(0.1 * gradient)
        return (loss.detach(),)

    start = {name: value.clone() for name, value in layers[0].state_dict().items()}
    _, replay = captured(place, lambda: step(layers[0]))
    layers[0].load_state_dict(start)
    for seed in place.pick((5, 50, 500), (5,)):
        new_numbers(x, target, seed=seed)
        replay()
        step(layers[1])
    torch.testing.assert_close(layers[0].state_dict(), layers[1].state_dict(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_step_of_decoding_can_be_captured_in_a_graph(place, dtype):
    "A mask says which places of the cache are filled; each replay fills one more and looks at all so far."
    n, heads, kv, d = place.pick(2048, 64), 4, 2, place.pick(64, 16)
    q, new_k, new_v = qkv(place.device, 2, heads, 1, d, kv=kv, dtype=dtype)
    keys, values = (torch.zeros(2, kv, n, d, dtype=dtype, device=place.device) for _ in range(2))
    mask = torch.zeros(2, 1, 1, n, dtype=torch.bool, device=place.device)
    at = torch.zeros(1, dtype=torch.long, device=place.device)

    def step():
        keys.index_copy_(2, at, new_k)
        values.index_copy_(2, at, new_v)
        mask.index_fill_(3, at, True)
        return (kernel(q, keys, values, mask),)

    (output,), replay = captured(place, step)
    mask.zero_()
    for place_now in range(place.pick(20, 3)):
        at.fill_(place_now)
        new_numbers(q, new_k, new_v, seed=3 * place_now)
        replay()
        check(output, right(q, keys[:, :, : place_now + 1], values[:, :, : place_now + 1]), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@gpu_only
def test_it_compiles_with_inductor_for_lengths_that_change(dtype, no_shape_check):
    "One graph, in which one query takes another kernel. On a CPU tests/test_flash_backward.py compiles without inductor."
    torch._dynamo.reset()

    def f(q, k, v, slopes):
        output, lse = kernel(2 * q, k, v, causal=True, softcap=5.0, alibi_slopes=slopes, return_lse=True)
        return output.relu() + lse[..., None].to(output.dtype)

    compiled, slopes = torch.compile(f, fullgraph=True, dynamic=True), torch.tensor([0.5, 0.1], device="cuda")
    for n_q, n_k in ((300, 300), (77, 200), (1, 1000), (513, 513)):
        inputs = [x.requires_grad_() for x in qkv("cuda", 1, 2, n_q, 64, kv=1, n_k=n_k, dtype=dtype)]
        results = [g(*inputs, slopes) for g in (compiled, f)]
        torch.testing.assert_close(*results, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
        d_output = arriving(inputs[0], inputs[2])[0]
        check_gradients(*(torch.autograd.grad(result, inputs, d_output) for result in results), dtype)


def test_packed_calls_can_be_captured_too(place):
    starts = torch.tensor(place.pick([0, 70, 70, 300], [0, 7, 7, 20]), dtype=torch.int32, device=place.device)
    q, k, v = qkv(place.device, 1, place.pick(2, 1), place.pick(300, 20), place.pick(64, 16))
    grads, asked = arriving(q, v), dict(cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
    results, replay = captured(place, lambda: both_ways(kernel, q, k, v, grads, **asked))
    new_numbers(q, k, v, *grads, seed=5)
    replay()
    assert all(torch.equal(a, b) for a, b in zip(results, both_ways(kernel, q, k, v, grads, **asked)))


@gpu_only
@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"packed": True}, {"padding": True}, {"slopes": True}], ids=str)
def test_a_call_never_waits_for_the_gpu(asked):
    q, k, v = qkv("cuda", 1, 4, 300, 64)
    options = {"causal": True} if "causal" in asked else {}
    if "packed" in asked:
        starts = torch.tensor([0, 70, 70, 300], dtype=torch.int32, device="cuda")
        options |= dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
    if "padding" in asked:
        options["mask"] = torch.arange(300, device="cuda")[None, None, None] < 200
    if "slopes" in asked:
        options["alibi_slopes"] = torch.ones(4, device="cuda")
    grads = arriving(q, v)
    few = () if "packed" in asked else (q[:, :, :1],)

    def run():
        both_ways(kernel, q, k, v, grads, **options)
        for query in few:
            kernel(query, k, v, **options)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu_only
def test_it_runs_in_the_stream_that_is_current():
    q, k, v = qkv("cuda", 1, 4, 1000, 64)
    grads = arriving(q, v)
    expected = both_ways(kernel, q, k, v, grads)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)       # in another stream the kernel would see zeros
        found = both_ways(kernel, late, k, v, grads)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@gpu_only
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_it_runs_on_the_gpu_of_its_tensors():
    q, k, v = qkv("cuda:1", 1, 4, 300, 64)
    with torch.cuda.device(0):
        output = kernel(q, k, v, causal=True)
        check(output, right(q, k, v, causal=True), torch.float16)
        check_both_ways(q, k, v, causal=True)
        check(kernel(q[:, :, :1], k, v), right(q[:, :, :1], k, v), torch.float16)
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
    for x in (q, k, v):
        x.requires_grad_()
    assert flash_backend(q, k, v)[0] == "triton"
    output = flash_attention(q, k, v)
    assert torch.equal(output, kernel(q, k, v)) and "flash" in type(output.grad_fn).__name__


# --- what it costs -----------------------------------------------------------------------------------------------------


def peak(f):
    "Bytes that f's tensors take at most, beyond what there was; and f's result."
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]  # as asked for, not in the blocks that were free
    result = f()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, result


@gpu_only
@pytest.mark.parametrize("asked", [{}, {"return_lse": True}, {"causal": True, "window": 100, "softcap": 2.0}], ids=str)
def test_the_way_there_takes_output_and_log_sum_exp_and_the_way_back_gradients_and_a_delta(asked):
    q, k, v = (x.requires_grad_() for x in qkv("cuda", 1, 8, 4096, 64))
    d_output, row = arriving(q, v)[0], 4 * 8 * 4096
    torch.autograd.grad(kernel(q, k, v), (q, k, v), d_output)
    there, found = peak(lambda: kernel(q, k, v, **asked))
    assert there == q.nbytes + row
    output = found[0] if isinstance(found, tuple) else found
    back, gradients = peak(lambda: torch.autograd.grad(output, (q, k, v), d_output))
    assert back == sum(x.nbytes for x in gradients) + row


@gpu_only
def test_what_is_not_wanted_takes_no_memory():
    q, k, v = qkv("cuda", 1, 8, 4096, 64)
    output, d_output = kernel(q.requires_grad_(), k, v), arriving(q, v)[0]
    assert peak(lambda: torch.autograd.grad(output, q, d_output, retain_graph=True))[0] < q.nbytes + 2 * 4 * 8 * 4096


@gpu_only
def test_another_length_compiles_nothing_new():
    "Lengths that fill whole tiles share a kernel, those that do not share another."
    back = (getattr(flash_backward, f"_{name}_kernel") for name in ("delta", "keys", "queries", "split"))
    kernels = (flash_forward._flash_kernel, *back)

    def compiled():
        return [len(f.device_caches[torch.cuda.current_device()][0]) for f in kernels]

    def run(batch, heads, n):
        q, k, v = qkv("cuda", batch, heads, n, 64)
        both_ways(kernel, q, k, v, arriving(q, v), causal=True)
        kernel(q[:, :, :1], k, v, causal=True)

    for lengths in ((1024, 2048, 4096, 3072), (1000, 3001, 77)):
        run(2, 4, lengths[0])
        before = compiled()
        for n in lengths[1:]:
            run(3, 8, n)
        assert compiled() == before
