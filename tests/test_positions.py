"""Chapter 05: positions, against definitions one number at a time and peers' formulas. (Reported faults: `test_reported_faults.py`.)"""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from attention_course import (
    LearnedPositions,
    MultiHeadAttention,
    RotaryPositions,
    SinusoidalPositions,
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    fused_attention,
    padding_mask,
    positions_from_mask,
    reorder_rotary,
    sinusoidal_encoding,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-4, torch.float16: 5e-4, torch.bfloat16: 4e-3}
LAYOUTS = pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got, right, atol=1e-12):
    torch.testing.assert_close(got, right, atol=atol, rtol=0)


def added(kind, d_model=16):
    torch.manual_seed(0)
    module = SinusoidalPositions(d_model) if kind == "sinusoidal" else LearnedPositions(40, d_model)
    return module.double()


ADDED = pytest.mark.parametrize("kind", ["sinusoidal", "learned"])


# --- sinusoidal -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_model", [1, 2, 5, 6, 127])
@pytest.mark.parametrize("offset", [0, 3, 5000])
def test_each_number_of_the_encoding_is_the_formula(d_model, offset):
    rows = sinusoidal_encoding(3, d_model, offset=offset, dtype=torch.float64)
    assert rows.shape == (3, d_model)
    for n in range(3):
        for column in range(d_model):
            angle = (n + offset) / 10000 ** (2 * (column // 2) / d_model)
            assert abs(rows[n, column].item() - (math.cos if column % 2 else math.sin)(angle)) < 1e-10


def test_no_positions_are_no_rows():
    assert sinusoidal_encoding(0, 4).shape == (0, 4)
    assert SinusoidalPositions(4)(torch.zeros(2, 0, 4)).shape == (2, 0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_encoding_is_right_in_all_dtypes(dtype):
    right = sinusoidal_encoding(2048, 16, dtype=torch.float64)
    rows = sinusoidal_encoding(2048, 16, dtype=dtype)
    assert rows.dtype == dtype
    close(rows.double(), right, atol=ROUNDING[dtype])


def test_the_product_of_rows_is_a_sum_of_cosines():
    rows = sinusoidal_encoding(50, 12, dtype=torch.float64)
    omega = torch.tensor([10000 ** (-2 * c / 12) for c in range(6)], dtype=torch.float64)
    i = torch.arange(50, dtype=torch.float64)
    close(rows @ rows.T, ((i[:, None] - i)[..., None] * omega).cos().sum(-1))


# --- added: sinusoidal and learned ----------------------------------------------------------------------------------


def rows_of(module, n):
    "What it adds to zeros."
    return module(torch.zeros(1, n, module.d_model, dtype=torch.float64))[0]


@ADDED
def test_each_position_adds_its_row(kind):
    module, x = added(kind), normal(2, 7, 16)
    rows = rows_of(module, 20)
    close(module(x), x + rows[:7])
    close(module(x, torch.arange(5, 12)), x + rows[5:12])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4], [9, 3, 3, 0, 19, 1, 2]])
    close(module(x, positions), x + rows[positions])
    close(module(x, positions[1:]), x + rows[positions[1]])
    close(module(x[0], positions[1]), x[0] + rows[positions[1]])  # no batch


@ADDED
def test_positions_of_a_sample_are_those_of_all_that_it_holds(kind):
    module, x = added(kind), normal(2, 3, 5, 16)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    got = module(x, positions)
    assert got.shape == x.shape
    for sample in range(2):
        close(got[sample], x[sample] + rows_of(module, 20)[positions[sample]])


@ADDED
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_any_whole_numbers_are_positions(kind, dtype):
    module, x = added(kind), normal(1, 3, 16)
    close(module(x, torch.tensor([4, 0, 30], dtype=dtype)), module(x, torch.tensor([4, 0, 30])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_output_has_the_dtype_of_the_input_whatever_that_of_the_module(dtype):
    x = normal(2, 5, 16, dtype=dtype)
    for module in (SinusoidalPositions(16), LearnedPositions(9, 16), SinusoidalPositions(16).half(), LearnedPositions(9, 16).half()):
        assert module(x).dtype == module(x, torch.arange(5)).dtype == dtype


def test_half_does_not_coarsen_sinusoids():
    x = torch.zeros(1, 2000, 16, dtype=torch.float64)
    for cast in ("half", "bfloat16"):
        module = getattr(SinusoidalPositions(16), cast)()
        assert torch.equal(module(x), SinusoidalPositions(16)(x))


def test_a_text_as_long_as_the_table_fits_and_rows_start_small():
    table = LearnedPositions(1000, 32)
    assert table(torch.zeros(1, 1000, 32)).shape == (1, 1000, 32)
    assert 0.018 < table.weight.std() < 0.022 and table.weight.mean().abs() < 1e-3


def test_learned_rows_get_the_gradients_of_all_that_stood_there():
    table = added("learned", 4)
    positions = torch.tensor([[0, 1, 2], [2, 2, 5]])
    table(torch.zeros(2, 3, 4, dtype=torch.float64), positions).sum().backward()
    expected = torch.zeros(40, dtype=torch.float64)
    expected[[0, 1, 2, 5]] = torch.tensor([1.0, 1, 3, 1], dtype=torch.float64)
    close(table.weight.grad, expected[:, None].expand(40, 4))


# --- rotary ---------------------------------------------------------------------------------------------------------


def turned_by_hand(x, position, *, base=10000.0, interleaved=False, d_rotary=None):
    "One vector, one pair at a time."
    d = d_rotary or len(x)
    out = x.clone()
    for c in range(d // 2):
        i, j = (2 * c, 2 * c + 1) if interleaved else (c, c + d // 2)
        angle = position * base ** (-2 * c / d)
        out[i] = x[i] * math.cos(angle) - x[j] * math.sin(angle)
        out[j] = x[i] * math.sin(angle) + x[j] * math.cos(angle)
    return out


@LAYOUTS
@pytest.mark.parametrize("options", [{}, {"base": 500.0}, {"d_rotary": 6}, {"d_rotary": 2, "base": 3.0}], ids=str)
def test_each_pair_is_turned_by_the_formula(interleaved, options):
    rotary, x = RotaryPositions(8, interleaved=interleaved, **options), normal(2, 3, 4, 8)
    positions = torch.tensor([[0, 1, 7, 900], [3, 3, 0, 2]])
    got = rotary(x, positions)
    for b in range(2):
        for h in range(3):
            for n in range(4):
                close(got[b, h, n], turned_by_hand(x[b, h, n], positions[b, n].item(), interleaved=interleaved, **options), atol=1e-10)


@LAYOUTS
def test_scores_depend_on_differences_only_and_lengths_are_kept(interleaved):
    rotary = RotaryPositions(16, interleaved=interleaved)
    q, k, at = normal(1, 2, 9, 16), normal(1, 2, 9, 16, seed=1), torch.arange(9)
    scores = rotary(q, at) @ rotary(k, at).mT
    for shift in (1, 40, 9999):
        close(rotary(q, at + shift) @ rotary(k, at + shift).mT, scores, atol=1e-9)
    close(rotary(q, at).norm(dim=-1), q.norm(dim=-1))


def test_turned_back_a_vector_is_what_it_was():
    rotary, x = RotaryPositions(8), normal(1, 1, 6, 8)
    cos, sin = rotary.tables(torch.arange(6), torch.float64)
    close(apply_rotary(apply_rotary(x, cos, sin), cos, -sin), x)


@LAYOUTS
def test_columns_that_are_not_turned_stay_bit_for_bit(interleaved):
    for dtype in DTYPES:
        x = normal(1, 2, 50, 33, dtype=dtype)
        assert torch.equal(RotaryPositions(33, d_rotary=16, interleaved=interleaved)(x)[..., 16:], x[..., 16:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "float"])
def test_angles_are_fine_whatever_the_dtypes_of_module_and_input(dtype, cast):
    rotary = getattr(RotaryPositions(32), cast)()
    x = normal(1, 1, 4096, 32).clamp(-1, 1).to(dtype)
    got, right = rotary(x), RotaryPositions(32)(x.double())
    assert got.dtype == dtype
    close(got.double(), right, atol={torch.float64: 1e-12, torch.float32: 4e-4, torch.float16: 2e-3, torch.bfloat16: 8e-3}[dtype])


def test_tables_of_finer_dtype_are_kept_fine_and_coarser_ones_do_not_coarsen_x():
    x = normal(1, 1, 5, 8)
    cos, sin = RotaryPositions(8).tables(torch.arange(5), torch.float64)
    assert cos.dtype == torch.float64 and apply_rotary(x.half(), cos, sin).dtype == torch.float16
    ones, zeros = torch.ones(5, 4), torch.zeros(5, 4)  # float32: no turn
    assert torch.equal(apply_rotary(x, ones, zeros), x)


def test_positions_one_row_for_all_samples_or_one_each():
    rotary, x = RotaryPositions(8), normal(2, 3, 5, 8)
    at = torch.tensor([4, 5, 6, 7, 8])
    close(rotary(x, at), rotary(x, at[None]))
    close(rotary(x, at), rotary(x, at.expand(2, 5)))
    assert rotary.tables(at)[0].shape == (5, 4) and rotary.tables(at.expand(2, 5))[0].shape == (2, 1, 5, 4)


def test_a_larger_base_turns_all_but_the_first_pair_more_slowly():
    one = torch.tensor([1])
    small, large = (RotaryPositions(8, base=base).tables(one, torch.float64)[0].acos()[0] for base in (1e4, 5e5))
    close(torch.stack((small[0], large[0])), torch.ones(2, dtype=torch.float64))
    assert (large[1:] < small[1:]).all()


@LAYOUTS
@pytest.mark.parametrize("d_rotary", [None, 4])
@pytest.mark.parametrize("n_kv_heads", [2, 1])
def test_reordered_weights_give_the_same_outputs_in_the_other_layout(interleaved, d_rotary, n_kv_heads):
    torch.manual_seed(0)
    m = MultiHeadAttention(16, 2, n_kv_heads=n_kv_heads, rotary=RotaryPositions(8, interleaved=interleaved, d_rotary=d_rotary)).double()
    for p in m.parameters():
        nn.init.normal_(p)
    other = copy.deepcopy(m)
    other.rotary = RotaryPositions(8, interleaved=not interleaved, d_rotary=d_rotary)
    x = normal(2, 7, 16)
    assert (other(x) - m(x)).abs().max() > 1e-2
    to = "half-split" if interleaved else "interleaved"
    with torch.no_grad():
        for layer, heads in ((other.w_q, 2), (other.w_k, n_kv_heads)):
            for part in (layer.weight, layer.bias):
                part.copy_(reorder_rotary(part, heads, to=to, d_rotary=d_rotary))
    close(other(x), m(x))
    close(other(x, causal=True), m(x, causal=True))


def test_there_and_back_is_the_same_weight():
    w = normal(24, 5)
    for d_rotary in (None, 2, 4, 8):
        there = reorder_rotary(w, 3, to="interleaved", d_rotary=d_rotary)
        assert torch.equal(reorder_rotary(there, 3, to="half-split", d_rotary=d_rotary), w)
    assert not torch.equal(there, w)


# --- rotary in the module -------------------------------------------------------------------------------------------


def with_rotary(seed=0, **options):
    torch.manual_seed(seed)
    return MultiHeadAttention(16, 4, rotary=RotaryPositions(4), **options).double()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_the_module_turns_queries_and_keys_and_not_values(fused, n_kv_heads):
    m, x = with_rotary(fused=fused, n_kv_heads=n_kv_heads), normal(2, 6, 16)
    q, k, v = m.project(x)
    heads = fused_attention(m.rotary(q), m.rotary(k), v, causal=True)
    close(m(x, causal=True), m.w_o(heads.transpose(1, 2).flatten(2)))
    output, weights = m(x, causal=True, return_weights=True)
    close(output, m(x, causal=True))
    close((m.rotary(q) @ m.rotary(k).repeat_interleave(4 // n_kv_heads, 1).mT / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf).softmax(-1), weights)


def test_shifted_positions_change_nothing_and_others_do():
    m, x = with_rotary(), normal(2, 6, 16)
    right = m(x)
    close(m(x, positions=torch.arange(100, 106)), right, atol=1e-10)
    close(m(x, positions=torch.tensor([[0], [50]]) + torch.arange(6)), right, atol=1e-10)
    assert (m(x, positions=torch.zeros(6, dtype=torch.int64)) - right).abs().max() > 1e-3
    close(m(x[0], positions=torch.arange(6)), right[0])  # one sample without a batch axis
    assert (m(x, positions=2 * torch.arange(6)) - right).abs().max() > 1e-3


def test_shuffled_words_with_their_positions_give_shuffled_outputs():
    m, x, order = with_rotary(), normal(1, 6, 16), torch.tensor([3, 1, 5, 0, 4, 2])
    close(m(x[:, order], positions=order), m(x)[:, order])


def test_left_padding_needs_no_counting_with_rotary_and_counted_positions_do_no_harm():
    m, x = with_rotary(), normal(2, 5, 16)
    real = torch.tensor([[False, False, True, True, True], [True] * 5])
    alone = m(x[:1, 2:], causal=True)
    for positions in (None, positions_from_mask(real)):
        close(m(x, mask=real[:, None, None], causal=True, positions=positions)[:1, 2:], alone, atol=1e-10)


def test_converted_modules_keep_their_rotary_and_torch_has_none():
    m, x = with_rotary(), normal(2, 6, 16)
    close(m.fuse()(x), m(x))
    close(m.fuse().split()(x), m(x))
    assert m.fuse().rotary is not m.rotary
    with pytest.raises(ValueError, match="rotary has no counterpart"):
        m.to_torch()


@pytest.mark.usefixtures("no_shape_check")
def test_a_rotary_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="rotary turns heads of d_head=8, but here d_head=4"):
        MultiHeadAttention(16, 4, rotary=RotaryPositions(8))
    with pytest.raises(TypeError, match="rotary is a str"):
        MultiHeadAttention(16, 4, rotary="rope")
    x = normal(2, 6, 16)
    with pytest.raises(ValueError, match="context is given, but rotary turns"):
        with_rotary()(x, normal(2, 3, 16))
    with pytest.raises(ValueError, match="positions are given, but nothing here uses them"):
        MultiHeadAttention(16, 4).double()(x, positions=torch.arange(6))
    for positions in (torch.arange(5), torch.arange(6)[:, None], torch.zeros(3, 6, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"positions has shape .*; expected \(6,\) or \(2, 6\)"):
            with_rotary()(x, positions=positions)
    for positions in (torch.arange(6.0), [0, 1, 2, 3, 4, 5], torch.ones(6, dtype=torch.bool)):
        with pytest.raises(TypeError, match="positions is .*; expected a tensor of whole numbers"):
            with_rotary()(x, positions=positions)


# --- ALiBi ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_heads", range(1, 34))
def test_slopes_are_those_of_the_published_program(n_heads):
    def published(n):
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        nearest = 2 ** math.floor(math.log2(n))
        return published(nearest) + published(2 * nearest)[0::2][: n - nearest]

    slopes = alibi_slopes(n_heads)
    torch.testing.assert_close(slopes, torch.tensor(published(n_heads)))
    assert slopes.unique().numel() == n_heads and 0 < slopes.min() and slopes.max() < 1


@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (4, 4), (2, 6), (1, 5), (0, 3), (6, 2)])
def test_bias_is_minus_slope_times_distance_with_the_queries_last(n_q, n_k):
    bias, slopes = alibi_bias(3, n_q, n_k), alibi_slopes(3)
    assert bias.shape == (3, n_q, n_k)
    for h in range(3):
        for i in range(n_q):
            for j in range(n_k):
                assert bias[h, i, j] == -slopes[h] * abs(i + n_k - n_q - j)


def test_as_a_mask_it_is_added_to_the_scores():
    torch.manual_seed(0)
    m, x = MultiHeadAttention(16, 4).double(), normal(2, 6, 16)
    bias = alibi_bias(4, 6, dtype=torch.float64)
    q, k, v = m.project(x)
    weights = (q @ k.mT / 2 + bias).softmax(-1)
    close(m(x, mask=bias[None]), m.w_o((weights @ v).transpose(1, 2).flatten(2)))
    close(m(x, mask=bias[None], causal=True)[:, :3], m(x[:, :3], mask=bias[None, :, :3, :3], causal=True))
    padded = padding_mask([4, 6])  # and with padding: both are masks
    hidden = bias[None] + torch.where(padded, 0.0, -math.inf)
    close(m(x, mask=hidden)[0, :4], m(x[:1, :4], mask=bias[None, :, :4, :4])[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_has_the_dtype_and_device_that_was_asked_for(dtype):
    assert alibi_bias(2, 3, dtype=dtype).dtype == dtype
    assert alibi_bias(2, 3, dtype=dtype, device="meta").is_meta
    assert sinusoidal_encoding(2, 4, dtype=dtype, device="meta").is_meta


# --- positions that count real tokens -------------------------------------------------------------------------------


def test_positions_count_real_tokens():
    real = torch.tensor([[False, False, True, True], [True, True, True, True], [False, False, False, False], [True, True, False, False]])
    right = [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 1, 1]]
    assert positions_from_mask(real).tolist() == right
    assert positions_from_mask(real[:, None, None]).tolist() == right
    assert positions_from_mask(padding_mask([2, 3])).tolist() == [[0, 1, 1], [0, 1, 2]]
    assert positions_from_mask(torch.ones(2, 0, dtype=torch.bool)).shape == (2, 0)


@ADDED
def test_left_padded_texts_are_read_as_they_are_alone(kind):
    torch.manual_seed(0)
    module, m, x = added(kind), MultiHeadAttention(16, 4).double(), normal(2, 5, 16)
    real = torch.tensor([[False, False, True, True, True], [True] * 5])
    got = m(module(x, positions_from_mask(real)), mask=real[:, None, None], causal=True)
    close(got[:1, 2:], m(module(x[:1, 2:]), causal=True), atol=1e-10)
    close(got[1:], m(module(x[1:]), causal=True), atol=1e-10)


# --- life of a module -----------------------------------------------------------------------------------------------


def modules():
    return [SinusoidalPositions(16), RotaryPositions(16), RotaryPositions(16, interleaved=True, d_rotary=4, base=100.0)]


def test_nothing_is_kept_but_the_learned_table():
    for module in modules():
        module(torch.zeros(1, 1, 7, 16))
        assert not module.state_dict() and not [*module.parameters()] and not [*module.buffers()]
        assert {k for k, v in vars(module).items() if isinstance(v, torch.Tensor)} == set()
    assert [*LearnedPositions(5, 16).state_dict()] == ["weight"]


def test_copies_and_pickles_do_the_same():
    x = normal(2, 2, 7, 16)
    for module in [*modules(), added("learned")]:
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(other(x), module(x))


def test_calls_do_not_remember_each_other():
    for module in modules():
        for n, first, dtype in ((4, 0, torch.float64), (9, 3, torch.float32), (4, 0, torch.float64), (4, 3, torch.float64)):
            x, at = normal(1, 1, n, 16, dtype=dtype), torch.arange(first, first + n)
            fresh = pickle.loads(pickle.dumps(module))
            assert torch.equal(module(x, at), fresh(x, at))
            close(module(x, at), module(torch.cat((torch.zeros(1, 1, first, 16, dtype=dtype), x), 2))[:, :, first:], atol=1e-6)


def test_inputs_are_never_modified():
    x, at = normal(2, 2, 5, 16), torch.arange(5)
    before = x.clone(), at.clone()
    for module in [*modules(), added("learned")]:
        module(x, at)
    reorder_rotary(x[0, 0].mT, 2, to="interleaved")
    assert torch.equal(x, before[0]) and torch.equal(at, before[1])


def test_gradients_flow_to_the_input():
    x = normal(1, 2, 3, 6).requires_grad_()
    for module in (SinusoidalPositions(6), RotaryPositions(6), RotaryPositions(6, interleaved=True, d_rotary=2)):
        assert torch.autograd.gradcheck(module, x)


def test_shapes_can_be_asked_of_the_meta_device():
    x = torch.empty(2, 2, 5, 16, device="meta")
    for module in [*modules(), LearnedPositions(9, 16).to("meta")]:
        assert module(x).shape == module(x, torch.arange(5, device="meta")).shape == x.shape


def test_descriptions_name_the_options():
    assert repr(RotaryPositions(8, base=500000.0)) == "RotaryPositions(8, base=500000, interleaved=False, d_rotary=8)"
    assert repr(LearnedPositions(9, 4)) == "LearnedPositions(max_len=9, d_model=4)"
    assert repr(SinusoidalPositions(4)) == "SinusoidalPositions(d_model=4)"


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary", "interleaved"])
@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
def test_compiles_in_one_graph_for_varying_lengths(kind, given, compiled):
    module = {
        "sinusoidal": SinusoidalPositions(16), "learned": LearnedPositions(40, 16),
        "rotary": RotaryPositions(16), "interleaved": RotaryPositions(16, interleaved=True, d_rotary=4),
    }[kind]
    fast = compiled(module)
    for n in (5, 9, 9, 6):
        x, at = normal(2, 3, n, 16, dtype=torch.float32), torch.arange(3, 3 + n).expand(2, n) if given else None
        close(fast(x, at), module(x, at), atol=1e-6)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("slopes", [False, True], ids=["rotary", "alibi"])
def test_attention_with_positions_compiles_in_one_graph(slopes, compiled):
    m = with_rotary().eval()

    def call(x):
        mask = alibi_bias(4, x.shape[1], dtype=x.dtype)[None] if slopes else None
        return m(x, mask=mask, causal=True)

    fast = compiled(call)
    for n in (5, 9, 9, 6):
        x = normal(2, n, 16)
        close(fast(x), call(x), atol=1e-10)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary"])
def test_exports_with_dynamic_batch_and_length(kind, given):
    module = {"sinusoidal": SinusoidalPositions(16), "learned": LearnedPositions(40, 16), "rotary": RotaryPositions(16)}[kind]
    batch, n = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("n", min=2, max=40)

    def inputs(b, length):
        x = normal(b, 3, length, 16, seed=b, dtype=torch.float32)
        return (x, torch.arange(length).expand(b, length).contiguous()) if given else (x,)

    shapes = {"x": {0: batch, 2: n}, **({"positions": {0: batch, 1: n}} if given else {})}
    program = torch.export.export(module, inputs(3, 7), dynamic_shapes=shapes)
    for b, length in ((3, 7), (5, 11), (2, 40)):
        close(program.module()(*inputs(b, length)), module(*inputs(b, length)), atol=1e-5)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: sinusoidal_encoding(-1, 4), ValueError, "n=-1; expected at least 0"),
        (lambda: sinusoidal_encoding(3.0, 4), TypeError, "n is a float; expected a whole number"),
        (lambda: sinusoidal_encoding(3, 0), ValueError, "d_model=0; expected at least 1"),
        (lambda: sinusoidal_encoding(3, 4, offset=-2), ValueError, "offset=-2"),
        (lambda: sinusoidal_encoding(3, 4, dtype=torch.int64), TypeError, "dtype is torch.int64; expected one of floating point"),
        (lambda: SinusoidalPositions(True), TypeError, "d_model is a bool"),
        (lambda: LearnedPositions(0, 4), ValueError, "max_len=0; expected at least 1"),
        (lambda: LearnedPositions(4, -4), ValueError, "d_model=-4"),
        (lambda: RotaryPositions(33), ValueError, "d_rotary=33 is not an even number of at most d_head=33 columns"),
        (lambda: RotaryPositions(33, d_rotary=34), ValueError, "d_rotary=34 is not an even number of at most d_head=33"),
        (lambda: RotaryPositions(8, d_rotary=3), ValueError, "d_rotary=3 is not an even number"),
        (lambda: RotaryPositions(8, d_rotary=0), ValueError, "d_rotary=0; expected at least 2"),
        (lambda: RotaryPositions(8, d_rotary=2.0), TypeError, "d_rotary is a float"),
        (lambda: RotaryPositions(8, base=0), ValueError, "base=0; expected a positive finite number"),
        (lambda: RotaryPositions(8, base=10**400), ValueError, "0; expected a positive finite number"),
        (lambda: RotaryPositions(8, base=math.inf), ValueError, "base=inf"),
        (lambda: RotaryPositions(8, base=math.nan), ValueError, "base=nan"),
        (lambda: RotaryPositions(8, base="10000"), TypeError, "base is a str"),
        (lambda: RotaryPositions(8, interleaved=1), TypeError, "interleaved is a int; expected True or False"),
        (lambda: apply_rotary(torch.zeros(1, 4), torch.ones(1, 3), torch.ones(1, 3)), ValueError, "at most 2 pairs for x of shape"),
        (lambda: apply_rotary(torch.zeros(1, 4), torch.ones(1, 2), torch.ones(1, 1)), ValueError, "expected the same"),
        (lambda: apply_rotary(torch.ones(1, 4).long(), torch.ones(1, 2), torch.ones(1, 2)), TypeError, "x is torch.int64; expected a tensor of floating point"),
        (lambda: apply_rotary(torch.ones(1, 4), torch.ones(1, 2).cfloat(), torch.ones(1, 2).cfloat()), TypeError, "cos is torch.complex64"),
        (lambda: apply_rotary(torch.ones(1, 4), torch.ones(1, 2), [[1.0, 1.0]]), TypeError, "sin is list"),
        (lambda: apply_rotary(torch.ones(1, 4), torch.ones(()), torch.ones(())), ValueError, "cos has no axes"),
        (lambda: apply_rotary(torch.ones(1, 1, 1, 4), torch.ones(5, 2), torch.ones(5, 2)), ValueError, r"cos and sin have shape \(5, 2\); they must broadcast to \(1, 1, 1, 2\)"),
        (lambda: apply_rotary(torch.ones(1, 1, 3, 4), torch.ones(5, 2), torch.ones(5, 2)), ValueError, r"must broadcast to \(1, 1, 3, 2\)"),
        (lambda: apply_rotary(torch.ones(1, 1, 5, 4), torch.ones(7, 1, 5, 2), torch.ones(7, 1, 5, 2)), ValueError, r"must broadcast to \(1, 1, 5, 2\)"),
        (lambda: apply_rotary(torch.ones(5, 4), torch.ones(1, 5, 2), torch.ones(1, 5, 2)), ValueError, r"must broadcast to \(5, 2\)"),
        (lambda: apply_rotary(torch.ones(1, 4), torch.ones(1, 2), torch.ones(1, 2), interleaved="no"), TypeError, "interleaved is a str"),
        (lambda: RotaryPositions(4).tables([0, 1]), TypeError, "positions is list; expected a tensor of whole numbers"),
        (lambda: RotaryPositions(4).tables(torch.rand(3)), TypeError, "positions is torch.float32"),
        (lambda: RotaryPositions(4).tables(torch.ones(1, 1, 3).long()), ValueError, r"positions has shape \(1, 1, 3\)"),
        (lambda: reorder_rotary(torch.zeros(6, 2), 4, to="interleaved"), ValueError, r"weight has shape \(6, 2\); its rows are not divisible by n_heads=4"),
        (lambda: reorder_rotary(torch.zeros(6, 2), 2, to="interleaved"), ValueError, "d_rotary=3 is not an even number"),
        (lambda: reorder_rotary(torch.zeros(8, 2), 2, to="paper"), ValueError, "to='paper' is no layout; expected 'interleaved' or 'half-split'"),
        (lambda: reorder_rotary([0.0] * 8, 2, to="interleaved"), TypeError, "weight is a list; expected a tensor"),
        (lambda: reorder_rotary(torch.zeros(8, 2), 0, to="interleaved"), ValueError, "n_heads=0"),
        (lambda: alibi_slopes(0), ValueError, "n_heads=0; expected at least 1"),
        (lambda: alibi_slopes(2.0), TypeError, "n_heads is a float"),
        (lambda: alibi_bias(2, -1), ValueError, "n_q=-1"),
        (lambda: alibi_bias(2, 1, 2.5), TypeError, "n_k is a float"),
        (lambda: alibi_bias(2, 1, dtype=torch.bool), TypeError, "dtype is torch.bool"),
        (lambda: positions_from_mask(torch.ones(2, 3)), TypeError, "mask is torch.float32; expected a boolean tensor"),
        (lambda: positions_from_mask([[True]]), TypeError, "mask is list"),
        (lambda: positions_from_mask(torch.ones(3, dtype=torch.bool)), ValueError, r"mask has shape \(3,\); expected \(batch, n\) or \(batch, 1, 1, n\)"),
        (lambda: positions_from_mask(torch.ones(2, 1, 3, 3, dtype=torch.bool)), ValueError, r"mask has shape \(2, 1, 3, 3\)"),
        (lambda: RotaryPositions(8)(torch.zeros(2, 3, 8)), ValueError, r"x has shape \(2, 3, 8\); expected \(batch, heads, n, 8\)"),
    ],
    ids=range(48),
)
def test_what_does_not_fit_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("make", [lambda: SinusoidalPositions(4), lambda: LearnedPositions(9, 4), lambda: RotaryPositions(4)], ids=["sinusoidal", "learned", "rotary"])
def test_calls_that_do_not_fit_are_refused(make):
    module, x = make(), torch.zeros(2, 3, 5, 4)
    for wrong, error, says in (
        (torch.zeros(2, 3, 5, 6), ValueError, r"x has shape \(2, 3, 5, 6\); expected \(..., n, 4\)"),
        (torch.zeros(4), ValueError, r"x has shape \(4,\)"),
        (torch.zeros(2, 3, 5, 4, dtype=torch.int64), TypeError, "x is torch.int64; expected a tensor of floating point"),
        ([[0.0] * 4], TypeError, "x is list"),
    ):
        with pytest.raises(error, match=says):
            module(wrong)
    for positions, error, says in (
        (torch.arange(4), ValueError, r"positions has shape \(4,\); expected \(5,\) or \(2, 5\)"),
        (torch.zeros(3, 5, dtype=torch.int64), ValueError, r"positions has shape \(3, 5\)"),
        (torch.tensor(3), ValueError, r"positions has shape \(\)"),
        (torch.tensor([0, 1, 2, 3, -1]), ValueError, "positions has -1; the first position is 0"),
        (torch.arange(5.0), TypeError, "positions is torch.float32; expected a tensor of whole numbers"),
        (range(5), TypeError, "positions is range"),
    ):
        with pytest.raises(error, match=says):
            module(x, positions)


@pytest.mark.usefixtures("no_shape_check")
def test_a_position_without_a_row_is_refused_and_both_numbers_are_named():
    table = LearnedPositions(8, 4)
    assert table(torch.zeros(1, 8, 4)).shape == (1, 8, 4)
    with pytest.raises(ValueError, match="x has 9 positions but the table has max_len=8 rows"):
        table(torch.zeros(1, 9, 4))
    with pytest.raises(ValueError, match="positions has 8 but the table has max_len=8 rows, 0 to 7"):
        table(torch.zeros(1, 3, 4), torch.arange(6, 9))


@pytest.mark.usefixtures("no_shape_check")
def test_positions_of_a_batch_do_not_fit_a_text_without_a_batch():
    for positions in (torch.zeros(5, 5, dtype=torch.int64), torch.arange(5)[None]):
        with pytest.raises(ValueError, match=r"positions has shape .*; expected \(5,\)$"):
            SinusoidalPositions(4)(torch.zeros(5, 4), positions)
