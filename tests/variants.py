"""All attentions of the library in one table, for the tests that span them: a new variant is one new row of `VARIANTS`.

A row runs `(q, k, v, mask=None, *, causal, window, scale, dropout_p, training)` on tensors of shape (batch, heads, length,
width), and says which masks, dtypes and features it supports. What it lacks it must refuse, with the words given in `lacks`.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from einops import rearrange

from attention_course.attention import scaled_dot_product_attention
from attention_course.flash_backward import _OLDEST_TRITON, flash_attention, triton
from attention_course.masking import (
    causal_mask, combine_masks, document_mask, fused_attention, padding_mask, prefix_mask, to_additive, window_mask,
)
from attention_course.multi_head import MultiHeadAttention
from attention_course.positions import RotaryPositions, reorder_rotary
from attention_course.tiling import tiled_attention
from attention_course.transformer import KVCache

KERNELS = triton is not None and tuple(map(int, triton.__version__.split(".")[:2])) >= _OLDEST_TRITON
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
FEATURES = ("grouped", "d_v", "scale")  # fewer key/value heads, values of another width, scores scaled otherwise
LENGTHS = ((1, 1), (17, 17), (63, 63), (64, 64), (65, 65), (127, 127), (1, 65), (17, 64), (64, 17), (127, 63))
HEADS = ((2, 2, 2), (1, 1, 1), (3, 4, 2), (2, 2, 1), (1, 6, 3), (1, 6, 6))  # batch, heads, key/value heads
WIDTHS = ((8, 8), (5, 5), (1, 1), (16, 16), (64, 64), (7, 3), (4, 9))  # of queries and keys, of values
SCALES = (None, 0.3, -0.5, 0.0)


# --- masks: what a variant is given, and which pairs that leaves visible ---------------------------------------------


@dataclass
class Given:
    "A mask in the library's terms, and in independent ones: the visible pairs and, where it is added, the learned bias."

    mask: torch.Tensor | None
    flags: dict
    keep: torch.Tensor
    bias: torch.Tensor | None = None


WINDOW = 7


def places(b, h, n_q, n_k):
    "Position of the query and of the key, for each pair; the queries are the last positions."
    *_, i, j = torch.meshgrid(*(torch.arange(n) for n in (b, h, n_q, n_k)), indexing="ij")
    return i + (n_k - n_q), j


def ragged(b, n):
    "A length for each sample, some of them shorter than n."
    return [n - (s + 1) * n // 4 for s in range(b)]


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unseen(b, h, n_q, n_k):
    "A random choice of pairs, with a query in the middle that may see nothing."
    keep = draw(b, h, n_q, n_k, seed=21) > -0.3
    keep[:, 0, n_q // 2] = False
    return keep


def shorter(b, n_k):
    return torch.tensor(ragged(b, n_k)).view(b, 1, 1, 1)


def give(kind: str, b: int, h: int, n_q: int, n_k: int, dtype: torch.dtype) -> Given:
    p, j = places(b, h, n_q, n_k)
    everything = torch.ones(b, h, n_q, n_k, dtype=torch.bool)
    wide = torch.float64 if dtype == torch.float32 else torch.promote_types(dtype, torch.float32)
    past, near = j <= p, (p - j).abs() < WINDOW
    match kind:
        case "none":
            return Given(None, {}, everything)
        case "causal":
            return Given(None, dict(causal=True), past)
        case "causal_mask":
            return Given(causal_mask(n_q, n_k), {}, past)
        case "padding":
            return Given(padding_mask(ragged(b, n_k), n_k), {}, j < shorter(b, n_k))
        case "all_padding":
            lengths = torch.tensor([*ragged(b, n_k)[:-1], 0])
            return Given(padding_mask(lengths, n_k), {}, j < lengths.view(b, 1, 1, 1))
        case "padding_causal":
            return Given(padding_mask(ragged(b, n_k), n_k), dict(causal=True), past & (j < shorter(b, n_k)))
        case "window":
            return Given(None, dict(window=WINDOW), near)
        case "window_causal":
            return Given(None, dict(window=WINDOW, causal=True), past & near)
        case "prefix":
            return Given(prefix_mask([n // 2 for n in ragged(b, n_k)], n_q, n_k), {}, past | (j < shorter(b, n_k) // 2))
        case "document":  # documents of 5 tokens; the queries are the last positions here too
            ids = torch.arange(max(n_q, n_k)) // 5
            mask = document_mask(ids.expand(b, -1))[..., ids.numel() - n_q :, ids.numel() - n_k :]
            q_ids, k_ids = ids[ids.numel() - n_q :], ids[ids.numel() - n_k :]
            return Given(mask, {}, (q_ids[:, None] == k_ids).expand(b, h, -1, -1))
        case "blind_row":
            keep = unseen(b, h, n_q, n_k)
            return Given(keep, {}, keep)
        case "bias":
            bias = draw(1, h, n_q, n_k, seed=22, dtype=dtype).requires_grad_()
            return Given(bias, {}, everything, bias)
        case "bias_for_all_causal":
            bias = draw(n_q, n_k, seed=23, dtype=dtype).requires_grad_()
            return Given(bias, dict(causal=True), past, bias)
        case "bias_wider":  # as a bias kept in float32 beside a model in half precision
            bias = draw(1, h, 1, n_k, seed=24, dtype=wide).requires_grad_()
            return Given(bias, {}, everything, bias)
        case "bias_-inf":
            keep = unseen(b, 1, n_q, n_k)
            bias = draw(b, 1, n_q, n_k, seed=25, dtype=dtype).masked_fill(~keep, -math.inf).requires_grad_()
            return Given(bias, {}, keep.expand(b, h, -1, -1), bias)
        case "additive_padding":
            return Given(to_additive(padding_mask(ragged(b, n_k), n_k), dtype), {}, j < shorter(b, n_k))
        case "combination":
            bias = draw(1, h, n_q, n_k, seed=26, dtype=dtype).requires_grad_()
            mask = combine_masks(padding_mask(ragged(b, n_k), n_k), bias, prefix_mask([n_k // 2] * b, n_q, n_k))
            visible = (j < shorter(b, n_k)) & (past | (j < n_k // 2)) & near
            return Given(mask, dict(window=WINDOW), visible, bias)
    raise LookupError(kind)


MASKS = (
    "none", "causal", "causal_mask", "padding", "all_padding", "padding_causal", "window", "window_causal", "prefix", "document",
    "blind_row", "bias", "bias_for_all_causal", "bias_wider", "bias_-inf", "additive_padding", "combination",
)


# --- the reference: closed formulas in double precision, no autograd, no attention of the library or of torch --------


def reference(q, k, v, keep, bias=None, scale=None, upstream=None) -> dict[str, torch.Tensor]:
    "Output, weights and, for an upstream gradient, the gradients of q, k, v and bias."
    h, kv = q.shape[1], k.shape[1]
    served = torch.tensor([head * kv // h for head in range(h)], dtype=torch.long)  # whose keys each query head reads
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v = (x.detach().cpu().double() for x in (q, k, v))
    keys, values = k[:, served], v[:, served]
    scores = scale * (q @ keys.mT)
    if bias is not None:
        scores = scores + bias.detach().cpu().double().masked_fill(bias.detach().cpu() == -math.inf, 0)
    top = scores.masked_fill(~keep, -math.inf).amax(-1, keepdim=True).nan_to_num(neginf=0) if scores.numel() else 0
    exps = (scores - top).exp().masked_fill(~keep, 0)
    sums = exps.sum(-1, keepdim=True)
    weights = exps / sums.masked_fill(sums == 0, 1)
    result = {"output": weights @ values, "weights": weights}
    if upstream is not None:
        upstream = upstream.detach().cpu().double()
        d_weights = upstream @ values.mT
        d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
        result["q"] = scale * (d_scores @ keys)
        result["k"] = torch.zeros_like(k).index_add(1, served, scale * (d_scores.mT @ q))
        result["v"] = torch.zeros_like(v).index_add(1, served, weights.mT @ upstream)
        if bias is not None:
            result["bias"] = d_scores.sum_to_size(bias.shape)
    return result


# --- the rows --------------------------------------------------------------------------------------------------------


class _Loop(torch.autograd.Function):
    "One number at a time in plain Python, and the gradient likewise."

    @staticmethod
    def forward(ctx, q, k, v, mask, causal, window, scale):
        (b, h, n_q, d), (_, kv, n_k, d_v) = q.shape, v.shape
        scale = 1 / math.sqrt(d) if scale is None else scale
        added = None if mask is None else mask.expand(b, h, n_q, n_k).tolist()
        queries, keys, values = q.tolist(), k.tolist(), v.tolist()
        output = [[[[0.0] * d_v for _ in range(n_q)] for _ in range(h)] for _ in range(b)]
        shares = {}
        for s, head, i in itertools.product(range(b), range(h), range(n_q)):
            served, place, scores = head * kv // h, i + n_k - n_q, {}
            for j in range(n_k):
                extra = 0.0 if added is None else added[s][head][i][j]
                if causal and j > place or window is not None and abs(place - j) >= window or extra is False or extra == -math.inf:
                    continue
                dot = sum(x * y for x, y in zip(queries[s][head][i], keys[s][served][j]))
                scores[j] = scale * dot + (0.0 if extra is True else extra)
            top = max(scores.values(), default=0.0)
            total = sum(math.exp(score - top) for score in scores.values())
            row = shares[s, head, i] = {j: math.exp(score - top) / total for j, score in scores.items()}
            output[s][head][i] = [sum(share * values[s][served][j][c] for j, share in row.items()) for c in range(d_v)]
        ctx.save_for_backward(q, k, v, mask)
        ctx.shares, ctx.scale = shares, scale
        return torch.tensor(output, dtype=torch.float64).reshape(b, h, n_q, d_v).to(q)

    @staticmethod
    def backward(ctx, upstream):
        q, k, v, mask = ctx.saved_tensors
        (b, h, n_q, d), (_, kv, n_k, d_v) = q.shape, v.shape
        queries, keys, values, arriving = (x.tolist() for x in (q, k, v, upstream))
        d_q, d_k, d_v_ = (torch.zeros(x.shape).tolist() for x in (q, k, v))
        d_added = torch.zeros(b, h, n_q, n_k, dtype=torch.float64)
        for (s, head, i), row in ctx.shares.items():
            served, up = head * kv // h, arriving[s][head][i]
            d_share = {j: sum(g * y for g, y in zip(up, values[s][served][j])) for j in row}
            mean = sum(row[j] * d_share[j] for j in row)
            for j, share in row.items():
                d_score = share * (d_share[j] - mean)
                d_added[s, head, i, j] = d_score
                for c in range(d):
                    d_q[s][head][i][c] += ctx.scale * d_score * keys[s][served][j][c]
                    d_k[s][served][j][c] += ctx.scale * d_score * queries[s][head][i][c]
                for c in range(d_v):
                    d_v_[s][served][j][c] += share * up[c]
        grads = [torch.tensor(g, dtype=torch.float64).reshape(x.shape).to(x) for g, x in ((d_q, q), (d_k, k), (d_v_, v))]
        learned = mask is not None and mask.is_floating_point()
        return *grads, d_added.sum_to_size(mask.shape).to(mask.dtype) if learned else None, None, None, None


def loop(q, k, v, mask=None, *, causal=False, window=None, scale=None):
    return _Loop.apply(q, k, v, mask, causal, window, scale)


def folded(mask, q, k, causal, window):
    "The mask that says the same, for an attention that has no such flags."
    sizes = dict(n_q=q.shape[-2], n_k=k.shape[-2], device=q.device)
    if window is not None:
        return combine_masks(mask, (causal_mask if causal else window_mask)(window=window, **sizes))
    return combine_masks(mask, causal_mask(**sizes)) if causal else mask


def einsum(q, k, v, mask=None, *, causal=False, window=None, scale=None, dropout_p=0.0, training=True, weights=False):
    dropout_p = dropout_p if training else 0.0
    both = scaled_dot_product_attention(q, k, v, folded(mask, q, k, causal, window), scale=scale, dropout_p=dropout_p)
    return both if weights else both[0]


def fused(q, k, v, mask=None, *, dropout_p=0.0, training=True, **options):
    return fused_attention(q, k, v, mask, dropout_p=dropout_p if training else 0.0, **options)


def repeated(q, k, v, mask=None, **options):
    "Key/value heads copied for every query head that reads them."
    served = [head * k.shape[1] // q.shape[1] for head in range(q.shape[1])]
    return fused(q, k[:, served], v[:, served], mask, **options)


def alone(q, k, v, mask=None, **options):
    "Each head of each sample by itself, without axes for batch and heads."
    (b, h, n_q, _), (_, kv, n_k, _) = q.shape, k.shape
    mask = None if mask is None else mask.expand(b, h, n_q, n_k)
    heads = [
        fused(q[s, g], k[s, g * kv // h], v[s, g * kv // h], None if mask is None else mask[s, g], **options)
        for s in range(b) for g in range(h)
    ]
    return torch.stack(heads).reshape(b, h, n_q, v.shape[-1]) if heads else fused(q, k, v, mask, **options)


def tiled(q, k, v, mask=None, *, dropout_p=0.0, training=True, **options):
    "It has no dropout, so that there is nothing to drop."
    return tiled_attention(q, k, v, mask, **options)


def flash(q, k, v, mask=None, *, dropout_p=0.0, training=True, **options):
    return flash_attention(q, k, v, mask, dropout_p=dropout_p if training else 0.0, **options)


def identity_module(q, k, v, *, fused=False, cross=False, attend=None, dropout=0.0, rotary=None):
    """A module whose projections hand q, k and v on unchanged, with its inputs, x and context.

    Self-attention over x = [q | k | v], of which each matrix selects its part; with other lengths or for `cross`, cross-attention.
    """
    h, kv, d = q.shape[1], k.shape[1], q.shape[-1]
    queries, keys, values = (rearrange(x, "b h n d -> b n (h d)") for x in (q, k, v))
    sizes = [h * d, kv * d, kv * d]
    options = dict(n_kv_heads=kv, d_head=d, fused=fused, attend=attend, dropout=dropout, rotary=rotary)
    if cross:
        layer = MultiHeadAttention(h * d, h, d_context=2 * kv * d, **options)
        x, context = queries, torch.cat([keys, values], dim=-1)
        matrices = torch.eye(h * d), *torch.eye(2 * kv * d).chunk(2)
    else:
        layer = MultiHeadAttention(sum(sizes), h, **options)
        matrices = torch.eye(sum(sizes)).split(sizes)
        if queries.shape[1] == keys.shape[1]:
            x, context = torch.cat([queries, keys, values], dim=-1), None
        else:
            x, context = F.pad(queries, (0, 2 * kv * d)), F.pad(torch.cat([keys, values], dim=-1), (h * d, 0))
    with torch.no_grad():
        if fused:
            layer.w_qkv.weight.copy_(torch.cat(matrices))
        else:
            for projection, matrix in zip((layer.w_q, layer.w_k, layer.w_v), matrices):
                projection.weight.copy_(matrix)
        layer.w_o.weight.copy_(torch.eye(layer.d_model)[:, : h * d])
    return layer.to(q), x, context


def module(
    q, k, v, mask=None, *, causal=False, window=None, dropout_p=0.0, training=True,
    fused=False, cross=False, attend=None, convert=lambda layer: layer, batch=True, ask=False, weights=False,
):
    "Attention of q, k and v by a `MultiHeadAttention`; `ask` for the weights too, and return those as well if `weights`."
    ask = ask or weights
    if window is not None and attend is not None:
        attend = partial(attend, window=window)
    elif window is not None:
        mask, causal = folded(mask, q, k, causal, window), False
    layer, x, context = identity_module(q, k, v, fused=fused, cross=cross, attend=attend, dropout=dropout_p)
    layer = convert(layer).train(training)
    options = dict(causal=causal, return_weights=ask)
    if batch or not len(x):
        result = layer(x, context, mask, **options)
    else:  # one sample at a time, without an axis for the batch
        masks = [mask] * len(x) if mask is None or mask.ndim < 4 else mask.expand(len(x), -1, -1, -1)
        contexts = [None] * len(x) if context is None else context
        results = [layer(*sample, **options) for sample in zip(x, contexts, masks)]
        result = tuple(map(torch.stack, zip(*results))) if ask else torch.stack(results)
    output = result[0] if ask else result
    output = rearrange(output[..., : q.shape[1] * q.shape[-1]], "b n (h d) -> b h n d", h=q.shape[1])
    return (output, result[1]) if weights else output


def averaged(run, q, k, v, mask=None, **options):
    "The values averaged by hand with the weights that an attention returned."
    weights = run(q, k, v, mask, weights=True, **options)[1].to(torch.promote_types(q.dtype, torch.float32))
    served = [head * k.shape[1] // q.shape[1] for head in range(q.shape[1])]
    return (weights @ v[:, served].to(weights.dtype)).to(q.dtype)


def pieces(past, n, causal, steps):
    "Cuts for n positions, of which the first `past` are only remembered: anywhere if the future is hidden, else the rest is one piece."
    if steps and causal:
        return [0, *range(past, n + 1)] if past else [*range(n + 1)]
    wanted = [0, n // 5, n // 5 + 1, n // 2, past, n] if causal else [0, past // 3, past, n]
    return sorted(cut for cut in set(wanted) if cut <= past or causal or cut == n)


def part(mask, start, end, past):
    "Of a mask, the rows of queries start to end (of all positions), and the keys before `end`."
    if mask is None or not mask.ndim:
        return mask
    mask = mask[..., start - past : end - past, :] if mask.ndim > 1 and mask.shape[-2] != 1 else mask
    return mask if mask.shape[-1] == 1 else mask[..., :end]


def turned_back(x, interleaved, width, base=10000.0):
    "Each pair of columns turned by minus its angle, in double precision, so that `RotaryPositions` turns it to where it was."
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    first, second = (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(0, width // 2), slice(width // 2, width))
    z = torch.complex(x[..., first].double(), x[..., second].double()) * torch.polar(torch.ones_like(angles), -angles)
    turned = torch.stack([z.real, z.imag], dim=-1 if interleaved else -2).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)


def remembered(
    q, k, v, mask=None, *, causal=False, window=None, dropout_p=0.0, training=True,
    steps=False, fused=False, rotary=None, convert=lambda layer: layer, weights=False,
):
    """Self-attention by a `MultiHeadAttention` that meets its sequence in several pieces and remembers the earlier ones in a `KVCache`.

    Positions that only have keys come first; those that only have a query get a key that is hidden. With `rotary`, a layout, queries
    and keys are turned back beforehand, in float32 at least.
    """
    (n_q, d), n_k = q.shape[-2:], k.shape[-2]
    n, past, more, dtype = max(n_q, n_k), max(n_k - n_q, 0), max(n_q - n_k, 0), q.dtype
    if more:
        mask = torch.ones(n_k, dtype=torch.bool) if mask is None else mask.expand(*mask.shape[:-1], n_k)
        mask = F.pad(mask, (more, 0), value=False if mask.dtype == torch.bool else -math.inf)
    q, k, v = F.pad(q, (0, 0, past, 0)), *(F.pad(x, (0, 0, more, 0)) for x in (k, v))
    width = d // 2 * 2
    if not width:
        rotary = None  # a single column cannot turn
    if rotary:
        wide = torch.promote_types(dtype, torch.float32)
        q, k = (turned_back(x.to(wide), rotary == "interleaved", width) for x in (q, k))
        v, rotary = v.to(wide), RotaryPositions(d, interleaved=rotary == "interleaved", d_rotary=width)
    attend = None if window is None else partial(fused_attention, window=window)
    layer, x, _ = identity_module(q, k, v, fused=fused, attend=attend, dropout=dropout_p, rotary=rotary)
    layer, cuts, results = convert(layer).train(training), pieces(past, n, causal, steps), []
    cache = KVCache() if len(cuts) > 2 else None
    for start, end in itertools.pairwise(cuts if n else [0, 0]):
        seen = part(mask, start, end, past) if start >= past else None
        results.append(layer(x[:, start:end], mask=seen, causal=causal, cache=cache, return_weights=weights))
    rows = [result[0] if weights else result for result in results]
    output = torch.cat(rows, dim=1)[:, past:, : q.shape[1] * d]
    output = rearrange(output, "b n (h d) -> b h n d", h=q.shape[1]).to(dtype)
    if not weights:
        return output
    shares = torch.cat([F.pad(result[1], (0, n - result[1].shape[-1])) for result in results], dim=-2)
    return output, shares[..., past:, more:]


def context_remembered(q, k, v, mask=None, *, causal=False, window=None, dropout_p=0.0, training=True, fused=False):
    "Attention to a context, the queries in several pieces: its keys and values are computed for the first and remembered."
    n_q, n_k, mask = q.shape[-2], k.shape[-2], folded(mask, q, k, causal, window)
    layer, x, context = identity_module(q, k, v, fused=fused, cross=not fused, dropout=dropout_p)
    cache, outputs, context = KVCache(), [], x if context is None else context
    for start, end in itertools.pairwise(sorted({0, n_q // 3, n_q // 2, n_q}) if n_q else [0, 0]):
        own = mask if mask is None or mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., start:end, :]
        outputs.append(layer.train(training)(x[:, start:end], context, own, cache=cache))
        context = torch.full_like(context, math.nan)  # nothing more is read from it
    output = torch.cat(outputs, dim=1)[..., : q.shape[1] * q.shape[-1]]
    return rearrange(output, "b n (h d) -> b h n d", h=q.shape[1])


def reordered(layer):
    "The other rotary layout, and weights to go with it."
    if layer.rotary is not None:
        to, width = "half-split" if layer.rotary.interleaved else "interleaved", layer.rotary.d_rotary
        layer.rotary = RotaryPositions(layer.d_head, interleaved=to == "interleaved", d_rotary=width)
        with torch.no_grad():
            for projection, heads in ((layer.w_q, layer.n_heads), (layer.w_k, layer.n_kv_heads)):
                for parameter in (projection.weight, projection.bias):
                    parameter.copy_(reorder_rotary(parameter, heads, to=to, d_rotary=width))
    return layer


def all_groups(layer):
    "As many key/value heads as heads, those of a group alike."
    options = dict(d_head=layer.d_head, d_context=layer.d_context, dropout=layer.dropout, attend=layer.attend)
    full = MultiHeadAttention(layer.d_model, layer.n_heads, **options).to(layer.w_o.weight)
    served = [head * layer.n_kv_heads // layer.n_heads for head in range(layer.n_heads)]
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            own = layer.get_parameter(name)
            if name[:3] in ("w_k", "w_v"):
                own = own.unflatten(0, (layer.n_kv_heads, layer.d_head))[served].flatten(0, 1)
            parameter.copy_(own)
    return full


def to_torch_and_back(layer):
    return MultiHeadAttention.from_torch(layer.to_torch())


def peer(q, k, v, mask=None, *, causal=False, window=None):
    "torch's own module, with the weights of ours; its masks say True where ours say False."
    layer, x, context = identity_module(q, k, v, cross=True)
    theirs = layer.to_torch()
    mask = folded(mask, q, k, causal, window)
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[-2]).flatten(0, 1)
        mask = ~mask if mask.dtype == torch.bool else mask.to(q.dtype)
    output = theirs(x, context, context, attn_mask=mask, need_weights=False)[0]
    return rearrange(output, "b n (h d) -> b h n d", h=q.shape[1])


@dataclass(frozen=True, eq=False)
class Variant:
    name: str
    run: Callable
    masks: tuple = MASKS
    dtypes: tuple = DTYPES
    features: tuple = ()  # of FEATURES
    lacks: dict = field(default_factory=dict)  # what it does not support -> words of its ValueError, or the class without such an argument
    weights: Callable | None = None  # as run, but returns (output, weights)
    ours: bool = True
    drops: bool = True  # has dropout
    thorough: bool = True  # every two settings meet, as masks and lengths; else every one is met
    whole: bool = True  # takes inputs and masks as they are; else in pieces, which errors name and whose gradients add up
    lengths: tuple = LENGTHS
    heads: tuple = HEADS
    widths: tuple = WIDTHS

    def __post_init__(self):
        supported = {*self.masks, *self.dtypes, *self.features}
        unsaid = {*MASKS, *DTYPES, *FEATURES} - supported - set(self.lacks)
        assert not unsaid, f"{self.name} neither supports nor lacks {unsaid}"
        assert not supported & set(self.lacks), f"{self.name} both supports and lacks {supported & set(self.lacks)}"

    def __str__(self):
        return self.name


NO_ARGUMENT = {"d_v": MultiHeadAttention, "scale": MultiHeadAttention}  # all heads of a module are alike
NOT_OURS = "its authors decide what happens here"

BLIND = ("all_padding", "blind_row", "bias_-inf", "combination")  # some query sees nothing
narrower = tuple(min(x, (32, 32)) for x in WIDTHS)
of_module = dict(features=("grouped",), lacks=NO_ARGUMENT, widths=narrower)
in_pieces = dict(**of_module, thorough=False, whole=False)
without_grouped = dict(widths=narrower, lacks={**NO_ARGUMENT, "grouped": r"n_kv_heads=1 with n_heads=2 has no counterpart"})

PADDING = ("none", "causal", "padding", "all_padding", "padding_causal", "window", "window_causal")
no_bias = dict.fromkeys([mask for mask in MASKS if mask not in PADDING], "padding alone|expected bool")

VARIANTS = [
    Variant("loop", loop, features=FEATURES, ours=False, thorough=False, heads=((1, 2, 1), (2, 1, 1)), widths=((2, 2), (3, 1))),
    Variant("einsum", einsum, features=FEATURES, weights=partial(einsum, weights=True)),
    Variant("einsum_weights", partial(averaged, einsum), features=FEATURES, thorough=False),
    Variant("fused", fused, features=FEATURES),
    Variant("fused_repeated", repeated, features=FEATURES, thorough=False),
    Variant("fused_alone", alone, features=FEATURES, thorough=False, whole=False),
    Variant("tiled", tiled, features=FEATURES, drops=False),
    Variant("tiled_small", partial(tiled, block_q=24, block_k=10), features=FEATURES, drops=False, thorough=False),
    Variant("tiled_whole", partial(tiled, block_q=1000, block_k=1000), features=FEATURES, drops=False, thorough=False),
    Variant("flash", flash, masks=PADDING, features=FEATURES, drops=False, lacks=no_bias),
    *[  # in Python on a CPU, where no GPU is
        Variant("flash_triton", partial(flash, backend="triton"), masks=PADDING, features=FEATURES, dtypes=DTYPES[1:], drops=False, thorough=False,
                lacks=no_bias | {torch.float64: "float64"}, heads=((1, 2, 2), (2, 1, 1), (1, 4, 2)))
    ] * KERNELS,
    Variant("module_split", module, **of_module),
    Variant("module_fused", partial(module, fused=True), **of_module),
    Variant("module_to_fused", partial(module, convert=MultiHeadAttention.fuse), **of_module, thorough=False),
    Variant("module_to_split", partial(module, fused=True, convert=MultiHeadAttention.split), **of_module, thorough=False),
    Variant("module_cross", partial(module, cross=True), **of_module, thorough=False),
    Variant("module_alone", partial(module, batch=False), **of_module, thorough=False, whole=False),
    Variant("module_split_asked", partial(module, ask=True), **of_module, weights=partial(module, weights=True), thorough=False),
    Variant("module_fused_asked", partial(module, fused=True, ask=True), **of_module, weights=partial(module, fused=True, weights=True), thorough=False),
    Variant("module_weights", partial(averaged, module), **of_module),
    Variant("module_attend_fused", partial(module, attend=fused_attention), **of_module, thorough=False),
    Variant("module_attend_einsum", partial(module, attend=einsum), **of_module, thorough=False),
    Variant("module_all_groups", partial(module, convert=all_groups), **of_module, thorough=False),
    Variant("module_cached", remembered, **in_pieces, weights=partial(remembered, weights=True)),
    Variant("module_cached_fused", partial(remembered, fused=True), **in_pieces),
    Variant("module_cached_steps", partial(remembered, steps=True), **in_pieces),
    Variant("module_cached_context", context_remembered, **in_pieces),
    Variant("module_rotary", partial(remembered, rotary="half-split"), **in_pieces),
    Variant("module_rotary_interleaved", partial(remembered, rotary="interleaved"), **in_pieces),
    Variant("module_rotary_reordered", partial(remembered, rotary="half-split", convert=reordered), **in_pieces),
    Variant("module_from_torch", partial(module, cross=True, convert=to_torch_and_back), **without_grouped, thorough=False),
    Variant(
        "nn.MultiheadAttention", peer, masks=tuple(mask for mask in MASKS if mask not in BLIND), ours=False,
        lacks=without_grouped["lacks"] | dict.fromkeys(BLIND, NOT_OURS), lengths=tuple(x for x in LENGTHS if x[0] <= x[1]), widths=narrower,
    ),
]
OURS = [variant for variant in VARIANTS if variant.ours and variant.masks == MASKS]  # tests/test_flash_attention.py has the other


# --- the settings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    mask: str
    lengths: tuple
    heads: tuple
    widths: tuple
    dtype: torch.dtype
    scale: float | None

    def __str__(self):
        (n_q, n_k), (b, h, kv), (d, d_v) = self.lengths, self.heads, self.widths
        scale = "" if self.scale is None else f"-scale{self.scale}"
        return f"{self.mask}-{n_q}x{n_k}-b{b}h{h}kv{kv}-d{d}v{d_v}-{str(self.dtype)[6:]}{scale}"


def settings(variant: Variant) -> list[Setting]:
    "Settings that the variant supports, such that every pair of them (or, if it is not thorough, every one) is met."
    heads = [x for x in variant.heads if "grouped" in variant.features or x[1] == x[2]]
    widths = [x for x in variant.widths if "d_v" in variant.features or x[0] == x[1]]
    scales = SCALES if "scale" in variant.features else (None,)
    factors = (variant.masks, variant.lengths, tuple(heads), tuple(widths), variant.dtypes, scales)
    if variant.thorough:
        return [Setting(*values) for values in pairwise(factors)]
    return [Setting(*(values[i % len(values)] for values in factors)) for i in range(max(map(len, factors)))]


@lru_cache
def pairwise(factors: tuple[tuple, ...]) -> list[tuple]:
    "Few combinations in which every two values of two factors meet: greedy, and always the same."
    indices = [range(len(values)) for values in factors]
    pairs = itertools.combinations(range(len(factors)), 2)
    left = dict.fromkeys((f, x, g, y) for f, g in pairs for x in indices[f] for y in indices[g])
    rows, turn = [], 0
    while left:
        f, x, g, y = next(iter(left))
        row = {f: x, g: y}
        for other in sorted(set(range(len(factors))) - set(row)):
            turn += 1

            def gain(value):
                met = sum(((a, b, other, value) if a < other else (other, value, a, b)) in left for a, b in row.items())
                return met, -((value - turn) % len(indices[other]))

            row[other] = max(indices[other], key=gain)
        for a, b in itertools.combinations(sorted(row), 2):
            left.pop((a, row[a], b, row[b]), None)
        rows.append(tuple(factors[f][row[f]] for f in range(len(factors))))
    return rows
