"""What the tests of the attention kernels share: where they run, what is right, and inputs that lie oddly in memory.

Without a GPU the kernels are interpreted (tests/conftest.py). `make interpret` runs more combinations than `make test`.
"""

import math
import os
from functools import partial

import pytest
import torch

from attention_course import flash_attention, flash_backward, flash_forward, padding_mask
from variants import KERNELS, draw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = os.environ.get("INTERPRET") == "all"
needs_triton = pytest.mark.skipif(not KERNELS, reason="triton 3.4 or newer is not installed")
kernel = partial(flash_attention, backend="triton")

DTYPES = (torch.float16, torch.float32, torch.bfloat16)
HEADS = ((1, 1, 1), (2, 2, 2), (1, 4, 2), (2, 2, 1))  # batch, heads, key/value heads
SEES = ((False, None), (True, None), (True, 1), (True, 9), (False, 2), (False, 30), (True, 1000))  # causal, window
KEEPS = (None, "padding", "all", "scattered")
CAPS = (None, 3.0)
SLOPES = (None, "heads", "batch")
SCALES = (None, 0.3, -0.5, 0.0)
LAYOUTS = ("plain", "tokens first", "columns apart", "part of a larger one", "one row for all")
TMA = (False, True)
PACKS = {  # lengths of queries and of keys, member by member
    "ragged": ([5, 33, 1, 16], [5, 33, 1, 16]),
    "empty members": ([0, 0, 5, 0], [0, 3, 0, 6]),  # cu_q 0 0 0 5 5, cu_k 0 0 3 3 9
    "queries without keys": ([4, 5], [0, 7]),
    "other lengths": ([2, 70, 5], [70, 2, 40]),
    "one token each": ([1] * 9, [1] * 9),
    "one member": ([20], [20]),
    "many after a long one": ([64, 1, 1, 1, 1], [3, 64, 1, 2, 9]),
}


@pytest.fixture
def unwritten_memory_is_nan():
    "What a kernel forgets to write must not happen to be right."
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert all(x.isnan().all() for x in (torch.empty(1000), torch.ones(1).new_empty(1000), torch.empty_like(torch.ones(1000))))
    yield
    torch.use_deterministic_algorithms(False)


def reference(q, k, v, keep=None, causal=False, window=None, scale=None, softcap=None, slopes=None):
    "Output and log-sum-exp from closed formulas, in float64; autograd knows the gradients."
    q, k, v = (x.cpu().double() for x in (q, k, v))
    served = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    scores = q @ k[:, served].mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    n_q, n_k = scores.shape[-2:]
    steps = torch.arange(n_k - n_q, n_k)[:, None] - torch.arange(n_k)
    if slopes is not None:
        scores = scores - slopes.cpu().double()[..., None, None] * steps.abs()
    seen = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        seen = seen & (steps >= 0)
    if window is not None:
        seen = seen & (steps.abs() < window)
    if keep is not None:
        seen = seen & keep.cpu()
    scores, blind = scores.masked_fill(~seen, -math.inf), ~seen.any(-1, keepdim=True)
    top = scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0) if n_k else 0
    exps = (scores - top).exp()
    total = exps.sum(-1, keepdim=True).masked_fill(blind, 1)
    lse = (total.log() + top).masked_fill(blind, -math.inf)[..., 0]
    return exps / total @ v[:, served], lse


def lay(x, layout):
    "The same numbers, otherwise in memory; around a part of a larger tensor there is NaN."
    match layout:
        case "tokens first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "columns apart":
            return x.mT.contiguous().mT
        case "part of a larger one":
            larger = x.new_full((x.shape[0] + 1, x.shape[1] + 1, x.shape[2] + 3, x.shape[3] + 8), math.nan)
            larger[1:, 1:, 2:-1, 8:] = x
            return larger[1:, 1:, 2:-1, 8:]
        case "one row for all":
            return x[:, :, :1].expand(x.shape)
    return x


def keep_of(kind, batch, n_k):
    if kind is None:
        return None
    if kind == "scattered":
        return draw(batch, 1, 1, n_k, seed=7) > -0.3
    return padding_mask([0 if kind == "all" else max(1, n_k // 2), *[n_k] * (batch - 1)], n_k)


def slopes_of(kind, batch, heads):
    return {None: None, "heads": draw(heads, seed=3).abs(), "batch": draw(batch, heads, seed=3).abs()}[kind]


def starts_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=DEVICE)


def names(case):
    return "-".join(str(x).replace("torch.", "").replace(" ", "") for x in case)


def each_case(cases):
    "All in a checkout, the first 25 on an installed wheel."
    marked = [pytest.param(case, id=names(case), marks=[pytest.mark.slow] * (i >= 25)) for i, case in enumerate(cases)]
    return pytest.mark.parametrize("case", marked)


def force(monkeypatch, name="_launch", **options):
    "Let all calls take one way forward, the kernel for many queries or (`_launch_split`) for few, with these options."
    launch = getattr(flash_backward, name)
    monkeypatch.setattr(flash_backward, name, lambda *args, **asked: launch(*args, **asked | options))
    if name != "_launch_back":
        monkeypatch.setattr(flash_backward, "_few", lambda *_: name == "_launch_split")


@pytest.fixture
def launches(monkeypatch):
    "The kernels that were launched: name, grid and options. With `launches.dry` set they do not run."
    seen, interpreting = Launches(), flash_forward._interpreting()
    monkeypatch.setattr(flash_backward, "_interpreting", lambda: interpreting)
    for name in ("flash", "delta", "keys", "queries", "split", "merge"):
        module, full = flash_forward if name == "flash" else flash_backward, f"_{name}_kernel"
        monkeypatch.setattr(module, full, Watched(name, getattr(module, full), seen))
    return seen


class Launches(list):
    dry = False

    @property
    def names(self):
        return [name for name, *_ in self]


class Watched:
    def __init__(self, name, kernel, seen):
        self.name, self.kernel, self.seen = name, kernel, seen

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.seen.append((self.name, grid, options))
            if not self.seen.dry:
                self.kernel[grid](*args, **options)

        return launch
