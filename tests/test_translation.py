"""Chapter 07: where a decoder looks. `cross_attention_maps` against attention computed by hand, and what it must leave alone."""

import pytest
import torch
from torch import nn

from attention_course import Transformer, TransformerConfig, scaled_dot_product_attention
from attention_course.translation import cross_attention_maps


def model(**changes):
    torch.manual_seed(0)
    config = TransformerConfig.tiny(12, d_model=16, n_heads=4, d_ff=24, **{"dropout": 0.5, **changes})
    return Transformer(config).double()


SRC = torch.tensor([[5, 6, 7, 8, 2], [9, 4, 2, 0, 0]])
TGT = torch.tensor([[1, 5, 9, 4], [1, 7, 2, 0]])


@pytest.mark.parametrize("changes", [{}, {"norm_first": True}, {"n_kv_heads": 2}, {"positions": "rotary"}, {"positions": "alibi"}])
def test_a_map_is_the_softmax_of_queries_and_memory_keys_and_hides_padding(changes):
    m = model(n_decoder_layers=1, **changes)
    maps = cross_attention_maps(m, SRC, TGT)
    assert maps.shape == (1, 2, 4, 4, 5)
    torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps.sum(-1)))
    assert (maps[:, 1, :, :, 3:] == 0).all()

    asked = []
    layer = m.decoder.layers[0].cross_attention
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: asked.append((args[0], kwargs["context"])), with_kwargs=True)
    with torch.no_grad():
        m.eval()(SRC, TGT)
        q, k, v = layer.project(*asked[0])
    hook.remove()
    by_hand = scaled_dot_product_attention(q, k, v, m.padding(SRC))[1]
    torch.testing.assert_close(maps[0], by_hand)


def test_each_layer_has_its_own_map_in_the_order_of_the_layers():
    m = model(n_layers=3)
    maps = cross_attention_maps(m, SRC, TGT)
    assert maps.shape[0] == 3
    with torch.no_grad():  # a change in the last layer moves the last map and no other
        m.decoder.layers[2].cross_attention.w_q.weight.mul_(-2)
    moved = (cross_attention_maps(m, SRC, TGT) - maps).abs().amax((1, 2, 3, 4))
    assert moved[:2].max() == 0 and moved[2] > 1e-4


def test_a_row_depends_on_nothing_that_is_written_later():
    m = model()
    longer = cross_attention_maps(m, SRC, TGT)
    shorter = cross_attention_maps(m, SRC, TGT[:, :2])
    torch.testing.assert_close(longer[..., :2, :], shorter)


def test_the_model_is_left_as_it_was():
    m = model().train()
    m.encoder.eval()  # modes may be mixed
    modes = [part.training for part in m.modules()]
    state, random = {k: v.clone() for k, v in m.state_dict().items()}, torch.get_rng_state()
    maps = cross_attention_maps(m, SRC, TGT)
    assert torch.equal(maps, cross_attention_maps(m, SRC, TGT))  # no dropout
    assert not maps.requires_grad and all(p.grad is None for p in m.parameters())
    assert [part.training for part in m.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(part._forward_pre_hooks for part in m.modules())


def test_the_hooks_are_gone_after_an_error_too():
    m = model().train()
    with pytest.raises(ValueError):
        cross_attention_maps(m, SRC, TGT + 100)
    assert not any(part._forward_pre_hooks for part in m.modules()) and m.training


@pytest.mark.usefixtures("no_shape_check")
@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), nn.Transformer(16, 2, 1, 1, 8, batch_first=True), Transformer(TransformerConfig.tiny(12, n_decoder_layers=0))])
def test_a_model_without_such_layers_is_refused(wrong):
    with pytest.raises(TypeError, match=f"model is a {type(wrong).__name__}; expected a Transformer"):
        cross_attention_maps(wrong, SRC, TGT)
