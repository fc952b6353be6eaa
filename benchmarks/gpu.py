"""`flash_attention` on a GPU against torch's own attention, forward and back: is it right, how fast, in how much memory.

    python benchmarks/gpu.py                       all of it, in 5 minutes on one H200; needs torch, triton, einops and jaxtyping
    python benchmarks/gpu.py --only headline       one section; --list shows all cases, --resume adds what is missing
    python benchmarks/gpu.py --dry-run             the same code on a CPU, in Triton's interpreter, with tiny sizes

All that FLASH, CUDNN, EFFICIENT and MATH name are torch's. Rates count 4 · batch · heads · n_q · n_k · d_head operations, half of it
under a causal mask, for everybody; the way back counts 2.5 times that. Times are the GPU's own (`measure.device_seconds`), in the
sections `launch` and `training` Python's too. Nothing goes back in time before its gradients were compared with those of float64.
A row with `error` says that ours failed or was wrong, one with `peer_error` that a peer cannot do this.
"""
import importlib
import itertools
import math
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import measure

DEVICE = "cuda"
GOES_ON = True
MINUTES = 5.0


class Size(NamedTuple):
    "How large things are: on a GPU, in a rehearsal."

    tokens: int         # batch · length
    width: int          # heads · d_head
    heads: tuple        # widths of a head, the most important first
    lengths: tuple
    middle: int         # a length at which a GPU is full
    side: int           # of the matrices whose product is the ceiling
    copied: int         # numbers
    checked: int        # length at which the gate compares
    odd: tuple          # n_q, n_k, d_head, d_v
    decoded: tuple      # heads, those of keys, and then lengths and batches, the most important first
    gpt: tuple          # layers, width, heads, length, batch, words


REAL = Size(16384, 2048, (128, 64, 256), (32768, 16384, 8192, 4096, 2048, 1024), 8192, 8192, 1 << 29, 1024,
            ((1000, 1000, 128, 128), (129, 1037, 80, 80), (515, 130, 33, 96)),
            (32, 8, (131072, 32768, 8192), (16, 1)), (12, 768, 12, 2048, 8, 50304))
TINY = Size(32, 32, (32, 16), (32, 16), 32, 64, 4096, 20, ((5, 19, 33, 24),), (4, 2, (40, 24), (2, 1)), (1, 32, 2, 16, 1, 64))
size, device = REAL, "cuda"


def rehearse():
    "On a CPU from now on: kernels in Triton's interpreter, and whatever torch's attention is there."
    global size, device
    os.environ["TRITON_INTERPRET"] = "1"        # before the kernels are loaded
    size, device = TINY, "cpu"


def course(name="flash_forward"):
    "A module with kernels, loaded late, since Triton then asks whether to interpret."
    if (device == "cpu") != importlib.import_module("attention_course.flash_forward")._interpreting():
        raise RuntimeError("TRITON_INTERPRET was " + ("not set when triton was loaded" if device == "cpu" else "set, and this is a GPU"))
    return importlib.import_module(f"attention_course.{name}")


# --- calls -----------------------------------------------------------------------------------------------------------


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def qkv(batch, heads, n_q, d, *, kv=None, n_k=None, d_v=None, dtype=torch.bfloat16):
    k_shape = (batch, kv or heads, n_k or n_q)
    return normal(batch, heads, n_q, d, dtype=dtype), normal(*k_shape, d, dtype=dtype, seed=1), normal(*k_shape, d_v or d, dtype=dtype, seed=2)


def of_case(case, **more):
    "Inputs with as many tokens as `size` says, and one sequence at least."
    batch, heads = max(1, size.tokens // case["length"]), max(1, size.width // case["d"])
    return qkv(batch, heads, case["length"], case["d"], **more)


def ours(q, k, v, **asked):
    course()
    from attention_course import flash_attention

    return partial(flash_attention, q, k, v, backend="triton", **asked)


def numbers(q, causal):
    return dict(reach=(None, 0 if causal else None), scale=q.shape[-1] ** -0.5)


def launch(q, k, v, causal, **options):
    "Our kernel without the checks around it, and with a choice of tile and of the copying engine (TMA)."
    return lambda: course()._launch(q, k, v, **numbers(q, causal), **options)[0]


def launch_split(q, k, v, **options):
    "The kernel for few queries likewise, with a choice of tile and of how many multiprocessors it splits the keys for."
    return lambda: course("flash_backward")._launch_split(q, k, v, **numbers(q, False), **options)[0]


def launches_back(q, k, v, causal, want):
    "The kernels of the wanted gradients likewise: a function of `tiles` and `tma`. It goes forward once, when first called."
    forward = cache(lambda: course()._launch(q, k, v, **numbers(q, causal)))
    d_output = like_output(q, v)

    def with_options(**options):
        def call():
            asked = {"want": want, **numbers(q, causal), **options}
            grads = course("flash_backward")._launch_back(q, k, v, *forward(), d_output, **asked)
            return [grad for grad in grads if grad is not None]

        return call

    return with_options


def trainable(*tensors):
    return [x.detach().requires_grad_() for x in tensors]


def like_output(q, v):
    return normal(*q.shape[:-1], v.shape[-1], dtype=q.dtype, seed=4)


def both(call, inputs, d_output):
    "Forward and back: the gradients of the inputs."
    def forward_and_back():
        with torch.enable_grad():
            return torch.autograd.grad(call(), inputs, d_output)

    return forward_and_back


def back(call, inputs, d_output):
    "Only back: it goes forward once, when first called, and keeps the graph. Gradients are new each time, and add up nowhere."
    forward = cache(call)

    def only_back():
        with torch.enable_grad():
            return torch.autograd.grad(forward(), inputs, d_output, retain_graph=True)

    return only_back


def launched(q, k, v, d_output, mask=None, d_lse=None, **asked):
    "All that our call and its gradient launch, without autograd, in whose threads kernels would be compiled one after the other."
    def call():
        tensors, options = course()._taken(q, k, v, mask, **asked)
        output, lse = course()._launch(*tensors, **options)
        course("flash_backward")._launch_back(*tensors[:3], output, lse, d_output, d_lse, tensors[3], **options)

    return call


def rung(name, q, k, v, causal):
    return lambda: course()._run_rung(name, q, k, v, causal=causal)


def torchs(name, q, k, v, causal=False, **options):
    "torch's attention by one backend, and no other; in a rehearsal by whatever there is."
    backend = getattr(SDPBackend, {"FLASH": "FLASH_ATTENTION", "CUDNN": "CUDNN_ATTENTION", "EFFICIENT": "EFFICIENT_ATTENTION", "MATH": "MATH"}[name])
    backends = [backend] if device == "cuda" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def call():
        with sdpa_kernel(backends):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, **options)

    return call


def flex(q, k, v, causal):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device == "cuda":
        flex_attention = torch.compile(flex_attention, dynamic=False)
    n = q.shape[-2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device) if causal else None
    return lambda: flex_attention(q, k, v, block_mask=mask)


# --- rows ------------------------------------------------------------------------------------------------------------


def flops(q, k, v, causal):
    "What the products of attention count, by the convention of the FlashAttention papers; masks other than causal are not subtracted."
    (batch, heads, n_q, d), (n_k, d_v) = q.shape, v.shape[-2:]
    return 2 * batch * heads * n_q * n_k * (d + d_v) // (2 if causal else 1)


def differ(a, b):
    "The norm of the difference as a share of the norm, of several tensors the largest. bfloat16 rounds to 8 bits: 0.002 or so."
    if not isinstance(a, torch.Tensor):
        return torch.tensor([differ(x, y) for x, y in zip(a, b, strict=True)]).max().item()      # NaN, if one is
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def contest(calls, timed, *, work=None, unit="tflops", alike=0.01, timer=None):
    """One row for each peer: ours timed in turn with all of them. `calls` begins with ours.

    A peer that cannot do it is said to; that ours and a peer differ by more than `alike` is an error in the row.
    """
    (name, call), *_ = calls.items()
    right = call()
    working, rows = {name: call}, {}
    for peer, call in list(calls.items())[1:]:
        try:
            off = differ(right, call())
        except Exception as error:
            settle()
            rows[peer] = {"peer": peer, "peer_error": measure.told(error)}
        else:
            working[peer], rows[peer] = call, {"peer": peer}
            if not off <= alike:        # NaN, too
                rows[peer]["error"] = f"WRONG: ours and {peer} differ by {off:.2g} of the norm"
    del right
    taken = timed(working, **({"timer": timer} if timer else {}))
    per = {"tflops": 1e12, "gb_per_s": 1e9, "tokens_per_s": 1}[unit]

    def rates(row):
        return {f"{side}_{unit}": rounded(work / per / (row[f"{side}_ms"] / 1000)) for side in ("ours", "peer") if work and f"{side}_ms" in row}

    for peer in [peer for peer in working if peer != name]:
        row = measure.compared(taken[name], taken[peer])
        rows[peer] = {"peer": peer, **row, **rates(row), **rows[peer]}
    if len(working) == 1:
        row = {"ours_ms": rounded(1000 * statistics.median(taken[name])), "rounds": len(taken[name])}
        rows["nobody"] = {"peer": "nobody", **row, **rates(row)}
    return list(rows.values())


def rounded(x):
    return float(f"{x:.4g}")


def settle():
    "Waits for the GPU, and raises if what went wrong there was more than one call."
    if device == "cuda":
        torch.cuda.synchronize()


class Section(NamedTuple):
    cases: Callable             # (quick) -> what to measure, besides the section's name
    rows: Callable              # (case, timed) -> rows
    kernels: Callable = lambda case: []      # (case) -> calls that compile all kernels of ours that the rows need
    seconds: float = 2          # that a case takes, about, with kernels compiled
    compiling: float = 0        # seconds until they are, about, on 16 cores


# --- environment, ceilings -------------------------------------------------------------------------------------------


def asked(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=measure.HERE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def environment(case, timed):
    "What the head of the file does not say. Clocks are those of this moment, before any work."
    import triton

    row = {"triton": triton.__version__, "commit": asked(["git", "rev-parse", "--short", "HEAD"]), "cores": os.cpu_count(),
           "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None, "compiler": shutil.which("cc")}
    fields = {"driver": "driver_version", "sm_mhz": "clocks.sm", "sm_max_mhz": "clocks.max.sm", "memory_mhz": "clocks.mem", "power_limit_w": "power.limit"}
    found = asked(["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits", "--id=0"])
    row |= zip(fields, found.split(", ") if found else [None] * len(fields), strict=True)
    if device == "cuda":
        row["l2_MB"] = round(torch.cuda.get_device_properties(0).L2_cache_size / 1e6)
    return [row]


def ceiling(case, timed):
    "The fastest that this GPU multiplies matrices and moves memory: what everything else is a share of."
    if case["what"] == "matmul":
        a, b = normal(size.side, size.side), normal(size.side, size.side, seed=1)
        call, work, unit = lambda: a @ b, 2 * size.side**3, ("tflops", 1e12)
    else:
        a, b = normal(size.copied), torch.empty(size.copied, dtype=torch.bfloat16, device=device)
        call, work, unit = lambda: b.copy_(a), 2 * a.nbytes, ("gb_per_s", 1e9)
    taken = timed({"call": call})["call"]
    return [{unit[0]: rounded(work / unit[1] / statistics.median(taken)), "best_ms": rounded(1000 * min(taken)), "rounds": len(taken)}]


# --- is it right -----------------------------------------------------------------------------------------------------


def exact(q, k, v, causal):
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


def gate_inputs(case):
    return qkv(2, 4 if device == "cuda" else 1, size.checked, case["d"], dtype=getattr(torch, case["dtype"]))


def gate(case, timed):
    "The kernels that are timed next are right: no more than twice as far from float64 as torch's FLASH is, which rounds the same numbers."
    q, k, v = gate_inputs(case)
    right = exact(q, k, v, case["causal"])
    error = (ours(q, k, v, causal=case["causal"])() - right).abs().max().item()
    row = {"max_error": finite(error)}
    try:
        bound = 2 * (torchs("FLASH", q, k, v, case["causal"])() - right).abs().max().item() + 1e-4
    except RuntimeError as missing:
        settle()
        bound, row["peer_error"] = BOUNDS[case["dtype"]], measure.told(missing)
    row["bound"] = rounded(bound)
    if not error <= bound:      # NaN, too
        row["error"] = f"WRONG: off by {error:.3g}, allowed is {bound:.3g}"
    return [row]


def wrong_by(found, right):
    "The largest error as a share of the largest number, for each of the gradients."
    pairs = zip(("dq", "dk", "dv"), found, right, strict=True)
    return {name: ((a - b).abs().max() / b.abs().max()).item() for name, a, b in pairs}


def gradient_gate(case):
    "As the gate, for gradients: no more than twice as far from float64 as those of torch's FLASH."
    inputs, causal = trainable(*gate_inputs(case)), case["causal"]
    wide, d_output = trainable(*(x.double() for x in inputs)), like_output(inputs[0], inputs[2])
    right = both(lambda: exact(*wide, causal), wide, d_output.double())()
    errors, row = wrong_by(both(ours(*inputs, causal=causal), inputs, d_output)(), right), {}
    try:
        theirs = wrong_by(both(torchs("FLASH", *inputs, causal), inputs, d_output)(), right)
        bounds = {name: 2 * off + 1e-4 for name, off in theirs.items()}
    except RuntimeError as missing:
        settle()
        bounds, row["peer_error"] = dict.fromkeys(errors, BOUNDS_BACK[case["dtype"]]), measure.told(missing)
    return [row | judged(errors, bounds)]


def judged(errors, bounds):
    bad = [f"{name} is off by {off:.3g}, allowed is {bounds[name]:.3g}" for name, off in errors.items()
           if not off <= bounds[name]]      # NaN, too
    row = {f"{name}_{what}": finite(off) for what, all_ in (("error", errors), ("bound", bounds)) for name, off in all_.items()}
    return row | ({"error": f"WRONG: {'; '.join(bad)}"} if bad else {})


def trust(case):
    "Raises unless the kernels that are to be timed give the right gradients."
    (row,) = gradient_gate({"dtype": "bfloat16", **case})
    if "error" in row:
        raise RuntimeError(f"not timed, for the gradients are {row['error']}")


def finite(x):
    return rounded(x) if math.isfinite(x) else 1e9


def gate_cases(quick):
    for dtype in ("bfloat16", "float16"):
        for d in size.heads[:2] if device == "cuda" else size.heads[:1]:
            for causal in (True, False):
                yield {"dtype": dtype, "d": d, "causal": causal}


BOUNDS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}     # for values of about 1: a rounding of weights, one of results
FEATURES = {
    "none": {}, "causal": {"causal": True}, "window": {"window": 50}, "causal window": {"causal": True, "window": 70}, "slopes": {"slopes": True},
    "soft cap": {"softcap": 2.0}, "groups": {"kv": 2, "causal": True}, "one key head": {"kv": 1}, "padding": {"padding": True},
    "negative scale": {"scale": -0.3}, "packed": {"packed": True, "causal": True}, "strides": {"strides": True, "causal": True},
    "all at once": {"kv": 2, "causal": True, "window": 200, "softcap": 3.0, "slopes": True, "padding": True, "strides": True},
}


def feature(name, lengths, dtype):
    "Arguments of a call that has the feature."
    options = dict(FEATURES[name])
    (n_q, n_k, d, d_v), batch, heads = lengths, 2, 4
    batch = 1 if options.get("packed") else 2
    q, k, v = qkv(batch, heads, n_q, d, kv=options.pop("kv", None), n_k=n_k, d_v=d_v, dtype=dtype)
    if options.pop("strides", False):       # tokens before heads, and a part of something larger
        q, k, v = (torch.cat([x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., x.shape[-1]:] for x in (q, k, v))
    if options.pop("slopes", False):
        options["alibi_slopes"] = normal(heads, dtype=torch.float32, seed=3).abs()
    if options.pop("padding", False):
        real = torch.tensor([n_k - n_k // 3, n_k], device=device)
        options["mask"] = (torch.arange(n_k, device=device) < real[:, None])[:, None, None]
    if options.pop("packed", False):
        for letter, n in (("q", n_q), ("k", n_k)):
            options[f"cu_seqlens_{letter}"] = torch.tensor([0, n // 3, n // 3, n - 2, n], dtype=torch.int32, device=device)
    return (q, k, v), options


def matrix(case, timed):
    "Every feature with every kind of number at sizes that fill no tile, output and log-sum-exp, against `tiled_attention` in float64."
    from attention_course import tiled_attention

    worst, bad, finite = (0.0, ""), [], True
    for lengths in size.odd:
        inputs, options = feature(case["feature"], lengths, getattr(torch, case["dtype"]))
        found = ours(*inputs, **options, return_lse=True)()
        wide = {name: x.double() if name == "alibi_slopes" else x for name, x in options.items()}
        right = tiled_attention(*(x.double() for x in inputs), **wide, return_lse=True)
        for what, a, b in zip(("output", "lse"), found, right, strict=True):
            off = torch.where(a == b, 0, (a - b).abs()).max().item()      # -inf is -inf where nothing is seen
            label = f"{what} at {lengths}: off by {off:.3g}"
            worst = max(worst, (off, label)) if math.isfinite(off) else (1e9, label)
            if not off <= BOUNDS[case["dtype"]]:
                bad.append(label)
    row = {"checks": 2 * len(size.odd), "failed": len(bad), "worst": rounded(worst[0]), "bound": BOUNDS[case["dtype"]]}
    return [row | ({"error": f"WRONG: {'; '.join(bad)}"} if bad else {})]


def matrix_cases(quick):
    for dtype in ("bfloat16", "float16", "float32") if device == "cuda" else ("float16",):
        for name in FEATURES:
            yield {"feature": name, "dtype": dtype}


BOUNDS_BACK = BOUNDS | {"float32": 1e-4}    # shares of the largest; slopes make exponents of hundreds, which cost digits
EARLY = "all at once", "groups", "packed"       # features whose gradients are compared before anything is timed


def gradient_inputs(case):
    "Inputs, options, and gradients of output and log-sum-exp."
    lengths = next(lengths for lengths in size.odd if lengths[0] == case["n_q"])
    inputs, options = feature(case["feature"], lengths, getattr(torch, case["dtype"]))
    return inputs, options, like_output(inputs[0], inputs[2]), normal(*inputs[0].shape[:-1], dtype=torch.float32, seed=5)


def feature_gradients(case):
    "Gradients by output and log-sum-exp, with a feature, at a size that fills no tile, against `tiled_attention` in float64."
    from attention_course import tiled_attention

    inputs, options, d_output, d_lse = gradient_inputs(case)
    wide = {name: x.double() if name == "alibi_slopes" else x for name, x in options.items()}
    inputs, doubles = trainable(*inputs), trainable(*(x.double() for x in inputs))
    with torch.enable_grad():
        output, lse = tiled_attention(*doubles, **wide, return_lse=True)
        d_lse = torch.where(lse == -math.inf, 0, d_lse)       # where nothing is seen
        right = torch.autograd.grad((output, lse), doubles, (d_output.double(), d_lse.double()))
    errors = wrong_by(both(ours(*inputs, **options, return_lse=True), inputs, (d_output, d_lse))(), right)
    return [judged(errors, dict.fromkeys(errors, BOUNDS_BACK[case["dtype"]]))]


def gradients(case, timed):
    return feature_gradients(case) if "feature" in case else gradient_gate(case)


def gradients_cases(quick):
    yield from gate_cases(quick)
    for case in matrix_cases(quick):
        if case["feature"] in EARLY:
            yield {**case, "n_q": size.odd[0][0]}


def gradient_matrix_cases(quick):
    for case in matrix_cases(quick):
        for n_q, *_ in size.odd[1:] or size.odd:
            yield {**case, "n_q": n_q}


def gradients_kernels(case):
    if "feature" not in case:
        return [trust_kernels(case)]
    inputs, options, d_output, d_lse = gradient_inputs(case)
    return [launched(*inputs, d_output, d_lse=d_lse, **options)]


def trust_kernels(case):
    q, k, v = gate_inputs({"dtype": "bfloat16", **case})
    return launched(q, k, v, like_output(q, v), causal=case["causal"])


def matrix_kernels(case):
    for lengths in size.odd:
        inputs, options = feature(case["feature"], lengths, getattr(torch, case["dtype"]))
        yield ours(*inputs, **options, return_lse=True)


# --- how fast --------------------------------------------------------------------------------------------------------


def headline_cases(quick):
    yield {"d": size.heads[0], "causal": True, "length": size.lengths[min(1, len(size.lengths) - 1)]}


def forward_cases(quick):
    for length in size.lengths if not quick or device == "cpu" else size.lengths[1::3]:
        for d in size.heads:
            for causal in (True, False):
                yield {"d": d, "causal": causal, "length": length}


def forward(case, timed):
    q, k, v = of_case(case)
    calls = {"ours": ours(q, k, v, causal=case["causal"])}
    calls |= {peer: torchs(peer, q, k, v, case["causal"]) for peer in ("FLASH", "CUDNN")}
    return contest(calls, timed, work=flops(q, k, v, case["causal"]))


def forward_kernels(case):
    yield ours(*of_case(case), causal=case["causal"])


def headline_back_cases(quick):
    for d in size.heads[:2]:
        yield {"d": d, "causal": True, "length": size.middle}


def backward_cases(quick):
    lengths = [length for length in size.lengths if length <= 16384]
    for heads in (size.heads[:2], size.heads[2:]):
        for length in lengths[1::3] if quick else lengths:
            for d in heads:
                for causal in (True, False):
                    yield {"d": d, "causal": causal, "length": length}


def backward(case, timed, peers=("FLASH", "CUDNN"), more=None):
    trust(case)
    q, k, v = inputs = trainable(*of_case(case))
    calls = {"ours": ours(q, k, v, causal=case["causal"])}
    calls |= {peer: torchs(peer, q, k, v, case["causal"]) for peer in peers} | (more(q, k, v) if more else {})
    d_output = like_output(q, v)
    calls = {name: back(call, inputs, d_output) for name, call in calls.items()}
    return contest(calls, timed, work=5 * flops(q, k, v, case["causal"]) // 2, alike=0.02)


def backward_kernels(case):
    q, k, v = of_case(case)
    return [trust_kernels(case), launched(q, k, v, like_output(q, v), causal=case["causal"])]


def others_back(case, timed):
    return backward(case, timed, ("EFFICIENT",), lambda q, k, v: {"FlexAttention": flex(q, k, v, case["causal"])})


def others_cases(quick):
    for length in (size.lengths[1],) if quick else (size.lengths[1], size.lengths[-2]):
        for d in size.heads[:2]:
            yield {"d": d, "causal": True, "length": length}


def others(case, timed):
    q, k, v = of_case(case)
    calls = {"ours": ours(q, k, v, causal=case["causal"]), "EFFICIENT": torchs("EFFICIENT", q, k, v, case["causal"])}
    return contest(calls | {"FlexAttention": flex(q, k, v, case["causal"])}, timed, work=flops(q, k, v, case["causal"]))


def groups_cases(quick):
    yield {"d": size.heads[0], "causal": True, "length": size.middle, "groups": 4 if device == "cuda" else 1}


def grouped_inputs(case):
    return of_case(case, kv=max(1, size.width // case["d"] // case["groups"]))


def groups(case, timed):
    "Several query heads for one key/value head: read as they are, or copied to all heads first."
    q, k, v = grouped_inputs(case)
    calls = {"ours": ours(q, k, v, causal=case["causal"])}
    calls |= {f"{peer}, enable_gqa": torchs(peer, q, k, v, case["causal"], enable_gqa=True) for peer in ("FLASH", "CUDNN")}
    calls["FLASH, copied"] = lambda: torchs("FLASH", q, *(x.repeat_interleave(case["groups"], 1) for x in (k, v)), case["causal"])()
    return contest(calls, timed, work=flops(q, k, v, case["causal"]))


def groups_kernels(case):
    yield ours(*grouped_inputs(case), causal=case["causal"])


def decode_cases(quick):
    *_, lengths, batches = size.decoded
    for batch, length in itertools.product(batches, lengths):
        yield {"d": size.heads[0], "batch": batch, "length": length, "padded": False}
    yield {"d": size.heads[0], "batch": batches[0], "length": lengths[1], "padded": True}


def decode_inputs(case):
    "One query for each sequence; padding is on the left, up to half of it."
    heads, kv, *_ = size.decoded
    batch, n = case["batch"], case["length"]
    mask = None
    if case["padded"]:
        mask = (torch.arange(n, device=device) >= torch.arange(batch, device=device)[:, None] * n // (2 * batch))[:, None, None]
    return qkv(batch, heads, 1, case["d"], kv=kv, n_k=n), mask


def decode(case, timed):
    "As when text is written: one query, many keys, so that reading keys and values once is all the work."
    (q, k, v), mask = decode_inputs(case)
    calls = {"ours": ours(q, k, v, mask=mask)}
    for peer in ("CUDNN", "EFFICIENT", "MATH") if case["padded"] else ("FLASH", "CUDNN", "EFFICIENT"):
        calls[f"{peer}, enable_gqa"] = torchs(peer, q, k, v, attn_mask=mask, enable_gqa=True)
    return contest(calls, timed, work=k.nbytes + v.nbytes, unit="gb_per_s")


def decode_kernels(case):
    (q, k, v), mask = decode_inputs(case)
    yield ours(q, k, v, mask=mask)


def launch_cases(quick):
    length = 128 if device == "cuda" else 16
    for graph, what in itertools.product((False, True), ("forward", "both", "decode")):
        yield {"what": what, "graph": graph, "d": size.heads[1], "length": length, "batch": 1, "heads": 2}


def launch_inputs(case):
    if case["what"] == "decode":
        return qkv(case["batch"], case["heads"], 1, case["d"], n_k=8 * case["length"])
    return qkv(case["batch"], case["heads"], case["length"], case["d"])


def launches(case, timed):
    "So little work that Python is the slow one: its time until all is queued, or a call's with all launches in one CUDA graph."
    inputs, causal = launch_inputs(case), case["what"] != "decode"
    if case["what"] == "both":
        inputs = trainable(*inputs)
    q, k, v = inputs
    calls = {"ours": ours(q, k, v, causal=causal)} | {peer: torchs(peer, q, k, v, causal) for peer in ("FLASH", "CUDNN")}
    if case["what"] == "forward":
        calls["our launcher alone"] = launch(q, k, v, causal)
    if case["what"] == "both":
        d_output = like_output(q, v)
        calls = {name: both(call, inputs, d_output) for name, call in calls.items()}
    if case["graph"]:
        return contest({name: captured(call) for name, call in calls.items()}, timed, timer=measure.seconds, alike=0.02)
    return contest(calls, timed, timer=queued, alike=0.02)


def launch_kernels(case):
    q, k, v = launch_inputs(case)
    if case["what"] == "both":
        yield launched(q, k, v, like_output(q, v), causal=True)
    else:
        yield ours(q, k, v, causal=case["what"] != "decode")


def queued(call, times):
    "Seconds of Python per call, until the last kernel is queued. (A stream's queue holds a thousand: then Python would wait.)"
    settle()
    times = min(times, 100)
    start = time.perf_counter()
    for _ in range(times):
        call()
    taken = (time.perf_counter() - start) / times
    settle()
    return taken


def captured(call):
    "The call as a CUDA graph, made when it is first called; in a rehearsal the call itself."
    if device != "cuda":
        return call

    @cache
    def graph():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):      # what is made once, such as a workspace
                call()
        torch.cuda.current_stream().wait_stream(side)
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made):
            output = call()
        return made, output

    def replay():
        made, output = graph()
        made.replay()
        return output

    return replay


# --- a model that learns ---------------------------------------------------------------------------------------------

STEPS = 3       # in a call


def training_cases(quick):
    yield dict(zip(("layers", "d_model", "heads", "length", "batch", "words"), size.gpt, strict=True))


def gpt(case, attend):
    "A language model as GPT-2's smallest, of the library's own layers; the same weights each time."
    from attention_course import Encoder, EncoderLayer, LearnedPositions

    torch.manual_seed(0)
    d_model = case["d_model"]
    layers = [
        EncoderLayer(d_model, case["heads"], 4 * d_model, activation="gelu", norm_first=True, attend=attend)
        for _ in range(case["layers"])
    ]
    words = nn.Embedding(case["words"], d_model)
    nn.init.normal_(words.weight, std=0.02)
    places = LearnedPositions(case["length"], d_model)
    return nn.ModuleDict({"words": words, "places": places, "blocks": Encoder(layers, nn.LayerNorm(d_model))}).to(device)


def learner(case, attend, way=nullcontext):
    "A call that takes some steps of AdamW: of each the loss, and the norms of the gradients behind the first layer's q, k and v."
    model = gpt(case, attend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    share = torch.rand((case["batch"], case["length"] + 1), generator=torch.Generator(device).manual_seed(6), device=device)
    tokens = (case["words"] * share**3).long()      # some words are frequent, so that there is something to learn
    first = model["blocks"].layers[0].attention

    def step():
        with torch.enable_grad(), way(), torch.autocast(device, torch.bfloat16):
            x = model["places"](model["words"](tokens[:, :-1]))
            scores = functional.linear(model["blocks"](x, causal=True), model["words"].weight)
            loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), *(part.weight.grad.norm() for part in (first.w_q, first.w_k, first.w_v))

    def steps():
        found = steps.last = [torch.stack(x) for x in zip(*(step() for _ in range(STEPS)), strict=True)]
        return found

    return steps


def training(case, timed):
    "Tokens a second in bfloat16, with our attention in all layers and with torch's (its choice, and cuDNN). Losses must agree."
    trust({"d": case["d_model"] // case["heads"], "causal": True})
    from attention_course import flash_attention

    calls = {"ours": learner(case, partial(flash_attention, backend="triton")), "torch's choice": learner(case, None)}
    if device == "cuda":
        calls["CUDNN"] = learner(case, None, lambda: sdpa_kernel([SDPBackend.CUDNN_ATTENTION]))
    tokens = STEPS * case["batch"] * case["length"]
    rows = contest(calls, timed, work=tokens, unit="tokens_per_s", alike=0.03, timer=measure.seconds)
    for row in rows:
        if "ratio" in row:      # then both have taken the same number of steps
            mine, theirs = (rounded(calls[name].last[0][-1].item()) for name in ("ours", row["peer"]))
            row |= {"ours_loss": mine, "peer_loss": theirs}
            if not abs(mine / theirs - 1) <= 0.02:
                row["error"] = f"WRONG: at the end the loss is {mine}, and {theirs} with {row['peer']}"
    return rows


def training_kernels(case):
    shape = case["batch"], case["length"], case["heads"], case["d_model"] // case["heads"]
    q = normal(*shape).transpose(1, 2)      # as the layers hand it over
    return [launched(q, q, q, q, causal=True), trust_kernels({"d": shape[-1], "causal": True})]


# --- in how much memory ----------------------------------------------------------------------------------------------


ALLOWED = {"forward": 4.1, "both": 8.1}     # bytes a query: for the log-sum-exp; and for the number that its gradient needs


def memory_cases(quick):
    long, d = size.lengths[0], size.heads[0]
    for what, who in itertools.product(("both", "forward"), ("ours", "FLASH", "CUDNN", "MATH")):
        yield {"what": what, "who": who, "d": d, "length": size.lengths[-2] if who == "MATH" else long}


def memory_inputs(case):
    return qkv(1, max(1, size.width // case["d"]), case["length"], case["d"])


def memory_call(case):
    "The call, and how many bytes of what it has in memory at the end nobody can do without."
    inputs = memory_inputs(case)
    q, k, v = inputs = trainable(*inputs) if case["what"] == "both" else inputs
    call = ours(q, k, v) if case["who"] == "ours" else torchs(case["who"], q, k, v)
    if case["what"] == "both":      # the output is there until the end
        return both(call, inputs, like_output(q, v)), 4 * q.nbytes
    return call, q.nbytes


def memory(case, timed):
    "What a call takes at its peak besides inputs, output and gradients."
    call, needed = memory_call(case)
    try:
        call()      # what is made once, such as a workspace, does not count
    except RuntimeError as error:
        settle()
        if case["who"] == "ours":
            raise
        return [{"peer_error": measure.told(error)}]
    none = {"memory_allocated.return_value": 0, "max_memory_allocated.return_value": needed}
    gauge = torch.cuda if device == "cuda" else mock.MagicMock(**none)
    gauge.synchronize()
    gauge.reset_peak_memory_stats()
    before = gauge.memory_allocated()
    call()
    gauge.synchronize()
    extra = gauge.max_memory_allocated() - before - needed
    heads = max(1, size.width // case["d"])
    row = {"extra_bytes": extra, "bytes_a_query": round(extra / (heads * case["length"]), 3)}
    if case["who"] == "ours" and row["bytes_a_query"] > ALLOWED[case["what"]]:
        row["error"] = f"MORE MEMORY than {ALLOWED[case['what']]:g} bytes a query"
    return [row]


def memory_kernels(case):
    q, k, v = memory_inputs(case)
    if case["who"] == "ours":
        yield launched(q, k, v, like_output(q, v)) if case["what"] == "both" else ours(q, k, v)


# --- the ladder, and other ways to go --------------------------------------------------------------------------------


def ladder_cases(quick):
    rungs = list(getattr(course_or_none(), "_RUNGS", ()))
    for d in size.heads[:1] if quick else size.heads[:2]:
        for i, name in enumerate(rungs):
            yield {"rung": name, "d": d, "causal": True, "length": size.middle if i else size.lengths[-1]}


def course_or_none():
    "The kernels, where triton is there."
    from attention_course import flash_forward

    return flash_forward if flash_forward.triton else None


def ladder(case, timed):
    "A rung of chapter 13's ladder against the kernel at its top."
    q, k, v = of_case(case)
    calls = {"rung": rung(case["rung"], q, k, v, case["causal"]), "the shipped kernel": ours(q, k, v, causal=case["causal"])}
    try:
        return contest(calls, timed, work=flops(q, k, v, case["causal"]))
    except ValueError as refused:       # a rung for other GPUs
        return [{"peer": "the shipped kernel", "peer_error": measure.told(refused)}]


def ladder_kernels(case):
    q, k, v = of_case(case)
    return [rung(case["rung"], q, k, v, case["causal"]), ours(q, k, v, causal=case["causal"])]


# Rows of a tile of queries and of keys, warps, stages: what else fits, by the width of a head. gpu_tiles.py tries more.
OTHER_TILES = {
    64: ((128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 4)),
    128: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 4, 2), (128, 32, 4, 3)),
    256: ((128, 32, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2)),
}


def variants_cases(quick):
    for d in size.heads:
        for causal in (True, False) if d == size.heads[0] else (True,):
            yield {"d": d, "causal": causal, "length": size.middle}


def variants_of(case):
    q, k, v = of_case(case)
    calls = {"ours": launch(q, k, v, case["causal"]), "without TMA": launch(q, k, v, case["causal"], tma=False)}
    for tile in OTHER_TILES.get(case["d"], ((16, 16, 4, 2),)):
        calls["tile " + "×".join(map(str, tile))] = launch(q, k, v, case["causal"], tile=tile)
    return (q, k, v), calls


def variants(case, timed):
    "Ours against itself with other choices: a ratio above 1 says that the other choice is the better one here."
    inputs, calls = variants_of(case)
    return contest(calls, timed, work=flops(*inputs, case["causal"]))


def variants_kernels(case):
    return variants_of(case)[1].values()


# The same for the kernels of the gradients, and without rows of queries for that of few queries.
OTHER_TILES_BACK = {
    "keys": {
        64: ((64, 128, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (32, 128, 8, 3), (32, 64, 4, 3)),
        128: ((64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 8, 2), (32, 64, 4, 2)),
        256: ((16, 64, 8, 2), (16, 64, 8, 3), (16, 32, 4, 2)),
    },
    "queries": {
        64: ((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2)),
        128: ((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 8, 3), (64, 128, 8, 2)),
        256: ((64, 64, 8, 2), (128, 16, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2)),
    },
}
OTHER_TILES_SPLIT = ((64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 8, 2), (128, 8, 3), (32, 4, 4))
PRODUCTS = {"forward": 2, "keys": 4, "queries": 3}      # that each kernel makes of matrices
WANT = {"keys": (False, True, True), "queries": (True, False, False)}       # the gradients of q, k and v that it computes


def variants_back_cases(quick):
    for d in size.heads:
        for causal in (True, False) if d == size.heads[0] else (True,):
            for kernel in WANT:
                yield {"kernel": kernel, "d": d, "causal": causal, "length": size.middle}


def variants_back_of(case):
    (q, k, v), kernel = of_case(case), case["kernel"]
    call = launches_back(q, k, v, case["causal"], WANT[kernel])
    calls = {"ours": call(), "with TMA": call(tma=True), "without TMA": call(tma=False)}
    for tile in OTHER_TILES_BACK[kernel].get(case["d"], ((16, 32, 4, 2),)):
        calls["tile " + "×".join(map(str, tile))] = call(tiles={kernel: tile})
    return (q, k, v), calls


def variants_back_kernels(case):
    return variants_back_of(case)[1].values()


def variants_back(case, timed):
    "As `variants`, for one kernel of the gradients; the operations are those that it does."
    inputs, calls = variants_back_of(case)
    return contest(calls, timed, work=PRODUCTS[case["kernel"]] * flops(*inputs, case["causal"]) // 2, alike=0.02)


def variants_split_cases(quick):
    *_, lengths, batches = size.decoded
    for batch in batches:
        yield {"d": size.heads[0], "batch": batch, "length": lengths[1], "padded": False}


def variants_split_of(case):
    inputs, _ = decode_inputs(case)
    calls = {"ours": launch_split(*inputs), "the kernel for many queries": launch(*inputs, False)}
    for tile in OTHER_TILES_SPLIT:
        calls["tile " + "×".join(map(str, tile))] = launch_split(*inputs, tile=tile)
    many = course()._multiprocessors(inputs[0].device)
    for times in (0.5, 2, 4):
        calls[f"{times:g} × as many splits"] = launch_split(*inputs, multiprocessors=round(times * many))
    return inputs, calls


def variants_split_kernels(case):
    return variants_split_of(case)[1].values()


def variants_split(case, timed):
    (_, k, v), calls = variants_split_of(case)
    return contest(calls, timed, work=k.nbytes + v.nbytes, unit="gb_per_s")


# --- all of it -------------------------------------------------------------------------------------------------------


def once(quick):
    yield {}


# In this order. Another section is another line, and functions for its cases, its rows and the kernels to be compiled beforehand.
SECTIONS = {
    "environment": Section(once, environment, seconds=1),
    "ceilings": Section(lambda quick: ({"what": what} for what in ("matmul", "copy")), ceiling),
    "gate": Section(gate_cases, gate, lambda case: [ours(*gate_inputs(case), causal=case["causal"])], seconds=1, compiling=5),
    "gradients": Section(gradients_cases, gradients, gradients_kernels, seconds=1, compiling=15),
    "headline": Section(headline_cases, forward, forward_kernels),
    "headline back": Section(headline_back_cases, backward, backward_kernels),
    "decode": Section(decode_cases, decode, decode_kernels, compiling=3),
    "memory": Section(memory_cases, memory, memory_kernels, seconds=1),
    "training": Section(training_cases, training, training_kernels, seconds=10),
    "backward": Section(backward_cases, backward, backward_kernels, compiling=6),
    "forward": Section(forward_cases, forward, forward_kernels, compiling=3),
    "variants back": Section(variants_back_cases, variants_back, variants_back_kernels, seconds=3, compiling=20),
    "variants split": Section(variants_split_cases, variants_split, variants_split_kernels, compiling=3),
    "launch": Section(launch_cases, launches, launch_kernels, compiling=3),
    "variants": Section(variants_cases, variants, variants_kernels, seconds=4, compiling=10),
    "groups": Section(groups_cases, groups, groups_kernels),
    "ladder": Section(ladder_cases, ladder, ladder_kernels, seconds=3, compiling=5),
    "matrix": Section(matrix_cases, matrix, matrix_kernels, seconds=1, compiling=25),
    "gradient matrix": Section(gradient_matrix_cases, gradients, gradients_kernels, seconds=1, compiling=60),
    "others": Section(others_cases, others, forward_kernels, seconds=25),        # last: FlexAttention compiles for long
    "others back": Section(headline_back_cases, others_back, backward_kernels, seconds=50),
}


def cases(quick):
    for name, section in SECTIONS.items():
        for case in section.cases(quick):
            yield {"section": name, **case}


def rows(case, timed):
    with torch.no_grad():
        return SECTIONS[case["section"]].rows(case, timed if device == "cuda" else rehearsed)


def rehearsed(calls, timer=None):
    "Every call once, and nothing to be learned from how long it took."
    return {name: 2 * [measure.seconds(call, 1)] for name, call in calls.items()}


prepared = set()        # sections


def expected(case):
    section = SECTIONS[case["section"]]
    return section.seconds + (0 if case["section"] in prepared else section.compiling) if device == "cuda" else 0


def prepare(chosen):
    "Compiles all kernels of ours that these cases launch, many at a time: Triton takes seconds for each, and the GPU is to be had for minutes."
    if device == "cuda":
        start = time.perf_counter()
        prepared.add(chosen[0]["section"])
        kernels = compiled(kernel for case in chosen for kernel in SECTIONS[case["section"]].kernels(case))
        print(f"{chosen[0]['section']}: {kernels} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)


def compiled(calls):
    "How many kernels these calls needed that were not there yet. They are launched no more than compiling needs: not at all."
    import triton
    from triton.runtime.jit import JITFunction

    run, kernels = JITFunction.run, {}

    def only_compile(self, *args, **options):
        kernel = run(self, *args, **{**options, "warmup": True})
        kernels[id(kernel)] = kernel
        return kernel

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # Triton older than 3.5 compiles one after the other.
        together = getattr(triton, "AsyncCompileMode", lambda *_, **__: nullcontext())(pool, ignore_errors=True)
        with mock.patch.object(JITFunction, "run", only_compile), torch.no_grad(), together:
            for call in calls:
                try:
                    call()
                except Exception as error:      # the case will say so, too
                    print(f"not compiled: {measure.told(error)}", flush=True)
        list(pool.map(load, kernels.values()))
    return len(kernels)


def load(kernel):
    "Makes what a first launch would make: Triton's launcher, by a C compiler, and the kernel on the GPU."
    try:
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        kernel._init_handles()
    except Exception as error:
        print(f"not loaded: {measure.told(error)}", flush=True)


NAMED = "rung", "kernel", "what", "batch", "d", "causal", "length", "padded", "graph"


def summary(rows):
    "The tables to read first."
    lines, sections = [], {name: [row for row in rows if row["section"] == name] for name in SECTIONS}
    top = next((row["tflops"] for row in sections["ceilings"] if "tflops" in row), None)
    moved = next((row["gb_per_s"] for row in sections["ceilings"] if "gb_per_s" in row), None)
    lines.append(f"ceilings: matrix product {top} TFLOP/s, copy {moved} GB/s")
    for name in ("gate", "gradients", "matrix", "gradient matrix"):
        if sections[name]:
            wrong = measure.failed(sections[name])
            lines.append(f"{name}: {'ALL RIGHT' if not wrong else f'{len(wrong)} WRONG'} of {len(sections[name])} rows")
    for name, found in sections.items():
        for row in found:
            if "ratio" not in row:
                continue
            case = " ".join(f"{field}={row[field]}" if field not in NAMED[:3] else row[field] for field in NAMED if field in row)
            unit = next((unit for unit in ("tflops", "gb_per_s", "tokens_per_s") if f"ours_{unit}" in row), None)
            rate = f"{row[f'ours_{unit}']:7.4g} against {row[f'peer_{unit}']:7.4g} {unit}" if unit else (
                f"{1000 * row['ours_ms']:7.4g} against {1000 * row['peer_ms']:7.4g} µs")
            limit = {"tflops": top, "gb_per_s": moved}.get(unit)
            share = f", {row[f'ours_{unit}'] / limit:4.0%} of the ceiling" if limit else ""
            spread = f"({1 / row['q3']:.2f} to {1 / row['q1']:.2f})"
            lines.append(f"{name:14} {case:34} {rate}{share}; {1 / row['ratio']:5.2f} × as fast {spread} as {row['peer']}")
    for row in sections["memory"]:
        if "extra_bytes" in row:
            much = f"{row['extra_bytes'] / 2**20:.1f} MiB, {row['bytes_a_query']:g} bytes a query"
            lines.append(f"memory         {row['what']}, {row['who']} at {row['length']}: {much}")
    lines += [f"no peer        {measure.shown(row)}" for row in rows if "peer_error" in row]
    return "\n".join(lines + goals(sections, moved))


def goals(sections, moved):
    "What is wanted, what came of it, and whether that is enough. Rows that are wrong, or that broke down, are not."
    def line(what, found, least, shown, rows):
        if bad := measure.failed(rows):
            return f"goal: {what}: MISSED ({len(bad)} rows have an error)"
        if not found:
            return f"goal: {what}: not measured"
        worst = min(found)
        return f"goal: {what}: {'MET' if worst >= least else 'MISSED'} ({shown(worst)} in the worst of {len(found)} cases)"

    rows = sections["headline back"] + sections["backward"]
    rows = [row for row in rows if row["d"] in (64, 128) and row["length"] >= 2048]
    times = [1 / row["ratio"] for row in rows if row.get("peer") == "FLASH" and "ratio" in row]
    what = "backward, heads of 64 and 128, 2,048 and more: at least {} × as fast as FLASH ({})"
    least = {"floor": 1.0, "target": 1.2}
    lines = [line(what.format(least[name], name), times, least[name], "{:.2f} ×".format, rows) for name in least]

    rows = [row for row in sections["decode"] if (row["batch"], row["length"], row["padded"]) == (16, 131072, False)]
    shares = [row["ours_gb_per_s"] / moved for row in rows if "ours_gb_per_s" in row] if moved else []
    what = "decoding, batch of 16, 131,072 keys: at least 80 % of a copy's speed"
    lines.append(line(what, shares[:1], 0.8, "{:.0%}".format, rows))

    rows = [row for row in sections["memory"] if (row["who"], row["what"]) == ("ours", "both") and row["length"] >= 2048]
    more = [-row["bytes_a_query"] for row in rows if "bytes_a_query" in row]
    what = "forward and back: 8 bytes a query besides output and gradients"
    return [*lines, line(what, more, -ALLOWED["both"], lambda x: f"{-x:g}", rows)]


if __name__ == "__main__":
    measure.main(__file__)
