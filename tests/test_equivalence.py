"""The equivalence ladder: every attention of `variants.py` gives the same outputs and gradients, which are the right ones.

`python -m pytest tests/test_equivalence.py -s -k table` shows the largest error of each row in each dtype.
"""

import re
from functools import lru_cache
from inspect import signature

import pytest
import torch

import attention_course
from variants import DTYPES, FEATURES, HALVES, MASKS, NOT_OURS, OURS, VARIANTS, Setting, Variant, draw, give, reference, settings

# Summed in float32 or wider and rounded once, relative to the largest entry or to 1. Kernels that compute in half precision,
# on a GPU and in torch's own module, are held to what the library promises everywhere.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PROMISED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
LADDER = [pytest.param(v, mask, id=f"{v}-{mask}") for v in VARIANTS for mask in v.masks]


@lru_cache(maxsize=None)
def climb(variant: Variant, setting: Setting, device: str = "cpu") -> dict[str, float]:
    "Run one row in one setting: the error of the output and of each gradient, relative to its largest entry or 1."
    (n_q, n_k), (b, h, kv), (d, d_v) = setting.lengths, setting.heads, setting.widths
    shapes = {"q": (b, h, n_q, d), "k": (b, kv, n_k, d), "v": (b, kv, n_k, d_v)}
    q, k, v = (draw(*shape, seed=seed, dtype=setting.dtype).to(device).requires_grad_() for seed, shape in enumerate(shapes.values()))
    upstream = draw(b, h, n_q, d_v, seed=3, dtype=setting.dtype)
    given = give(setting.mask, b, h, n_q, n_k, setting.dtype)
    mask = None if given.mask is None else given.mask.to(device)
    options = dict(given.flags) | ({} if setting.scale is None else {"scale": setting.scale})

    output = variant.run(q, k, v, mask, **options)
    assert output.dtype == setting.dtype and output.shape == (b, h, n_q, d_v) and output.device.type == device
    output.backward(upstream.to(device))
    expected = reference(q, k, v, given.keep, given.bias, setting.scale, upstream)
    got = {"output": output, "q": q.grad, "k": k.grad, "v": v.grad}
    if given.bias is not None:
        got["bias"] = given.bias.grad
    # What sees nothing is 0 and moves nothing, what nobody sees moves nothing: exactly, not nearly.
    blind, lonely = ~given.keep.any(-1), ~given.keep.any(-2).unflatten(1, (kv, h // kv)).any(2)
    for name, hidden in (("output", blind), ("q", blind), ("k", lonely), ("v", lonely)):
        assert (got[name].detach().cpu()[hidden] == 0).all(), f"{name} is not exactly 0 where the mask hides all"
    errors = {}
    for name, value in got.items():
        want = expected[name]
        assert value.shape == want.shape, name
        errors[name] = ((value.detach().cpu().double() - want).abs().max() / want.abs().max().clamp(min=1)).item()
    return errors


def wrong(variant: Variant, setting: Setting, device: str) -> str | None:
    "What is beyond its tolerance, or went altogether wrong."
    tolerance = TOLERANCE if device == "cpu" and variant.name != "nn.MultiheadAttention" else PROMISED
    beyond = {name: error for name, error in climb(variant, setting, device).items() if not error <= tolerance[setting.dtype]}
    return f"{setting}: {beyond}" if beyond else None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("variant", "mask"), LADDER)
def test_every_row_equals_the_reference(variant, mask, device):
    found = [wrong(variant, setting, device) for setting in settings(variant) if setting.mask == mask]
    assert found and not any(found), "\n".join(filter(None, found))


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "grouped" in v.features and torch.float64 in v.dtypes], ids=str)
def test_grouped_heads_equal_heads_repeated(variant, n_kv_heads):
    served = [head * n_kv_heads // 6 for head in range(6)]
    q, k, v = draw(2, 6, 5, 4, seed=0), draw(2, n_kv_heads, 7, 4, seed=1), draw(2, n_kv_heads, 7, 4, seed=2)
    grouped, full = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    a = variant.run(*grouped, causal=True)
    b = variant.run(full[0], full[1][:, served], full[2][:, served], causal=True)
    torch.testing.assert_close(a, b, atol=1e-13, rtol=0)
    for output in (a, b):
        output.square().sum().backward()
    for x, y in zip(grouped, full):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("variant", "mask"), [
    pytest.param(v, mask, id=f"{v}-{mask}") for v in OURS if v.whole and not v.name.endswith("weights")
    for mask in ("none", "causal", "padding", "bias", "bias_wider") if mask in v.masks
])
def test_half_precision_is_computed_wider_and_rounded_once(variant, dtype, mask):
    q, k, v = (draw(2, 2, 33, 8, seed=seed, dtype=dtype).requires_grad_() for seed in range(3))
    upstream, given = draw(2, 2, 33, 8, seed=3, dtype=dtype), give(mask, 2, 2, 33, 33, dtype)
    output = variant.run(q, k, v, given.mask, **given.flags)
    output.backward(upstream)
    right = reference(q, k, v, given.keep, given.bias, upstream=upstream)
    for name, value in {"output": output, "q": q.grad, "k": k.grad, "v": v.grad}.items():
        share = (value == right[name].to(dtype)).double().mean()
        assert share > 0.98, f"only {share:.0%} of {name} are what a wider computation rounds to"


# --- what is not supported -------------------------------------------------------------------------------------------

LACKS = [pytest.param(v, lack, id=f"{v}-{lack}") for v in VARIANTS for lack in v.lacks if v.lacks[lack] != NOT_OURS]


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(("variant", "lack"), LACKS)
def test_what_a_row_lacks_it_refuses(variant, lack):
    refusal = variant.lacks[lack]
    if isinstance(refusal, type):
        assert lack not in {*signature(refusal).parameters, *signature(refusal.forward).parameters}
        return
    needs = {"grouped": dict(heads=(2, 2, 1)), "d_v": dict(widths=(4, 3)), "scale": dict(scale=0.3)}.get(lack, {})
    needs |= {"mask": lack} if lack in MASKS else {"dtype": lack} if lack in DTYPES else {}
    plain = dict(mask="none", lengths=(5, 5), heads=(2, 2, 2), widths=(4, 4), dtype=torch.float64, scale=None)
    with pytest.raises(ValueError, match=refusal) as error:
        climb(variant, Setting(**plain | needs))
    if variant.ours and lack in MASKS:  # and says where to go
        assert any(re.search(rf"\b{name}\b", str(error.value)) for name in attention_course.__all__), error.value


def test_a_gap_in_the_table_is_noticed():
    with pytest.raises(AssertionError, match="neither supports nor lacks"):
        Variant("new", run=None, masks=MASKS[1:], features=FEATURES)


# --- the reference itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MASKS)
def test_the_gradients_of_the_reference_are_those_of_finite_differences(kind):
    b, h, kv, n_q, n_k = 2, 2, 1, 3, 4
    given = give(kind, b, h, n_q, n_k, torch.float64)
    inputs = {"q": draw(b, h, n_q, 3, seed=0), "k": draw(b, kv, n_k, 3, seed=1), "v": draw(b, kv, n_k, 2, seed=2)}
    if given.bias is not None:
        inputs["bias"] = given.bias.detach()
    upstream = draw(b, h, n_q, 2, seed=3)

    def loss(**changed):
        return (reference(keep=given.keep, **inputs | changed)["output"] * upstream).sum()

    exact = reference(keep=given.keep, upstream=upstream, **inputs)
    for name, x in inputs.items():
        numeric = torch.zeros(x.numel(), dtype=torch.float64)
        for i in range(x.numel()):
            step = torch.zeros(x.numel(), dtype=torch.float64).index_fill(0, torch.tensor([i]), 1e-6).reshape(x.shape)
            numeric[i] = (loss(**{name: x + step}) - loss(**{name: x - step})) / 2e-6
        torch.testing.assert_close(exact[name], numeric.reshape(x.shape), atol=1e-8, rtol=0)


# --- the ladder, to be looked at -------------------------------------------------------------------------------------


def attempt(variant: Variant, setting: Setting, device: str) -> float:
    "The largest error; infinite where nothing came out."
    try:
        return max(climb(variant, setting, device).values())
    except Exception:
        return float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_table_of_the_largest_errors(device):
    "Every row really met each mask, length, dtype and number of heads that it supports; and this is how far off it was."
    lines = ["", f"largest error of output and gradients, relative to the largest entry or 1, on {device}", ""]
    lines += [" " * 22 + "".join(f"{str(dtype)[6:]:>10}" for dtype in DTYPES) + "  settings  masks  not supported"]
    for variant in VARIANTS:
        met = settings(variant)
        assert {s.mask for s in met} == set(variant.masks) and {s.dtype for s in met} == set(variant.dtypes)
        assert {s.lengths for s in met} == set(variant.lengths)
        shown = {"grouped": {s.heads[1] > s.heads[2] for s in met}, "d_v": {len(set(s.widths)) > 1 for s in met}, "scale": {bool(s.scale) for s in met}}
        assert all(shown[feature] >= {feature in variant.features} for feature in FEATURES)
        if variant.thorough:
            assert {(s.mask, s.lengths) for s in met} == {(mask, lengths) for mask in variant.masks for lengths in variant.lengths}
            assert {(s.mask, s.dtype) for s in met} == {(mask, dtype) for mask in variant.masks for dtype in variant.dtypes}
        largest = {dtype: max(attempt(variant, s, device) for s in met if s.dtype == dtype) for dtype in variant.dtypes}
        shown = "".join(f"{largest[d]:10.1e}" if d in largest else " " * 9 + "-" for d in DTYPES)
        lines += [f"{variant.name:22}{shown}{len(met):10}{len(variant.masks):7}  {', '.join(map(str, variant.lacks)) or '-'}"]
    print("\n".join(lines))
