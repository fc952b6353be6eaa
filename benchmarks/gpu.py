"""`flash_attention` on a GPU against torch's own attention: is it right, how fast, in how much memory.

    python benchmarks/gpu.py                       all of it, in 5 minutes on one H200; needs torch, triton, einops and jaxtyping
    python benchmarks/gpu.py --only headline       one section; --list shows all cases, --resume adds what is missing
    python benchmarks/gpu.py --dry-run             the same code on a CPU, in Triton's interpreter, with tiny sizes

All that FLASH, CUDNN, EFFICIENT and MATH name are torch's. Rates count 4 · batch · heads · n_q · n_k · d_head operations, half of it
under a causal mask, for everybody. Times are the GPU's own (`measure.device_seconds`), in the section `launch` Python's too.
A row with `error` says that ours failed or was wrong, one with `peer_error` that a peer cannot do this.
"""
import math
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
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


REAL = Size(16384, 2048, (128, 64, 256), (32768, 16384, 8192, 4096, 2048, 1024), 8192, 8192, 1 << 29, 1024,
            ((1000, 1000, 128, 128), (129, 1037, 80, 80), (515, 130, 33, 96)))
TINY = Size(32, 32, (32, 16), (32, 16), 32, 64, 4096, 20, ((5, 19, 33, 24),))
size, device = REAL, "cuda"


def rehearse():
    "On a CPU from now on: kernels in Triton's interpreter, and whatever torch's attention is there."
    global size, device
    os.environ["TRITON_INTERPRET"] = "1"        # before the kernels are loaded
    size, device = TINY, "cpu"


def course():
    "The module with the kernels, loaded late, since Triton then asks whether to interpret."
    from attention_course import flash_forward

    if (device == "cpu") != flash_forward._interpreting():
        raise RuntimeError("TRITON_INTERPRET was " + ("not set when triton was loaded" if device == "cpu" else "set, and this is a GPU"))
    return flash_forward


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


def launch(q, k, v, causal, **options):
    "Our kernel without the checks around it, and with a choice of tile and of the copying engine (TMA)."
    return lambda: course()._launch(q, k, v, reach=(None, 0 if causal else None), scale=q.shape[-1] ** -0.5, **options)[0]


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
    "The norm of the difference as a share of the norm. bfloat16 rounds to 8 bits: 0.002 or so."
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
    per = {"tflops": 1e12, "gb_per_s": 1e9}[unit]

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
    row = {"max_error": rounded(error) if math.isfinite(error) else 1e9}
    try:
        bound = 2 * (torchs("FLASH", q, k, v, case["causal"])() - right).abs().max().item() + 1e-4
    except RuntimeError as missing:
        settle()
        bound, row["peer_error"] = BOUNDS[case["dtype"]], measure.told(missing)
    row["bound"] = rounded(bound)
    if not error <= bound:      # NaN, too
        row["error"] = f"WRONG: off by {error:.3g}, allowed is {bound:.3g}"
    return [row]


def gate_cases(quick):
    for dtype in ("bfloat16", "float16"):
        for d in size.heads[:2] if device == "cuda" else size.heads[:1]:
            for causal in (True, False):
                yield {"dtype": dtype, "d": d, "causal": causal}


BOUNDS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}     # absolute, for values of about 1: a rounding of weights, one of results
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


def one_query_cases(quick):
    yield {"d": size.heads[0], "batch": 16 if device == "cuda" else 2, "heads": 32 if device == "cuda" else 2, "kv": 8 if device == "cuda" else 1, "length": size.middle}


def one_query_inputs(case):
    return qkv(case["batch"], case["heads"], 1, case["d"], kv=case["kv"], n_k=case["length"])


def one_query(case, timed):
    "As when text is written: one query, many keys, so that reading them is all the work."
    q, k, v = one_query_inputs(case)
    calls = {"ours": ours(q, k, v), "FLASH, enable_gqa": torchs("FLASH", q, k, v, enable_gqa=True)}
    return contest(calls, timed, work=k.nbytes + v.nbytes, unit="gb_per_s")


def one_query_kernels(case):
    yield ours(*one_query_inputs(case))


def launch_cases(quick):
    yield {"d": size.heads[1], "causal": True, "length": 128 if device == "cuda" else 16, "batch": 1, "heads": 2}


def launch_inputs(case):
    return qkv(case["batch"], case["heads"], case["length"], case["d"])


def launches(case, timed):
    "So little work that Python is the slow one: what a call costs there, with and without what the function checks."
    q, k, v = launch_inputs(case)
    calls = {"ours": ours(q, k, v, causal=True), "FLASH": torchs("FLASH", q, k, v, True), "our launcher alone": launch(q, k, v, True)}
    return contest(calls, timed, timer=measure.seconds)


def launch_kernels(case):
    yield ours(*launch_inputs(case), causal=True)


# --- in how much memory ----------------------------------------------------------------------------------------------


def memory_cases(quick):
    long, d = size.lengths[0], size.heads[0]
    for who, length in (("ours", long), ("ours with log-sum-exp", long), ("FLASH", long), ("CUDNN", long), ("MATH", size.lengths[-2])):
        yield {"who": who, "d": d, "length": length}


def memory_call(case):
    q, k, v = qkv(1, max(1, size.width // case["d"]), case["length"], case["d"])
    if case["who"].startswith("ours"):
        return q, ours(q, k, v, return_lse="log" in case["who"])
    return q, torchs(case["who"], q, k, v)


def memory(case, timed):
    "What a call takes at its peak besides inputs and output. Ours: nothing, or 4 bytes a query for the log-sum-exp."
    q, call = memory_call(case)
    try:
        call()      # what is made once, such as a workspace, does not count
    except RuntimeError as error:
        settle()
        if case["who"].startswith("ours"):
            raise
        return [{"peer_error": measure.told(error)}]
    gauge = torch.cuda if device == "cuda" else mock.MagicMock(**{"memory_allocated.return_value": 0, "max_memory_allocated.return_value": q.nbytes})
    gauge.synchronize()
    gauge.reset_peak_memory_stats()
    before = gauge.memory_allocated()
    output = call()
    gauge.synchronize()
    output = output[0] if isinstance(output, tuple) else output
    extra = gauge.max_memory_allocated() - before - output.nbytes
    row = {"extra_bytes": extra, "bytes_a_query": round(extra / (q.numel() / case["d"]), 3)}
    allowed = 4.1 if "log" in case["who"] else 0.1
    if case["who"].startswith("ours") and row["bytes_a_query"] > allowed:
        row["error"] = f"MORE MEMORY than {allowed:g} bytes a query"
    return [row]


def memory_kernels(case):
    return [memory_call(case)[1]] if case["who"].startswith("ours") else []


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


# --- all of it -------------------------------------------------------------------------------------------------------


def once(quick):
    yield {}


# In this order. Another section is another line, and functions for its cases, its rows and the kernels to be compiled beforehand.
SECTIONS = {
    "environment": Section(once, environment, seconds=1),
    "gate": Section(gate_cases, gate, lambda case: [ours(*gate_inputs(case), causal=case["causal"])], seconds=1),
    "ceilings": Section(lambda quick: ({"what": what} for what in ("matmul", "copy")), ceiling),
    "headline": Section(headline_cases, forward, forward_kernels),
    "forward": Section(forward_cases, forward, forward_kernels),
    "groups": Section(groups_cases, groups, groups_kernels),
    "one query": Section(one_query_cases, one_query, one_query_kernels),
    "memory": Section(memory_cases, memory, memory_kernels),
    "launch": Section(launch_cases, launches, launch_kernels),
    "ladder": Section(ladder_cases, ladder, ladder_kernels, seconds=3),
    "variants": Section(variants_cases, variants, variants_kernels, seconds=4),
    "matrix": Section(matrix_cases, matrix, matrix_kernels, seconds=1),
    "others": Section(others_cases, others, forward_kernels, seconds=25),        # last: FlexAttention compiles for long
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


def expected(case):
    return SECTIONS[case["section"]].seconds if device == "cuda" else 0


def prepare(chosen):
    "Compiles all kernels of ours that these cases launch, many at a time: Triton takes seconds for each, and the GPU is to be had for minutes."
    if device == "cuda":
        start = time.perf_counter()
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


def summary(rows):
    "The tables to read first."
    lines, sections = [], {name: [row for row in rows if row["section"] == name] for name in SECTIONS}
    top = next((row["tflops"] for row in sections["ceilings"] if "tflops" in row), None)
    moved = next((row["gb_per_s"] for row in sections["ceilings"] if "gb_per_s" in row), None)
    lines.append(f"ceilings: matrix product {top} TFLOP/s, copy {moved} GB/s")
    for name in ("gate", "matrix"):
        if sections[name]:
            wrong = measure.failed(sections[name])
            lines.append(f"{name}: {'ALL RIGHT' if not wrong else f'{len(wrong)} WRONG'} of {len(sections[name])} rows")
    for name in ("headline", "forward", "groups", "one query", "others", "ladder", "variants", "launch"):
        for row in sections[name]:
            if "ratio" not in row:
                continue
            case = " ".join(f"{row[field]}" if field in ("rung",) else f"{field}={row[field]}" for field in ("rung", "d", "causal", "length") if field in row)
            unit = next((unit for unit in ("tflops", "gb_per_s") if f"ours_{unit}" in row), None)
            rate = f"{row[f'ours_{unit}']:7.4g} against {row[f'peer_{unit}']:7.4g} {unit}" if unit else f"{row['ours_ms']:7.4f} against {row['peer_ms']:7.4f} ms"
            limit = {"tflops": top, "gb_per_s": moved}.get(unit)
            share = f", {row[f'ours_{unit}'] / limit:4.0%} of the ceiling" if limit else ""
            lines.append(f"{name:9} {case:34} {rate}{share}; {1 / row['ratio']:5.2f} × as fast ({1 / row['q3']:.2f} to {1 / row['q1']:.2f}) as {row['peer']}")
    for row in sections["memory"]:
        if "extra_bytes" in row:
            lines.append(f"memory    {row['who']} at {row['length']}: {row['extra_bytes'] / 2**20:.1f} MiB, {row['bytes_a_query']:g} bytes a query")
    lines += [f"no peer   {measure.shown(row)}" for row in rows if "peer_error" in row]
    return "\n".join(lines)


if __name__ == "__main__":
    measure.main(__file__)
