"""Faults that were reported in public about positions, layers, caches and whole models, each ruled out in all that the library has of them.

The numbers are those of the reports. `RUNNERS` is the table of what can read a sequence: a new layer or model is one new row.
"""

import copy
import io
import itertools
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attention_course.masking import causal_mask, fused_attention, padding_mask
from attention_course.multi_head import MultiHeadAttention
from attention_course.positions import (
    LearnedPositions, RotaryPositions, SinusoidalPositions, alibi_bias, alibi_slopes, apply_rotary, positions_from_mask, reorder_rotary,
    sinusoidal_encoding,
)
from attention_course.transformer import (
    Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward, KVCache, Transformer, TransformerConfig,
)
from attention_course.translation import beam_search, greedy_decode
from variants import HALVES, OURS, draw

KINDS = ("sinusoidal", "learned", "rotary", "alibi", None)
VOCAB, D, LONGEST = 13, 16, 32  # ids 0 (padding) to 12, width, rows of learned positions

each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
each_norm = pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
both_layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
pytestmark = pytest.mark.usefixtures("no_shape_check")  # which would take most of the time; two tests have it for all


@pytest.fixture
def shape_check(no_shape_check):
    jaxtyping.config.update("jaxtyping_disable", False)


def close(a, b, atol=1e-10):
    torch.testing.assert_close(a.double(), b.double(), atol=atol, rtol=0)


def stirred(module, seed=0):
    "In double precision and eval mode, with random weights, biases and norms: nothing is equal, or zero, by chance of its beginning."
    generator = torch.Generator().manual_seed(seed)
    module.double().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.2 * values if norm else values / parameter.shape[-1] ** 0.5)
    return module


def tokens(*shape, seed=0):
    "Ids of which none is padding."
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def left(*rows, n=None):
    "Rows of ids, filled with padding on the left."
    n = max(map(len, rows)) if n is None else n
    return torch.tensor([[0] * (n - len(row)) + list(row) for row in rows])


# --- all that reads a sequence ---------------------------------------------------------------------------------------


class Gpt(nn.Module):
    "A model as GPT is one: embeddings, positions, causal layers, and the embedding again for the logits."

    def __init__(self, kind, norm_first=True, n_layers=2, dropout=0.0, max_len=LONGEST, interleaved=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        self.added = {"sinusoidal": lambda: SinusoidalPositions(D), "learned": lambda: LearnedPositions(max_len, D)}.get(kind, lambda: None)()
        rotary = RotaryPositions(D // 2, interleaved=interleaved) if kind == "rotary" else None
        layers = [EncoderLayer(D, 2, 24, norm_first=norm_first, dropout=dropout, rotary=rotary) for _ in range(n_layers)]
        self.layers = Encoder(layers, nn.LayerNorm(D) if norm_first else None, alibi=kind == "alibi")
        self.turning = rotary is not None

    def forward(self, ids, real=None, cache=None, shift=0):
        "`real` is about all positions, also those in the cache."
        past = cache[0].length if cache else 0
        real = (F.pad(ids, (past, 0), value=1) != 0) if real is None else real
        positions = positions_from_mask(real)[:, past:] + shift
        x = self.embedding(ids)
        x = x if self.added is None else self.added(x, positions)
        h = self.layers(x, real[:, None, None], causal=True, cache=cache, positions=positions if self.turning else None)
        return F.linear(h, self.embedding.weight)


def transformer(kind="sinusoidal", seed=0, **changes):
    "A small encoder-decoder in double precision."
    sizes = dict(d_model=D, n_heads=2, d_ff=24, n_layers=2, dropout=0.0, max_len=LONGEST, positions=kind)
    return stirred(Transformer(TransformerConfig(VOCAB, **sizes | changes)), seed)


SRC = left(*(tokens(n, seed=n).tolist() for n in (6, 3, 5, 1))).flip(1)  # four sources, padding on the right


@dataclass
class Runner:
    "Something that reads ids, all at once or the new ones of a sequence that a cache remembers."

    module: nn.Module
    read: Callable  # (ids, real, cache, rows): `real` (batch, all positions) or None; `rows`: which of the memories goes with each row
    new_cache: Callable

    def __call__(self, ids, *, real=None, cache=None, rows=None):
        return self.read(ids, real, cache, list(range(len(ids))) if rows is None else rows)

    def steps(self, ids, cuts, cache=None, **options):
        "The same in pieces, with a cache."
        cache = self.new_cache() if cache is None else cache
        return torch.cat([self(ids[:, a:b], cache=cache, **options) for a, b in itertools.pairwise(cuts)], dim=1)


def of_transformer(kind, dropout=0.0, **changes):
    model = transformer(kind, dropout=dropout, **changes)

    def read(ids, real, cache, rows):
        src = SRC[rows]
        options = {}
        if real is not None:
            past = cache[0].length if cache else 0
            options = dict(tgt_mask=real[:, None, None], positions=positions_from_mask(real)[:, past:])
        return model.decode(ids, model.encode(src), model.padding(src), cache=cache, **options)

    return Runner(model, read, model.new_cache)


def of_gpt(kind, dropout=0.0, **changes):
    model = stirred(Gpt(kind, dropout=dropout, **changes))
    return Runner(model, lambda ids, real, cache, rows: model(ids, real, cache), model.layers.new_cache)


def of_part(make, rotary=False, across=False, single=True, dropout=0.0, **options):
    "A layer or stack alone, its inputs rows of a fixed table."
    turning = RotaryPositions(8, interleaved=True) if rotary else None
    part = stirred(make(dropout=dropout, **{"rotary": turning} if rotary else {}, **options))
    table, memory, memory_mask = draw(VOCAB, D, seed=5), draw(4, 6, D, seed=6), padding_mask([6, 3, 5, 1])

    def read(ids, real, cache, rows):
        past, x = cache[0].length if cache else 0, table[ids].to(next(part.parameters()).dtype)
        own = dict(positions=None if real is None else positions_from_mask(real)[:, past:]) if rotary else {}
        if cache is not None:
            own |= dict(zip(("cache", "memory_cache"), cache)) if single else dict(cache=cache)
        mask = None if real is None else real[:, None, None]
        if across:
            return part(x, memory[rows].to(x.dtype), mask, memory_mask[rows], **own)
        return part(x, mask=mask, causal=True, **own)

    return Runner(part, read, (lambda: [KVCache(), KVCache()][: 1 + across]) if single else part.new_cache)


layer, decoder_layer = partial(EncoderLayer, D, 2, 24), partial(DecoderLayer, D, 2, 24)


def stack(cls, make, dropout=0.0, norm_first=False, alibi=False, rotary=None):
    layers = [make(dropout=dropout, norm_first=norm_first, rotary=rotary) for _ in range(2)]
    return cls(layers, nn.LayerNorm(D) if norm_first else None, alibi=alibi)


RUNNERS = {
    "attention": partial(of_part, partial(MultiHeadAttention, D, 2)),
    "attention-rotary": partial(of_part, partial(MultiHeadAttention, D, 2), rotary=True),
    "attention-rotary-grouped-fused": partial(of_part, partial(MultiHeadAttention, D, 4, d_head=8, n_kv_heads=2, fused=True), rotary=True),
    "encoder-layer": partial(of_part, layer),
    "encoder-layer-rotary-pre": partial(of_part, layer, rotary=True, norm_first=True, activation="swiglu"),
    "decoder-layer": partial(of_part, decoder_layer, across=True),
    "decoder-layer-rotary-pre": partial(of_part, decoder_layer, across=True, rotary=True, norm_first=True, activation="gelu"),
    "encoder-alibi": partial(of_part, partial(stack, Encoder, layer, alibi=True), single=False),
    "encoder-rotary-pre": partial(of_part, partial(stack, Encoder, layer, norm_first=True), single=False, rotary=True),
    "decoder-alibi-pre": partial(of_part, partial(stack, Decoder, decoder_layer, alibi=True, norm_first=True), single=False, across=True),
    "decoder-rotary": partial(of_part, partial(stack, Decoder, decoder_layer), single=False, across=True, rotary=True),
    **{f"gpt-{kind}": partial(of_gpt, kind) for kind in KINDS},
    "gpt-rotary-post": partial(of_gpt, "rotary", norm_first=False),
    **{f"transformer-{kind}": partial(of_transformer, kind, norm_first=kind in ("alibi", "learned")) for kind in KINDS},
    "transformer-grouped": partial(of_transformer, "rotary", n_kv_heads=1, norm_first=True, activation="swiglu", tie_output=False),
}
MODELS = [name for name in RUNNERS if name.startswith(("gpt", "transformer"))]
each = pytest.mark.parametrize("name", RUNNERS)
each_model = pytest.mark.parametrize("name", MODELS)


@lru_cache(maxsize=None)
def runner(name):
    "One for all tests that leave it as it is."
    return RUNNERS[name]()


# --- decoding sees what training saw: G06, G14, G15, G33 --------------------------------------------------------------


@each
def test_g06_step_by_step_gives_what_teacher_forcing_gives(name, shape_check):
    run, ids = runner(name), tokens(2, 5)
    forced = run(ids)
    close(torch.stack([run(ids[:, : t + 1])[:, -1] for t in range(5)], dim=1), forced)
    close(run.steps(ids, range(6)), forced)
    assert (run(ids.flip(1)).flip(1) - forced).abs().max() > 0.01


def test_g06_the_future_has_no_influence():
    for name in RUNNERS:
        run, ids = runner(name), tokens(2, 5)
        whole = run(ids)
        for t in range(1, 5):
            other = torch.cat([ids[:, :t], ids[:, t:] % (VOCAB - 1) + 1], dim=1)
            assert torch.equal(run(other)[:, :t], whole[:, :t]), name
            assert not torch.equal(run(other)[:, t:], whole[:, t:]), name


@each
def test_g14_chunks_of_any_length_continue_the_cache(name):
    run, ids = runner(name), tokens(2, 16)
    whole = run(ids)
    for cuts in ((0, 7, 16), (0, 1, 15, 16)):
        close(run.steps(ids, cuts), whole)
    five = whole[:, :5]
    for chosen in itertools.product([False, True], repeat=4):  # every split of five tokens
        close(run.steps(ids[:, :5], [0, *(t + 1 for t in range(4) if chosen[t]), 5]), five)


@pytest.mark.parametrize("rotary", [None, RotaryPositions(8)], ids=["plain", "rotary"])
def test_g14_a_row_of_a_chunk_sees_all_before_it_and_itself(rotary):
    module = stirred(MultiHeadAttention(D, 2, rotary=rotary))
    for cuts in ((0, 7, 16), (0, 1, 15, 16)):
        cache, x = KVCache(), draw(2, 16, D, seed=1)
        for start, end in itertools.pairwise(cuts):
            weights = module(x[:, start:end], causal=True, cache=cache, return_weights=True)[1]
            assert weights.shape == (2, 2, end - start, end) and cache.length == end
            for i in range(end - start):
                assert (weights[..., i, : start + i + 1] > 0).all() and (weights[..., i, start + i + 1 :] == 0).all()


@each
def test_g14_gradients_flow_through_the_cache(name):
    gradients = []
    for cuts in (None, (0, 3, 4, 6)):
        run, ids = RUNNERS[name](), tokens(2, 6)
        output = run(ids) if cuts is None else run.steps(ids, cuts)
        output.square().sum().backward()
        gradients.append([p.grad for p in run.module.parameters()])
    for one, two in zip(*gradients):
        assert (one is None) == (two is None)  # the encoder's, in models that have one, are there both times
        assert one is None or torch.allclose(one, two, rtol=1e-9, atol=1e-9)


def held(cache):
    return [value for own in cache for value in vars(own).values() if isinstance(value, torch.Tensor)]


@each
def test_g15_a_cache_that_was_reset_knows_nothing_of_the_sequence_before(name):
    run, a, b = runner(name), tokens(2, 6, seed=1), tokens(1, 4, seed=2)
    cache = run.new_cache()
    run.steps(a, range(7), cache)
    assert cache[0].length == 6 and len(held(cache)) == 2 * len(cache)
    for own in cache:
        own.reset()
    assert all(own.length == 0 for own in cache) and not held(cache)
    again = run.steps(b, (0, 3, 4), cache)
    assert torch.equal(again, run.steps(b, (0, 3, 4)))
    assert cache[0].length == 4 and {x.shape[0] for x in held(cache)} == {1}
    close(again, run(b))


@each
def test_g15_a_cache_of_another_batch_is_not_continued(name):
    run = runner(name)
    cache = run.new_cache()
    run(tokens(2, 6), cache=cache)
    with pytest.raises(ValueError, match="reset|shape|batch"):
        run(tokens(1, 4), cache=cache)


def generated(run, ids, n, use_cache):
    "Greedy continuation of rows without padding."
    cache = run.new_cache() if use_cache else None
    new = ids
    for _ in range(n):
        logits = run(new if use_cache else ids, cache=cache)
        new = logits[:, -1:, 1:].argmax(-1) + 1
        ids = torch.cat([ids, new], dim=1)
    return ids


@each_model
def test_g15_generation_for_one_prompt_leaves_nothing_for_the_next(name):
    run, a, b = runner(name), tokens(2, 6, seed=1), tokens(1, 4, seed=2)
    generated(run, a, 5, True)
    after = generated(run, b, 5, True)
    assert torch.equal(after, generated(RUNNERS[name](), b, 5, True))
    assert torch.equal(after, generated(run, b, 5, False))


def test_g15_a_cache_that_was_cropped_goes_on_as_if_nothing_had_been():
    for name in RUNNERS:
        run, ids = runner(name), tokens(2, 8)
        cache = run.new_cache()
        run(torch.cat([ids[:, :5], tokens(2, 3, seed=8)], dim=1), cache=cache)
        for own in cache:
            if own.length == 8:  # the others are of the memory
                own.crop(5)
        assert cache[0].length == 5
        close(run(ids[:, 5:], cache=cache), run(ids)[:, 5:])


@each
def test_g33_a_window_of_several_tokens_stands_at_their_own_positions(name):
    run, ids = runner(name), tokens(2, 8)
    window = run.steps(ids, (0, 5, 8))[:, 5:]
    close(window, run.steps(ids, (0, 5, 6, 7, 8))[:, 5:], atol=1e-12)
    close(window, run(ids)[:, 5:])


@each
def test_g33_pasts_of_different_lengths(name):
    run, ids = runner(name), tokens(2, 8)
    ids[1, :3] = 0  # the second sample has a past of 2
    real = ids != 0
    cache = run.new_cache()
    run(ids[:, :5], real=real[:, :5], cache=cache)
    window = run(ids[:, 5:], real=real, cache=cache)
    close(window[:1], run(ids[:1], rows=[0])[:, 5:])
    close(window[1:], run(ids[1:, 3:], rows=[1])[:, 2:])
    one = run.new_cache()
    run(ids[:, :5], real=real[:, :5], cache=one)
    singles = [run(ids[:, t : t + 1], real=real[:, : t + 1], cache=one) for t in (5, 6, 7)]
    close(window, torch.cat(singles, dim=1), atol=1e-12)


@both_layouts
@pytest.mark.parametrize("past", [[5, 5], [5, 2]])
def test_g33_positions_given_are_those_counted(past, interleaved):
    rotary = RotaryPositions(8, interleaved=interleaved)
    x, at = draw(2, 2, 3, 8, seed=1), torch.tensor(past)[:, None] + torch.arange(3)
    window = rotary(x, at)
    for i, (start, sample) in enumerate(zip(past, x)):
        for t in range(3):
            close(window[i, :, t], rotary(sample[None, :, t : t + 1], torch.tensor([start + t]))[0, :, 0], atol=1e-15)
    assert (window - rotary(x, at[:, :1].expand(2, 3))).abs().max() > 0.1  # the reported slip
    if past[0] == past[1]:
        assert torch.equal(window, rotary(x, at[0]))


# --- padding on the left: G11, G31 -----------------------------------------------------------------------------------


@each
def test_g11_rows_that_see_nothing_stay_finite_and_prompts_read_as_if_alone(name):
    run, rows = runner(name), [tokens(n, seed=n).tolist() for n in (3, 5, 6)]
    ids = left(*rows)
    output = run(ids, real=ids != 0)
    assert output.isfinite().all()
    for i, row in enumerate(rows):
        close(output[i, -len(row) :], run(torch.tensor([row]), rows=[i])[0])
    grads = torch.autograd.grad(output[:, -1].square().sum(), list(run.module.parameters()), allow_unused=True)
    assert all(grad is None or grad.isfinite().all() for grad in grads)


@each_kind
@each_norm
def test_g11_a_model_finds_the_padding_of_source_and_target_by_itself(kind, norm_first):
    model = transformer(kind, norm_first=norm_first)
    sources, targets = ([tokens(n, seed=n + s).tolist() for n in lengths] for s, lengths in ((0, (4, 2, 6)), (9, (3, 5, 6))))
    logits = model(left(*sources), left(*targets))
    assert logits.isfinite().all()
    for i, (source, target) in enumerate(zip(sources, targets)):
        close(logits[i, -len(target) :], model(torch.tensor([source]), torch.tensor([target]))[0])
    logits.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@each
def test_g31_real_tokens_of_a_left_padded_prompt_count_from_zero(name):
    run, rows = runner(name), [[5], [5, 6, 7]]
    for extra in (0, 2):
        ids = left(*rows, n=3 + extra)
        assert positions_from_mask(ids != 0).tolist() == [[0] * (3 + extra), [0] * extra + [0, 1, 2]]
        output = run(ids, real=ids != 0)
        for i, row in enumerate(rows):
            close(output[i, -len(row) :], run(torch.tensor([row]), rows=[i])[0])


def test_g31_only_absolute_positions_notice_a_shift():
    ids = tokens(1, 4)
    for kind in KINDS:
        model = stirred(Gpt(kind))
        moved = (model(ids, shift=7) - model(ids)).abs().max()
        assert moved > 0.01 if kind in ("sinusoidal", "learned") else moved < 1e-10, kind


# --- weights from elsewhere: G25 -------------------------------------------------------------------------------------


@each_norm
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_g25_an_encoder_layer_copies_to_torch_and_back(activation, norm_first):
    ours = stirred(EncoderLayer(8, 2, 16, activation=activation, norm_first=norm_first, eps=1e-6))
    theirs = ours.to_torch()
    blocks = torch.cat([layer.weight for layer in (ours.attention.w_q, ours.attention.w_k, ours.attention.w_v)])
    assert torch.equal(theirs.self_attn.in_proj_weight, blocks)
    back = EncoderLayer.from_torch(theirs)
    assert all(map(torch.equal, ours.state_dict().values(), back.state_dict().values())) and ours.state_dict().keys() == back.state_dict().keys()
    x, real = 3 * draw(2, 5, 8, seed=1), padding_mask([5, 3])
    for mask in (None, real):
        hidden = None if mask is None else ~mask[:, 0, 0]
        expected = theirs(x, src_key_padding_mask=hidden)
        for layer in (ours, back):
            seen = layer(x, mask)
            close(seen[0], expected[0])
            close(seen[1, :3], expected[1, :3])
    # Weights of another order, another bend or another eps would be noticed.
    mixed = copy.deepcopy(theirs)
    with torch.no_grad():
        mixed.self_attn.in_proj_weight.copy_(torch.stack(blocks.split(4)[::2] + blocks.split(4)[1::2]).flatten(0, 1))
    other = EncoderLayer(8, 2, 16, activation="gelu" if activation == "relu" else "relu", norm_first=norm_first, eps=1e-6).double()
    coarse = EncoderLayer(8, 2, 16, activation=activation, norm_first=norm_first, eps=1e-5).double()
    for module in (other, coarse):
        module.load_state_dict(ours.state_dict())
    for wrong in (mixed, other.eval(), coarse.eval()):
        assert (wrong(x) - ours(x)).abs().max() > 1e-8


@each_norm
def test_g25_a_decoder_layer_copies_to_torch_and_back(norm_first):
    ours = stirred(DecoderLayer(8, 2, 16, norm_first=norm_first))
    theirs = ours.to_torch()
    for mine, other in ((ours.attention, theirs.self_attn), (ours.cross_attention, theirs.multihead_attn)):
        assert torch.equal(other.in_proj_weight, torch.cat([mine.w_q.weight, mine.w_k.weight, mine.w_v.weight]))
    back = DecoderLayer.from_torch(theirs)
    assert all(map(torch.equal, ours.state_dict().values(), back.state_dict().values()))
    x, memory = 3 * draw(2, 5, 8, seed=1), 3 * draw(2, 7, 8, seed=2)
    for mask in (None, padding_mask([7, 4])):
        hidden = None if mask is None else ~mask[:, 0, 0]
        expected = theirs(x, memory, tgt_mask=~causal_mask(5), memory_key_padding_mask=hidden)
        for layer in (ours, back):
            close(layer(x, memory, memory_mask=mask), expected)


@each_norm
def test_g25_whole_stacks_copy_to_torch_and_back(norm_first):
    model = transformer(None, norm_first=norm_first)
    theirs = model.to_torch()
    back = Transformer.from_torch(theirs, VOCAB, positions=None)
    for name in ("encoder", "decoder"):
        ours, again = (getattr(m, name).state_dict() for m in (model, back))
        assert ours.keys() == again.keys() and all(map(torch.equal, ours.values(), again.values()))
    x, y, real = 3 * draw(2, 5, D, seed=1), 3 * draw(2, 4, D, seed=2), padding_mask([5, 3])
    hidden = ~real[:, 0, 0]
    expected = theirs(x, y, tgt_mask=~causal_mask(4), src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
    for stacks in (model, back):
        close(stacks.decoder(y, stacks.encoder(x, real), memory_mask=real), expected)


# --- sinusoids and tables: G26 to G30 --------------------------------------------------------------------------------


def closed_form(positions, d):
    "From the formula, number by number."
    def entry(p, c):
        angle = p / 10000 ** ((c - c % 2) / d)
        return math.cos(angle) if c % 2 else math.sin(angle)

    return torch.tensor([[entry(p, c) for c in range(d)] for p in positions], dtype=torch.float64).reshape(len(positions), d)


@pytest.mark.parametrize("d", [1, 5, 7, 127, 6])
def test_g26_odd_widths_lack_the_last_cosine(d):
    expected = closed_form(range(3), d)
    close(sinusoidal_encoding(3, d, dtype=torch.float64), expected, atol=1e-12)
    close(SinusoidalPositions(d)(torch.zeros(2, 3, d, dtype=torch.float64))[1], expected, atol=1e-12)
    if d == 5:
        assert sinusoidal_encoding(3, 5)[1].tolist() == pytest.approx([0.841471, 0.540302, 0.025116, 0.999685, 0.000631], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_g26_a_model_of_odd_width(kind):
    config = partial(TransformerConfig, VOCAB, d_model=5, n_heads=1, d_ff=8, n_layers=1, positions=kind)
    if kind == "rotary":
        with pytest.raises(ValueError, match="d_rotary=5 is not an even number"):
            Transformer(config())
    else:
        assert Transformer(config())(tokens(2, 3), tokens(2, 4)).shape == (2, 4, VOCAB)


def test_g27_sines_and_cosines_take_turns_as_in_the_paper():
    assert sinusoidal_encoding(1, 10).tolist() == [[0, 1] * 5]
    assert SinusoidalPositions(10)(torch.zeros(1, 1, 10)).tolist() == [[[0, 1] * 5]]
    rows = sinusoidal_encoding(4, 10, dtype=torch.float64)
    for i in range(5):
        for pos in range(4):
            assert rows[pos, 2 * i] == pytest.approx(math.sin(pos / 10000 ** (2 * i / 10)), abs=1e-15)
            assert rows[pos, 2 * i + 1] == pytest.approx(math.cos(pos / 10000 ** (2 * i / 10)), abs=1e-15)


def test_g28_beyond_a_learned_table_both_numbers_are_named():
    table = LearnedPositions(8, 4)
    assert table(torch.zeros(1, 8, 4)).shape == (1, 8, 4)
    with pytest.raises(ValueError, match="x has 9 positions but the table has max_len=8"):
        table(torch.zeros(1, 9, 4))
    close(table(torch.zeros(1, 2, 4), torch.arange(6, 8))[0], table.weight[6:])
    with pytest.raises(ValueError, match="positions has 8 but the table has max_len=8 rows, 0 to 7"):
        table(torch.zeros(1, 3, 4), torch.arange(6, 9))
    with pytest.raises(ValueError, match="positions has -1"):
        table(torch.zeros(1, 3, 4), torch.arange(-1, 2))


def test_g28_a_model_with_learned_positions_names_them_too():
    model = transformer("learned", max_len=8)
    eight, nine = tokens(1, 8), tokens(1, 9)
    assert model(eight, eight).shape == (1, 8, VOCAB)
    for src, tgt in ((nine, eight), (eight, nine)):
        with pytest.raises(ValueError, match="8 but the table has max_len=8"):
            model(src, tgt)
    cache, memory = model.new_cache(), model.encode(eight)
    model.decode(eight[:, :6], memory, cache=cache)
    with pytest.raises(ValueError, match="8 but the table has max_len=8"):
        model.decode(eight[:, :3], memory, cache=cache)


@each_kind
def test_g28_the_others_have_no_end(kind):
    close(sinusoidal_encoding(3, 6, offset=6, dtype=torch.float64), closed_form(range(6, 9), 6), atol=1e-12)
    if kind != "learned":
        model, long = transformer(kind, max_len=8), tokens(1, 20)
        assert model(long, long).isfinite().all()
        close(model(long, long), transformer(kind, max_len=99)(long, long), atol=0)


@each_kind
def test_g29_only_learned_positions_are_in_the_state(kind):
    short, long, none = transformer(kind, max_len=16), transformer(kind, seed=1, max_len=32), transformer(None)
    own = short.state_dict().keys() - none.state_dict().keys()
    assert own == ({"src_positions.weight", "tgt_positions.weight"} if kind == "learned" else set())
    assert not list(short.buffers())
    src, tgt = tokens(1, 10), tokens(1, 10, seed=1)
    for source, target in ((short, copy.deepcopy(long)), (long, copy.deepcopy(short))):
        if kind == "learned":  # of which every row is learned: there is nothing to fill a longer table with
            with pytest.raises(RuntimeError, match=r"size mismatch for src_positions.weight"):
                target.load_state_dict(source.state_dict())
        else:
            assert str(target.load_state_dict(source.state_dict(), strict=True)) == "<All keys matched successfully>"
            assert torch.equal(target(src, tgt), source(src, tgt))


@pytest.mark.parametrize("module", [SinusoidalPositions(8), RotaryPositions(8)], ids=["sinusoidal", "rotary"])
def test_g29_a_computed_table_is_no_parameter_and_follows_its_input(module):
    assert not module.state_dict() and not list(module.parameters()) and not list(module.buffers())
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        output = module(torch.zeros(1, 2, 3, 8, dtype=dtype))
        assert output.dtype == dtype and not output.requires_grad
    assert module(torch.zeros(1, 2, 3, 8, device="meta")).device.type == "meta"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-4), (torch.bfloat16, 4e-3)], ids=str)
def test_g30_sinusoids_of_a_half_precision_model_are_computed_wider(dtype, bound):
    right = closed_form(range(512), 16)
    model = Transformer(TransformerConfig(VOCAB, d_model=16, n_heads=2, d_ff=8, n_layers=1, dropout=0.0)).to(dtype)
    with torch.no_grad():
        model.tgt_embedding.weight.zero_()
    ways = {
        "function": sinusoidal_encoding(512, 16, dtype=dtype),
        "module": SinusoidalPositions(16).to(dtype)(torch.zeros(1, 512, 16, dtype=dtype))[0],
        "given": SinusoidalPositions(16)(torch.zeros(1, 512, 16, dtype=dtype), torch.arange(512, dtype=torch.int32))[0],
        "source": model.embed(tokens(1, 512), source=True)[0][0],
        "target": model.embed(tokens(1, 512), source=False)[0][0],
    }
    for name, table in ways.items():
        assert table.dtype == dtype and (table.double() - right).abs().max() <= bound, name
    coarse = torch.arange(512, dtype=dtype)[:, None] * 10000 ** (-torch.arange(0, 16, 2, dtype=dtype) / 16)
    assert (coarse.double().sin() - right[:, ::2]).abs().max() > 10 * bound  # the reported slip


# --- rotary: G32, G34 to G36 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["interleaved", "half-split"])
@pytest.mark.parametrize("d_rotary", [None, 4])
@pytest.mark.parametrize("n_kv_heads", [2, 1])
def test_g32_weights_of_one_layout_are_reordered_for_the_other(n_kv_heads, d_rotary, to):
    def made(interleaved):
        rotary = RotaryPositions(8, interleaved=interleaved, d_rotary=d_rotary)
        return stirred(MultiHeadAttention(16, 2, n_kv_heads=n_kv_heads, rotary=rotary))

    one, other = made(to != "interleaved"), made(to == "interleaved")  # of the same weights, by their seed
    x = draw(2, 6, 16, seed=1)
    assert (one(x, causal=True) - other(x, causal=True)).abs().max() > 1e-2
    untouched = [p.clone() for layer in (other.w_v, other.w_o) for p in layer.parameters()]
    with torch.no_grad():
        for layer, heads in ((other.w_q, 2), (other.w_k, n_kv_heads)):
            for parameter in layer.parameters():  # weight and bias
                parameter.copy_(reorder_rotary(parameter, heads, to=to, d_rotary=d_rotary))
    close(one(x, causal=True), other(x, causal=True), atol=1e-12)
    assert all(map(torch.equal, untouched, [p for layer in (other.w_v, other.w_o) for p in layer.parameters()]))
    with torch.no_grad():
        other.w_q.bias.copy_(one.w_q.bias)
    assert (one(x, causal=True) - other(x, causal=True)).abs().max() > 1e-2  # biases have rows too


def test_g32_a_whole_model_changes_its_layout():
    one, other, ids = stirred(Gpt("rotary")), stirred(Gpt("rotary", interleaved=True)), tokens(2, 7)
    assert (one(ids) - other(ids)).abs().max() > 1e-2
    with torch.no_grad():
        for layer in other.layers.layers:
            for projection in (layer.attention.w_q, layer.attention.w_k):
                for parameter in projection.parameters():
                    parameter.copy_(reorder_rotary(parameter, 2, to="interleaved"))
    close(one(ids), other(ids))


def turned(x, positions, interleaved, width, base=10000.0):
    "From the formula, number by number."
    result = x.clone()
    for pair in range(width // 2):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width // 2)
        for t, p in enumerate(positions):
            cos, sin = math.cos(p * base ** (-2 * pair / width)), math.sin(p * base ** (-2 * pair / width))
            result[..., t, a] = x[..., t, a] * cos - x[..., t, b] * sin
            result[..., t, b] = x[..., t, a] * sin + x[..., t, b] * cos
    return result


@both_layouts
def test_g34_what_came_before_does_not_matter(interleaved):
    used, seven = RotaryPositions(8, interleaved=interleaved), draw(1, 1, 7, 8, seed=0)
    whole = RotaryPositions(8, interleaved=interleaved)(seven)
    close(whole, turned(seven, range(7), interleaved, 8), atol=1e-12)
    for offset in (0, 3, 0):
        close(used(seven[:, :, offset : offset + 4], torch.arange(4) + offset), whole[:, :, offset : offset + 4], atol=1e-15)
    for n in (4, 9, 4):
        x = draw(1, 1, n, 8, seed=n)
        assert torch.equal(used(x), RotaryPositions(8, interleaved=interleaved)(x))
    for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.float64):
        x = seven.to(dtype)
        assert torch.equal(used(x), RotaryPositions(8, interleaved=interleaved)(x)) and used(x).dtype == dtype
    assert used(seven.to("meta")).device.type == "meta"
    assert torch.equal(used(seven), whole)


def test_g34_nor_does_it_for_the_other_kinds():
    sinusoidal, learned = SinusoidalPositions(8), LearnedPositions(9, 8).double()
    right = {"sinusoidal": closed_form(range(9), 8), "learned": learned.weight}
    for name, module in (("sinusoidal", sinusoidal), ("learned", learned)):
        for offset, n in ((0, 4), (3, 4), (0, 4), (0, 9), (0, 4)):
            rows = module(torch.zeros(1, n, 8, dtype=torch.float64), torch.arange(offset, offset + n))[0]
            close(rows, right[name][offset : offset + n], atol=1e-12)
        close(module(torch.zeros(1, 4, 8, dtype=torch.float64))[0], right[name][:4], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_g35_angles_are_computed_wide_whatever_the_model_is(dtype):
    rotary = RotaryPositions(32).to(dtype)
    at = torch.arange(4096)
    frequencies = torch.tensor([10000 ** (-2 * i / 32) for i in range(16)], dtype=torch.float64)
    angles = at[:, None].double() * frequencies
    cos, sin = rotary.tables(at, dtype)
    assert max((cos.double() - angles.cos()).abs().max(), (sin.double() - angles.sin()).abs().max()) <= 1e-3
    assert angles[1857, 1].item() == pytest.approx(1044.2678, abs=1e-4)
    assert cos[1857, 1].item() == pytest.approx(0.306693, abs=1e-3)
    x = torch.zeros(1, 1, 4096, 32, dtype=dtype)
    x[..., :16] = 1  # the first of each pair: turned, it is the cosine and the sine
    seen = rotary(x)[0, 0].double()
    rounding = {torch.float32: 1e-3, torch.float16: 1.5e-3, torch.bfloat16: 5e-3}[dtype]
    close(seen, torch.cat([angles.cos(), angles.sin()], dim=-1), atol=rounding)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@both_layouts
def test_g35_a_half_precision_attention_far_into_a_text(dtype, interleaved):
    def made(seed=0):
        return stirred(MultiHeadAttention(64, 2, rotary=RotaryPositions(32, interleaved=interleaved)), seed)

    x, at = draw(1, 8, 64, seed=1).to(dtype), torch.arange(8) * 500
    exact = made().to(dtype).double()(x.double(), causal=True, positions=at)
    close(made().to(dtype)(x, causal=True, positions=at), exact, atol={torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype])


def test_g36_a_width_that_cannot_turn_is_refused_at_construction():
    for sizes, options in (((33,), {}), ((33,), dict(d_rotary=34)), ((33,), dict(d_rotary=33)), ((33,), dict(d_rotary=0)), ((32,), dict(d_rotary=34))):
        with pytest.raises(ValueError, match="d_rotary="):
            RotaryPositions(*sizes, **options)
    with pytest.raises(ValueError, match="expected the same, with at most 16 pairs"):
        apply_rotary(torch.zeros(1, 33), torch.ones(1, 17), torch.zeros(1, 17))
    with pytest.raises(ValueError, match="d_rotary=34"):
        reorder_rotary(torch.zeros(33), 1, to="interleaved", d_rotary=34)


@both_layouts
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_g36_columns_that_do_not_turn_stay_bit_for_bit(dtype, interleaved):
    x = draw(2, 3, 5, 33, seed=0).to(dtype)
    output = RotaryPositions(33, d_rotary=16, interleaved=interleaved)(x)
    assert torch.equal(output[..., 16:], x[..., 16:])
    close(output[..., :16], turned(x.double(), range(5), interleaved, 16)[..., :16], atol={torch.float32: 1e-5}.get(dtype, 4e-2))
    assert not (output[..., 1:, :16] == x[..., 1:, :16]).all(-1).any()


# --- distance: G37, G38 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", OURS, ids=str)
def test_g37_the_first_slope_is_a_half(variant):
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    bias = alibi_bias(8, 4, dtype=torch.float64)[:1]
    nothing, identity = torch.zeros(1, 1, 4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)[None, None]
    rows = variant.run(nothing, nothing, identity, bias[None], causal=True)[0, 0]
    assert rows[3].tolist() == pytest.approx([0.1015, 0.1674, 0.2760, 0.4551], abs=5e-5)
    assert (rows.triu(1) == 0).all()


def test_g37_stacks_hand_that_bias_to_their_layers():
    for name in ("encoder-alibi", "decoder-alibi-pre", "gpt-alibi", "transformer-alibi"):
        run, seen = RUNNERS[name](), []
        stacks = [part for part in run.module.modules() if isinstance(part, (Encoder, Decoder))]
        run(tokens(2, 4))  # and once more, to look
        for part in stacks:
            for each_layer in part.layers:
                each_layer.attention.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["mask"]), with_kwargs=True)
        run(tokens(2, 4))
        assert len(seen) == sum(len(part.layers) for part in stacks)
        for mask in seen:
            n = mask.shape[-1]
            finite = mask.expand(2, 2, n, n).masked_fill(mask == -math.inf, 0)
            expected = alibi_bias(2, n, dtype=mask.dtype).expand(2, -1, -1, -1).masked_fill(mask == -math.inf, 0)
            assert mask.dtype == torch.float64 and torch.equal(finite, expected)


def test_g38_the_bias_does_not_depend_on_the_lengths_before():
    def expected(n_q, n_k):
        return [[[-(2.0 ** -(8 * (h + 1) / 2)) * abs(i + n_k - n_q - j) for j in range(n_k)] for i in range(n_q)] for h in range(2)]

    for n_q, n_k in ((5, 5), (6, 6), (4, 4), (2, 6)):
        close(alibi_bias(2, n_q, n_k, dtype=torch.float64), torch.tensor(expected(n_q, n_k), dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("name", RUNNERS)
def test_g38_nothing_that_was_read_is_left(name):
    run, before = runner(name), list(RUNNERS[name]().module.state_dict())
    for n in (5, 6, 4):
        ids = tokens(2, n, seed=n)
        assert torch.equal(run(ids), RUNNERS[name]()(ids))
    ids = tokens(2, 6, seed=6)  # two queries, six keys
    assert torch.equal(run.steps(ids, (0, 4, 6)), RUNNERS[name]().steps(ids, (0, 4, 6)))
    close(run.steps(ids, (0, 4, 6))[:, 4:], run(ids)[:, 4:])
    fresh = RUNNERS[name]().module
    assert list(run.module.state_dict()) == before and not list(run.module.buffers())
    for part, other in zip(run.module.modules(), fresh.modules()):  # nor any attribute
        assert {k: repr(v) for k, v in vars(part).items() if k[0] != "_"} == {k: repr(v) for k, v in vars(other).items() if k[0] != "_"}


# --- layers and stacks: G39 to G42 -----------------------------------------------------------------------------------


@each_kind
def test_g39_a_pre_norm_stack_hands_on_what_is_normed(kind):
    torch.manual_seed(0)
    config = TransformerConfig(VOCAB, d_model=16, n_heads=2, d_ff=32, n_layers=6, dropout=0.0, norm_first=True, positions=kind, max_len=9)
    model = Transformer(config).double()
    gpt = Gpt(kind, n_layers=6).double()
    outputs = []
    gpt.layers.register_forward_hook(lambda module, args, output: outputs.append(output))
    src, tgt = tokens(3, 9), tokens(3, 7)
    gpt(src)
    memory = model.encode(src)
    outputs += [memory, model.decode_hidden(tgt, memory)]
    bare = Transformer(replace(config, final_norm=False)).double()
    outputs += [bare.encode(src), bare.decode_hidden(tgt, bare.encode(src))]
    for output in outputs[:3]:
        assert output.mean(-1).abs().max() < 1e-5 and (output.std(-1, correction=0) - 1).abs().max() < 1e-5
    for output in outputs[3:]:  # what the reported slip looks like
        assert output.std(-1, correction=0).mean() > 1.2


@each_norm
def test_g39_a_post_norm_stack_has_no_norm_twice(norm_first):
    model = Transformer(TransformerConfig.tiny(VOCAB, norm_first=norm_first))
    assert (model.encoder.norm is not None) == (model.decoder.norm is not None) == norm_first


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_g40_the_residual_is_the_input_itself(activation):
    x, memory = 3 + 5 * draw(2, 6, D, seed=1), draw(2, 4, D, seed=2)
    options = dict(norm_first=True, activation=activation)
    parts = {
        "encoder layer": (layer(**options), (x,)), "decoder layer": (decoder_layer(**options), (x, memory)),
        "encoder": (Encoder([layer(**options), layer(**options)]), (x,)),
        "decoder": (Decoder([decoder_layer(**options), decoder_layer(**options)]), (x, memory)),
    }
    for name, (part, inputs) in parts.items():
        stirred(part)
        assert not torch.equal(part(*inputs), x)
        with torch.no_grad():
            for inner in part.modules():
                for last in ("w_o", "w_out"):
                    if isinstance(inner, (MultiHeadAttention, FeedForward)) and hasattr(inner, last):
                        getattr(inner, last).weight.zero_(), getattr(inner, last).bias.zero_()
        assert torch.equal(part(*inputs), x), name


@each_kind
@each_norm
def test_g41_layers_begin_different_and_share_nothing(kind, norm_first):
    def made(seed):
        torch.manual_seed(seed)
        return Transformer(TransformerConfig(VOCAB, d_model=D, n_heads=2, d_ff=24, n_layers=3, norm_first=norm_first, positions=kind))

    model = made(0)
    for part in (model.encoder, model.decoder):
        assert len(part.layers) == 3
        for one, two in itertools.combinations(part.layers, 2):
            for (name, a), b in zip(one.named_parameters(), two.parameters()):
                assert a.data_ptr() != b.data_ptr(), name
                assert a.ndim < 2 or not torch.equal(a, b), name
    addresses = [p.data_ptr() for p in model.parameters()]
    assert len(set(addresses)) == len(addresses)
    assert all(map(torch.equal, model.parameters(), made(0).parameters()))
    assert not all(map(torch.equal, model.parameters(), made(1).parameters()))


@each
def test_g42_padding_at_the_end_is_not_cut_off(name, shape_check):
    run, ids = runner(name), tokens(2, 5)
    ids[:, 3:] = 0
    real = ids != 0
    outputs = [run(ids, real=real)]
    with torch.no_grad():
        outputs.append(run(ids, real=real))
    run.module.train()
    outputs.append(run(ids, real=real))
    run.module.eval()
    for output in outputs:
        assert output.shape[:2] == (2, 5) and output.isfinite().all()
        close(output[:, :3], outputs[0][:, :3], atol=1e-12)
    close(outputs[0][:, :3], run(ids[:, :3]))


@each_kind
def test_g42_nor_at_the_end_of_a_source(kind):
    model, src, tgt = transformer(kind), tokens(2, 5), tokens(2, 4)
    src[:, 3:] = 0
    outputs = [model.encode(src)]
    with torch.no_grad():
        outputs.append(model.encode(src))
    outputs.append(model.train().encode(src))
    for output in outputs:
        assert output.shape == (2, 5, D)
        close(output[:, :3], outputs[0][:, :3], atol=1e-12)
    close(outputs[0][:, :3], model.encode(src[:, :3]))
    close(model(src, tgt), model(src[:, :3], tgt))


# --- encoder and decoder: G43 to G45 ---------------------------------------------------------------------------------


def continued(model, prompts, n, extra=0, use_cache=True):
    "Greedy continuation of prompts of any lengths by a GPT: ids and logits of the new tokens, row by row."
    ids = left(*prompts, n=max(map(len, prompts)) + extra)
    real, cache, new, logits = ids != 0, model.layers.new_cache() if use_cache else None, ids, []
    for _ in range(n):
        logits.append(model(new if use_cache else ids, real, cache)[:, -1])
        new = logits[-1][:, None, 1:].argmax(-1) + 1
        ids, real = torch.cat([ids, new], dim=1), F.pad(real, (0, 1), value=True)
    return ids[:, -n:], torch.stack(logits, dim=1)


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
@each_kind
def test_g43_a_prompt_is_continued_the_same_in_any_batch(kind, use_cache):
    model, prompts = stirred(Gpt(kind)), [tokens(n, seed=n).tolist() for n in (3, 6)]
    with torch.no_grad():
        alone = [continued(model, [prompt], 5, use_cache=use_cache) for prompt in prompts]
        for extra, order in itertools.product((0, 1, 7), ((0, 1), (1, 0), (0, 1, 1, 0))):
            ids, logits = continued(model, [prompts[i] for i in order], 5, extra, use_cache)
            for row, i in enumerate(order):
                assert torch.equal(ids[row], alone[i][0][0])
                close(logits[row], alone[i][1][0])


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
@each_kind
def test_g43_a_sentence_is_translated_the_same_in_any_batch(kind, use_cache):
    model, sources = transformer(kind), [tokens(n, seed=n).tolist() for n in (3, 6)]
    greedy = partial(greedy_decode, model, max_len=5, use_cache=use_cache)
    alone = [greedy(torch.tensor([source]))[0].tolist() for source in sources]
    for extra, order, side in ((0, (0, 1), "left"), (1, (1, 0), "right"), (7, (0, 1), "right"), (7, (1, 0), "left")):
        rows = [sources[i] for i in order]
        src = left(*rows, n=6 + extra) if side == "left" else left(*(row[::-1] for row in rows), n=6 + extra).flip(1)
        for row, i in zip(greedy(src).tolist(), order):
            assert row[: len(alone[i])] == alone[i] and not any(row[len(alone[i]) :])
        targets = [[1, *alone[i]] for i in order]
        logits = model(src, left(*targets))
        for row, i in enumerate(order):
            close(logits[row, -len(targets[row]) :], model(torch.tensor([sources[i]]), torch.tensor([targets[row]]))[0])


def cross_weights(layers, run):
    "The weights with which each decoder layer looks at the memory while `run` runs."
    calls = []

    def keep(module, args, kwargs):
        calls.append((module, args, {**kwargs, "cache": None}))

    hooks = [each_layer.cross_attention.register_forward_pre_hook(keep, with_kwargs=True) for each_layer in layers]
    run()
    for hook in hooks:
        hook.remove()
    return [module(*args, **kwargs, return_weights=True)[1] for module, args, kwargs in calls]


@pytest.mark.parametrize(("n_s", "sources", "n_t", "targets"), [(5, [5, 2], 3, [1, 3]), (4, [4, 2], 4, [2, 4])])
@each_kind
@each_norm
def test_g44_the_memory_is_masked_by_the_source(kind, norm_first, n_s, sources, n_t, targets):
    model, src, tgt = transformer(kind, norm_first=norm_first), tokens(2, n_s), tokens(2, n_t, seed=1)
    src = src * padding_mask(sources, n_s)[:, 0, 0]
    ragged = tgt * padding_mask(targets, n_t)[:, 0, 0]
    seen = {}
    for name, ids in (("full", tgt), ("ragged", ragged)):
        seen[name] = cross_weights(model.decoder.layers, lambda: model(src, ids))
        assert len(seen[name]) == 2
        for weights in seen[name]:
            assert weights.shape == (2, 2, n_t, n_s)
            for i, n in enumerate(sources):
                assert (weights[i, ..., n:] == 0).all() and (weights[i, ..., :n] > 0).all()
            close(weights.sum(-1), torch.ones(2, 2, n_t))
    for full, short in zip(*seen.values()):
        for i, n in enumerate(targets):
            close(full[i, :, :n], short[i, :, :n])


@each_kind
def test_g44_what_stands_in_the_memory_at_padding_is_irrelevant(kind):
    model, src, tgt = transformer(kind), tokens(2, 5), tokens(2, 3, seed=1)
    src[1, 2:] = 0
    memory = model.encode(src)
    clean = model.decode(tgt, memory, model.padding(src))
    dirty = memory.detach().clone()
    dirty[1, 2:] = 1e6
    dirty.requires_grad_()
    output = model.decode(tgt, dirty, model.padding(src))
    assert torch.equal(output, clean)
    output.square().sum().backward()
    assert (dirty.grad[1, 2:] == 0).all() and (dirty.grad[1, :2] != 0).any()
    layer_output = decoder_layer().double().eval()
    x = draw(2, 3, D, seed=3)
    assert torch.equal(*(layer_output(x, y, memory_mask=model.padding(src)) for y in (memory, dirty)))


@pytest.mark.parametrize("scale", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_g45_logits_have_no_factor_tied_or_not(share, scale):
    tied = transformer(share_embeddings=share, scale_embeddings=scale)
    free = transformer(share_embeddings=share, scale_embeddings=scale, tie_output=False)
    free.load_state_dict(tied.state_dict() | {"output.weight": tied.tgt_embedding.weight.detach().clone()})
    src, tgt = tokens(2, 5), tokens(2, 4, seed=1)
    hidden = tied.decode_hidden(tgt, tied.encode(src), tied.padding(src))
    for model in (tied, free):
        close(model(src, tgt), hidden @ tied.tgt_embedding.weight.T, atol=1e-12)
    embedded = tied.embed(tgt, source=False)[0] - sinusoidal_encoding(4, D, dtype=torch.float64)
    close(embedded, tied.tgt_embedding(tgt) * (math.sqrt(D) if scale else 1), atol=1e-12)
    # The same matrix reads and writes.
    logits = tied.unembed(hidden)
    with torch.no_grad():
        tied.tgt_embedding.weight.mul_(2)
        free.tgt_embedding.weight.mul_(2)
    close(tied.unembed(hidden), 2 * logits, atol=1e-12)
    close(free.unembed(hidden), logits, atol=1e-12)
    close(tied.embed(tgt, source=False)[0] - sinusoidal_encoding(4, D, dtype=torch.float64), 2 * embedded, atol=1e-12)


# --- beams: G48 (G46, G47, G49 to G51 stand with the functions they are about) -----------------------------------------


@each_kind
def test_g48_beams_go_on_from_their_own_past(kind):
    model, sources = transformer(kind), [tokens(n, seed=n).tolist() for n in (5, 3)]
    src = left(*sources).flip(1)
    both = [beam_search(model, src, beam=3, n_best=3, max_len=6, use_cache=use_cache) for use_cache in (True, False)]
    for cached, uncached, row in zip(*both, src):
        assert [h.ids for h in cached] == [h.ids for h in uncached] and len(cached) == 3
        for one, two in zip(cached, uncached):
            assert one.score == pytest.approx(two.score, abs=1e-8)
            forced = model(row[None], torch.tensor([[1, *one.ids]])).log_softmax(-1)[0]
            assert one.log_probability == pytest.approx(sum(forced[t, token].item() for t, token in enumerate(one.ids)), abs=1e-8)


@each
def test_g48_a_cache_that_is_reordered_goes_on_with_other_pasts(name):
    run, ids, next_ids = runner(name), tokens(3, 5), tokens(3, 2, seed=1)
    index = torch.tensor([2, 0, 0])
    cache = run.new_cache()
    run(ids, cache=cache, rows=[0, 1, 2])
    for own in cache:
        own.reorder(index)
    after = run(next_ids, cache=cache, rows=index.tolist())
    close(after, run(torch.cat([ids[index], next_ids], dim=1), rows=index.tolist())[:, 5:])


# --- state: G73, G74 -------------------------------------------------------------------------------------------------


def names_of(model, weight):
    return [name for name, p in model.named_parameters(remove_duplicate=False) if p is weight]


def copies(model):
    "Every way in which a model becomes another one, or itself with other weights."
    other = copy.deepcopy(stirred(copy.deepcopy(model), seed=7))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    other.load_state_dict(state, strict=True)
    yield "load", other
    assigned = copy.deepcopy(stirred(copy.deepcopy(model), seed=7))
    assigned.load_state_dict(state, strict=True, assign=True)
    yield "assign", assigned
    yield "deepcopy", copy.deepcopy(model)
    yield "pickle", pickle.loads(pickle.dumps(model))
    yield "to", copy.deepcopy(model).to(torch.float32).to(torch.float64)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_g73_a_tied_weight_is_one_parameter_however_it_came(share):
    model, src, tgt = transformer(share_embeddings=share), tokens(2, 5), tokens(2, 4, seed=1)
    count, expected = len(list(model.parameters())), model(src, tgt)
    for way, other in copies(model):
        weight = other.tgt_embedding.weight
        assert isinstance(weight, nn.Parameter) and len(names_of(other, weight)) == 1, way
        assert len(list(other.parameters())) == len(other.state_dict()) == count, way
        close(other(src, tgt), expected, atol=1e-4 if way == "to" else 1e-12)
        before, optimizer = weight.detach().clone(), torch.optim.SGD(other.parameters(), lr=0.1)
        other(src, tgt).square().mean().backward()
        gradient = weight.grad.clone()
        optimizer.step()
        close(weight, before - 0.1 * gradient, atol=1e-12)  # stepped once
        hidden = other.decode_hidden(tgt, other.encode(src), other.padding(src))
        close(other(src, tgt), hidden @ weight.T, atol=1e-12)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_g73_the_gradient_of_a_tied_weight_is_the_sum_over_its_uses(share):
    tied, free = transformer(share_embeddings=share), transformer(share_embeddings=False, tie_output=False)
    weight = tied.tgt_embedding.weight.detach().clone()
    source = tied.tgt_embedding if share else tied.src_embedding
    free.load_state_dict(tied.state_dict() | {"output.weight": weight, "src_embedding.weight": source.weight.detach().clone()})
    src, tgt = tokens(2, 5), tokens(2, 4, seed=1)
    for model in (tied, free):
        model(src, tgt).square().sum().backward()
    uses = [free.tgt_embedding.weight.grad, free.output.weight.grad, *([free.src_embedding.weight.grad] if share else [])]
    assert all(use.abs().max() > 0.1 for use in uses)
    torch.testing.assert_close(tied.tgt_embedding.weight.grad, sum(uses), atol=1e-9, rtol=1e-9)


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


OPTIONS = {
    **{f"feed-forward-{activation}": partial(FeedForward, D, 24, activation=activation) for activation in ("relu", "gelu", "swiglu")},
    "feed-forward-no-bias": partial(FeedForward, D, 24, bias=False),
    **{f"encoder-layer-{option}-{getattr(value, '__name__', value)}": partial(layer, **{option: value}) for option, value in (
        ("norm_first", True), ("bias", False), ("dropout", 0.1), ("activation", "gelu"), ("activation", "swiglu"), ("n_kv_heads", 1),
        ("eps", 1e-6), ("rotary", RotaryPositions(8)), ("attend", fused_attention))},
    **{f"attention-{option}-{getattr(value, '__name__', value)}": partial(MultiHeadAttention, D, 2, **{option: value}) for option, value in (
        ("fused", True), ("bias", False), ("n_kv_heads", 1), ("d_head", 5), ("dropout", 0.1), ("rotary", RotaryPositions(8, interleaved=True)),
        ("attend", fused_attention))},
    "sinusoidal": partial(SinusoidalPositions, D), "learned": partial(LearnedPositions, 9, D),
}
INPUTS = {"feed": (draw(2, 5, D, seed=1),), "enco": (draw(2, 5, D, seed=1),), "atte": (draw(2, 5, D, seed=1),), "sinu": (draw(2, 5, D, seed=1),), "lear": (draw(2, 5, D, seed=1),)}


@pytest.mark.parametrize("name", [*RUNNERS, *OPTIONS])
def test_g74_everything_can_be_copied_and_pickled(name):
    if name in RUNNERS:
        run = RUNNERS[name]()
        module = run.module
        inputs = (SRC[:2], tokens(2, 4)) if isinstance(module, Transformer) else (tokens(2, 4),) if isinstance(module, Gpt) else (draw(2, 4, D, seed=1),)
        inputs += (draw(2, 6, D, seed=2),) if isinstance(module, (DecoderLayer, Decoder)) else ()
    else:
        module, inputs = stirred(OPTIONS[name]()), INPUTS[name[:4]]
    for _ in range(2):  # before a forward, and after one
        made = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), saved(module)]
        output = module(*inputs)
        for other in made:
            assert torch.equal(other.eval()(*inputs), output)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.add_(1.0)
            assert torch.equal(module(*inputs), output)


@pytest.mark.parametrize("changes", [
    {}, dict(norm_first=True), dict(activation="gelu"), dict(activation="swiglu"), dict(tie_output=False), dict(share_embeddings=False),
    dict(tgt_vocab_size=7, share_embeddings=False), dict(scale_embeddings=False), dict(bias=False), dict(pad_id=None), dict(n_kv_heads=1),
    dict(final_norm=True), dict(n_decoder_layers=1), dict(dropout=0.1), dict(eps=1e-6),
], ids=str)
def test_g74_whole_models_of_every_option(changes):
    model, src, tgt = transformer(**changes), tokens(2, 5) % 7, tokens(2, 4, seed=1) % 7
    for config in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config)), saved(model.config)):
        assert config == model.config and Transformer(config).config == config
    for _ in range(2):
        made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved(model)]
        output = model(src, tgt)
        assert all(torch.equal(other(src, tgt), output) for other in made)


def test_g74_a_cache_too():
    cache = KVCache()
    for _ in range(2):
        for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), saved(cache)):
            assert other.length == cache.length
            other.update(draw(2, 1, 3, 4, seed=0), draw(2, 1, 3, 4, seed=1))
            assert other.length == cache.length + 3
            if cache.length:
                assert all(torch.equal(a[..., : cache.length, :], b) for a, b in zip(other.read(), cache.read()))
        cache.update(draw(2, 1, 2, 4, seed=2), draw(2, 1, 2, 4, seed=3))


# --- export and compile: G75, G76 ------------------------------------------------------------------------------------


class Exported(nn.Module):
    "Without options and masks: what goes in is ids."

    def __init__(self, name):
        super().__init__()
        what, kind = name.split("-")
        self.kind = None if kind == "None" else kind
        self.what = what
        self.model = (Gpt(self.kind, n_layers=1) if what == "gpt" else transformer(self.kind, n_layers=1)).float().eval()

    def forward(self, *ids):
        if self.what == "encoder":
            return self.model.encode(*ids)
        return self.model(*ids)

    def inputs(self, batch, n):
        ids = tokens(batch, n, seed=n)
        ids[0, n - 1 :] = 0 if n > 1 else ids[0, n - 1 :]
        return (ids, tokens(batch, n + 2, seed=1)) if self.what == "transformer" else (ids,)


EXPORTED = [*(f"gpt-{kind}" for kind in KINDS), "transformer-learned", "encoder-rotary"]  # more with two lengths: test_transformer.py


@pytest.mark.skipif(torch.__version__ < "2.5", reason="torch 2.4 cannot export models with dynamic lengths and masks")
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_g75_an_exported_model_takes_any_batch_and_length(name):
    model = Exported(name)
    batch, lengths = torch.export.Dim("batch", max=64), [torch.export.Dim(f"n{i}", max=LONGEST) for i in range(2)]
    inputs = model.inputs(2, 5)
    shapes = tuple({0: batch, 1: n} for n in lengths[: len(inputs)])
    exported = torch.export.export(model, inputs, dynamic_shapes={"ids": shapes}).module()
    for b, n in ((2, 5), (1, 5), (3, 9), (2, 1)):
        inputs = model.inputs(b, n)
        close(exported(*inputs), model(*inputs), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED[:-2])
def test_g76_models_compile_in_one_graph_for_all_lengths(name, compiled):
    model = Exported(name)
    fast = compiled(model)
    for n in (5, 9, 9, 5):
        inputs = model.inputs(2, n)
        close(fast(*inputs), model(*inputs), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention-rotary-grouped-fused", "encoder-layer-rotary-pre"])
def test_g76_layers_compile_in_one_graph_for_all_lengths(name, compiled):
    run = RUNNERS[name]()
    real = padding_mask([9, 3], 9)[:, 0, 0]
    fast = compiled(lambda ids, mask: run(ids, real=mask))
    for n in (5, 9, 9, 5):
        close(fast(tokens(2, n), real[:, :n]), run(tokens(2, n), real=real[:, :n]), atol=1e-6)


# --- the same every time: G77 ----------------------------------------------------------------------------------------


@each
def test_g77_the_same_seed_gives_the_same_output_and_gradients(name):
    run, ids = RUNNERS[name](dropout=0.1), tokens(2, 6)

    def outcome(seed, training=True):
        run.module.train(training).zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        output = run(ids)
        output.square().sum().backward()
        return [output.detach(), *(p.grad.clone() for p in run.module.parameters() if p.grad is not None)]

    assert all(map(torch.equal, outcome(0), outcome(0)))
    assert not torch.equal(outcome(0)[0], outcome(1)[0])
    assert all(map(torch.equal, outcome(0, training=False), outcome(1, training=False)))
    state = torch.get_rng_state()
    run(ids)
    assert torch.equal(torch.get_rng_state(), state)  # eval draws nothing


FRESH = {
    "encoder-layer": lambda: layer(dropout=0.1), "decoder-layer": lambda: decoder_layer(dropout=0.1), "feed-forward": lambda: FeedForward(D, 24),
    "learned": lambda: LearnedPositions(9, D), **{f"transformer-{kind}": partial(lambda kind: Transformer(TransformerConfig.tiny(VOCAB, positions=kind)), kind) for kind in KINDS},
}


@pytest.mark.parametrize("name", FRESH)
def test_g77_a_seed_decides_the_beginning_and_is_left_alone(name):
    def made(seed):
        torch.manual_seed(seed)
        return FRESH[name](), torch.rand(3), torch.initial_seed()

    (a, after_a, _), (b, after_b, _), (c, after_c, seed) = made(0), made(0), made(1)
    assert all(map(torch.equal, a.parameters(), b.parameters())) and torch.equal(after_a, after_b)
    assert not all(map(torch.equal, a.parameters(), c.parameters())) and not torch.equal(after_a, after_c)
    assert seed == 1  # as was set, not by the module


# --- none is forgotten -----------------------------------------------------------------------------------------------


def test_every_case_has_a_test_that_bears_its_name():
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    named = {int(number) for number in re.findall(r"^def test_g(\d\d)_", text, re.MULTILINE)}
    assert {*range(1, 52), *range(73, 78)} <= named
