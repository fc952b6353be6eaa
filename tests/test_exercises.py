"""The exercises of all chapters, with stubs and solutions as they stand in the notebooks: right is right, untouched is seen, slips are named."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from attention_course import check, compare, exercise
from attention_course.toolkit import _EXERCISES

NOTEBOOKS = sorted((Path(__file__).parents[1] / "nbs").glob("*.ipynb"))


def exercises():
    "Pairs of cells (stub, solution) that check the same exercise, with the chapter's imports."
    for path in NOTEBOOKS:
        cells = ["".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        found = {}
        for source in cells:
            for name in re.findall(r'^(?:assert )?check\("(\w+\.\w+)"', source, flags=re.M):
                if not name.startswith("toolkit."):  # chapter 00 shows `check` at work on an exercise of its own
                    found.setdefault(name, []).append(source)
        for name, sources in found.items():
            yield pytest.param(name, sources, id=name)


ALL = list(exercises())


def run(source):
    exec(compile(source, "<cell>", "exec"), {"math": math, "torch": torch, "check": check})


@pytest.mark.parametrize(("name", "cells"), ALL)
def test_an_untouched_stub_is_recognised_and_the_solution_passes(name, cells, capsys):
    assert len(cells) == 2, "an exercise has one stub and one solution"
    stub, solution = cells
    run(stub)
    assert capsys.readouterr().out == f"○ {name}: not attempted yet\n"
    assert "#| code-fold: true" in solution and "# @title Solution" in solution
    run(solution)
    assert capsys.readouterr().out == f"✓ {name}: right\n"


def test_every_registered_exercise_stands_in_a_chapter():
    assert len(ALL) >= 4
    assert {name for name in _EXERCISES if not name.startswith("test.")} == {p.id for p in ALL}


def attend(q, k, v, scale=None, dim=-1):
    return (q @ k.T * (q.shape[-1] ** -0.5 if scale is None else scale)).softmax(dim) @ v


def unit(keys, i):
    return keys[i]


def overflow(s, T):
    e = (s / T).exp()
    return e / e.sum()


def forgot_return(scores, d):
    (scores / math.sqrt(d)).softmax(-1)


def grid_mask(n_q, n_k):
    return torch.arange(n_k) <= torch.arange(n_q)[:, None] + (n_k - n_q)


def banded(lengths, n, window):
    i, j = torch.arange(n)[:, None], torch.arange(n)
    return (j <= i) & (i - j < window) & (j < lengths[:, None, None, None])


def packed(documents):
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & (documents != 0)[:, None, None, :] & grid_mask(documents.shape[1], documents.shape[1])


def two_heads(n, sure=1e3, step=-1, first=0, out=None):
    "Weights by hand: head 0 looks `step` places away, head 1 at place `first`."
    w_q, w_k, w_v = torch.zeros(3, 2 * n, 2 * n).unbind()
    w_q[n:, :n] = sure * torch.eye(n).roll(step, 1)
    w_q[n:, n + first] = sure
    w_k[n:, :n] = w_k[n:, n:] = w_v[:n, :n] = w_v[:n, n:] = torch.eye(n)
    return w_q, w_k, w_v, torch.eye(2 * n) if out is None else out(n)


SLIPS = [
    ("attention.weights", lambda s, d: (s / math.sqrt(d)).softmax(0), "the columns sum to 1"),
    ("attention.weights", lambda s, d: s.softmax(-1), "not scaled"),
    ("attention.weights", lambda s, d: (s / d).softmax(-1), "you divided by d;"),
    ("attention.weights", lambda s, d: (s * math.sqrt(d)).softmax(-1), "you multiplied"),
    ("attention.weights", lambda s, d: (s / math.sqrt(d)).flatten().softmax(0).view_as(s), "all weights together"),
    ("attention.weights", lambda s, d: s.softmax(-1) / math.sqrt(d), "after the softmax"),
    ("attention.weights", lambda s, d: s / math.sqrt(d), "softmax is missing"),
    ("attention.weights", lambda s, d: (s / math.sqrt(d)).softmax(-1).T, r"its shape is \(5, 3\); expected \(3, 5\), the axes being \(query, key\)"),
    ("attention.weights", lambda s, d: (s / math.sqrt(d) + 1e-3 * torch.arange(s.shape[1])).softmax(-1), r"first difference at \[query 0, key 0\]"),
    ("attention.weights", lambda s: s, "it raised TypeError"),
    ("attention.weights", forgot_return, "is a `return` missing"),
    ("attention.weights", lambda s, d: s.div_(math.sqrt(d)).softmax(-1), "changed its argument number 1"),
    ("attention.weights", lambda s, d: "weights", "it returned a str"),
    ("attention.weights", lambda s, d: 1 / 0, "it raised ZeroDivisionError"),
    ("attention.attend", lambda q, k, v: attend(q, k, v, 1.0), "not scaled"),
    ("attention.attend", lambda q, k, v: attend(q, k, v, 1 / q.shape[-1]), "you divided by d;"),
    ("attention.attend", lambda q, k, v: attend(q, k, v, q.shape[-1] ** 0.5), "you multiplied"),
    ("attention.attend", lambda q, k, v: attend(q, k, v, v.shape[-1] ** -0.5), "d_v"),
    ("attention.attend", lambda q, k, v: attend(q, k, v, len(k) ** -0.5), "number of keys"),
    ("attention.attend", lambda q, k, v: attend(q, k, v, dim=0), "softmax runs over the queries"),
    ("attention.attend", lambda q, k, v: q @ k.T / q.shape[-1] ** 0.5 @ v, "softmax is missing"),
    ("attention.attend", lambda q, k, v: attend(q, k, k), "you averaged the keys"),
    ("attention.attend", lambda q, k, v: (q @ k.T / q.shape[-1] ** 0.5).softmax(-1), "these are the weights"),
    ("attention.attend", lambda q, k, v: (attend(q, k, v), None), "it returned a tuple"),
    ("attention.attend", lambda q, k, v: q.T @ k @ v, "it raised RuntimeError"),
    ("attention.attend", lambda q, k, v: attend(q, k, v) if q.ndim == 2 else q @ k, "right for one sentence, but for a batch it raised RuntimeError"),
    ("attention.attend", lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5).softmax(1) @ v, "right for one sentence, but for a batch first difference at .sentence 0, query 0.*Count axes from the end"),
    ("attention.attend", lambda q, k, v: attend(q, k, v, 2 / q.shape[-1]), "half of d"),
    ("attention.attend", lambda q, k, v: attend(q, k, v, len(q) ** -0.5), "number of queries"),
    ("attention.attend", lambda q, k, v: (q @ k.T / q.shape[-1] ** 0.5).exp() @ v, "exponentials are there"),
    ("attention.attend", lambda q, k, v: attend(q, k, v, 1.0) / q.shape[-1] ** 0.5, "scaled after the softmax"),
    ("attention.weights", lambda s, d: (s / (d**1 / 2)).softmax(-1), "half of d"),
    ("attention.weights", lambda s, d: (s / math.sqrt(d)).exp(), "exponentials are there"),
    ("attention.weights", lambda s, d: s / s.sum(-1, keepdim=True), "without `exp`"),
    ("attention.weights", lambda s, d: (s / s.shape[0] ** 0.5).softmax(-1), "number of queries"),
    ("attention.weights", lambda s, d: (s / s.shape[1] ** 0.5).softmax(-1), "number of keys"),
    ("attention.temperature", overflow, "overflows"),
    ("attention.temperature", lambda s, T: (s * T).softmax(-1), "you multiplied by T"),
    ("attention.temperature", lambda s, T: s.softmax(-1), "T has no effect"),
    ("attention.temperature", lambda s, T: s.softmax(-1) / T, "after the softmax"),
    ("attention.temperature", lambda s, T: (s - s.max()).exp() / T / ((s - s.max()).exp() / T).sum(), "after it, it cancels"),
    ("attention.temperature", lambda s, T: (s / T - s.max()).exp() / (s / T - s.max()).exp().sum(), "in the cold it still overflows"),
    ("attention.temperature", lambda s, T: overflow(s - s.mean(), T), "in the cold it still overflows"),
    ("attention.temperature", lambda s, T: overflow(s - s.abs().max(), T), "largest absolute value"),
    ("attention.temperature", lambda s, T: ((s - s.max()) / T).exp(), "exponentials are there"),
    ("attention.effective_keys", lambda p: (-(p * p.log()).sum(-1)).exp(), "0 times minus infinity"),
    ("attention.effective_keys", lambda p: -torch.xlogy(p, p).sum(-1), "this is the entropy"),
    ("attention.effective_keys", lambda p: torch.xlogy(p, p).sum(-1).exp(), "sign of the entropy"),
    ("attention.effective_keys", lambda p: (-torch.xlogy(p, p) / math.log(2)).sum(-1).exp(), "base 2"),
    ("attention.effective_keys", lambda p: (p > 0).sum(-1), "you counted"),
    ("attention.effective_keys", lambda p: (-torch.xlogy(p, p)).mean(-1).exp(), "average over keys"),
    ("attention.effective_keys", lambda p: (-torch.xlogy(p, p)).sum(0).exp(), "summed over the queries"),
    ("attention.effective_keys", lambda p: 1 / p.square().sum(-1), "sum of squares"),
    ("attention.effective_keys", lambda p: (-torch.where(p > 0, p, 1).log().sum(-1)).exp(), "not weighted"),
    ("attention.effective_keys", lambda p: (-(p * p.clamp(min=1e-3).log()).sum(-1)).exp(), "first difference at .query 4"),
    ("attention.effective_keys", lambda p: (-(p * (p + 1e-3).log()).sum(-1)).exp(), "first difference"),
    ("attention.aim", unit, "how long must the query be"),
    ("attention.aim", lambda keys, i: -1e3 * keys[i], "gets the most attention"),
    ("attention.aim", lambda keys, i: keys[i] - 0.3 * keys.mean(0), "the most of all, but 99 % was asked for$"),
    ("attention.aim", lambda keys, i: keys[i] * math.inf, "not finite"),
    ("attention.aim", lambda keys, i: keys[i : i + 1] * 1e4, r"its shape is \(1, 8\)"),
    ("attention.aim", lambda keys, i: keys[i] * 1e4, "times as long as it has to be"),
    ("attention.disguise", lambda a, b: (2 * a, b), "the keys are as they were"),
    ("attention.disguise", lambda a, b: (2 * a, 2 * b), "same matrix"),
    ("attention.disguise", lambda a, b: (a @ M(a), b @ torch.linalg.inv(M(a))), "transposed"),
    ("attention.disguise", lambda a, b: (a, b), "as they were: rescaling"),
    ("attention.disguise", lambda a, b: (-a, -b), "in 4 of 4 dimensions are as they were"),
    ("attention.disguise", lambda a, b: (2 * a, b / 2), "R has to mix them"),
    ("attention.disguise", lambda a, b: 2 * a, "it returned a Tensor"),
    ("attention.disguise", lambda a, b: (a[:2], b[:2]), "the shapes are"),
    ("attention.disguise", lambda a, b: (a + 1, b - 1), "the scores differ"),
    # 03 masking
    ("masking.causal", lambda n_q, n_k: torch.ones(n_q, n_k).tril().bool(), r"first positions, not the last \(upper left\)"),
    ("masking.causal", lambda n_q, n_k: ~grid_mask(n_q, n_k), "polarity"),
    ("masking.causal", lambda n_q, n_k: torch.ones(n_q, n_k).triu(1).bool(), "first positions, not the last, and True hides"),
    ("masking.causal", lambda n_q, n_k: torch.ones(n_q, n_k).tril(n_k - n_q - 1).bool(), "a word must see itself"),
    ("masking.causal", lambda n_q, n_k: torch.ones(n_q, n_k).triu(n_k - n_q).bool(), "upside down"),
    ("masking.causal", lambda n_q, n_k: torch.ones(n_q, n_k).triu().bool(), "upside down"),
    ("masking.causal", lambda n_q, n_k: torch.ones(n_k, n_k).tril().bool()[-n_q:], r"the shape must still be \(n_q, n_k\)"),
    ("masking.causal", lambda n_q, n_k: grid_mask(n_q, n_k) | (torch.arange(n_k) == n_k - 1), r"at \[query 0, key 3\]: visible, expected hidden"),
    ("masking.causal", lambda n_q, n_k: grid_mask(n_q, n_k).T, "axes are swapped"),
    ("masking.causal", lambda n_q, n_k: torch.ones(n_q, n_k).tril(n_k - n_q + 1).bool(), "off by one"),
    ("masking.causal", lambda n_q, n_k: torch.ones(n_q, n_k).tril(n_q - n_k).bool(), "wrong sign"),
    ("masking.causal", lambda n_q, n_k: torch.ones(n_q, n_k).tril(max(n_k - n_q, 0)).bool(), "with more queries than keys"),
    ("masking.causal", lambda n_q, n_k: torch.zeros(n_q, n_k).masked_fill(~grid_mask(n_q, n_k), -math.inf), "additive"),
    ("masking.causal", lambda n_q, n_k: grid_mask(n_q, n_k).int(), r"must be True and False \(dtype bool\)"),
    ("masking.causal", lambda n_q, n_k: grid_mask(n_q, n_k)[None], r"its shape is \(1, 4, 4\)"),
    ("masking.translate", lambda a, p: a | p[:, None, None, :], "not negated: in torch's modules True hides"),
    ("masking.translate", lambda a, p: a & p[:, None, None, :], "joined by and"),
    ("masking.translate", lambda a, p: ~a | ~p[:, None, None, :], "unless both masks hide it"),
    ("masking.translate", lambda a, p: ~a & p[:, None, None, :], "only the attn_mask was negated"),
    ("masking.translate", lambda a, p: a & ~p[:, None, None, :], "only the key_padding_mask was negated"),
    ("masking.translate", lambda a, p: ~a.expand(len(p), 1, -1, -1), "padding is missing"),
    ("masking.translate", lambda a, p: ~p[:, None, None, :].expand(-1, 1, len(a), -1), "attn_mask is missing"),
    ("masking.translate", lambda a, p: ~(a | p[:, None, :]), "axis of the heads is missing"),
    ("masking.translate", lambda a, p: ~(a | p), r"for attn_mask \(4, 4\) and key_padding_mask \(2, 4\), it raised RuntimeError"),
    ("masking.translate", lambda a, p: ~(a | p[:, None, :, None]), "the padding hides queries, not keys"),
    ("masking.translate", lambda a, p: torch.zeros(len(p), 1, *a.shape).masked_fill(a | p[:, None, None, :], -math.inf), "additive"),
    ("masking.window", lambda n, m, w: ~banded(n, m, w), "polarity"),
    ("masking.window", lambda n, m, w: banded(n, m, w + 1), "one too wide"),
    ("masking.window", lambda n, m, w: banded(n, m, w - 1), "one too narrow"),
    ("masking.window", lambda n, m, w: banded(n, m, w) | banded(n, m, w).mT & (torch.arange(m) < n[:, None, None, None]), "looks ahead as well"),
    ("masking.window", lambda n, m, w: banded(n, m, m), "window is missing"),
    ("masking.window", lambda n, m, w: banded(torch.full_like(n, m), m, w), "the filler is visible"),
    ("masking.window", lambda n, m, w: banded(n + 1, m, w), "one token of filler"),
    ("masking.window", lambda n, m, w: banded(torch.full_like(n, m), m, w) & (torch.arange(m)[:, None] < n[:, None, None, None]), "the rows of filler see nothing"),
    ("masking.window", lambda n, m, w: banded(n, m, w) & (torch.arange(m)[:, None] < n[:, None, None, None]), "the rows of filler see nothing"),
    ("masking.window", lambda n, m, w: banded(n, m, w)[:, 0], "axis of the heads is missing"),
    ("masking.window", lambda n, m, w: banded(torch.full_like(n, m), m, w) | (torch.arange(m) < n[:, None, None, None]), "you joined by or"),
    ("masking.window", lambda n, m, w: banded(n, int(n.max()), w), "reaches to the longest sentence"),
    ("masking.window", lambda n, m, w: grid_mask(m, m) & banded(n, int(n.max()), w), r"n may be longer, and the keys must reach to it \(for lengths \[3, 2\] and n = 5"),
    ("masking.packed", lambda d: ~packed(d), "polarity"),
    ("masking.packed", lambda d: (d[:, None, :, None] == d[:, None, None, :]) & (d != 0)[:, None, None, :], "it looks ahead: a language model"),
    ("masking.packed", lambda d: d[:, None, :, None] == d[:, None, None, :], "two conditions are missing"),
    ("masking.packed", lambda d: (d[:, None, :, None] == d[:, None, None, :]) & grid_mask(d.shape[1], d.shape[1]), "filler sees filler: 0 equals 0"),
    ("masking.packed", lambda d: grid_mask(d.shape[1], d.shape[1]) & (d != 0)[:, None, None, :], "documents play no part"),
    ("masking.packed", lambda d: grid_mask(d.shape[1], d.shape[1]) & (d != 0)[:, None, None, :] & (d != 0)[:, None, :, None], "both tokens must have the same number"),
    ("masking.packed", lambda d: (d[:, None, :, None] >= d[:, None, None, :]) & (d != 0)[:, None, None, :] & grid_mask(d.shape[1], d.shape[1]), "for ==, not for >="),
    ("masking.packed", lambda d: packed(d).tril(-1), "a word must see itself"),
    ("masking.packed", lambda d: packed(d).mT, "upside down"),
    ("masking.packed", lambda d: packed(d)[:, 0], "axis of the heads is missing"),
    ("masking.packed", lambda d: packed(d) | torch.eye(d.shape[1]).bool() & (d == 0)[:, None, :, None], "filler sees itself"),
    ("masking.packed", lambda d: packed(d + 1) & (torch.arange(d.shape[1]) < (d != 0).sum(-1)[:, None, None, None]), "filler may also come first"),
    ("masking.blind", lambda m: m.sum(-1) == 0, "additive row of zeros sees everything"),
    ("masking.blind", lambda m: (m == 0).all(-1), "additive row of zeros sees everything"),
    ("masking.blind", lambda m: ~m.any(-1) if m.dtype == torch.bool else (m < 0).all(-1), "a finite number hides nothing"),
    ("masking.blind", lambda m: ~m.any(-1) if m.dtype == torch.bool else (m <= -1e9).all(-1), "-1e9 hides nothing"),
    ("masking.blind", lambda m: ~m.any(-1) if m.dtype == torch.bool else (m <= torch.finfo(m.dtype).min).all(-1), "lowest finite number"),
    ("masking.blind", lambda m: ~m.all(-1) if m.dtype == torch.bool else (m == -math.inf).any(-1), "all keys of the row"),
    ("masking.blind", lambda m: ~m.any(-1) if m.dtype == torch.bool else (m == -math.inf).any(-1), "boolean masks: right; additive masks: you ask for some hidden key"),
    ("masking.blind", lambda m: ~m.all(-1) if m.dtype == torch.bool else (m == -math.inf).all(-1), "boolean masks: you ask for some hidden key.*; additive masks: right"),
    ("masking.blind", lambda m: ~m.any(-1) if m.dtype == torch.bool else m.sum(-1) == -math.inf, "additive masks: the sum is -inf as soon as one key is hidden"),
    ("masking.blind", lambda m: (m == -math.inf).all(-1), "a boolean mask has no -inf"),
    ("masking.blind", lambda m: (m == -math.inf).all(-1) if m.dtype == torch.float32 else ~m.any(-1), "half precision was left out"),
    ("masking.blind", lambda m: ~m.any(-1) if m.dtype == torch.bool else (m < -1e4).all(-1), "a finite number such as -10000"),
    ("masking.blind", lambda m: ~m.any(-1) if m.dtype == torch.bool else torch.zeros(m.shape[:-1]).bool(), r"at \[row 1\]: False, expected True"),
    ("masking.blind", lambda m: ~m.any(-2) if m.dtype == torch.bool else (m == -math.inf).all(-2), "over the queries"),
    ("masking.blind", lambda m: m.any(-1) if m.dtype == torch.bool else (m != -math.inf).any(-1), "inverted"),
    ("masking.blind", lambda m: (~m).all(-1), "it raised TypeError"),
    ("masking.reach", lambda n: (grid_mask(n, n), grid_mask(n, n)), r"sees 9 keys in the first mask; at most 6"),
    ("masking.reach", lambda n: grid_mask(n, n), "expected the pair"),
    ("masking.reach", lambda n: (grid_mask(n, n), None), "the second mask is None"),
    ("masking.reach", lambda n: (~banded(torch.tensor([n]), n, math.isqrt(n - 1) + 1)[0, 0], ~torch.eye(n).bool()), "If True hides there: it must mean visible"),
    ("masking.reach", lambda n: (banded(torch.tensor([n]), n, math.isqrt(n - 1) + 1)[0, 0], grid_mask(n, n) & (torch.arange(n) % (math.isqrt(n - 1) + 1) == 0)), "for n = 9, .*behind the last stop before the query"),
    ("masking.reach", lambda n: (torch.eye(n).bool(), torch.ones(n, n).bool()), "the second mask is not causal: query 0 sees key 1"),
    ("masking.reach", lambda n: (torch.eye(n), torch.eye(n)), "must be True and False"),
    ("masking.reach", lambda n: (torch.eye(n).bool(), torch.eye(n).bool()), "out of reach; the first: query 1 does not reach key 0"),
    ("masking.reach", lambda n: (banded(torch.tensor([n]), n, math.isqrt(n - 1) + 1)[0, 0],) * 2, "the second should jump where the first walks"),
    ("masking.reach", lambda n: (torch.eye(n).bool()[:1], torch.eye(n).bool()), r"shape of the first mask is \(1, 9\)"),
    # 04 multi_head
    ("multi_head.split", lambda x, h: x.reshape(len(x), h, x.shape[1], -1), "in one go cuts words apart"),
    ("multi_head.split", lambda x, h: x.unflatten(-1, (-1, h)).permute(0, 3, 1, 2), "interleaved"),
    ("multi_head.split", lambda x, h: x.unflatten(-1, (h, -1)), "bring the heads in front of the words"),
    ("multi_head.split", lambda x, h: x.unflatten(-1, (h, -1)).permute(0, 2, 3, 1), "n and d have changed places"),
    ("multi_head.split", lambda x, h: torch.stack(x.chunk(h, -1)), r"its shape is \(3, 2, 5, 4\); expected \(2, 3, 5, 4\)"),
    ("multi_head.split", lambda x, h: x.reshape(len(x), h + 1, x.shape[1], -1), "it raised RuntimeError"),
    ("multi_head.merge", lambda x: x.reshape(len(x), x.shape[2], -1), "words are glued together"),
    ("multi_head.merge", lambda x: x.permute(0, 2, 3, 1).flatten(2), "interleaved"),
    ("multi_head.merge", lambda x: x.transpose(1, 3).flatten(2), "you swapped heads and widths"),
    ("multi_head.merge", lambda x: x.transpose(1, 2), "now make one axis of the two"),
    ("multi_head.merge", lambda x: x.sum(1), "added up; they must stand side by side"),
    ("multi_head.merge", lambda x: x.mean(1), "means over the heads"),
    ("multi_head.merge", lambda x: x.flatten(1, 2), "one after another along the words"),
    ("multi_head.group", lambda a, h, kv: a % kv, r"deals the key/value heads out in turn, \[0, 1, 0, 1\]"),
    ("multi_head.group", lambda a, h, kv: a // kv, "not by the number of key/value heads"),
    ("multi_head.group", lambda a, h, kv: a * kv / h, "divide with //"),
    ("multi_head.group", lambda a, h, kv: a % (h // kv), "place of the head within its group"),
    ("multi_head.group", lambda a, h, kv: a // (h // kv) * (h // kv), "first head of the group"),
    ("multi_head.group", lambda a, h, kv: kv - 1 - a * kv // h, "for a = 0, n_heads = 4, n_kv_heads = 2: it returned 1; expected 0"),
    ("multi_head.group", lambda a, h, kv: a * kv // h + 1, "count from 0, too"),
    ("multi_head.group", lambda a, h, kv: h // kv, "is the size of a group"),
    ("multi_head.group", lambda a, h, kv: a, "which one does head a read"),
    ("multi_head.group", lambda a, h, kv: 0, "only if there is one key/value head"),
    ("multi_head.group", lambda a, h, kv: a // 2, "not always two heads share"),
    ("multi_head.group", lambda a, h, kv: round(a * kv / h), "round down, with //: the last heads"),
    ("multi_head.group", lambda a, h, kv: math.ceil(a * kv / h), "rounding up gives the next group"),
    ("multi_head.group", lambda a, h, kv: [i * kv // h for i in range(h)], r"for a = 0, n_heads = 4, n_kv_heads = 2: its shape is \(4,\); expected one number"),
    ("multi_head.group", lambda a, h, kv: torch.arange(h), r"its shape is \(4,\); expected one number"),
    ("multi_head.count", lambda d, h, kv, w: 4 * d * d + 4 * d, "is right only if"),
    ("multi_head.count", lambda d, h, kv, w: 2 * d * h * w + 2 * d * kv * w, "the biases are missing: one number"),
    ("multi_head.count", lambda d, h, kv, w: (d + 1) * (h + 2 * kv) * w, "the output projection is missing$"),
    ("multi_head.count", lambda d, h, kv, w: d * (h + 2 * kv) * w, "and the biases are too"),
    ("multi_head.count", lambda d, h, kv, w: (d + 1) * 3 * h * w + (h * w + 1) * d, "not n_heads"),
    ("multi_head.count", lambda d, h, kv, w: (d + 1) * (h + kv) * w + (h * w + 1) * d, "you counted one"),
    ("multi_head.count", lambda d, h, kv, w: (d + 1) * (2 * h + 2 * kv) * w, "as long as its output, d_model"),
    ("multi_head.count", lambda d, h, kv, w: 2 * d * h * w + 2 * d * kv * w + 4, "one bias per matrix is not enough"),
    ("multi_head.count", lambda d, h, kv, w: 4 * d * d, "counts no biases, and is right only if"),
    ("multi_head.count", lambda d, h, kv, w: 2 * d * h * w + 2 * d * kv * w + 4 * d, "the matrices are right; a bias is as long"),
    ("multi_head.count", lambda d, h, kv, w: (d + 1) * (h + 2 * kv) * w + (d + 1) * d, "W_o is square only if"),
    ("multi_head.count", lambda d, h, kv, w: (d + 1) * (h + 2 * kv) * w + (kv * w + 1) * d, "W_o reads all query heads"),
    ("multi_head.count", lambda d, h, kv, w: 2 * d * h * w + 2 * d * kv * w + d, "those of the other three are missing"),
    ("multi_head.count", lambda d, h, kv, w: (d + 1) * (h + 2 * kv) * w + h * w * d, "the bias of the output projection is missing"),
    ("multi_head.count", lambda d, h, kv, w: 3 * (d + 1) * w + (w + 1) * d, "this is one head only"),
    ("multi_head.count", lambda d, h, kv, w: 1048576 + d, "for d_model = 12, n_heads = 3, n_kv_heads = 1, d_head = 5: it returned 1048588; expected 517"),
    ("multi_head.unpack", lambda p, h, kv: [p[a * (len(p) // (h + kv)) :][: n * (len(p) // (h + kv))] for a, n in ((0, h), (h, kv), (h, kv))], r"n_heads \+ 2 \* n_kv_heads heads in there"),
    ("multi_head.unpack", lambda p, h, kv: [p[: p.shape[1] // h * h], p[-6:-3], p[-3:]], "need not be d_model / n_heads; count the rows"),
    ("multi_head.unpack", lambda p, h, kv: p.split([n * (p.shape[1] // h) for n in (h, kv, kv)]), "with 4 query and 2 key/value heads and 24 rows of 10 numbers, it raised RuntimeError"),
    ("multi_head.unpack", lambda p, h, kv: [x[None] for x in p.split([len(p) * n // (h + 2 * kv) for n in (h, kv, kv)])], r"w_q has shape \(1, 12, 10\)"),
    ("multi_head.unpack", lambda p, h, kv: p.chunk(3), "you cut three equal parts"),
    ("multi_head.unpack", lambda p, h, kv: p.T.split([len(p) * n // (h + 2 * kv) for n in (h, kv, kv)], dim=1), "w_q is transposed"),
    ("multi_head.unpack", lambda p, h, kv: [p.split([len(p) * n // (h + 2 * kv) for n in (h, kv, kv)])[i] for i in (0, 2, 1)], "w_k holds the rows of w_v"),
    ("multi_head.unpack", lambda p, h, kv: p.split([len(p) * n // (h + 2 * kv) for n in (kv, h, kv)]), r"w_q has shape \(6, 10\); expected \(12, 10\)"),
    ("multi_head.unpack", lambda p, h, kv: [x.flip(0) for x in p.split([len(p) * n // (h + 2 * kv) for n in (h, kv, kv)])], "has the right shape, but other rows: its first is number 11 of packed, expected number 0"),
    ("multi_head.unpack", lambda p, h, kv: p, "it returned a Tensor; expected the three weights"),
    ("multi_head.unpack", lambda p, h, kv: p.split(len(p) // 2), "it returned 2 things"),
    ("multi_head.two_heads", lambda n: two_heads(n, step=1), "the word after, not the word before"),
    ("multi_head.two_heads", lambda n: two_heads(n, sure=5.0), "not firmly enough"),
    ("multi_head.two_heads", lambda n: two_heads(n, out=lambda n: torch.eye(2 * n).roll(n, 1)), "changed halves"),
    ("multi_head.two_heads", lambda n: two_heads(n, out=lambda n: 2 * torch.eye(2 * n)), "look where they should; look at w_v and w_o: what"),
    ("multi_head.two_heads", lambda n: two_heads(n, first=1), "head 1 0% on place 0; both should be near 100"),
    ("multi_head.two_heads", lambda n: two_heads(n, sure=15.0), "not firmly enough: head 0 puts at least 9[0-9.]+% of its weight"),
    ("multi_head.two_heads", lambda n: [two_heads(n)[i] for i in (1, 0, 2, 3)], "w_q and w_k have changed places"),
    ("multi_head.two_heads", lambda n: [m if i != 1 else torch.eye(2 * n) for i, m in enumerate(two_heads(n))], "the keys of head 0 depend on the word"),
    ("multi_head.two_heads", lambda n: [m if i != 2 else torch.eye(2 * n) for i, m in enumerate(two_heads(n))], "hands over its place"),
    ("multi_head.two_heads", lambda n: two_heads(n)[:3], "the four matrices"),
    ("multi_head.two_heads", lambda n: (torch.eye(n),) * 4, r"w_q has shape \(5, 5\); expected \(10, 10\)"),
    ("multi_head.two_heads", lambda n: (math.inf * torch.ones(2 * n, 2 * n),) * 4, "some numbers of w_q are not finite"),
    # 06 transformer
    ("transformer.rms_norm", lambda x, g, e: torch.nn.functional.layer_norm(x, x.shape[-1:], g, eps=e), "the mean is taken away: this norm leaves it"),
    ("transformer.rms_norm", lambda x, g, e: g * x / (x.var(-1, keepdim=True, correction=0) + e).sqrt(), "in the root only"),
    ("transformer.rms_norm", lambda x, g, e: g * x / (x.var(-1, keepdim=True) + e).sqrt(), "over d - 1 numbers"),
    ("transformer.rms_norm", lambda x, g, e: g * x / (x.std(-1, keepdim=True) + e), "torch's std takes the mean away"),
    ("transformer.rms_norm", lambda x, g, e: g * x / (x.square().mean(-1, keepdim=True).sqrt() + e), "eps stands under the root"),
    ("transformer.rms_norm", lambda x, g, e: g * x / x.square().mean(-1, keepdim=True).sqrt(), "eps is missing"),
    ("transformer.rms_norm", lambda x, g, e: x / (x.square().mean(-1, keepdim=True) + e).sqrt(), "gamma is missing"),
    ("transformer.rms_norm", lambda x, g, e: g * x / (x.square().mean(-1, keepdim=True) + e), "divides by the mean itself"),
    ("transformer.rms_norm", lambda x, g, e: g * x / (x.square().sum(-1, keepdim=True) + e).sqrt(), "d times too large"),
    ("transformer.rms_norm", lambda x, g, e: g * x / (x.square().mean(1, keepdim=True) + e).sqrt(), "runs over the words"),
    ("transformer.rms_norm", lambda x, g, e: g * x / (x.square().mean(0, keepdim=True) + e).sqrt(), "runs over the batch"),
    ("transformer.rms_norm", lambda x, g, e: g * x / (x.square().mean((1, 2), keepdim=True) + e).sqrt(), "runs over the whole text"),
    ("transformer.rms_norm", lambda x, g, e: g * x / (x.square().mean() + e).sqrt(), "runs over everything"),
    ("transformer.parallel", lambda x, n, a, f: a(n(x)) + f(n(x)), "the residual is missing"),
    ("transformer.parallel", lambda x, n, a, f: n(x) + a(n(x)) + f(n(x)), "you added to the normed x"),
    ("transformer.parallel", lambda x, n, a, f: x + a(n(x)) + x + f(n(x)), "x is added twice"),
    ("transformer.parallel", lambda x, n, a, f: x + a(n(x)) + f(n(x + a(n(x)))), "one after the other"),
    ("transformer.parallel", lambda x, n, a, f: x + a(x) + f(x), "the norm is missing"),
    ("transformer.parallel", lambda x, n, a, f: x + a(x) + f(n(x)), "attention has to read"),
    ("transformer.parallel", lambda x, n, a, f: x + a(n(x)) + f(x), "the feed-forward part has to read"),
    ("transformer.parallel", lambda x, n, a, f: n(x + a(x) + f(x)), "this is post-norm"),
    ("transformer.parallel", lambda x, n, a, f: n(x + a(n(x)) + f(n(x))), "nothing is normed after the sum"),
    ("transformer.parallel", lambda x, n, a, f: x + f(a(n(x))), "reads what attention made"),
    ("transformer.parallel", lambda x, n, a, f: x + f(n(x)), "what attention makes is missing"),
    ("transformer.parallel", lambda x, n, a, f: x + a(n(x)), "what the feed-forward part makes is missing"),
    ("transformer.parallel", lambda x, n, a, f: x * a(n(x)), r"first difference at \[text 0, word 0, number 0\]"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, decoder=lambda s, t, past: t.expand(-1, len(past), -1)), "it is not causal: a word may not see"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, decoder=lambda s, t, past: past.expand(len(t), -1, -1)), "the decoder mask: the padding is not hidden"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, decoder=lambda s, t, past: t & past.T), "the triangle lies the wrong way"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, decoder=lambda s, t, past: t & past.tril(-1)), "a word may see itself, too"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, decoder=lambda s, t, past: t.mT & past), r"the decoder mask: you hid padded queries"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, encoder=lambda s, t, past: s & torch.ones(s.shape[-1], s.shape[-1]).tril().bool()), "the encoder reads both ways"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, encoder=lambda s, t, past: torch.ones(len(s), s.shape[-1], s.shape[-1]).bool()), "the encoder mask: the padding is not hidden"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, encoder=lambda s, t, past: s.mT.expand(-1, -1, s.shape[-1])), "the encoder mask: you hid padded queries"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, encoder=lambda s, t, past: s), r"the encoder mask has shape \(2, 1, 5\); expected \(2, 5, 5\)"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, cross=lambda s, t, past: t.mT.expand(-1, -1, s.shape[-1])), "it hides padding of the target; what is asked is the source$"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, cross=lambda s, t, past: s.mT.expand(-1, -1, t.shape[-1])), "yours is turned around"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, cross=lambda s, t, past: torch.ones(len(s), t.shape[-1], s.shape[-1]).bool()), "the padding of the source is not hidden"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, cross=lambda s, t, past: s & torch.ones(t.shape[-1], s.shape[-1]).tril().bool()), "the whole source may be seen"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, cross=lambda s, t, past: (s if s.shape != t.shape else t).expand(-1, t.shape[-1], -1)), "even if the lengths agree"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, cross=lambda s, t, past: s.expand(-1, t.shape[-1], -1) if s.shape != t.shape else t & past), "the source may be seen as a whole"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, encoder=lambda s, t, past: s & s.mT), "the encoder mask: you hid padded queries, too"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, decoder=lambda s, t, past: t & t.mT & past), "hide padded keys .columns. only"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, cross=lambda s, t, past: t.mT & s), "the cross mask: you hid padded queries, too"),
    ("transformer.masks", lambda s, t, pad: [~m for m in three_masks(s, t, pad)], "yours is the opposite"),
    ("transformer.masks", lambda s, t, pad: [m.int() for m in three_masks(s, t, pad)], "the encoder mask is not boolean"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, 0), "with 5 source and 3 target words, pad = 9"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad, cross=lambda s, t, past: s.expand(-1, t.shape[-1], -1).roll(1, -1)), "the cross mask is wrong: in text 1, query 0 may see key 0"),
    ("transformer.masks", lambda s, t, pad: three_masks(s, t, pad)[:2], "it returned 2 things"),
    ("transformer.masks", lambda s, t, pad: torch.ones(3), "it returned a Tensor; expected three masks"),
    ("transformer.masks", lambda s, t, pad: s.nothing, "it raised AttributeError"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) - 2 * d, "norms at the end of the two stacks are missing"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) - d, "at the end of both stacks"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) - 2 * n * d * f, "three matrices; you counted two"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) - 4 * n * d * d, "two attentions; you counted one"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) - n * (4 * d * d + d), "you counted one and two"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) - n * d, "three norms; you counted two"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) + V * d, "you counted two$"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) + 2 * V * d, "you counted three$"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) - V * d, "the embedding is missing"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) - (5 * n + 2) * d, "the norms are missing"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) + (5 * n + 2) * d, "has only its scale"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) - 3 * n * d * d, "with W_o; you counted three"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, n) - 2 * n * d * f - 2 * d, "three matrices, and the norms at the end"),
    ("transformer.count", lambda V, d, f, n: n * (4 * d * d + 3 * d * f + 2 * d) + d + V * d, "the encoder only"),
    ("transformer.count", lambda V, d, f, n: parameters(V, d, f, 1), "there are n_layers"),
    ("transformer.count", lambda V, d, f, n: 7, "for vocab_size = 11, d_model = 4, d_ff = 6, n_layers = 1: it returned 7; expected"),
    ("transformer.maximum", lambda: maximum([[1.0, -1], [0, 1]], [1.0, 1]), "so bring -x1 through, too"),
    ("transformer.maximum", lambda: maximum([[1.0, 0], [-1, 1]], [1.0, 1]), "so bring -x2 through, too"),
    ("transformer.maximum", lambda: maximum([[-1.0, 0, 0], [1, 1, -1]], [-1.0, 1, -1]), "the smaller of the two"),
    ("transformer.maximum", lambda: maximum([[1.0, 0], [0, 1]], [1.0, 1]), "the sum of the positive parts"),
    ("transformer.maximum", lambda: maximum([[1.0, -1], [-1, 1]], [1.0, 1]), "the distance of the two"),
    ("transformer.maximum", lambda: maximum([[1.0, 0, 0], [-1, 1, -1]], [1.0, 1, 1]), r"for x1 = -1, x2 = -2 it gives 3; expected -1"),
    ("transformer.maximum", lambda: [p.T if i == 0 else p for i, p in enumerate(maximum([[1.0, 0, 0], [-1, 1, -1]], [1.0, 1, -1]))], "one row for each input"),
    ("transformer.maximum", lambda: maximum([[1.0, 0, 0], [-1, 1, -1]], [1.0, 1, -1])[:3], r"expected the four \(w_1, b_1, w_2, b_2\)"),
    ("transformer.maximum", lambda: [p[:2] if i == 1 else p for i, p in enumerate(maximum([[1.0, 0, 0], [-1, 1, -1]], [1.0, 1, -1]))], r"w_1 has 3 columns, so b_1 must have shape \(3,\); it has \(2,\)"),
]


# --- 06 transformer: three masks of which one may be wrong, the right count, and a feed-forward network


def three_masks(src, tgt, pad, encoder=None, decoder=None, cross=None):
    s, t = (src != pad)[:, None], (tgt != pad)[:, None]
    past = torch.ones(tgt.shape[1], tgt.shape[1]).tril().bool()
    return (
        encoder(s, t, past) if encoder else s.expand(-1, src.shape[1], -1),
        decoder(s, t, past) if decoder else t & past,
        cross(s, t, past) if cross else s.expand(-1, tgt.shape[1], -1),
    )


def parameters(V, d, f, n):
    return n * (12 * d * d + 6 * d * f + 5 * d) + 2 * d + V * d


def maximum(w_1, w_2):
    w_1, w_2 = torch.tensor(w_1), torch.tensor(w_2)[:, None]
    return w_1, torch.zeros(len(w_2)), w_2, torch.zeros(1)


# --- 01 recurrence: the pieces of wrong attempts, and a memory that is one unit


def mix(x, h, w, u, b):
    return x @ w.T + h @ u.T + b


def gated(i, f, g, o, c):
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def latch(w_x, w_m, w_h, b=0.0):
    return lambda: (torch.tensor([[w_x, w_m]]), torch.tensor([[w_h]]), torch.tensor([b]))


def keep_old(i, f, g, o, c):
    return o.sigmoid() * c.tanh(), gated(i, f, g, o, c)[1]


def memory(scale=1.0, sign=1.0):
    w_ih = torch.tensor([[0.0, 0.0], [8, 8], [-8, 8]])
    w_hh = torch.tensor([[2.0 * scale, 3 * sign, -3 * sign], [0, 0, 0], [0, 0, 0]])
    return w_ih, w_hh, torch.tensor([0.0, -12, -12])


def soft_memory(keep):
    "Detectors that are not sharp, and so need a firm hold."
    w_ih, w_hh = torch.tensor([[0.0, 0.0], [5, 5], [-5, 5]]), torch.tensor([[keep, 2, -2], [0, 0, 0], [0, 0, 0]])
    return lambda: (w_ih, w_hh, torch.tensor([0.0, -7, -7]))


SLIPS += [
    ("recurrence.cell", mix, "tanh is missing"),
    ("recurrence.cell", lambda *a: mix(*a).sigmoid(), "you used a sigmoid"),
    ("recurrence.cell", lambda x, h, w, u, b: (x @ w.T + h @ u.T).tanh(), "bias is missing"),
    ("recurrence.cell", lambda x, h, w, u, b: (mix(x, h, w, u, b) + b).tanh(), "added it twice"),
    ("recurrence.cell", lambda *a: mix(*a).relu(), "you used relu"),
    ("recurrence.cell", lambda *a: a[1] + mix(*a).tanh(), "not added outside"),
    ("recurrence.cell", lambda x, h, w, u, b: (x @ w.T).tanh() + (h @ u.T).tanh() + b, "three parts one by one"),
    ("recurrence.cell", lambda *a: math.tanh(mix(*a)), "math.tanh. takes a single number"),
    ("recurrence.cell", lambda x, h, w, u, b: (x @ w.T + b).tanh(), "nothing is remembered"),
    ("recurrence.cell", lambda x, h, w, u, b: (h @ u.T + b).tanh(), "input `x` is not used"),
    ("recurrence.cell", lambda x, h, w, u, b: (x @ w.T + h @ u + b).tanh(), "`w_hh` has to be transposed"),
    ("recurrence.cell", lambda x, h, w, u, b: (x @ w + h @ u + b).tanh(), "both matrices have to be transposed"),
    ("recurrence.cell", lambda x, h, w, u, b: (x @ w.T).tanh() + (h @ u.T + b).tanh(), "one by one"),
    ("recurrence.cell", lambda x, h, w, u, b: (x @ w.T + h @ u.T).tanh() + b, "after the tanh"),
    ("recurrence.cell", lambda x, h, w, u, b: (x @ u.T + h @ w.T + b).tanh(), "wrong way round"),
    ("recurrence.cell", lambda x, h, w, u, b: (x @ (w.T if x.shape[1] == 4 else w) + h @ u.T + b).tanh(), "right when d_in = d, but .* it raised RuntimeError"),
    ("recurrence.gates", lambda i, f, g, o, c: gated(i, f, g, o, c)[1], "expected the pair"),
    ("recurrence.gates", lambda *a: gated(*a)[::-1], "other way round"),
    ("recurrence.gates", lambda i, f, g, o, c: gated(f, i, g, o, c), "new_c: the forget gate and the input gate are swapped"),
    ("recurrence.gates", lambda i, f, g, o, c: (c, f.sigmoid() * c + i.sigmoid() * g), "new_c: the candidate g needs its tanh"),
    ("recurrence.gates", lambda i, f, g, o, c: (c, f.sigmoid() * c + i.sigmoid() * g.sigmoid()), "not through the sigmoid"),
    ("recurrence.gates", lambda i, f, g, o, c: (c, f.tanh() * c + i.tanh() * g.tanh()), "need the sigmoid, not tanh"),
    ("recurrence.gates", lambda i, f, g, o, c: (c, f * c + i * g.tanh()), "between 0 and 1"),
    ("recurrence.gates", lambda i, f, g, o, c: (c, c + i.sigmoid() * g.tanh()), "nothing is forgotten"),
    ("recurrence.gates", lambda i, f, g, o, c: (c, i.sigmoid() * g.tanh()), "the old cell state is missing"),
    ("recurrence.gates", lambda i, f, g, o, c: (o * (f * c + i * g), f * c + i * g), "apply them"),
    ("recurrence.gates", lambda i, f, g, o, c: (c, f.sigmoid() * (c + i.sigmoid() * g.tanh())), "not for the sum"),
    ("recurrence.gates", lambda i, f, g, o, c: gated(o, f, g, i, c), "the input gate and the output gate are swapped"),
    ("recurrence.gates", lambda i, f, g, o, c: (c, f.sigmoid() * c + g.tanh()), "everything is added"),
    ("recurrence.gates", lambda i, f, g, o, c: (c, f.sigmoid() * c + (1 - f.sigmoid()) * g.tanh()), "not 1 - forget gate"),
    ("recurrence.gates", lambda i, f, g, o, c: (c, (1 - f.sigmoid()) * c + i.sigmoid() * g.tanh()), "says how much is .kept"),
    ("recurrence.gates", lambda *a: (gated(*a)[0], gated(*a)[1].tanh()), "itself is not squashed"),
    ("recurrence.gates", lambda *a: (gated(*a)[0], gated(*a)[1] + 0.1), "new_c: first difference at .text 0, number 0"),
    ("recurrence.gates", keep_old, "new_c is right. new_h: you showed the .old"),
    ("recurrence.gates", lambda i, f, g, o, c: (o.sigmoid() * gated(i, f, g, o, c)[1], gated(i, f, g, o, c)[1]), "tanh around the new cell state is missing"),
    ("recurrence.gates", lambda i, f, g, o, c: (o.tanh() * gated(i, f, g, o, c)[1].tanh(), gated(i, f, g, o, c)[1]), "output gate needs the sigmoid, not tanh"),
    ("recurrence.gates", lambda i, f, g, o, c: (o * gated(i, f, g, o, c)[1].tanh(), gated(i, f, g, o, c)[1]), "output gate needs its sigmoid"),
    ("recurrence.gates", lambda *a: (gated(*a)[1].tanh(), gated(*a)[1]), "output gate is missing"),
    ("recurrence.gates", lambda i, f, g, o, c: (o.sigmoid() * gated(i, f, g, o, c)[1].sigmoid(), gated(i, f, g, o, c)[1]), "not through the sigmoid"),
    ("recurrence.gates", lambda *a: (gated(*a)[0] + 0.1, gated(*a)[1]), "new_c is right. new_h: first difference"),
    ("recurrence.bias", lambda left, steps: left ** (1 / steps), "gate itself"),
    ("recurrence.bias", lambda left, steps: math.log(left / (1 - left)), "holds for one step"),
    ("recurrence.bias", lambda left, steps: math.log((p := 1 - (1 - left) / steps) / (1 - p)), "not taking the root"),
    ("recurrence.bias", lambda left, steps: math.log((p := left**steps) / (1 - p)), "you took the power"),
    ("recurrence.bias", lambda left, steps: math.log(left ** (1 / steps)), "not the inverse"),
    ("recurrence.bias", lambda left, steps: math.log((1 - (p := left ** (1 / steps))) / p), "sign is wrong"),
    ("recurrence.bias", lambda left, steps: math.atanh(left ** (1 / steps)), "inverse of tanh"),
    ("recurrence.bias", lambda left, steps: 9.2, "for left = 0.99, steps = 100: it returned 9.2; expected 9.205"),
    ("recurrence.bias", lambda left, steps: 1 / (1 + math.exp(-(left ** (1 / steps)))), "inverse of the sigmoid, not"),
    ("recurrence.bias", lambda left, steps: math.log((p := left ** (1 / (steps + 1))) / (1 - p)), "one step too many"),
    ("recurrence.ticks", lambda n, layers: min(n, layers), "for n = 7, layers = 1: it returned 1; expected 7"),
    ("recurrence.ticks", lambda n, layers: n * layers, "need not wait"),
    ("recurrence.ticks", lambda n, layers: n + layers, "one too many"),
    ("recurrence.ticks", lambda n, layers: n, "not free"),
    ("recurrence.ticks", lambda n, layers: max(n, layers), "overlap"),
    ("recurrence.ticks", lambda n, layers: n + layers - 2, "one too few"),
    ("recurrence.crossing", lambda blocks, d: (blocks - 2) * d, "it is negative"),
    ("recurrence.crossing", lambda blocks, d: (blocks - 2) * d if blocks > 2 else math.inf, "return 0, not infinity"),
    ("recurrence.crossing", lambda blocks, d: blocks * d, "left out the projections"),
    ("recurrence.crossing", lambda blocks, d: d, "rule of the paper"),
    ("recurrence.crossing", lambda blocks, d: max(0, (blocks - 1.5) * d), "four projections"),
    ("recurrence.crossing", lambda blocks, d: max(0, (2 * blocks - 4) * d), "n²d each"),
    ("recurrence.crossing", lambda blocks, d: 2 * d, "for the LSTM only"),
    ("recurrence.crossing", lambda blocks, d: max(0, (blocks / 2 - 2) * d), "2·blocks·nd²"),
    ("recurrence.memory", lambda: memory()[0], "expected the three tensors"),
    ("recurrence.memory", lambda: (*memory()[:2], torch.zeros(2)), r"the shapes are .*\(2,\); expected \(d, 2\), \(d, d\) and \(d,\)"),
    ("recurrence.memory", lambda: (memory()[0] * math.nan, *memory()[1:]), "not finite"),
    ("recurrence.memory", latch(5.0, 0.0, 0.0), "tells the .last. value"),
    ("recurrence.memory", latch(0.5, 0.0, 2.0), "the mark makes no difference"),
    ("recurrence.memory", latch(1.0, 0.0, 3.0), "the mark makes no difference"),  # the first word, marked or not
    ("recurrence.memory", latch(1.0, 1.0, 3.0), "texts are remembered wrongly"),
    ("recurrence.memory", lambda: memory(scale=4.5), "but not where others come before"),
    ("recurrence.memory", lambda: memory(scale=0.4), "it fades"),
    ("recurrence.memory", latch(0.0, 1.0, 2.0), "does the value of the marked word get in"),
    ("recurrence.memory", lambda: memory(sign=-1.0), "opposite sign"),
    ("recurrence.memory", lambda: memory(scale=0.55), "only .* away from 0"),
    ("recurrence.memory", lambda: (memory()[0].flip(0), memory()[1].flip(0, 1), memory()[2].flip(0)), "number 2 of the state remembers it"),
    ("recurrence.memory", lambda: (memory()[0], memory()[1].T, memory()[2]), "yours is transposed"),
    ("recurrence.memory", soft_memory(0.9), "with a weight of only 0.9; with 2 it would hold"),
]


def row(p, d, power=2.0, base=10000.0):
    "Angles of the clocks of exercise 5.1."
    return p * base ** (-power * torch.arange(d // 2, dtype=torch.float64) / d)


def taking_turns(first, second):
    return torch.stack((first, second), dim=-1).flatten(-2)


def turn(x, positions, power=2.0, base=10000.0, sign=1):
    "Exercise 5.2, with knobs."
    angle = sign * row(positions[:, None], x.shape[-1], power, base)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


def turn_neighbours(x, positions):
    angle = row(positions[:, None], x.shape[-1])
    a, b = x[:, ::2], x[:, 1::2]
    return taking_turns(a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())


def turn_overwriting(x, positions):
    angle = row(positions[:, None], x.shape[-1])
    a, b = x.chunk(2, dim=-1)
    a = a * angle.cos() - b * angle.sin()
    b = a * angle.sin() + b * angle.cos()
    return torch.cat((a, b), dim=-1)


def turn_signs(first, second):
    def attempt(x, positions):
        cos, sin = row(positions[:, None], x.shape[-1]).cos(), row(positions[:, None], x.shape[-1]).sin()
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos + first * b * sin, a * sin + second * b * cos), dim=-1)

    return attempt


SLIPS += [
    ("positions.row", lambda p, d: torch.cat((row(p, d).sin(), row(p, d).cos())), "take turns"),
    ("positions.row", lambda p, d: taking_turns(row(p, d).cos(), row(p, d).sin()), "changed places"),
    ("positions.row", lambda p, d: taking_turns(row(p, d, 1).sin(), row(p, d, 1).cos()), "left out the 2"),
    ("positions.row", lambda p, d: [(math.sin, math.cos)[c % 2](p / 10000 ** (2 * c / d)) for c in range(d)], "the number of the column is the 2c"),
    ("positions.row", lambda p, d: [(math.sin, math.cos)[c % 2](p / 10000 ** (c / d)) for c in range(d)], "share one angle; here each column has its own$"),
    ("positions.row", lambda p, d: [f(p / 10000 ** (2 * c / d)) for c in range(0, d, 2) for f in (math.sin, math.cos)], "already the 2c"),
    ("positions.row", lambda p, d: taking_turns(row(p, d, -2).sin(), row(p, d, -2).cos()), "slower, not faster"),
    ("positions.row", lambda p, d: [f(p / 10000 ** (2 * c / d)) for c in range(1, d // 2 + 1) for f in (math.sin, math.cos)], "clocks are counted from 0"),
    ("positions.row", lambda p, d: taking_turns(row(p + 1, d).sin(), row(p + 1, d).cos()), "row of position p . 1"),
    ("positions.row", lambda p, d: taking_turns(row(p, d), row(p, d)), "these are the angles"),
    ("positions.row", lambda p, d: taking_turns(torch.deg2rad(row(p, d)).sin(), torch.deg2rad(row(p, d)).cos()), "took them for degrees"),
    ("positions.row", lambda p, d: taking_turns(row(p, d).sin(), row(p, d).sin()), "sine fills both"),
    ("positions.row", lambda p, d: taking_turns(row(p, d, base=1000.0).sin(), row(p, d, base=1000.0).cos()), "not 1000"),
    ("positions.row", lambda p, d: taking_turns(row(p, d).sin(), row(p, d).cos())[:-1], r"for p = 3, d = 8: its shape is \(7,\)"),
    ("positions.rotary", turn_neighbours, "half-split takes one number from each half"),
    ("positions.rotary", lambda x, p: turn(x, p, sign=-1), "the other way"),
    ("positions.rotary", lambda x, p: turn(x, torch.arange(len(x))), "did not use .positions"),
    ("positions.rotary", lambda x, p: turn(x, p, power=1), "left out the 2"),
    ("positions.rotary", lambda x, p: turn(x, p, power=4), "already the 2c"),
    ("positions.rotary", lambda x, p: turn(x, p, power=-2), "they turn faster"),
    ("positions.rotary", turn_overwriting, "both need the old ones"),
    ("positions.rotary", turn_signs(1, 1), "there is no minus"),
    ("positions.rotary", turn_signs(-1, -1), "a minus too many"),
    ("positions.rotary", lambda x, p: x * row(p[:, None], x.shape[-1]).cos().repeat(1, 2), "mixes the two numbers"),
    ("positions.rotary", lambda x, p: taking_turns(*turn(x, p).chunk(2, dim=-1)), "put back as neighbours"),
    ("positions.rotary", lambda x, p: x + torch.cat((row(p[:, None], x.shape[-1]).sin(), row(p[:, None], x.shape[-1]).cos()), -1), "here pairs are turned"),
    ("positions.rotary", lambda x, p: turn(x, p, base=1000.0), "not 1000"),
    ("positions.rotary", lambda x, p: x @ p, "it raised RuntimeError"),
    ("positions.number", lambda real: torch.arange(real.shape[1]).expand(real.shape), "padding counts as words"),
    ("positions.number", lambda real: real.cumsum(-1), "off by one: the first word of a text is at position 0$"),
    ("positions.number", lambda real: real.cumsum(-1) - 1, "at the padding this gives -1"),
    ("positions.number", lambda real: (real.flip(-1).cumsum(-1).flip(-1) - 1) * real, "from the right"),
    ("positions.number", lambda real: (real.cumsum(0) - 1).clamp(min=0), "along the batch"),
    ("positions.number", lambda real: ((~real).cumsum(-1) - 1).clamp(min=0), "counts the padding"),
    ("positions.number", lambda real: real.sum(-1, keepdim=True).expand(real.shape), "how many words each text has"),
    ("positions.slope", lambda w: 1 / w, "leaves 1/e"),
    ("positions.slope", lambda w: -math.log(2) / w, "the sign"),
    ("positions.slope", lambda w: math.log(2) * w, "do not multiply"),
    ("positions.slope", lambda w: math.log(w) / w, "take the logarithm of 2$"),
    ("positions.slope", lambda w: math.log10(2) / w, "not that to base 10"),
    ("positions.slope", lambda w: 2 ** (-1 / w), "factor for one word"),
    ("positions.slope", lambda w: 1 / (2 * w), "as a straight line"),
    ("positions.slope", lambda w: 2.0**-w, "as in the list of slopes"),
    ("positions.base", lambda d, n: (n / math.pi) ** (d / (d - 2)), "n - 1 steps, not n$"),
    ("positions.base", lambda d, n: ((n - 1) / (2 * math.pi)) ** (d / (d - 2)), "a whole circle"),
    ("positions.base", lambda d, n: (2 * (n - 1) / math.pi) ** (d / (d - 2)), "a quarter of a circle"),
    ("positions.base", lambda d, n: ((n - 1) / 180) ** (d / (d - 2)), "not 180"),
    ("positions.base", lambda d, n: (n - 1) / math.pi, "frequency is not 1 / base"),
    ("positions.base", lambda d, n: n / math.pi, "number d/2 - 1, not d/2; and"),
    ("positions.base", lambda d, n: ((n - 1) / math.pi) ** ((d - 2) / d), "upside down: raise"),
    ("positions.base", lambda d, n: ((n - 1) / math.pi) ** (2 * d / (d - 2)), "left out the 2"),
    ("positions.base", lambda d, n: ((n - 1) / math.pi) ** (d / (2 * (d - 1))), "there are d/2 clocks, not d"),
    ("positions.base", lambda d, n: (math.pi / (n - 1)) ** (d / (d - 2)), "half circle is upside down"),
    ("positions.base", lambda d, n: 10000.0, "for d = 8, n = 100: it returned 10000"),
]


def M(a):
    n = a.shape[1]
    return torch.eye(n, dtype=a.dtype) + torch.ones(n, n, dtype=a.dtype).triu(1)


# --- 07 measuring ---
def runs(words, n):
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def common(output, reference, n):
    "How many runs both have, each as often as both have it."
    left = runs(reference, n)
    return sum(run in left and not left.remove(run) for run in runs(output, n))


# --- 07 training ---
def smoothed(x, t, s, right=None, each=None, divide=None, keep=None, log_softmax=lambda x: x.log_softmax(-1)):
    "The label-smoothed loss, as most people would write it, with places to slip."
    p, real, V = log_softmax(x), (t != 0), x.shape[-1]
    kept = real if keep is None else keep
    loss = -((1 - s) if right is None else right) * p.gather(-1, t[:, None])[:, 0] - (s / V if each is None else each) * p.sum(-1)
    return (loss * kept).sum() / (real.sum().clamp(min=1) if divide is None else divide)


SLIPS += [
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, divide=len(t)), "mean over all places"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, divide=len(t), keep=1), "padding counts"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, keep=1), "the loss at padding is added"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, divide=1), "the sum over the real tokens"),
    ("translation.loss", lambda x, t, s: -smoothed(x, t, s), "sign is wrong"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, right=1, each=0), "smoothing is missing"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, right=1 - s - s / (x.shape[-1] - 1), each=s / (x.shape[-1] - 1)), "not the other V - 1"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, each=s), "not their sum"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, right=1), "taken from the right token"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, each=0), "the others have not got it"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, right=s, each=(1 - s) / x.shape[-1]), "changed places"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, log_softmax=lambda x: x), "log_softmax is missing"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, log_softmax=lambda x: x.log_softmax(0)), "over the places"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s, divide=(t != 0).sum()), "without a real token: 1 of its 1 numbers came out as NaN"),
    ("translation.loss", lambda x, t, s: smoothed(x, t, s) + 0.1, "expected"),
    ("translation.warmup", lambda peak, d_model: 1 / peak**2, "the width is missing"),
    ("translation.warmup", lambda peak, d_model: 1 / (d_model * peak), "you have to square"),
    ("translation.warmup", lambda peak, d_model: (d_model * peak) ** -2, "here it was squared"),
    ("translation.warmup", lambda peak, d_model: 1 / (math.sqrt(d_model) * peak**2), "once squared, it is d_model"),
    ("translation.warmup", lambda peak, d_model: d_model * peak**2, "upside down"),
    ("translation.warmup", lambda peak, d_model: d_model / peak**2, "you multiplied by d_model"),
    ("translation.warmup", lambda peak, d_model: (d_model * peak) ** -0.5, "the way back"),
    ("translation.warmup", lambda peak, d_model: math.floor(0.5 + 1 / (d_model * peak**2)), "do not round"),
    ("translation.warmup", lambda peak, d_model: 4000, "for peak = 0.001, d_model = 512: it returned 4000; expected"),
]


# --- 07 decoding ---
def nucleus(p, share, holds=lambda x, total, share: total - x < share, descending=True):
    "The fewest tokens that have the share, as True and False."
    ranked, order = p.sort(descending=descending)
    stays = torch.zeros(len(p), dtype=torch.bool)
    stays[order] = holds(ranked, ranked.cumsum(0), share)
    return stays


SLIPS += [
    ("translation.top_p", lambda p, s: nucleus(p, s, lambda x, total, s: total <= s), "with which the share is reached has to stay too: look at what those before it have$"),
    ("translation.top_p", lambda p, s: nucleus(p, s, lambda x, total, s: total < s), "at least. includes equal"),
    ("translation.top_p", lambda p, s: nucleus(p, s, lambda x, total, s: total - x <= s), "one too many"),
    ("translation.top_p", lambda p, s: nucleus(p, s, descending=False), "you begin with the unlikeliest"),
    ("translation.top_p", lambda p, s: p.sort(descending=True)[0].cumsum(0) - p.sort(descending=True)[0] < s, "right, but in sorted order"),
    ("translation.top_p", lambda p, s: p.cumsum(0) - p < s, "in the order given"),
    ("translation.top_p", lambda p, s: ~nucleus(p, s), "True is for the tokens that stay"),
    ("translation.top_p", lambda p, s: p >= s, "compared with the share by itself"),
    ("translation.top_p", lambda p, s: p >= 1 - s, "compared with 1 - share by itself"),
    ("translation.top_p", lambda p, s: p * nucleus(p, s), "these are the probabilities that stay; True"),
    ("translation.top_p", lambda p, s: p * nucleus(p, s) / (p * nucleus(p, s)).sum(), "that stay, scaled up"),
    ("translation.top_p", lambda p, s: nucleus(p, s).int(), "the numbers are right, but they must be True and False"),
    ("translation.top_p", lambda p, s: p.sort(descending=True), "it returned a sort"),
    ("translation.scores", lambda lp, n, a: lp / n**a, "n is one more than .words.$"),
    ("translation.scores", lambda lp, n, a: lp / n.clamp(min=1) ** a, "for all, not only where"),
    ("translation.scores", lambda lp, n, a: lp * (n + 1) ** a, "you multiplied"),
    ("translation.scores", lambda lp, n, a: lp / ((n + 1) * a), "alpha is an exponent"),
    ("translation.scores", lambda lp, n, a: lp / (n + 1), "always divided by n"),
    ("translation.scores", lambda lp, n, a: lp, "alpha is not used"),
    ("translation.scores", lambda lp, n, a: (lp / (n + 1)) ** a, "is NaN; only n is raised"),
    ("translation.scores", lambda lp, n, a: -((-lp / (n + 1)) ** a), "the quotient is raised"),
    ("translation.scores", lambda lp, n, a: lp / ((5 + n + 1) / 6) ** a, "the rule of Wu et al., ..5 . n. / 6"),
    ("translation.scores", lambda lp, n, a: lp / ((5 + n) / 6) ** a, "and without the end token"),
    ("translation.scores", lambda lp, n, a: lp.exp() / (n + 1) ** a, "this is a probability"),
    ("translation.scores", lambda lp, n, a: (lp / (n + 1) ** a).exp(), "the exponential of the score"),
    ("translation.scores", lambda lp, n, a: -lp / (n + 1) ** a, "the sign is turned"),
    ("translation.scores", lambda lp, n, a: (lp / (n + 1) ** a).sort(descending=True)[0], "keep the order of the hypotheses"),
    ("translation.scores", lambda lp, n, a: (lp / (n + 1) ** a).argmax(), "the place of the best"),
    ("translation.scores", lambda lp, n, a: (lp / (n + 1) ** a).argsort(descending=True), "this is the order of the hypotheses"),
    ("translation.precision", lambda o, r, n: sum(run in set(runs(r, n)) for run in runs(o, n)) / len(runs(o, n)), "at most as often as the reference"),
    ("translation.precision", lambda o, r, n: len(set(runs(o, n)) & set(runs(r, n))) / len(set(runs(o, n))), "each run is counted once"),
    ("translation.precision", lambda o, r, n: common(o, r, n) / len(runs(r, n)), "divided by the runs of the reference"),
    ("translation.precision", lambda o, r, n: common(o, r, n) / len(o), "by the number of words"),
    ("translation.precision", lambda o, r, n: common(o, r, n) / len(set(runs(o, n))), "number of different runs"),
    ("translation.precision", lambda o, r, n: common(o, r, n), "how many runs there are in both"),
    ("translation.precision", lambda o, r, n: common(o[:-1], r[:-1], n) / max(1, len(runs(o, n)) - 1), "the last run of each text is missing"),
    ("translation.precision", lambda o, r, n: 100 * common(o, r, n) / len(runs(o, n)), "in percent"),
    ("translation.precision", lambda o, r, n: common(o, r, n) / len(runs(o, n)), "it raised ZeroDivisionError"),
    ("translation.precision", lambda o, r, n: common(o, r, n) / max(1, len(runs(o, n))) + 0.1, "expected"),
]


def online(blocks, shrink=lambda old, new: (old - new).exp(), base=lambda block, top: top):
    top, total = torch.tensor(-math.inf).double(), torch.tensor(0.0).double()
    for block in blocks:
        old, top = top, torch.maximum(top, block.max())
        total = total * shrink(old, top) + (block - base(block, top)).exp().sum()
    return top, total


def absorbed(top, total, average, scores, v, start=lambda average, total: average * total, old=True, shrink=True):
    new = torch.maximum(top, scores.max(-1, keepdim=True)[0])
    r, w = (top - new).exp(), (scores - new).exp()
    return (start(average, total) * (r if shrink else 1) + w @ v) / (total * (r if old else 1) + w.sum(-1, keepdim=True))


def tiles(n_q, n_k, block_q, block_k, row=lambda first, last: last, column=lambda first, last: first, shift=1):
    rows = [(i, min(i + block_q, n_q) - 1) for i in range(0, n_q, block_q)]
    columns = [(j, min(j + block_k, n_k) - 1) for j in range(0, n_k, block_k)]
    return torch.tensor([[column(*c) <= row(*r) + shift * (n_k - n_q) for c in columns] for r in rows])


def merged(a, x, b, y, weigh=lambda lse, top: (lse - top).exp()):
    top = torch.maximum(x, y)
    x, y = weigh(x, top)[:, None], weigh(y, top)[:, None]
    return (x * a + y * b) / (x + y)


def tile_gradient(q, k, v, o, g, lse, weights=None, delta=None, scale=True):
    p = (q @ k.T / math.sqrt(q.shape[-1]) - lse[:, None]).exp() if weights is None else weights(q @ k.T / math.sqrt(q.shape[-1]))
    d = (o * g).sum(-1, keepdim=True) if delta is None else delta(p, g @ v.T)
    return p * (g @ v.T - d) @ k / (math.sqrt(q.shape[-1]) if scale else 1)


def moved(n, d, size, blocks=lambda n, block: -(-n // block), each=2, once=2, room=4):
    return once * n * d + each * n * d * blocks(n, size // (room * d))


SLIPS += [
    ("tiling.online", lambda b: online(b, lambda old, new: 1), "still relative to the old maximum"),
    ("tiling.online", lambda b: online(b, lambda old, new: 1, lambda block, top: block.max()), "relative to its own maximum, and nothing shrinks"),
    ("tiling.online", lambda b: online(b, base=lambda block, top: block.max()), "must be relative to the largest of all so far, not"),
    ("tiling.online", lambda b: online(b, lambda old, new: (new - old).exp()), "came out as NaN|upside down"),
    ("tiling.online", lambda b: online(b, lambda old, new: (new - old).exp() if old > -math.inf else 1), "upside down"),
    ("tiling.online", lambda b: (torch.cat(b).max(), torch.cat(b).exp().sum()), "no maximum is subtracted"),
    ("tiling.online", lambda b: (b[0].max(), (torch.cat(b) - b[0].max()).exp().sum()), "maximum of the first block"),
    ("tiling.online", lambda b: online(b[-1:]), "expected|forgets the earlier blocks"),
    ("tiling.online", lambda b: online(b, lambda old, new: 0), "forgets the earlier blocks"),
    ("tiling.online", lambda b: (online(b)[0], online(b)[1].log()), "logarithm of the sum"),
    ("tiling.online", lambda b: (torch.cat(b).max(), torch.cat(b).logsumexp(0)), "is the log-sum-exp"),
    ("tiling.online", lambda b: online(b)[::-1], "wrong way round"),
    ("tiling.online", lambda b: online(b)[1], "its shape is"),
    ("tiling.online", lambda b: (torch.cat(b).max().clamp(min=0), (torch.cat(b) - torch.cat(b).max().clamp(min=0)).exp().sum()), "may be negative: start at -inf"),
    ("tiling.online", lambda b: (b[-1].max(), (torch.cat(b) - b[-1].max()).exp().sum()), "largest of the last block; it must"),
    ("tiling.online", lambda b: (b[-1].max(), sum((x - x.max()).exp().sum() for x in b)), "largest of the last block, and each block"),
    ("tiling.online", lambda b: (online(b)[0], sum((x - torch.cat(b[: i + 1]).max()).exp().sum() * (torch.cat(b[:i]).max() - online(b)[0]).exp() for i, x in enumerate(b) if i)), "only what was summed before shrinks"),
    ("tiling.step", lambda *a: absorbed(*a, start=lambda average, total: average), "was divided already"),
    ("tiling.step", lambda *a: absorbed(*a, old=False), "old total must shrink"),
    ("tiling.step", lambda *a: absorbed(*a, shrink=False), "old sum must shrink"),
    ("tiling.step", lambda *a: absorbed(*a, shrink=False, old=False), "nothing shrinks"),
    ("tiling.step", lambda t, n, a, s, v: (a * n + (s - s.amax(-1, keepdim=True)).exp() @ v) / (n + (s - s.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)), "relative to its own maximum"),
    ("tiling.step", lambda t, n, a, s, v: absorbed(2 * torch.maximum(t, s.amax(-1, keepdim=True)) - t, n, a, s, v) * math.nan, "NaN"),
    ("tiling.step", lambda t, n, a, s, v: a * n * (t - torch.maximum(t, s.amax(-1, keepdim=True))).exp() + (s - torch.maximum(t, s.amax(-1, keepdim=True))).exp() @ v, "not divided by the new total"),
    ("tiling.step", lambda t, n, a, s, v: (a + s.softmax(-1) @ v) / 2, "averages two averages"),
    ("tiling.step", lambda t, n, a, s, v: s.softmax(-1) @ v, "old keys are forgotten"),
    ("tiling.step", lambda t, n, a, s, v: (a * n + (s - t).exp() @ v) / (n + (s - t).exp().sum(-1, keepdim=True)), "still relative to the old top"),
    ("tiling.step", lambda t, n, a, s, v: (a * n * (t - max(t.max(), s.max())).exp() + (s - max(t.max(), s.max())).exp() @ v) / (n * (t - max(t.max(), s.max())).exp() + (s - max(t.max(), s.max())).exp().sum(-1, keepdim=True)), "one maximum for all queries"),
    ("tiling.step", lambda t, n, a, s, v: absorbed(t, n, a, s, v) * (n * (t - torch.maximum(t, s.amax(-1, keepdim=True))).exp() + (s - torch.maximum(t, s.amax(-1, keepdim=True))).exp().sum(-1, keepdim=True)) / n, "divided by the old total"),
    ("tiling.visits", lambda *a: ~tiles(*a), "polarity"),
    ("tiling.visits", lambda *a: tiles(*a, shift=0), "are the first positions"),
    ("tiling.visits", lambda *a: tiles(*a, shift=-1), "wrong sign"),
    ("tiling.visits", lambda *a: tiles(*a, row=lambda first, last: first), "last query of a block decides"),
    ("tiling.visits", lambda *a: tiles(*a, row=lambda first, last: first, column=lambda first, last: last), "one visible pair is enough"),
    ("tiling.visits", lambda *a: tiles(*a, column=lambda first, last: last), "first key of a block decides"),
    ("tiling.visits", lambda *a: tiles(*a, column=lambda first, last: first + 1), "a query sees itself"),
    ("tiling.visits", lambda *a: tiles(*a, row=lambda first, last: last + 1), "one too far"),
    ("tiling.visits", lambda n, m, p, q: tiles(n, m, p, q, shift=0, row=lambda first, last: first + p - 1), "are the first positions.*no more care"),
    ("tiling.visits", lambda n, m, p, q: tiles(n, m, p, q, row=lambda first, last: first + p - 2), "a query sees itself.*no more care"),
    ("tiling.visits", lambda *a: tiles(*a).T, "axes are swapped|its shape is"),
    ("tiling.visits", lambda n, m, p, q: torch.ones(-(-n // p), -(-m // q)).tril().bool(), "blocks were compared by their numbers"),
    ("tiling.visits", lambda n, m, p, q: tiles(n, m, p, q)[: n // p, : m // q], "short blocks at the end are missing"),
    ("tiling.visits", lambda *a: tiles(*a).int(), r"must be True and False \(dtype bool\)"),
    ("tiling.merge", merged, "such rows must be 0"),
    ("tiling.merge", lambda *a: merged(*a, weigh=lambda lse, top: lse.exp()), "overflows for a large lse: subtract"),
    ("tiling.merge", lambda *a: merged(*a, weigh=lambda lse, top: lse.exp()).nan_to_num(), "overflows"),
    ("tiling.merge", lambda *a: merged(*a, weigh=lambda lse, top: lse), "not lse"),
    ("tiling.merge", lambda *a: merged(*a, weigh=lambda lse, top: (lse - top.max()).exp()).nan_to_num(), "one maximum for all queries"),
    ("tiling.merge", lambda a, x, b, y: (a + b) / 2, "both parts weigh the same"),
    ("tiling.merge", lambda a, x, b, y: a + b, "without weights"),
    ("tiling.merge", lambda a, x, b, y: merged(b, x, a, y).nan_to_num(), "weights are swapped"),
    ("tiling.merge", lambda a, x, b, y: (x - torch.maximum(x, y)).exp()[:, None] * a + (y - torch.maximum(x, y)).exp()[:, None] * b, "not divided by the sum of the weights"),
    ("tiling.gradient", lambda *a: tile_gradient(*a, weights=lambda s: s.softmax(-1)), "normalised within the tile; exp"),
    ("tiling.gradient", lambda *a: tile_gradient(*a, weights=lambda s: s.softmax(-1), delta=lambda p, d: (p * d).sum(-1, keepdim=True)), "and so is delta"),
    ("tiling.gradient", lambda *a: tile_gradient(*a, delta=lambda p, d: (p * d).sum(-1, keepdim=True)), "summed over this tile only"),
    ("tiling.gradient", lambda *a: tile_gradient(*a, delta=lambda p, d: 0), "delta is missing"),
    ("tiling.gradient", lambda q, k, v, o, g, lse: tile_gradient(q, k, v, o, g, lse, delta=lambda p, d: (o * g).sum()), "one number for each query"),
    ("tiling.gradient", lambda q, k, v, o, g, lse: tile_gradient(q, k, v, o, g, lse, weights=lambda s: (s * math.sqrt(q.shape[-1] / v.shape[-1]) - lse[:, None]).exp()) * math.sqrt(q.shape[-1] / v.shape[-1]), "not of v"),
    ("tiling.gradient", lambda q, k, v, o, g, lse: tile_gradient(q, k, v, o, g, lse, weights=lambda s: s.exp() / lse[:, None]), "lse is a logarithm"),
    ("tiling.gradient", lambda q, k, v, o, g, lse: tile_gradient(q, k, v, -o, g, lse), "wrong sign"),
    ("tiling.gradient", lambda *a: tile_gradient(*a, scale=False), "scale is missing at the end"),
    ("tiling.gradient", lambda q, k, v, o, g, lse: tile_gradient(q * math.sqrt(q.shape[-1]), k, v, o, g, lse), "scores lack the scale"),
    ("tiling.gradient", lambda q, k, v, o, g, lse: tile_gradient(q * math.sqrt(q.shape[-1]), k, v, o, g, lse, scale=False), "in the scores and at the end"),
    ("tiling.gradient", lambda q, k, v, o, g, lse: (g @ v.T - (o * g).sum(-1, keepdim=True)) @ k / math.sqrt(q.shape[-1]), "lacks the factor of the weights"),
    ("tiling.gradient", lambda q, k, v, o, g, lse: tile_gradient(q, k, v, o, g, lse).T, "its shape is"),
    ("tiling.traffic", lambda n, d, s: moved(n, d, s, blocks=lambda n, block: n // block), "there is one, not none"),
    ("tiling.traffic", lambda n, d, s: moved(n, d, s, blocks=lambda n, block: n // min(n, block)), "round the number of blocks up"),
    ("tiling.traffic", lambda n, d, s: moved(n, d, s, blocks=lambda n, block: n / min(n, block)), "must be rounded up"),
    ("tiling.traffic", lambda n, d, s: moved(n, d, s, each=1), "k and v both go in"),
    ("tiling.traffic", lambda n, d, s: moved(n, d, s, once=1), "one of them is missing"),
    ("tiling.traffic", lambda n, d, s: moved(n, d, s, once=1, each=3), "q stays while k and v pass by"),
    ("tiling.traffic", lambda n, d, s: moved(n, d, s, blocks=lambda n, block: math.ceil(n * 4 * d / s)), "a whole number of queries"),
    ("tiling.traffic", lambda n, d, s: moved(n, d, s, once=0), "q and the output are missing"),
    ("tiling.traffic", lambda n, d, s: moved(n, d, s, room=1), "needs 4 . d numbers"),
    ("tiling.traffic", lambda n, d, s: 2 * moved(n, d, s), "these are bytes"),
    ("tiling.traffic", lambda n, d, s: moved(n, d, s, blocks=lambda n, block: n), "not once for each query"),
    ("tiling.traffic", lambda n, d, s: moved(n, d, s, blocks=lambda n, block: 1), "there are several"),
]


def bounds(block, m, n, n_q, n_k, shift=None, seen=1, clear_by="first", least=0):
    shift = n_k - n_q if shift is None else shift
    first, last = block * m + shift, block * m + m - 1 + shift
    return min(max((first if clear_by == "first" else last) + seen, least), n_k) // n * n, min(max(last + seen, least), n_k)


def base(m, s, factor, old=True, guard=True, on_s=True, on_m=False):
    highest = s.amax(-1) * (factor if on_s else 1)
    new = torch.maximum(m * (factor if on_m else 1), highest) if old else highest
    return new.masked_fill(new == -math.inf, 0) if guard else new


def place(program, batch, n_heads, n_kv_heads, n_blocks, kv=lambda h, n, kv: h * kv // n, block=lambda turn, n: n - 1 - turn):
    turn, both = divmod(program, batch * n_heads)
    return both // n_heads, both % n_heads, kv(both % n_heads, n_heads, n_kv_heads), block(turn, n_blocks)


def blocks_first(program, batch, n_heads, n_kv_heads, n_blocks):
    both, turn = divmod(program, n_blocks)
    return both // n_heads, both % n_heads, both % n_heads * n_kv_heads // n_heads, n_blocks - 1 - turn


def heads_through(program, batch, n_heads, n_kv_heads, n_blocks):
    turn, both = divmod(program, batch * n_heads)
    return both % batch, both // batch, both // batch * n_kv_heads // n_heads, n_blocks - 1 - turn


def sequence(block, starts, m, begins=None, from_start=True, strict=False):
    begins = begins or [x // m + s for s, x in enumerate(starts)]
    s = max(s for s in range(len(starts) - 1) if s == 0 or (begins[s] < block if strict else begins[s] <= block))
    return s, block - begins[s] if from_start else block


def without_gaps(block, starts, m):
    begins = [0]
    for a, b in zip(starts, starts[1:]):
        begins.append(begins[-1] + math.ceil((b - a) / m))
    return sequence(block, starts, m, begins)


def rate(seconds, batch, heads, n_q, n_k, d, d_v, causal, each=2, half=2, unit=1e12):
    work = each * batch * heads * n_q * n_k * (d + d_v)
    return (work / half if causal else work) / seconds / unit


SLIPS += [
    ("flash_forward.bounds", lambda *a: bounds(*a, shift=0), "upper left"),
    ("flash_forward.bounds", lambda *a: bounds(*a, clear_by="last"), "all of them must see it, the first one, too"),
    ("flash_forward.bounds", lambda *a: bounds(*a, seen=0), "sees itself"),
    ("flash_forward.bounds", lambda b, m, n, q, k: (min(max(b * m + k - q, 0), k) // n * n, bounds(b, m, n, q, k)[1]), "its place \\+ 1 keys"),
    ("flash_forward.bounds", lambda b, m, n, q, k: (0, k), "for block = 0, block_m = 16, block_n = 16, n_q = 64, n_k = 64: first difference in end: 64, expected 16"),
    ("flash_forward.bounds", lambda b, m, n, q, k: (min(max(b * m + k - q + 1, 0), k), bounds(b, m, n, q, k)[1]), "not a multiple"),
    ("flash_forward.bounds", lambda b, m, n, q, k: (bounds(b, m, n, q, k)[0], math.ceil(bounds(b, m, n, q, k)[1] / n) * n), "need not be a multiple"),
    ("flash_forward.bounds", lambda b, m, n, q, k: (bounds(b, m, n, q, k)[0] // n, math.ceil(bounds(b, m, n, q, k)[1] / n)), "numbers of blocks"),
    ("flash_forward.bounds", lambda *a: bounds(*a, least=-999), "may be negative"),
    ("flash_forward.bounds", lambda *a: bounds(*a)[0], "expected 2 numbers"),
    ("flash_forward.bounds", lambda *a: (bounds(*a)[0], 0), "in end: 0, expected"),
    ("flash_forward.base", lambda *a: base(*a, guard=False), "has seen nothing yet"),
    ("flash_forward.base", lambda *a: base(*a, old=False), "what was seen before"),
    ("flash_forward.base", lambda *a: base(*a, on_s=False), "still wants the factor"),
    ("flash_forward.base", lambda *a: base(*a, on_m=True), "has the factor in it already"),
    ("flash_forward.base", lambda *a: base(*a).clamp(min=0), "may well be negative"),
    ("flash_forward.base", lambda m, s, f: torch.maximum(m, s.max() * f), "runs over the keys"),
    ("flash_forward.base", lambda m, s, f: base(m, s.masked_fill(~(s > -math.inf).any(-1, keepdim=True), 0), f), "also a negative one"),
    ("flash_forward.base", lambda m, s, f: m.masked_fill(m == -math.inf, 0), "this tile counts as well"),
    ("flash_forward.base", lambda *a: base(*a, guard=False).clamp(min=-1e30), "asks for 0"),
    ("flash_forward.place", lambda *a: place(*a, kv=lambda h, n, kv: h % kv), "neighbours must share"),
    ("flash_forward.place", lambda *a: place(*a, kv=lambda h, n, kv: h // kv), "size of a group"),
    ("flash_forward.place", lambda *a: place(*a, block=lambda turn, n: turn), "last block of queries goes first"),
    ("flash_forward.place", blocks_first, "is the next head"),
    ("flash_forward.place", heads_through, "numbered through the batch"),
    ("flash_forward.place", lambda p, b, n, kv, blocks: (place(p, b, n, kv, blocks)[0], p % (b * n), *place(p, b, n, kv, blocks)[2:]), "count it inside its sequence"),
    ("flash_forward.place", lambda *a: place(*a, block=lambda turn, n: n - turn), "numbered from 0"),
    ("flash_forward.wraps", lambda shape, strides: math.prod(shape) > 2**31 - 1, "how far the last one lies"),
    ("flash_forward.wraps", lambda shape, strides: sum(n * s for n, s in zip(shape, strides)) > 2**31 - 1, "n - 1 steps"),
    ("flash_forward.wraps", lambda shape, strides: sum((n - 1) * s for n, s in zip(shape, strides)) * 2 > 2**31 - 1, "not bytes"),
    ("flash_forward.wraps", lambda shape, strides: sum((n - 1) * s for n, s in zip(shape, strides)) * 4 > 2**31 - 1, "not bytes"),
    ("flash_forward.wraps", lambda shape, strides: sum((n - 1) * s for n, s in zip(shape, strides)) > 2**32 - 1, "signed"),
    ("flash_forward.wraps", lambda shape, strides: sum((n - 1) * s for n, s in zip(shape, strides)) >= 2**31 - 1, "itself still fits"),
    ("flash_forward.wraps", lambda shape, strides: sum((n - 1) * s for n, s in zip(shape, strides)) <= 2**31 - 1, "True means"),
    ("flash_forward.wraps", lambda shape, strides: max((n - 1) * s for n, s in zip(shape, strides)) > 2**31 - 1, "along all axes add up"),
    ("flash_forward.wraps", lambda shape, strides: sum((n - 1) * s for n, s in zip(shape[:-1], strides)) > 2**31 - 1, "the last axis counts"),
    ("flash_forward.wraps", lambda shape, strides: sum((n - 1) * s for n, s in zip(shape, strides)) > 2**31, "no longer fits"),
    ("flash_forward.wraps", lambda shape, strides: len(shape) == 4, r"for shape = \(2, 4, 10, 16\), strides = \(640, 160, 16, 1\): it returned 1; expected 0"),
    ("flash_forward.sequence", lambda b, starts, m: (0, b), r"for block = 1, starts = \[0, 5, 5, 40, 51\], block_m = 16: first difference in s: 0, expected 1"),
    ("flash_forward.sequence", lambda *a: sequence(*a, from_start=False), "counted from the first block of all"),
    ("flash_forward.sequence", lambda *a: sequence(*a, strict=True), "compare with <="),
    ("flash_forward.sequence", without_gaps, "blocks without gaps"),
    ("flash_forward.sequence", lambda b, starts, m: (sequence(b, starts, m)[0], 0), "in which: 0, expected 1"),
    ("flash_forward.rate", lambda *a: rate(*a, each=1), "are two operations"),
    ("flash_forward.rate", lambda *a: rate(*a, half=1), "half of it counts"),
    ("flash_forward.rate", lambda s, b, h, q, k, d, d_v, c: rate(s, b, h, q, k, d, 0, c), "two products"),
    ("flash_forward.rate", lambda s, b, h, q, k, d, d_v, c: rate(s, b, h, q, k, d, d, c), "a width of their own"),
    ("flash_forward.rate", lambda s, b, h, q, k, d, d_v, c: rate(s, b, h, q, k, d_v, d_v, c), "queries and keys have a width"),
    ("flash_forward.rate", lambda s, b, h, q, k, d, d_v, c: rate(s, b, h, q, q, d, d_v, c), "not n_q²"),
    ("flash_forward.rate", lambda s, b, h, q, k, d, d_v, c: rate(s, 1, 1, q, k, d, d_v, c), "each head of each sequence"),
    ("flash_forward.rate", lambda *a: rate(*a, unit=1), "operations per second"),
    ("flash_forward.rate", lambda *a: rate(*a, unit=1e9), "in giga"),
    ("flash_forward.rate", lambda s, b, h, q, k, d, d_v, c: rate(s, b, h, q, k, d, d_v, False) * (1 - (q - 1) / (2 * k) if c else 1), "number of visible pairs"),
]


def through(p, dp, delta=None, front=None):
    delta = (p * dp).sum(-1, keepdim=True) if delta is None else delta
    return (p if front is None else front) * (dp - delta)


def constant(o, do, dl, less=1, wide=torch.float32):
    return (o.to(wide) * do.to(wide)).sum(-1) - (0 if dl is None else less * dl)


def in_half(o, do, dl, back=None):
    return (o * do).sum(-1).float() - (0 if dl is None else dl)


def added(q, k, v, do, lse, delta, scale, weigh=None, before=None, after=None, sign=1, factor=True, for_v=None, for_k=None):
    s = (scale if before is None else before) * q @ k.T
    p = (s - lse[:, None]).exp().masked_fill(lse[:, None] == -math.inf, 0) if weigh is None else weigh(s, lse[:, None])
    ds = (p if factor else 1) * (do @ v.T - sign * delta[:, None])
    return (scale if after is None else after) * (p if for_k else ds).T @ q, (ds if for_v else p).T @ do


def unseen_weigh(f, x=0):
    return lambda s, lse: f(s, lse).masked_fill(lse == -math.inf, x)


def own_constant(q, k, v, do, lse, delta, scale):
    p = (scale * q @ k.T - lse[:, None]).exp().masked_fill(lse[:, None] == -math.inf, 0)
    return added(q, k, v, do, lse, (p * (do @ v.T)).sum(-1), scale)


def looks(block, m, n, n_q, n_k, shift=None, down=math.floor, up=math.ceil, cut=True, low=0, high=True, later=0, turned=False, one=None):
    shift = n_k - n_q if shift is None else shift
    keys = [block * n, min(block * n + n, n_k if cut else math.inf) - 1]
    keys = keys[::-1] if turned else [keys[one]] * 2 if one is not None else keys
    begin, clear = (max(key - shift + later, low) for key in keys)
    return down(begin / m) * m, min(up(clear / m) * m, n_q if high else math.inf)


def kept(x):
    "Rounds nothing, where a number of tiles is rounded."
    return x


def stretches(n_k, n, batch, heads, sms, each=2, programs=None, most=math.floor, blocks=math.ceil, length=math.ceil):
    room = max(1, most(each * sms / (batch * heads if programs is None else programs(batch, heads))))
    chunk = max(1, length(blocks(n_k / n) / room)) * n
    return math.ceil(n_k / chunk), chunk


def ragged(n_k, n, batch, heads, sms):
    chunk = math.ceil(n_k / max(1, 2 * sms // (batch * heads)))
    return math.ceil(n_k / chunk), chunk


def together(outputs, lses, weigh=None, divide=True, lse=None):
    top = lses.max().masked_fill(lses.max() == -math.inf, 0)
    weights = (lses - top).exp() if weigh is None else weigh(lses)
    total = weights.sum()
    return weights @ outputs / (total.masked_fill(total == 0, 1) if divide else 1), top + total.log() if lse is None else lse(lses)


def subtracted(outputs, lses):
    weights = (lses - lses.max()).exp()
    return weights @ outputs / weights.sum(), lses.max() + weights.sum().log()


SLIPS += [
    ("flash_backward.softmax", lambda p, dp: through(p, dp, 0), "constant is missing"),
    ("flash_backward.softmax", lambda p, dp: through(p, dp, (p * dp).sum(0)), "the keys of a row"),
    ("flash_backward.softmax", lambda p, dp: through(p, dp, (p * dp).sum()), "not one for all"),
    ("flash_backward.softmax", lambda p, dp: through(p, dp, (p * dp).mean(-1, keepdim=True)), "do not divide by the number"),
    ("flash_backward.softmax", lambda p, dp: through(p, dp, dp.sum(-1, keepdim=True)), "weights · d_weights, not of d_weights"),
    ("flash_backward.softmax", lambda p, dp: through(p, dp, dp.mean(-1, keepdim=True)), "not the mean of d_weights"),
    ("flash_backward.softmax", lambda p, dp: through(p, dp, -(p * dp).sum(-1, keepdim=True)), "wrong sign"),
    ("flash_backward.softmax", lambda p, dp: through(p, dp, front=1), "in front is missing"),
    ("flash_backward.softmax", lambda p, dp: p * dp - (p * dp).sum(-1, keepdim=True), "multiplied by the weights, too"),
    ("flash_backward.softmax", lambda p, dp: p * through(p, dp), "`weights` is there twice"),
    ("flash_backward.softmax", lambda p, dp: p * through(1, p * dp, (p * dp).sum(-1, keepdim=True)), "multiplied by the weights twice"),
    ("flash_backward.softmax", lambda p, dp: p * (1 - p) * dp, "moves the others, too"),
    ("flash_backward.softmax", lambda p, dp: through(p.softmax(-1), dp), "they are weights already"),
    ("flash_backward.softmax", lambda p, dp: through(1, dp, p * dp.sum(-1, keepdim=True)), "log_softmax"),
    ("flash_backward.softmax", lambda p, dp: through(dp, p), "weights and d_weights are exchanged"),
    ("flash_backward.softmax", lambda p, dp: through(p, dp).T,
     r"its shape is \(5, 3\); expected \(3, 5\), the axes being \(row, key\)"),
    ("flash_backward.softmax", lambda p, dp: through(p, dp, (p * dp).sum(-1)), "it raised RuntimeError"),
    ("flash_backward.softmax", lambda p, dp: through(p, dp) / p * p, "10 of its 24 numbers came out as NaN"),
    ("flash_backward.softmax", lambda p, dp: through(p, dp).clamp(min=0), r"first difference at \[row 0, key 1\]: 0, expected -"),
    ("flash_backward.delta", lambda o, do, dl: constant(o, do, dl, less=-1), "wrong sign"),
    ("flash_backward.delta", lambda o, do, dl: constant(o, do, None), "log-sum-exp is missing"),
    ("flash_backward.delta", in_half, "too coarse for a sum"),
    ("flash_backward.delta", lambda o, do, dl: constant((o * do).float(), torch.ones_like(do), dl), "products are rounded"),
    ("flash_backward.delta", lambda o, do, dl: constant(o, do, dl).to(o.dtype), "and then rounded"),
    ("flash_backward.delta", lambda o, do, dl: constant(o.T, do.T, None), "the last axis; and subtract d_lse"),
    ("flash_backward.delta", lambda o, do, dl: (o.float() * do.float()).sum(0) - (0 if dl is None else dl),
     "it raised RuntimeError"),
    ("flash_backward.delta", lambda o, do, dl: constant(o, do, dl)[:, None], "without keepdim"),
    ("flash_backward.delta", lambda o, do, dl: (o.float() * do.float()).sum() - (0 if dl is None else dl), "not one for all"),
    ("flash_backward.delta", lambda o, do, dl: (o.float() * do.float()).mean(-1) - (0 if dl is None else dl), "not a mean"),
    ("flash_backward.delta", lambda o, do, dl: -constant(o, do, dl), "turned round"),
    ("flash_backward.delta", lambda o, do, dl: constant(o, o, dl), "of output and itself"),
    ("flash_backward.delta", lambda o, do, dl: constant(do, do, dl), "of d_output and itself"),
    ("flash_backward.delta", lambda o, do, dl: (o.float() * do.float()).sum(-1) - dl, "d_lse is None where nobody used"),
    ("flash_backward.delta", lambda o, do, dl: constant(o, do, dl, less=2), r"first difference at \[query 0\]: "),
    ("flash_backward.tile", lambda *a: added(*a, after=1), "d_k lacks the scale"),
    ("flash_backward.tile", lambda *a: added(*a, before=1), "scores lack the scale"),
    ("flash_backward.tile", lambda *a: added(*a, before=1, after=1), "in the scores and at the end"),
    ("flash_backward.tile", lambda *a: (added(*a)[0], a[-1] * added(*a)[1]), "d_v knows no scale"),
    ("flash_backward.tile", lambda *a: added(*a, weigh=lambda s, x: (s - x).exp()), "exp\\(s - lse\\) is infinite"),
    ("flash_backward.tile", lambda *a: added(*a, weigh=lambda s, x: (s - x).exp().nan_to_num()),
     r"d_k: first difference at \[key 0, column 0\]: inf"),
    ("flash_backward.tile", lambda *a: added(*a, weigh=lambda s, x: (s - x.masked_fill(x == -math.inf, 0)).exp()),
     "with 0 in its place"),
    ("flash_backward.tile", lambda *a: added(*a, weigh=unseen_weigh(lambda s, x: (s - x).exp(), 1)), "its weights are 0, not 1"),
    ("flash_backward.tile", lambda *a: added(*a, weigh=lambda s, x: s.exp() / x.exp()), "exp\\(s - lse\\) in one"),
    ("flash_backward.tile", lambda *a: added(*a, weigh=unseen_weigh(lambda s, x: s.exp() / x.exp())), "exp\\(lse\\) overflows: "),
    ("flash_backward.tile", lambda *a: added(*a, weigh=unseen_weigh(lambda s, x: 2 ** (s - x))), "powers of e"),
    ("flash_backward.tile", lambda *a: added(*a, weigh=unseen_weigh(lambda s, x: 2 ** (s / math.log(2) - x))),
     "lse is natural, too"),
    ("flash_backward.tile", lambda *a: added(*a, weigh=unseen_weigh(lambda s, x: s.softmax(-1))),
     "normalised over the keys of this tile;"),
    ("flash_backward.tile", lambda *a: added(*a, weigh=lambda s, x: s.softmax(-1)), "saw nothing weighs as well"),
    ("flash_backward.tile", lambda *a: added(*a, weigh=lambda s, x: s.softmax(0)), "normalised over queries"),
    ("flash_backward.tile", lambda *a: added(*a, weigh=unseen_weigh(lambda s, x: s.exp() / x)), "lse is a logarithm"),
    ("flash_backward.tile", lambda *a: added(*a, sign=0), "delta is missing"),
    ("flash_backward.tile", lambda *a: added(*a, sign=-1), "delta has the wrong sign"),
    ("flash_backward.tile", own_constant, "delta was summed over this tile only"),
    ("flash_backward.tile", lambda *a: added(*a, factor=False), "lacks the factor of the weights"),
    ("flash_backward.tile", lambda *a: added(*a, for_v=True), "d_v takes the weights"),
    ("flash_backward.tile", lambda *a: added(*a, for_k=True), "not the weights"),
    ("flash_backward.tile", lambda *a: added(*a)[::-1], r"wrong way round: \(d_k, d_v\)"),
    ("flash_backward.tile", lambda *a: added(*a)[0], r"it returned a Tensor; expected the pair \(d_k, d_v\)"),
    ("flash_backward.tile", lambda *a: (*added(*a), 0), "it returned 3 things"),
    ("flash_backward.tile", lambda *a: (added(*a)[0].T, added(*a)[1]),
     r"d_k: its shape is \(3, 5\); expected \(5, 3\), the axes being \(key, column\)"),
    ("flash_backward.tile", lambda *a: (added(*a)[0], 2 * added(*a)[1]), r"d_v: first difference at \[key 0, column 0\]"),
    ("flash_backward.tile", lambda *a: (added(*a)[0], added(*a)[1] * math.nan), "d_v: 10 of its 10 numbers came out as NaN"),
    ("flash_backward.bounds", lambda *a: looks(*a, shift=0), "upper left: the queries are the last"),
    ("flash_backward.bounds", lambda *a: tuple(min(x, a[3]) for x in looks(*a, shift=0)), "upper left, cut to n_q"),
    ("flash_backward.bounds", lambda *a: looks(*a, shift=a[3] - a[4]), "shift has the wrong sign: "),
    ("flash_backward.bounds", lambda *a: tuple(min(x, a[3]) for x in looks(*a, shift=a[3] - a[4])), "the wrong sign, and is cut"),
    ("flash_backward.bounds", lambda *a: looks(*a, later=1), "sees itself"),
    ("flash_backward.bounds", lambda *a: (looks(*a, later=1)[0], looks(*a)[1]),
     "n_k = 61: first difference in begin: 32, expected 16"),
    ("flash_backward.bounds", lambda *a: (looks(*a)[0], looks(*a, later=-1)[1]),
     "n_k = 30: first difference in clear: 0, expected 16"),
    ("flash_backward.bounds", lambda *a: looks(*a, down=kept), "`begin` is not a multiple"),
    ("flash_backward.bounds", lambda *a: looks(*a, up=kept), "`clear` is not a multiple"),
    ("flash_backward.bounds", lambda *a: looks(*a, down=kept, up=kept), "both are whole tiles"),
    ("flash_backward.bounds", lambda *a: (min(looks(*a, down=math.ceil)[0], a[3]), looks(*a)[1]), "`begin` is rounded down"),
    ("flash_backward.bounds", lambda *a: looks(*a, up=math.floor), "`clear` is rounded up"),
    ("flash_backward.bounds", lambda *a: looks(*a, turned=True), "and for `clear` its last"),
    ("flash_backward.bounds", lambda *a: looks(*a, one=0), "`clear`: all keys of the block"),
    ("flash_backward.bounds", lambda *a: looks(*a, one=1), "`begin`: one visible key"),
    ("flash_backward.bounds", lambda *a: looks(*a, cut=False), "the last block may be short"),
    ("flash_backward.bounds", lambda *a: looks(*a, low=-math.inf), "nothing may be negative"),
    ("flash_backward.bounds", lambda b, m, *a: tuple(math.ceil(x / m) for x in looks(b, m, *a)), "numbers of tiles"),
    ("flash_backward.bounds", lambda *a: looks(*a)[::-1], "wrong way round"),
    ("flash_backward.bounds", lambda *a: looks(*a, high=False), "`clear` goes no further"),
    ("flash_backward.bounds", bounds, "a block of keys asks for its queries"),
    ("flash_backward.bounds", lambda *a: looks(*a)[0], r"it returned 0; expected 2 numbers, \(begin, clear\)"),
    ("flash_backward.bounds", lambda *a: (0, looks(*a)[1]),
     "for block = 2, block_m = 16, block_n = 8, n_q = 64, n_k = 64: first difference in begin: 0, expected 16"),
    ("flash_backward.splits", lambda *a: stretches(*a, each=1), "room for two"),
    ("flash_backward.splits", lambda *a: stretches(*a, programs=lambda batch, heads: 1),
     "^[^:]*: each key/value head of each sequence"),
    ("flash_backward.splits", lambda *a: stretches(*a, programs=lambda batch, heads: batch), "heads need their own programs"),
    ("flash_backward.splits", lambda *a: stretches(*a, programs=lambda batch, heads: heads), "sequences need their own programs"),
    ("flash_backward.splits", lambda *a: stretches(*a, most=math.ceil), "more programs than there is room"),
    ("flash_backward.splits", lambda *a: (min(max(1, 2 * a[4] // (a[2] * a[3])), math.ceil(a[0] / a[1])), stretches(*a)[1]),
     "would be empty$"),
    ("flash_backward.splits", lambda *a: (max(1, 2 * a[4] // (a[2] * a[3])), stretches(*a)[1]), "not even as many blocks"),
    ("flash_backward.splits", ragged, "a stretch has whole blocks"),
    ("flash_backward.splits", lambda *a: (stretches(*a)[0], math.ceil(a[0] / stretches(*a)[0])),
     "the number of stretches is right"),
    ("flash_backward.splits", lambda *a: stretches(*a, length=math.floor, blocks=math.floor), "round up twice"),
    ("flash_backward.splits", lambda *a: stretches(*a, length=math.floor), "round the blocks of a stretch up"),
    ("flash_backward.splits", lambda *a: stretches(*a, blocks=math.floor), "round the number of blocks up"),
    ("flash_backward.splits", lambda *a: stretches(*a, most=round),
     "n_kv_heads = 3, multiprocessors = 17: first difference in n_splits: 6, expected 5"),
    ("flash_backward.splits", lambda *a: stretches(*a) if 2 * a[4] >= a[2] * a[3] else (0, 0), "each still needs one stretch"),
    ("flash_backward.splits",
     lambda n_k, n, b, h, sms: (math.ceil(n_k / n), math.ceil(math.ceil(n_k / n) / (2 * sms // (b * h))) * n),
     "it raised ZeroDivisionError"),
    ("flash_backward.splits", lambda *a: (math.ceil(a[0] / a[1]), a[1]), "one block for each stretch"),
    ("flash_backward.splits", lambda *a: (1, math.ceil(a[0] / a[1]) * a[1]), "not split at all"),
    ("flash_backward.splits", lambda *a: (stretches(*a)[0], stretches(*a)[1] // a[1]), "counts keys, not blocks"),
    ("flash_backward.splits", lambda *a: stretches(*a)[::-1], "wrong way round"),
    ("flash_backward.splits", lambda *a: (stretches(*a)[0], a[1]),
     "batch = 1, n_kv_heads = 8, multiprocessors = 132: first difference in chunk: 64, expected 128"),
    ("flash_backward.merge", lambda *a: together(*a, weigh=torch.ones_like, lse=lambda x: x.logsumexp(0)), "plain mean"),
    ("flash_backward.merge", lambda o, x: (o.mean(0), x.logsumexp(0)), "plain mean"),
    ("flash_backward.merge", lambda o, x: (o.sum(0), x.logsumexp(0)), "plain sum"),
    ("flash_backward.merge", lambda *a: together(*a, divide=False), "not normalised"),
    ("flash_backward.merge",
     lambda *a: together(*a, weigh=lambda x: x.masked_fill(x == -math.inf, 0), lse=lambda x: x.logsumexp(0)),
     "not lse"),
    ("flash_backward.merge",
     lambda *a: together(*a, weigh=lambda x: 2 ** (x - x.max().clamp(min=-9999)), lse=lambda x: x.logsumexp(0)),
     "not of 2"),
    ("flash_backward.merge", lambda o, x: together(o, math.log(2) * x, lse=lambda y: y.logsumexp(0) / math.log(2)),
     "logarithms to base e"),
    ("flash_backward.merge", lambda o, x: (x.exp() @ o / x.exp().sum(), x.exp().sum().log()), "is 0 for a small one: "),
    ("flash_backward.merge", lambda o, x: ((x.exp() @ o / x.exp().sum()).nan_to_num(), x.exp().sum().log()),
     "overflows for a large lse"),
    ("flash_backward.merge", lambda *a: together(*a, lse=lambda x: x.exp().sum().log()), "where the new lse is made"),
    ("flash_backward.merge", subtracted, "-inf - \\(-inf\\) is no number"),
    ("flash_backward.merge", lambda o, x: (x.softmax(0) @ o, x.logsumexp(0)), "softmax has nothing to share out"),
    ("flash_backward.merge", lambda *a: (together(*a)[0], subtracted(*a)[1]), "output 0, lse -inf"),
    ("flash_backward.merge", lambda *a: together(*a, lse=lambda x: x.max()), "the largest alone"),
    ("flash_backward.merge", lambda *a: together(*a, lse=lambda x: (x - x.max().clamp(min=-9999)).exp().sum().log()),
     "must be added to the logarithm again"),
    ("flash_backward.merge", lambda *a: together(*a, lse=lambda x: x.sum()), "the logarithm of a sum"),
    ("flash_backward.merge", lambda *a: together(*a, lse=lambda x: x.mean()), "with more keys it grows"),
    ("flash_backward.merge", lambda *a: together(*a, lse=lambda x: x.exp().sum()), "its logarithm was asked for"),
    ("flash_backward.merge", lambda *a: together(*a)[::-1], r"wrong way round: \(output, lse\)"),
    ("flash_backward.merge", lambda *a: together(*a)[0], r"it returned a Tensor; expected the pair \(output, lse\)"),
    ("flash_backward.merge", lambda *a: (together(*a)[0][None], together(*a)[1]),
     r"output: its shape is \(1, 3\); expected \(3,\)"),
    ("flash_backward.merge", lambda o, x: together(o, x.clamp(min=-1e9)), "lse: it returned .*; expected -inf"),
]


@pytest.mark.parametrize(("name", "attempt", "says"), SLIPS, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(SLIPS)])
def test_slips_are_caught_and_named(name, attempt, says, capsys):
    assert check(name, attempt) is False
    said = capsys.readouterr().out
    assert said.startswith(f"✗ {name}: ") and re.search(says, said), said


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("attention.weights", lambda s, d: torch.softmax(s.float() / d**0.5, 1)),  # float32 is precise enough
        ("attention.attend", lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]),
        ("attention.attend", lambda q, k, v: torch.einsum("...ij,...jd->...id", (torch.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5).softmax(-1), v)),
        ("attention.effective_keys", lambda p: 2 ** -(p * torch.where(p > 0, p, 1.0).log2()).sum(-1)),
        ("attention.disguise", lambda a, b: (a @ M(a).flip(0), b @ torch.linalg.inv(M(a).flip(0)).T)),
        ("recurrence.memory", soft_memory(2.0)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_right_answers_pass(name, attempt):
    assert check(name, attempt) is True


def test_an_unknown_exercise_is_an_error_that_lists_the_known_ones():
    for name in ("attention.wieghts", "no_such_chapter.weights", "weights", ""):
        with pytest.raises(ValueError, match=re.escape(f"no exercise is called {name!r}") + ".*attention.weights"):
            check(name, lambda: None)


@pytest.mark.usefixtures("no_shape_check")
def test_a_result_in_place_of_a_function_is_pointed_out(capsys):
    assert check("attention.weights", torch.zeros(2)) is False
    assert "wants the function itself, not a value of type Tensor" in capsys.readouterr().out


def test_a_reader_who_presses_stop_is_obeyed():
    def endless(scores, d):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("attention.weights", endless)


def test_compare_reports_nan_and_missing_dimensions():
    @exercise("test.identity")
    def _identity(attempt):
        return compare(attempt, lambda x: x, [(torch.ones(2, 2),)], axes=("row", "column"))

    assert _identity(lambda x: x) is None
    assert _identity(lambda x: x * math.nan) == "4 of its 4 numbers came out as NaN"
    assert _identity(lambda x: x.sum()) == "its shape is (); expected (2, 2), the axes being (row, column)"
    assert _identity(lambda x: x + torch.tensor([[0, 0], [0.5, 0]])) == "first difference at [row 1, column 0]: 1.5, expected 1"
    assert _identity(lambda x: x + torch.tensor([[0, 0], [math.inf, 0]])) == "first difference at [row 1, column 0]: inf, expected 1"


def test_compare_says_for_which_plain_numbers():
    problem = compare(lambda a, b: a, lambda n, d: torch.tensor(n * d), [(2, 1), (3, 0.5)])
    assert problem == "for n = 3, d = 0.5: it returned 3; expected 1.5"
    assert compare(lambda a, b: a, lambda *n: torch.tensor(n[1]), [(2, 1)]) == "for 2, 1: it returned 2; expected 1"
    problem = compare(lambda n: torch.ones(n), lambda n: torch.arange(1, n + 1), [(1,), (3,)], axes=("place",))
    assert problem == "for n = 3: first difference at [place 1]: 1, expected 2"
    assert compare(lambda n: torch.ones(2), lambda n: torch.ones(n), [(3,)]) == "for n = 3: its shape is (2,); expected (3,)"
    assert compare(lambda x: x.sum(), lambda x: x.prod(), [(torch.tensor([2.0, 1.0]),)]) == "it returned 3; expected 2"


def test_compare_tells_infinity_from_large_numbers_and_truth_from_one():
    hidden = torch.zeros(2, 2).masked_fill(torch.ones(2, 2).triu(1).bool(), -math.inf)
    for wrong in (hidden.clamp(min=-1e9), hidden.clamp(min=5.0), -hidden, hidden.nan_to_num(neginf=math.nan)):
        assert compare(lambda: wrong, lambda: hidden, [()])
    assert compare(lambda: hidden.float(), lambda: hidden.double(), [()]) is None
    keep = hidden == 0
    assert "dtype bool" in compare(lambda: keep.int(), lambda: keep, [()])
    assert compare(lambda: keep.tolist(), lambda: keep, [()]) is None


def test_a_slip_that_cannot_be_made_on_the_inputs_is_passed_over():
    problem = compare(lambda x: x + 1, lambda x: x, [(torch.zeros(2, 3),)], slips={"squared": lambda x: x @ x, "one too many": lambda x: x + 1})
    assert problem == "one too many"


@pytest.mark.parametrize("answer", [torch.zeros(3, 5, dtype=torch.complex64), "a", {}, [[1], [2, 3]], (x for x in [1])], ids=lambda a: type(a).__name__)
def test_an_answer_that_is_no_tensor_of_numbers_is_said_to_be_none(answer, capsys):
    for name in ("attention.weights", "attention.aim"):
        assert check(name, lambda *args: answer) is False
    assert check("attention.disguise", lambda *args: (answer, answer)) is False
    assert capsys.readouterr().out.count("it returned a") == 3


def test_numbers_that_are_none_do_not_pass_as_a_disguise():
    for bad in (math.nan, math.inf):
        assert check("attention.disguise", lambda a, b: (a * bad, b)) is False


def test_a_misspelt_einsum_is_a_mistake_and_not_an_untouched_stub(capsys):
    assert check("attention.attend", lambda q, k, v: torch.einsum("..id,...jd->...ij", q, k)) is False
    assert "it raised RuntimeError" in capsys.readouterr().out


def test_stubs_in_other_words_are_stubs(capsys):
    def says(scores, d):
        "Only a docstring."

    def refuses(scores, d):
        raise NotImplementedError

    def blank(scores, d):
        return (... / math.sqrt(d)).softmax(-1)

    def filled_in_part(scores, d):
        return torch.softmax(..., dim=-1)

    for stub in (says, refuses, blank, filled_in_part):
        assert check("attention.weights", stub) is False
    assert capsys.readouterr().out == "○ attention.weights: not attempted yet\n" * 4


@pytest.mark.usefixtures("no_shape_check")
def test_swapped_arguments_are_pointed_out():
    with pytest.raises(TypeError, match=r"name is a function; expected a string: check\(name, attempt\)"):
        check(attend, "attention.attend")
