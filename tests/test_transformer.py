"""Chapter 06: layers, stacks, the whole model and its cache, against torch's. (Reported faults: `test_reported_faults.py`.)"""

import copy
import dataclasses
import inspect
import io
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from attention_course import (
    Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward, KVCache, MultiHeadAttention,
    Transformer, TransformerConfig, causal_mask, fused_attention, padding_mask,
)
from attention_course.positions import RotaryPositions

POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", None]
ORDERS = pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
KINDS = pytest.mark.parametrize("positions", POSITIONS, ids=str)
EXPORT = pytest.mark.skipif(torch.__version__ < "2.5", reason="torch 2.4 cannot export models with dynamic lengths and masks")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ids(*shape, seed=0, vocab=30):
    return torch.randint(1, vocab, shape, generator=torch.Generator().manual_seed(seed))


def moved(module, seed=0):
    "The module in float64, every parameter moved, so that a lost bias or a lost scale would be seen."
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in module.double().parameters():
            p.add_(0.2 * torch.randn_like(p))
    return module


def model(seed=0, vocab=30, eval=True, **changes):
    torch.manual_seed(seed)
    made = Transformer(TransformerConfig.tiny(vocab, **{"d_model": 16, "n_heads": 2, "d_ff": 24, "dropout": 0.0, **changes}))
    made = moved(made, seed)
    return made.eval() if eval else made


def close(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def padded(src_lengths=(7, 4), tgt_lengths=(3, 5), vocab=30):
    src, tgt = ids(len(src_lengths), max(src_lengths), vocab=vocab), ids(len(tgt_lengths), max(tgt_lengths), seed=1, vocab=vocab)
    for rows, lengths in ((src, src_lengths), (tgt, tgt_lengths)):
        for row, length in zip(rows, lengths):
            row[length:] = 0
    return src, tgt


# --- feed-forward ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_feed_forward_equals_its_formula(activation, bias):
    ff, x = moved(FeedForward(6, 10, activation=activation, bias=bias)), normal(2, 3, 6)

    def apply(w, x):
        return x @ w.weight.T + (w.bias if bias else 0)

    h = apply(ff.w_in, x)
    if activation == "relu":
        h = h.clamp(min=0)
    elif activation == "gelu":
        h = h * torch.special.ndtr(h)
    else:
        gate = apply(ff.w_gate, x)
        h = gate / (1 + (-gate).exp()) * h
    close(ff(x), apply(ff.w_out, h))
    assert (ff.w_gate is not None) == (activation == "swiglu")
    assert all((p.bias is not None) == bias for p in (ff.w_in, ff.w_out))


def test_feed_forward_works_on_each_position_alone_with_any_axes_in_front():
    ff, x = moved(FeedForward(6, 10)), normal(2, 3, 4, 6)
    close(ff(x)[1, 2, 3], ff(x[1, 2, 3:4])[0])
    assert ff(normal(0, 6)).shape == (0, 6)


# --- one layer ------------------------------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_encoder_layer_is_torchs_both_ways(norm_first, activation, bias, training):
    theirs = moved(nn.TransformerEncoderLayer(12, 3, 20, 0.0, activation, batch_first=True, norm_first=norm_first, bias=bias, layer_norm_eps=1e-3))
    ours = EncoderLayer.from_torch(theirs.train(training))
    assert ours.training == training and ours.norm_attention.eps == 1e-3 and ours.feed_forward.activation == activation
    keep, real = padding_mask([5, 3]), padding_mask([5, 3])[:, 0, 0, :, None].double()
    other, upper = ours.to_torch(), torch.ones(5, 5).triu(1).bool()
    for mine, options in (({"mask": keep}, {"src_key_padding_mask": ~keep[:, 0, 0]}), ({"causal": True}, {"src_mask": upper}), ({}, {})):
        results = []
        for f in (partial(ours, **mine), partial(theirs, **options), partial(other, **options)):
            x = normal(2, 5, 12).requires_grad_()
            output = f(x) * real
            results.append((output, *torch.autograd.grad(output.pow(3).sum(), x)))
        for a, b in zip(results[0] * 2, results[1] + results[2]):
            close(a, b)


@ORDERS
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_decoder_layer_is_torchs_both_ways(norm_first, activation, bias):
    theirs = moved(nn.TransformerDecoderLayer(12, 3, 20, 0.0, activation, batch_first=True, norm_first=norm_first, bias=bias))
    ours = DecoderLayer.from_torch(theirs)
    keep, seen = padding_mask([2, 4]), padding_mask([6, 3])
    real = keep[:, 0, 0, :, None].double()
    options = dict(tgt_mask=~causal_mask(4), tgt_key_padding_mask=~keep[:, 0, 0], memory_key_padding_mask=~seen[:, 0, 0])
    results = []
    for f in (partial(ours, mask=keep, memory_mask=seen), partial(theirs, **options), partial(ours.to_torch(), **options)):
        x, memory = normal(2, 4, 12).requires_grad_(), normal(2, 6, 12, seed=1).requires_grad_()
        output = f(x, memory) * real
        results.append((output, *torch.autograd.grad(output.pow(3).sum(), (x, memory))))
    for a, b in zip(results[0] * 2, results[1] + results[2]):
        close(a, b)


@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer], ids=lambda c: c.__name__)
def test_round_trip_keeps_weights_mode_and_what_is_frozen_and_draws_nothing(kind):
    layer = moved(kind(12, 3, 20, dropout=0.25, activation="gelu", norm_first=True)).eval().requires_grad_(False)
    state = torch.get_rng_state()
    theirs = layer.to_torch()
    back = kind.from_torch(theirs)
    assert torch.equal(torch.get_rng_state(), state)
    assert theirs.dropout1.p == back.dropout.p == 0.25 and not back.training and not theirs.training
    assert not any(p.requires_grad for m in (theirs, back) for p in m.parameters())
    for (name, a), (other, b) in zip(layer.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b) and a.data_ptr() != b.data_ptr()


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EncoderLayer(12, 3, 20, activation="swiglu").to_torch(), "swiglu"),
        (lambda: EncoderLayer(12, 6, 20, n_kv_heads=2).to_torch(), "n_kv_heads=2"),
        (lambda: EncoderLayer(12, 3, 20, rotary=RotaryPositions(4)).to_torch(), "rotary"),
        (lambda: EncoderLayer(12, 3, 20, attend=lambda q, k, v, mask, causal: v).to_torch(), "attend"),
        (lambda: DecoderLayer(12, 3, 20, activation="swiglu").to_torch(), "swiglu"),
        (lambda: DecoderLayer(12, 3, 20, d_memory=8).to_torch(), "d_memory=8"),
        (lambda: Encoder([EncoderLayer(12, 3, 20)], alibi=True).to_torch(), "alibi"),
        (lambda: Encoder([]).to_torch(), "without layers"),
        (lambda: Decoder([], alibi=True).to_torch(), "alibi"),
        (lambda: Decoder([]).to_torch(), "without layers"),
        (lambda: EncoderLayer.from_torch(nn.TransformerEncoderLayer(12, 3, 20, activation=torch.tanh)), "activation"),
        (lambda: EncoderLayer.from_torch(nn.TransformerEncoderLayer(12, 3, 20, activation=nn.GELU("tanh"))), "approximate"),
        (lambda: Transformer.from_torch(nn.Transformer(12, 3, 0, 1, 20), 30), "no layers"),
        (lambda: Transformer.from_torch(nn.Transformer(12, 3, 1, 1, 20), 30, d_model=12), "d_model is decided by the module"),
        (lambda: Transformer.from_torch(nn.Transformer(12, 3, 1, 1, 20), 30, n_kv_heads=1), "n_kv_heads is decided by the module"),
        (lambda: Transformer.from_torch(nn.Transformer(12, 3, 1, 1, 20), 30, positions="rotary"), "positions='rotary' has no counterpart"),
        (lambda: Transformer.from_torch(nn.Transformer(12, 3, 1, 1, 20), 30, positions="alibi"), "positions='alibi' has no counterpart"),
    ],
    ids=range(17),
)
def test_what_has_no_counterpart_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def torchs(norms=(nn.LayerNorm(12), nn.LayerNorm(12)), **of_decoder):
    "An nn.Transformer whose decoder has options of its own."
    options = dict(d_model=12, nhead=3, dim_feedforward=20, batch_first=True)
    return nn.Transformer(
        12, 3, batch_first=True,
        custom_encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), 1, norms[0], enable_nested_tensor=False),
        custom_decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(**{**options, **of_decoder}), 1, norms[1]),
    )


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nhead": 4}, "n_heads=3 and of 4"),
        ({"dim_feedforward": 16}, "d_ff=20 and of 16"),
        ({"activation": "gelu"}, "activation=relu and of gelu"),
        ({"norm_first": True}, "norm_first=False and of True"),
        ({"dropout": 0.2}, "dropout=0.1 and of 0.2"),
        ({"bias": False}, "bias=True and of False"),
        ({"layer_norm_eps": 1e-3}, "eps=1e-05 and of 0.001"),
        ({"norms": (None, nn.LayerNorm(12))}, "norm after one stack only"),
        ({"norms": (nn.LayerNorm(12), nn.LayerNorm(12, 1e-3))}, "decoder.norm is LayerNorm"),
        ({"norms": (nn.LayerNorm(12, bias=False), nn.LayerNorm(12))}, "encoder.norm is LayerNorm"),
        ({"norms": (nn.RMSNorm(12), nn.RMSNorm(12))}, "encoder.norm is RMSNorm"),
    ],
    ids=str,
)
def test_a_module_that_no_config_describes_is_refused(options, says):
    "Its config would be saved, and make another model."
    assert Transformer.from_torch(torchs(), 30).config.n_heads == 3
    with pytest.raises(ValueError, match=says):
        Transformer.from_torch(torchs(**options), 30)


@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer], ids=lambda c: c.__name__)
def test_what_replaced_parts_do_is_not_lost_in_silence(kind):
    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    theirs = nn.TransformerEncoderLayer if kind is EncoderLayer else nn.TransformerDecoderLayer
    for name, of in (("linear1", lambda layer: layer), ("linear2", lambda layer: layer), ("out_proj", lambda layer: layer.self_attn)):
        layer = theirs(12, 3, 12)
        setattr(of(layer), name, Adapter(12, 12))
        with pytest.raises(TypeError, match=f"{name} is a Adapter; only nn.Linear can be converted"):
            kind.from_torch(layer)
    for name in ("w_in", "w_out"):
        layer = kind(12, 3, 12)
        setattr(layer.feed_forward, name, Adapter(12, 12))
        with pytest.raises(TypeError, match=f"{name} is a Adapter; only nn.Linear can be converted"):
            layer.to_torch()
    layer = theirs(12, 3, 12)
    layer.dropout2.p = 0.5
    with pytest.raises(ValueError, match=r"dropout has the shares \[0.1, 0.5"):
        kind.from_torch(layer)


@pytest.mark.usefixtures("no_shape_check")
def test_another_class_is_refused():
    wrong = nn.Linear(2, 2)
    for kind in (EncoderLayer, DecoderLayer, Encoder, Decoder):
        with pytest.raises(TypeError, match=f"module is a Linear; expected an nn.Transformer{kind.__name__}"):
            kind.from_torch(wrong)
    with pytest.raises(TypeError, match="expected an nn.Transformer"):
        Transformer.from_torch(wrong, 30)


@ORDERS
def test_the_step_is_the_one_of_its_order(norm_first):
    layer, x = moved(EncoderLayer(12, 3, 20, norm_first=norm_first)), normal(2, 4, 12)
    a, f, one, two = layer.attention, layer.feed_forward, layer.norm_attention, layer.norm_feed_forward
    if norm_first:
        y = x + a(one(x))
        right = y + f(two(y))
    else:
        y = one(x + a(x))
        right = two(y + f(y))
    close(layer(x), right, 1e-14)


def test_dropout_falls_on_what_each_sublayer_returns_and_nowhere_else():
    layer = moved(EncoderLayer(12, 3, 20, dropout=1.0, norm_first=True)).train()
    x = normal(2, 4, 12)
    assert torch.equal(layer(x), x)  # all that is written is dropped
    layer = moved(DecoderLayer(12, 3, 20, dropout=1.0)).train()
    right = x
    for norm in (layer.norm_attention, layer.norm_cross_attention, layer.norm_feed_forward):
        right = norm(right)
    close(layer(x, normal(2, 5, 12)), right)
    assert layer.attention.dropout == 0  # the paper drops no attention weights


def test_a_memory_of_another_width():
    layer = moved(DecoderLayer(12, 3, 20, d_memory=8))
    assert layer(normal(2, 4, 12), normal(2, 5, 8)).shape == (2, 4, 12)
    assert layer.cross_attention.w_k.weight.shape == (12, 8)


def test_options_reach_the_attentions():
    layer = DecoderLayer(16, 4, 20, n_kv_heads=2, bias=False, rotary=RotaryPositions(4), attend=fused_attention, eps=0.25)
    assert layer.attention.n_kv_heads == layer.cross_attention.n_kv_heads == 2
    assert layer.attention.rotary is not None and layer.cross_attention.rotary is None
    assert layer.attention.attend is layer.cross_attention.attend is fused_attention
    assert not [name for name, _ in layer.named_parameters() if "bias" in name]
    assert layer.norm_cross_attention.eps == 0.25


def test_the_target_never_sees_its_future_in_either_mode():
    layer, memory = moved(DecoderLayer(12, 3, 20)), normal(1, 6, 12, seed=1)
    for training in (True, False):
        x = normal(1, 5, 12).requires_grad_()
        output = layer.train(training)(x, memory)
        for i in range(5):
            (gradient,) = torch.autograd.grad(output[0, i] @ normal(12, seed=2), x, retain_graph=True)
            assert (gradient[0] != 0).any(-1).tolist() == [j <= i for j in range(5)]


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: FeedForward(0, 4), ValueError, "d_model=0"),
        (lambda: FeedForward(4, 2.5), TypeError, "d_ff"),
        (lambda: FeedForward(4, 4, activation="tanh"), ValueError, "activation='tanh' is not one of"),
        (lambda: EncoderLayer(10, 3, 4), ValueError, "d_model=10 is not divisible by n_heads=3"),
        (lambda: EncoderLayer(12, 3, 4, dropout=1.5), ValueError, "dropout=1.5; expected a number from 0 to 1"),
        (lambda: EncoderLayer(12, 3, 4, dropout="no"), TypeError, "dropout is a str"),
        (lambda: DecoderLayer(12, 3, 4, norm_first=1), TypeError, "norm_first is a int"),
        (lambda: EncoderLayer(12, 3, 4)(normal(2, 3, 11, dtype=torch.float32)), ValueError, r"x has shape \(2, 3, 11\)"),
        (lambda: EncoderLayer(12, 3, 4)(normal(2, 3, 12, dtype=torch.float32), positions=torch.arange(3)), ValueError, "no rotary"),
        (lambda: DecoderLayer(12, 3, 4)(normal(2, 3, 12, dtype=torch.float32), normal(1, 3, 12, dtype=torch.float32)), ValueError, "their batches must agree"),
        (lambda: DecoderLayer(12, 3, 4)(normal(2, 3, 12, dtype=torch.float32), normal(2, 5, 12, dtype=torch.float32), memory_mask=padding_mask([3, 2])), ValueError, r"\(2, 1, 1, 3\)"),
        (lambda: EncoderLayer(12, 3, 4)(normal(2, 3, 12, dtype=torch.float32), cache=[]), TypeError, "cache is a list; expected a KVCache"),
        (lambda: Encoder([EncoderLayer(12, 3, 4)])(normal(2, 3, 12, dtype=torch.float32), cache=[KVCache()] * 3), ValueError, "cache is 3 caches; expected the list of 1"),
        (lambda: Decoder([DecoderLayer(12, 3, 4)])(normal(2, 3, 12, dtype=torch.float32), normal(2, 3, 12, dtype=torch.float32), cache=KVCache()), ValueError, "cache is a KVCache; expected the list of 2"),
        (lambda: Transformer({"d_model": 3}), TypeError, "config is a dict; expected a TransformerConfig"),
        (lambda: TransformerConfig(0), ValueError, "vocab_size=0"),
        (lambda: TransformerConfig(9, n_layers=-1), ValueError, "n_layers=-1"),
        (lambda: TransformerConfig(9, positions="relative"), ValueError, "positions='relative' is not one of"),
        (lambda: TransformerConfig(9, tgt_vocab_size=8), ValueError, "share_embeddings=True needs one vocabulary"),
        (lambda: TransformerConfig(9, pad_id=9), ValueError, "pad_id=9 is beyond the vocabulary"),
        (lambda: TransformerConfig(9, tie_output=None), TypeError, "tie_output is a NoneType"),
        (lambda: TransformerConfig.tiny(9, d_modle=3), TypeError, "d_modle"),
        (lambda: Transformer(TransformerConfig.tiny(9))(ids(2, 3).float(), ids(2, 3)), TypeError, "src is torch.float32; expected a tensor of token ids"),
        (lambda: Transformer(TransformerConfig.tiny(9))(torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)), ValueError, r"src has shape \(3,\); expected \(batch, length\)"),
        (lambda: Transformer(TransformerConfig.tiny(9))(torch.ones(1, 3, dtype=torch.int64), torch.full((1, 3), 9)), ValueError, "tgt has the id 9; the vocabulary has 0 to 8"),
        (lambda: Transformer(TransformerConfig.tiny(9))(torch.full((1, 3), -1), torch.ones(1, 3, dtype=torch.int64)), ValueError, "src has the id -1"),
        (lambda: Transformer(TransformerConfig.tiny(9, positions="learned", max_len=4))(torch.ones(1, 5, dtype=torch.int64), torch.ones(1, 3, dtype=torch.int64)), ValueError, "max_len=4"),
        (lambda: Transformer(TransformerConfig.tiny(9, d_model=18, n_heads=6, positions="rotary")), ValueError, "d_rotary=3"),
        (lambda: Transformer(TransformerConfig.tiny(9)).decode(torch.ones(2, 3, dtype=torch.int64), normal(3, 4, 128, dtype=torch.float32)), ValueError, "batches must agree"),
        (lambda: FeedForward(4, 4, bias="no"), TypeError, "bias is a str"),
        (lambda: FeedForward(4, 4)(normal(2, 3)), ValueError, r"x has shape \(2, 3\); expected \(..., 4\)"),
        (lambda: FeedForward(4, 4)(normal(2, 4)), TypeError, "x is torch.float64 but the module is torch.float32"),
        (lambda: EncoderLayer(12, 3, 4, norm_first=True)(normal(2, 3, 11)), ValueError, r"x has shape \(2, 3, 11\)"),
        (lambda: EncoderLayer(12, 3, 4, norm_first=True)(normal(2, 3, 12)), TypeError, "x is torch.float64 but the module"),
        (lambda: DecoderLayer(12, 3, 4, norm_first=True)(normal(2, 3, 11), normal(2, 3, 12)), ValueError, r"x has shape \(2, 3, 11\)"),
        (lambda: EncoderLayer(12, 3, 4, eps=-1.0), ValueError, "eps=-1.0; expected a finite number of at least 0"),
        (lambda: DecoderLayer(12, 3, 4, eps="no"), TypeError, "eps is a str; expected a number"),
        (lambda: Encoder([], alibi="no"), TypeError, "alibi is a str; expected True or False"),
        (lambda: Decoder([], alibi=1), TypeError, "alibi is a int; expected True or False"),
        (lambda: Transformer(TransformerConfig.tiny(9)).unembed(normal(2, 7)), ValueError, r"h has shape \(2, 7\); expected \(..., 128\)"),
        (lambda: TransformerConfig(9, eps=float("nan")), ValueError, "eps=nan; expected a finite number of at least 0"),
        (lambda: TransformerConfig(9, dropout=2.0), ValueError, "dropout=2.0; expected a number from 0 to 1"),
        (lambda: TransformerConfig(9, dropout="no"), TypeError, "dropout is a str"),
        (lambda: TransformerConfig(9, final_norm="no"), TypeError, "final_norm is a str; expected True or False"),
        (lambda: TransformerConfig(9, activation="tanh"), ValueError, "activation='tanh' is not one of"),
        (lambda: TransformerConfig(9, n_heads=3), ValueError, "d_model=512 is not divisible by n_heads=3"),
        (lambda: TransformerConfig(9, n_kv_heads=3), ValueError, "n_heads=8 is not divisible by n_kv_heads=3"),
        (lambda: TransformerConfig(9, d_model=24, positions="rotary"), ValueError, "d_rotary=3"),
    ],
    ids=range(48),
)
def test_what_does_not_fit_is_refused_by_name(make, error, says):
    with pytest.raises(error, match=says):
        make()


# --- stacks ---------------------------------------------------------------------------------------------------------


def test_layers_start_different_share_nothing_and_follow_the_seed():
    first, again, other = (model(seed=s, n_layers=3) for s in (0, 0, 1))
    for stack in (first.encoder, first.decoder):
        for name, p in stack.layers[0].named_parameters():
            if p.ndim == 2:
                for layer in stack.layers[1:]:
                    q = dict(layer.named_parameters())[name]
                    assert not torch.equal(p, q) and p.data_ptr() != q.data_ptr()
    for p, q, r in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) and not torch.equal(p, r)


def test_a_pre_norm_stack_ends_in_a_norm_and_a_post_norm_stack_in_its_layer():
    for norm_first in (False, True):
        m = Transformer(TransformerConfig.tiny(30, norm_first=norm_first, n_layers=6, dropout=0.0)).eval()
        assert (m.encoder.norm is not None) == (m.decoder.norm is not None) == norm_first
        memory = m.encode(ids(2, 7))
        hidden = m.decode_hidden(ids(2, 5), memory)
        for x in (memory, hidden):
            close(x.mean(-1), torch.zeros_like(x.mean(-1)), 1e-5)
            close(x.std(-1, correction=0), torch.ones_like(x.mean(-1)), 1e-3)
    m = Transformer(TransformerConfig.tiny(30, norm_first=True, final_norm=False))
    assert m.encoder.norm is None and m.decoder.norm is None


def test_a_causal_encoder_reads_only_backwards():
    stack = moved(Encoder([EncoderLayer(12, 3, 20) for _ in range(2)]))
    x = normal(1, 6, 12)
    close(stack(x, causal=True)[:, :4], stack(x[:, :4], causal=True))
    assert (stack(x)[:, :4] - stack(x[:, :4])).abs().max() > 1e-3


def test_stacks_travel_to_torch_and_back():
    encoder = moved(Encoder([EncoderLayer(12, 3, 20) for _ in range(2)], nn.LayerNorm(12))).eval()
    decoder = moved(Decoder([DecoderLayer(12, 3, 20) for _ in range(2)])).eval()
    x, memory = normal(2, 4, 12), normal(2, 6, 12, seed=1)
    theirs = encoder.to_torch()
    close(theirs(x), encoder(x))
    close(Encoder.from_torch(theirs)(x), encoder(x))
    theirs = decoder.to_torch()
    close(theirs(x, memory, tgt_mask=~causal_mask(4)), decoder(x, memory))
    assert theirs.norm is None and not theirs.training
    close(Decoder.from_torch(theirs)(x, memory), decoder(x, memory))


# --- the whole model ------------------------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("training", [True, False])
def test_the_whole_is_torchs_both_ways_with_padding(norm_first, activation, training):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it takes no fast path
        theirs = moved(nn.Transformer(12, 3, 2, 3, 20, 0.0, activation, batch_first=True, norm_first=norm_first)).train(training)
    ours = Transformer.from_torch(theirs, vocab_size=30)
    assert ours.training == training and ours.config.final_norm and ours.config.n_decoder_layers == 3
    src, tgt = padded()
    real = (tgt != 0)[..., None].double()

    def through(module, x, y):
        return module(
            x, y, tgt_mask=~causal_mask(5), src_key_padding_mask=src == 0,
            memory_key_padding_mask=src == 0, tgt_key_padding_mask=tgt == 0,
        )

    results = []
    for module in (theirs, ours.to_torch()):
        x, _ = ours.embed(src, source=True)
        y, _ = ours.embed(tgt, source=False)
        logits = ours.unembed(through(module, x, y)) * real
        results.append((logits, *torch.autograd.grad(logits.pow(3).mean(), ours.tgt_embedding.weight)))
    logits = ours(src, tgt) * real
    for other in results:
        close(logits, other[0])
        close(torch.autograd.grad(logits.pow(3).mean(), ours.tgt_embedding.weight, retain_graph=True)[0], other[1])


def test_ours_to_torch_and_back():
    ours = model(n_layers=2, n_decoder_layers=1, norm_first=True)
    back = Transformer.from_torch(ours.to_torch(), 30)
    back.tgt_embedding.load_state_dict(ours.tgt_embedding.state_dict())
    src, tgt = padded()
    close(back(src, tgt), ours(src, tgt))
    assert back.config == dataclasses.replace(ours.config, final_norm=True)


@KINDS
@ORDERS
def test_padding_changes_nothing_on_either_side(positions, norm_first):
    m = model(positions=positions, norm_first=norm_first)
    src, tgt = padded()
    together = m(src, tgt)
    close(together[0, :3], m(src[:1, :7], tgt[:1, :3])[0])
    close(together[1], m(src[1:, :4], tgt[1:])[0])
    wider = m(nn.functional.pad(src, (0, 5)), nn.functional.pad(tgt, (0, 2)))
    close(wider[1, :5], together[1])
    # Padding on the left: the same sentence, counted from its first real token.
    left_src, left_tgt = nn.functional.pad(src[1:, :4], (3, 0)), nn.functional.pad(tgt[1:], (2, 0))
    close(m(left_src, left_tgt)[0, 2:], together[1])
    assert m(torch.zeros_like(src), tgt).isfinite().all()


def test_without_a_padding_id_nothing_is_hidden():
    m = model(pad_id=None)
    src, tgt = padded()
    assert m.padding(src) is None
    assert (m(src, tgt)[1] - m(src[1:, :4], tgt[1:])[0]).abs().max() > 1e-3
    close(m(src, tgt, padding_mask([7, 4]), padding_mask([3, 5]))[1], m(src[1:, :4], tgt[1:])[0])


def test_masks_that_are_given_take_the_place_of_the_padding():
    m = model()
    src, tgt = ids(2, 7), ids(2, 5)
    keep = padding_mask([7, 4])
    close(m(src, tgt, keep)[1], m(src[1:, :4], tgt[1:])[0])
    close(m.decode(tgt, m.encode(src, keep), keep), m(src, tgt, keep))
    close(m.unembed(m.decode_hidden(tgt, m.encode(src))), m(src, tgt))


def test_the_source_mask_goes_to_the_memory_and_the_targets_does_not():
    m = model()
    for lengths in (((5, 2), (1, 3)), ((4, 2), (2, 4))):
        src, tgt = padded(*lengths)
        memory = m.encode(src)
        other = memory.clone()
        other[src == 0] = 77.0
        assert torch.equal(m.decode(tgt, other, m.padding(src)), m.decode(tgt, memory, m.padding(src)))
        assert m(src, tgt).isfinite().all()


@pytest.mark.parametrize("n_t", [5, 3], ids=["equal lengths", "unequal lengths"])
def test_a_source_mask_with_a_row_for_each_query_is_refused_and_one_row_is_not(n_t):
    m, src, tgt = model(), ids(2, 5), ids(2, n_t)
    full = torch.ones(5, 5, dtype=torch.bool).tril()
    for mask in (full, full[None, None], full[None, None].double(), full.expand(2, 2, 5, 5)):
        with pytest.raises(ValueError, match=r"src_mask has shape \(.*5, 5\); expected one row for all queries, .* call encode and decode"):
            m(src, tgt, mask)
    row = torch.tensor([True, True, True, False, False])
    for mask in (row, row[None], row.expand(2, 1, 1, 5), torch.zeros(5).double().masked_fill(~row, -torch.inf)[None]):
        close(m(src, tgt, mask), m(src[:, :3], tgt))
    # By hand, each part has its own mask: the encoder looks back only, the decoder sees all.
    memory = m.encode(src, full)
    close(memory[:, :1], m.encode(src[:, :1]))
    assert (m.decode(tgt, memory) - m(src, tgt)).abs().max() > 1e-3


def test_scaled_embeddings_and_logits_without_a_factor():
    m, plain = model(), model(scale_embeddings=False)
    plain.load_state_dict(m.state_dict())
    x, _ = m.embed(ids(2, 5), source=True)
    y, _ = plain.embed(ids(2, 5), source=True)
    close(x - y, 3 * m.tgt_embedding(ids(2, 5)))  # √16 - 1
    h = normal(2, 3, 16)
    close(m.unembed(h), h @ m.tgt_embedding.weight.T)
    close(plain.unembed(h), m.unembed(h))
    untied = model(tie_output=False)
    close(untied.unembed(h), h @ untied.output.weight.T)


def test_tied_means_one_parameter_wherever_it_goes():
    m = model(eval=False)
    assert [n for n, _ in m.named_parameters() if "embedding" in n or "output" in n] == ["tgt_embedding.weight"]
    assert [n for n in m.state_dict() if "embedding" in n or n.startswith("output")] == ["tgt_embedding.weight"]
    src, tgt = padded()

    def check(other):
        before, logits = other.embed(src, source=True)[0], other(src, tgt)
        with torch.no_grad():
            other.tgt_embedding.weight.add_(0.5)
        assert not torch.equal(other.embed(src, source=True)[0], before) and not torch.equal(other(src, tgt), logits)
        h = normal(2, 16).to(other.tgt_embedding.weight)
        torch.testing.assert_close(other.unembed(h), h @ other.tgt_embedding.weight.T)

    state = {name: p.clone() for name, p in m.state_dict().items()}
    buffer = io.BytesIO()
    torch.save(m, buffer)
    buffer.seek(0)
    fresh, assigned = model(seed=3, eval=False), model(seed=4, eval=False)
    fresh.load_state_dict(state)
    assigned.load_state_dict({name: p.clone() for name, p in state.items()}, assign=True)
    for other in (fresh, assigned, copy.deepcopy(m), pickle.loads(pickle.dumps(m)), torch.load(buffer, weights_only=False)):
        close(other(src, tgt), m(src, tgt))
        check(other)
    check(copy.deepcopy(m).to(torch.float32))
    check(copy.deepcopy(m).to(torch.float32).to(torch.float64))


def test_the_gradient_of_the_tied_parameter_is_the_sum_of_its_three_uses():
    m = model(eval=False)
    three = model(share_embeddings=False, tie_output=False, eval=False)
    state = m.state_dict()
    state["src_embedding.weight"] = state["output.weight"] = state["tgt_embedding.weight"]
    three.load_state_dict(state)
    src, tgt = padded()
    for one in (m, three):
        nn.functional.cross_entropy(one(src, tgt).flatten(0, 1), tgt.flatten()).backward()
    close(m.tgt_embedding.weight.grad, sum(part.weight.grad for part in (three.src_embedding, three.tgt_embedding, three.output)))


@pytest.mark.parametrize(("share", "tie"), [(True, True), (True, False), (False, True), (False, False)])
def test_every_way_of_sharing(share, tie):
    m = model(share_embeddings=share, tie_output=tie, **({} if share else {"vocab": 40, "tgt_vocab_size": 30}))
    src, tgt = padded()
    assert m(src, tgt).shape == (2, 5, 30)
    extra = 0 if share else 40 * 16
    extra += 0 if tie else 30 * 16
    base = model()
    assert sum(p.numel() for p in m.parameters()) - sum(p.numel() for p in base.parameters()) == extra


def test_two_vocabularies_check_their_own_ids():
    m = model(vocab=40, tgt_vocab_size=30, share_embeddings=False)
    m(torch.full((1, 2), 39), torch.full((1, 2), 29))
    with pytest.raises(ValueError, match="tgt has the id 35; the vocabulary has 0 to 29"):
        m(torch.full((1, 2), 39), torch.full((1, 2), 35))


def test_int32_ids_and_one_token_and_no_token():
    m = model()
    src, tgt = padded()
    close(m(src.int(), tgt.int()), m(src, tgt))
    assert m(src[:, :1], tgt[:, :1]).shape == (2, 1, 30)
    assert m(src[:0], tgt[:0]).shape == (0, 5, 30)


def test_presets_and_parameter_counts():
    with torch.device("meta"):
        count = {
            name: sum(p.numel() for p in Transformer(getattr(TransformerConfig, name)(37_000)).parameters())
            for name in ("base", "big")
        }
    assert count == {"base": 63_082_496, "big": 214_245_376}
    assert TransformerConfig.base(9) == TransformerConfig(9)
    big = TransformerConfig.big(9, dropout=0.2)
    assert (big.d_model, big.n_heads, big.d_ff, big.n_layers, big.dropout) == (1024, 16, 4096, 6, 0.2)
    tiny = TransformerConfig.tiny(9, n_layers=1)
    assert tiny.n_layers == 1 and tiny.d_model == 128
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny.d_model = 3


def test_options_of_the_config_reach_the_layers():
    m = model(n_heads=4, n_kv_heads=2, activation="swiglu", bias=False, norm_first=True, eps=1e-3, n_layers=1, n_decoder_layers=2, dropout=0.3)
    assert len(m.encoder.layers) == 1 and len(m.decoder.layers) == 2
    for layer in (*m.encoder.layers, *m.decoder.layers):
        assert layer.attention.n_kv_heads == 2 and layer.feed_forward.activation == "swiglu"
        assert layer.norm_first and layer.norm_attention.eps == 1e-3 and layer.dropout.p == 0.3
    assert not [name for name, _ in m.named_parameters() if "bias" in name]
    assert m.dropout.p == 0.3
    assert model(n_layers=0)(*padded()).shape == (2, 5, 30)


def test_dropout_draws_the_same_for_the_same_seed_and_eval_draws_nothing():
    m, (src, tgt) = model(dropout=0.3, eval=False), padded()
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        logits = m(src, tgt)
        results.append((logits, *torch.autograd.grad(logits.sum(), list(m.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert not torch.equal(m(src, tgt), m(src, tgt))
    m.eval()
    state = torch.get_rng_state()
    assert torch.equal(m(src, tgt), m(src, tgt)) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@KINDS
def test_every_dtype(positions, dtype):
    m, (src, tgt) = model(positions=positions, norm_first=True), padded()
    logits = copy.deepcopy(m).to(dtype)(src, tgt)
    assert logits.dtype == dtype
    scale = m(src, tgt).abs().max().item()
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(logits.double(), m(src, tgt), atol=tolerance * scale, rtol=0)


def test_autocast():
    m, (src, tgt) = model().float(), padded()
    with torch.autocast("cpu", torch.bfloat16):
        logits = m(src, tgt)
        cache = m.new_cache()
        memory = m.encode(src)
        for t in range(5):
            m.decode(tgt[:, t : t + 1], memory, m.padding(src), cache=cache)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits.float(), m(src, tgt), atol=0.1 * m(src, tgt).abs().max().item(), rtol=0)


@KINDS
def test_every_kind_is_copied_pickled_and_saved(positions):
    m, (src, tgt) = model(positions=positions, activation="swiglu"), padded()
    right = m(src, tgt)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(src, tgt), right)
        with torch.no_grad():
            next(other.encoder.parameters()).add_(1)
        assert torch.equal(m(src, tgt), right)
    assert pickle.loads(pickle.dumps(m.config)) == m.config
    if positions != "learned":
        assert not [name for name in m.state_dict() if "positions" in name]


# --- the cache ------------------------------------------------------------------------------------------------------

SPLITS = [[9], [1] * 9, [4, 1, 4], [1, 8]]


def in_pieces(m, tgt, memory, mask, sizes, **options):
    cache, out = m.new_cache(), []
    for piece in tgt.split(sizes, dim=1):
        out.append(m.decode(piece, memory, mask, cache=cache, **options))
    return torch.cat(out, dim=1), cache


@KINDS
@ORDERS
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_cached_is_uncached_in_any_split(positions, norm_first, sizes):
    m = model(positions=positions, norm_first=norm_first, n_heads=4, n_kv_heads=2)
    src, tgt = padded((7, 4), (9, 9))
    memory = m.encode(src)
    out, cache = in_pieces(m, tgt, memory, m.padding(src), sizes)
    close(out, m(src, tgt))
    assert len(cache) == 2 * len(m.decoder.layers)
    assert [c.length for c in cache] == [9, 7] * len(m.decoder.layers)


@KINDS
def test_gradients_flow_through_the_cache(positions):
    m = model(positions=positions, eval=False)
    src, tgt = padded((7, 4), (9, 9))
    gradients = []
    for cached in (False, True):
        m.zero_grad()
        out = in_pieces(m, tgt, m.encode(src), m.padding(src), [3, 1, 5])[0] if cached else m(src, tgt)
        out.pow(3).mean().backward()
        gradients.append([p.grad.clone() for p in m.parameters()])
    for a, b in zip(*gradients, strict=True):
        close(a, b)


@KINDS
@pytest.mark.parametrize("sizes", [[1] * 6, [2, 4]], ids=str)
def test_a_target_padded_on_the_left_is_written_with_its_own_positions_and_mask(positions, sizes):
    m = model(positions=positions)
    src, short = padded((7, 4), (6, 6))
    short[1, :2] = 0
    short[1, 2:] = ids(4, seed=8)
    right = m(src[1:, :4], short[1:, 2:])[0]
    keep = short != 0
    where = (keep.cumsum(-1) - 1).clamp(min=0)
    memory, cache, out, start = m.encode(src), m.new_cache(), [], 0
    for size in sizes:
        now = slice(start, start + size)
        options = {} if positions in ("alibi", None) else {"positions": where[:, now]}
        out.append(m.decode(short[:, now], memory, m.padding(src), keep[:, None, None, : start + size], cache=cache, **options))
        start += size
    close(torch.cat(out, 1)[1, 2:], right)


def test_the_memory_is_projected_once():
    m, calls = model(), []
    m.decoder.layers[0].cross_attention.w_k.register_forward_hook(lambda *_: calls.append(1))
    src, tgt = padded((7, 4), (9, 9))
    in_pieces(m, tgt, m.encode(src), m.padding(src), [1] * 9)
    assert calls == [1]


def test_a_causal_encoder_takes_a_cache_and_one_that_reads_both_ways_may_not_use_it():
    stack, x = moved(Encoder([EncoderLayer(12, 3, 20, norm_first=True) for _ in range(2)], nn.LayerNorm(12))), normal(2, 6, 12)
    for causal in (True, False):
        cache = stack.new_cache()
        out = torch.cat([stack(piece, causal=causal, cache=cache) for piece in x.split([2, 4], 1)], 1)
        assert out.allclose(stack(x, causal=causal), atol=1e-12) == causal


def test_crop_reorder_and_reset():
    cache, k, v = KVCache(), normal(3, 2, 5, 4), normal(3, 2, 5, 6, seed=1)
    assert cache.length == 0 and repr(cache) == "KVCache(length=0)"
    got = cache.update(k, v)
    assert torch.equal(got[0], k) and torch.equal(got[1], v) and cache.length == 5
    before = k.clone()
    cache.update(k[:, :, :2], v[:, :, :2])
    assert cache.length == 7 and torch.equal(k, before)
    cache.crop(7)
    cache.crop(5)
    assert torch.equal(cache.read()[0], k) and torch.equal(cache.read()[1], v)
    cache.reorder(torch.tensor([2, 0, 0, 1]))
    assert torch.equal(cache.read()[0], k[[2, 0, 0, 1]]) and cache.length == 5
    cache.crop(0)
    assert cache.length == 0
    cache.reorder(torch.tensor([1, 0]))  # nothing to reorder
    cache.update(k[:1], v[:1])  # another batch, after a reset
    cache.reset()
    assert cache.length == 0
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.read()


def test_what_was_cropped_is_written_anew():
    m = model()
    src, tgt = padded((7, 4), (9, 9))
    memory = m.encode(src)
    other = ids(2, 9, seed=9)
    _, cache = in_pieces(m, torch.cat([tgt[:, :4], other[:, 4:]], 1), memory, m.padding(src), [9])
    for own in cache[::2]:
        own.crop(4)
    close(m.decode(tgt[:, 4:], memory, m.padding(src), cache=cache), m(src, tgt)[:, 4:])


def test_reordered_beams_go_on_from_their_own_past():
    m = model()
    src, tgt = padded((7, 4), (9, 9))
    memory, keep = m.encode(src), m.padding(src)
    _, cache = in_pieces(m, tgt[:, :5], memory, keep, [5])
    order = torch.tensor([1, 0, 1])
    for c in cache:
        c.reorder(order)
    last = ids(3, 1, seed=5)
    out = m.decode(last, memory[order], keep[order], cache=cache)
    close(out, m(src[order], torch.cat([tgt[order, :5], last], 1))[:, -1:])


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda c: c.update(normal(3, 2, 1, 4), normal(2, 2, 1, 6)), ValueError, r"k has shape \(3, 2, 1, 4\) but v \(2, 2, 1, 6\)"),
        (lambda c: c.update(normal(2, 2, 1, 4), normal(2, 2, 1, 6)), ValueError, r"k has shape \(2, 2, 1, 4\) but the cache holds \(3, 2, 5, 4\).*reset"),
        (lambda c: c.update(normal(3, 2, 1, 4), normal(3, 2, 1, 7)), ValueError, "v has shape"),
        (lambda c: c.update(normal(3, 2, 1, 4).float(), normal(3, 2, 1, 6).float()), ValueError, "k is torch.float32 on cpu but the cache holds torch.float64"),
        (lambda c: c.crop(6), ValueError, "n=6 is more than the 5 positions"),
        (lambda c: c.crop(-1), ValueError, "n=-1"),
        (lambda c: c.crop(1.5), TypeError, "n is"),
        (lambda c: c.update([1], [2]), TypeError, "k is a list; expected a tensor"),
        (lambda c: c.update(normal(3, 1, 4), normal(3, 1, 6)), ValueError, r"k has shape \(3, 1, 4\); expected \(batch, h_kv, n, d\)"),
        (lambda c: KVCache().update(normal(3, 2, 1, 4), normal(3, 2, 1, 4).half()), ValueError, "k is torch.float64 on cpu but v torch.float16"),
        (lambda c: c.reorder(torch.tensor([0, 3])), ValueError, "index has 3; the cache holds samples 0 to 2"),
        (lambda c: c.reorder(torch.tensor([-1])), ValueError, "index has -1"),
        (lambda c: c.reorder(torch.tensor([True, False])), TypeError, "index is torch.bool; expected a tensor of whole numbers"),
        (lambda c: c.reorder(torch.tensor(1)), ValueError, r"index has shape \(\); expected \(new_batch,\)"),
        (lambda c: c.reorder([0, 1]), TypeError, "index is list"),
        (lambda c: KVCache().reorder("all"), TypeError, "index is str"),
    ],
    ids=range(16),
)
def test_a_cache_refuses_what_does_not_fit(call, error, says):
    cache = KVCache()
    cache.update(normal(3, 2, 5, 4), normal(3, 2, 5, 6))
    with pytest.raises(error, match=says):
        call(cache)
    assert cache.length == 5


def test_a_cache_of_another_memory_is_refused():
    m, (src, tgt) = model(), padded()
    cache = m.new_cache()
    m.decode(tgt, m.encode(src), m.padding(src), cache=cache)
    with pytest.raises(ValueError, match="cache holds 7 positions but context has 4; it belongs to another context"):
        m.decode(tgt[:, :1], m.encode(src[:, :4]), cache=cache)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("fails", ["mask of the memory", "mask of the target", "memory", "interrupted"])
@pytest.mark.parametrize("first", [True, False], ids=["empty", "begun"])
def test_a_call_that_fails_leaves_the_caches_as_they_were(fails, first):
    m, (src, tgt) = model(), padded((7, 4), (5, 5))
    memory, keep, cache = m.encode(src), m.padding(src), m.new_cache()
    past = 0 if first else 2
    if past:
        m.decode(tgt[:, :past], memory, keep, cache=cache)
    before = [c.length for c in cache]
    rest = tgt[:, past:]
    if fails == "mask of the memory":
        with pytest.raises(ValueError, match="mask has shape"):
            m.decode(rest, memory, torch.ones(2, 1, 1, 3).bool(), cache=cache)
    elif fails == "mask of the target":
        with pytest.raises(ValueError, match="mask has shape"):
            m.decode(rest, memory, keep, torch.ones(2, 1, 1, 9).bool(), cache=cache)
    elif fails == "memory":
        with pytest.raises(ValueError):
            m.decode(rest, memory[:1], cache=cache)
    else:
        def stop(*_):
            raise KeyboardInterrupt

        hook = m.decoder.layers[1].feed_forward.register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            m.decode(rest, memory, keep, cache=cache)
        hook.remove()
    assert [c.length for c in cache] == before
    close(m.decode(rest, memory, keep, cache=cache), m.decode(tgt, memory, keep)[:, past:])


@pytest.mark.usefixtures("no_shape_check")
def test_caches_that_do_not_belong_together_are_refused():
    m, (src, tgt) = model(), padded()
    memory, cache = m.encode(src), m.new_cache()
    m.decode(tgt, memory, cache=cache)
    cache[0].crop(2)  # and not the other layer's
    for place, wanted in ((0, "for the positions, .* hold 2 and 5"), (1, "for the memory, .* hold 0 and 7")):
        with pytest.raises(ValueError, match=wanted):
            m.decode(tgt[:, :1], memory, cache=cache)
        cache[2].crop(2)
        cache[1].reset()
    encoder, x = moved(Encoder([EncoderLayer(12, 3, 20) for _ in range(2)])), normal(2, 3, 12)
    with pytest.raises(ValueError, match="cache has one KVCache twice"):
        encoder(x, causal=True, cache=[KVCache()] * 2)
    with pytest.raises(TypeError, match="cache has a NoneType; expected KVCaches"):
        m.decode(tgt, memory, cache=[None] * 4)
    with pytest.raises(ValueError, match="cache is a KVCache; expected the list of 4"):
        m.decode(tgt, memory, cache=KVCache())
    with pytest.raises(TypeError, match="tgt is list; expected a tensor of token ids"):
        m.decode([[1, 2]], memory, cache=m.new_cache())


@KINDS
def test_a_decoder_without_layers_never_loses_count(positions):
    m, (src, tgt) = model(positions=positions, n_decoder_layers=0), padded((7, 4), (5, 5))
    memory, whole, added = m.encode(src), m.decode(tgt, m.encode(src)), positions in ("sinusoidal", "learned")
    if added:
        with pytest.raises(ValueError, match="no cache that could count what came before; give positions"):
            m.decode(tgt, memory, cache=m.new_cache())
    for t in range(5):
        at = torch.tensor([t]) if added else None
        close(m.decode(tgt[:, t : t + 1], memory, cache=m.new_cache(), positions=at), whole[:, t : t + 1])


# --- attention's own cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("turned", [False, True])
def test_attention_with_a_cache_is_attention_without(fused, n_kv_heads, turned):
    m = moved(MultiHeadAttention(16, 4, n_kv_heads=n_kv_heads, fused=fused, rotary=RotaryPositions(4) if turned else None))
    x = normal(2, 9, 16)
    for sizes in SPLITS:
        cache = KVCache()
        out = torch.cat([m(piece, causal=True, cache=cache) for piece in x.split(sizes, 1)], 1)
        close(out, m(x, causal=True))
        assert cache.read()[0].shape == (2, n_kv_heads, 9, 4)
    cache = KVCache()
    m(x[:, :6], causal=True, cache=cache)
    output, weights = m(x[:, 6:], causal=True, cache=cache, return_weights=True)
    close(weights, m(x, causal=True, return_weights=True)[1][:, :, 6:])


@pytest.mark.parametrize("fused", [False, True])
def test_attention_keeps_the_keys_and_values_of_a_context(fused):
    m, x, context = moved(MultiHeadAttention(16, 4, fused=fused)), normal(2, 5, 16), normal(2, 7, 16, seed=1)
    cache = KVCache()
    first = m(x[:, :2], context, cache=cache)
    rest = m(x[:, 2:], context, cache=cache)
    close(torch.cat([first, rest], 1), m(x, context))
    assert cache.length == 7


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("kind", [MultiHeadAttention, EncoderLayer], ids=lambda c: c.__name__)
def test_a_refused_mask_leaves_the_cache_of_one_layer_as_it_was(kind):
    m, x, cache = moved(kind(12, 3, *[20] * (kind is EncoderLayer))), normal(2, 5, 12), KVCache()
    m(x[:, :2], causal=True, cache=cache)
    with pytest.raises(ValueError, match="mask has shape"):
        m(x[:, 2:], mask=torch.ones(2, 1, 1, 9).bool(), causal=True, cache=cache)
    assert cache.length == 2
    close(m(x[:, 2:], causal=True, cache=cache), m(x, causal=True)[:, 2:])


def test_attention_with_a_cache_and_one_sample_without_a_batch_axis():
    m, x, cache = moved(MultiHeadAttention(16, 4)), normal(5, 16), KVCache()
    out = torch.cat([m(piece, causal=True, cache=cache) for piece in x.split([2, 3])])
    close(out, m(x, causal=True))


# --- compile and export ---------------------------------------------------------------------------------------------

LENGTHS = [(5, 7), (9, 4), (3, 8)]
# Each takes another way through the code with two lengths; sinusoids are added as learned ones are. Decoders alone, of all kinds, are
# compiled and exported in test_reported_faults_models.py.
SOME_KINDS = pytest.mark.parametrize("positions", ("learned", "rotary", "alibi"))


@pytest.mark.slow
@SOME_KINDS
def test_a_model_compiles_without_graph_breaks(positions, compiled):
    m = model(positions=positions, norm_first=True, activation="swiglu", n_layers=1)
    f = compiled(m)
    for n_t, n_s in LENGTHS:
        src, tgt = padded((n_s, 2), (n_t, 3))
        close(f(src, tgt), m(src, tgt))


@pytest.mark.slow
@ORDERS
def test_encoder_and_decoder_compile_without_graph_breaks(norm_first, compiled):
    encoder = moved(Encoder([EncoderLayer(12, 3, 20, norm_first=norm_first)], nn.LayerNorm(12)))
    f = compiled(encoder)
    for n, _ in LENGTHS:
        close(f(normal(2, n, 12), causal=True), encoder(normal(2, n, 12), causal=True))


@pytest.mark.slow
def test_a_decoder_compiles_without_graph_breaks(compiled):
    decoder = moved(Decoder([DecoderLayer(12, 3, 20)]))
    f = compiled(decoder)
    for n, n_s in LENGTHS:
        x, memory = normal(2, n, 12), normal(2, n_s, 12, seed=1)
        close(f(x, memory), decoder(x, memory))


@pytest.mark.usefixtures("no_shape_check")
def test_a_decoder_with_a_cache_compiles_without_graph_breaks():
    decoder, x, memory = moved(Decoder([DecoderLayer(12, 3, 20)])), normal(2, 2, 12), normal(2, 5, 12, seed=1)
    f, cache = torch.compile(lambda x, cache: decoder(x, memory, cache=cache), backend="eager", fullgraph=True), decoder.new_cache()
    close(torch.cat([f(x[:, :1], cache), f(x[:, 1:], cache)], 1), decoder(x, memory))
    assert [c.length for c in cache] == [2, 5]


@EXPORT
@SOME_KINDS
@pytest.mark.usefixtures("no_shape_check")
def test_an_exported_model_takes_other_batches_and_lengths(positions):
    m = model(positions=positions, n_layers=1)
    batch, n_s, n_t = (torch.export.Dim(name, min=1, max=500) for name in ("batch", "n_s", "n_t"))
    program = torch.export.export(
        m, padded((5, 4), (6, 3)), dynamic_shapes=({0: batch, 1: n_s}, {0: batch, 1: n_t}), strict=False
    ).module()
    for src_lengths, tgt_lengths in (((5,), (6,)), ((9, 4, 2), (3, 1, 2)), ((1, 1), (2, 2)), ((4, 3), (1, 1))):
        src, tgt = padded(src_lengths, tgt_lengths)
        close(program(src, tgt), m(src, tgt))


@EXPORT
@pytest.mark.usefixtures("no_shape_check")
def test_exported_stacks_take_other_batches_and_lengths():
    batch, n, n_s = (torch.export.Dim(name, min=1, max=500) for name in ("batch", "n", "n_s"))
    encoder, decoder = moved(Encoder([EncoderLayer(12, 3, 20)])), moved(Decoder([DecoderLayer(12, 3, 20)]))
    one = torch.export.export(encoder, (normal(2, 5, 12),), dynamic_shapes=({0: batch, 1: n},), strict=False).module()
    two = torch.export.export(decoder, (normal(2, 5, 12), normal(2, 7, 12)), dynamic_shapes=({0: batch, 1: n}, {0: batch, 1: n_s}), strict=False).module()
    for b, length, other in ((1, 5, 7), (3, 9, 2), (2, 1, 3)):
        x, memory = normal(b, length, 12), normal(b, other, 12, seed=1)
        close(one(x), encoder(x))
        close(two(x, memory), decoder(x, memory))


# --- as users see it ------------------------------------------------------------------------------------------------


def test_every_argument_of_the_public_classes_is_explained():
    import attention_course.transformer as module

    source = inspect.getsource(module)
    for kind in (FeedForward, EncoderLayer, DecoderLayer, Encoder, Decoder, Transformer, TransformerConfig, KVCache):
        assert kind.__doc__ and kind.__module__ == "attention_course.transformer"
    assert "view(" not in source and "print(" not in source


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "alibi", None])
def test_stacks_without_layers_hand_on_what_they_get(positions):
    model = Transformer(TransformerConfig.tiny(9, n_layers=0, positions=positions))
    ids = torch.ones(1, 3, dtype=torch.long)
    assert model(ids, ids).shape == (1, 3, 9)


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@KINDS
def test_gradients_of_each_sample_with_vmap(positions):
    "Ids, positions and masks are not looked at where there is nothing to look at."
    m = model(positions=positions)
    weights, (src, tgt) = dict(m.named_parameters()), padded((7, 4), (5, 3))
    loss = lambda weights, *sides: torch.func.functional_call(m, weights, tuple(ids[None] for ids in sides)).square().mean()
    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, src, tgt)
    for i in range(len(src)):
        for found, expected in zip(mapped.values(), torch.autograd.grad(loss(weights, src[i], tgt[i]), list(weights.values())), strict=True):
            close(found[i], expected)
