"""Chapter 07, training: loss and schedule (reported faults G49, G50, G51), accumulation, several processes, checkpoints, kills."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("safetensors")

from attention_course import translation
from attention_course.transformer import Transformer, TransformerConfig
from attention_course.translation import (
    fit, label_smoothed_loss, load_checkpoint, load_model, noam_schedule, save_checkpoint, validation_loss,
)

errors = pytest.mark.usefixtures("no_shape_check")


def backwards(n=60, seed=0, longest=9):
    "Pairs of which the target is the source, read from right to left."
    rng = random.Random(seed)
    words = [[rng.randrange(4, 16) for _ in range(rng.randint(2, longest))] for _ in range(n)]
    return [([*w, 2], [*w[::-1], 2]) for w in words]


def small(seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    options = dict(d_model=16, n_heads=2, d_ff=24, n_layers=1, dropout=0.1)
    return Transformer(TransformerConfig.tiny(16, **{**options, **changes})).to(dtype)


QUICK = dict(max_tokens=60, warmup=10, ema=0.9, log_every=1, progress=False)  # eight batches to an epoch


@pytest.fixture(autouse=True)
def one_thread():
    "The order in which threads add up is no part of the promise of exact resumption."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(found, expected, **close):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **{**dict(atol=0, rtol=0), **close}, msg=lambda m: f"{name}: {m}")


def lasting(history):
    "The rows without what depends on the clock."
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_s")} for row in history]


# --- the schedule ---------------------------------------------------------------------------------------------------


def test_g51_the_schedule_starts_at_step_0_peaks_at_the_end_of_the_warmup_and_decays():
    rate = [noam_schedule(step, 512, 4000) for step in (0, 1, 2, 4000, 16000)]
    assert rate == pytest.approx([0, 1.74693e-7, 2 * 1.74693e-7, 6.98771e-4, 3.49386e-4], rel=1e-5)
    assert max(range(1, 9000), key=lambda step: noam_schedule(step, 512, 4000)) == 4000
    assert noam_schedule(0, 512, 1) == 0 and noam_schedule(1, 512, 1) == pytest.approx(512**-0.5)


@errors
@pytest.mark.parametrize(("arguments", "says"), [((1, 512, 0), "warmup=0"), ((1, 512, -4), "warmup=-4"), ((-1, 512, 5), "step=-1"), ((1, 0, 5), "d_model=0"), ((1, 8, math.nan), "warmup=nan")])
def test_g51_what_has_no_rate_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        noam_schedule(*arguments)


# --- the loss -------------------------------------------------------------------------------------------------------

G49 = torch.tensor([[2, 1, 0, -1, 0.5], [0, 3, -2, 1, 0], [9, 9, 9, 9, -9]], dtype=torch.float64)


def smoothed_by_hand(logits, targets, smoothing, pad_id):
    "Token by token, from the definition: the target is a distribution."
    total, n = 0.0, 0
    for row, target in zip(logits.tolist(), targets.tolist()):
        if target != pad_id:
            log_p = [x - math.log(sum(map(math.exp, row))) for x in row]
            q = [smoothing / len(row) + (1 - smoothing) * (i == target) for i in range(len(row))]
            total, n = total - sum(a * b for a, b in zip(q, log_p)), n + 1
    return total / max(n, 1)


def test_g49_the_mean_is_over_real_tokens():
    targets = torch.tensor([1, 2, 0])
    logits = G49.clone().requires_grad_()
    loss = label_smoothed_loss(logits, targets, smoothing=0.1, pad_id=0)
    assert loss.item() == pytest.approx(3.300438, abs=5e-7) == pytest.approx(smoothed_by_hand(G49, targets, 0.1, 0))
    assert loss.item() == pytest.approx(F.cross_entropy(G49, targets, label_smoothing=0.1, ignore_index=0).item())
    plain = label_smoothed_loss(G49, targets, smoothing=0.0, pad_id=0)
    assert plain.item() == pytest.approx(F.nll_loss(G49.log_softmax(-1), targets, ignore_index=0).item())
    (grad,) = torch.autograd.grad(loss, logits)
    for value in (-50.0, math.inf, math.nan):  # what stands at padding does not matter
        other = G49.clone()
        other[2] = value
        other.requires_grad_()
        again = label_smoothed_loss(other, targets, smoothing=0.1, pad_id=0)
        assert torch.equal(again, loss) and torch.equal(torch.autograd.grad(again, other)[0], grad)
    assert torch.equal(grad[2], torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("targets", [[2, 1, 3], [2, 0, 3], [0, 0, 0]], ids=["no padding", "one pad", "only padding"])
def test_g50_any_number_of_pads_will_do(targets):
    targets = torch.tensor(targets)
    logits = G49.clone().requires_grad_()
    loss = label_smoothed_loss(logits, targets, smoothing=0.1, pad_id=0)
    assert loss.item() == pytest.approx(smoothed_by_hand(G49, targets, 0.1, 0))
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.isfinite().all()
    if not targets.any():
        assert loss.item() == 0 and not grad.any()
    if targets.all():
        assert torch.equal(loss, label_smoothed_loss(logits, targets, smoothing=0.1, pad_id=None))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", [(6,), (3, 5)], ids=str)
def test_loss_and_gradient_are_those_of_torch(smoothing, shape):
    torch.manual_seed(0)
    ours = torch.randn(*shape, 11, dtype=torch.float64, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    targets = torch.randint(0, 11, shape)
    targets.view(-1)[:2] = torch.tensor([0, 3])
    loss = label_smoothed_loss(ours, targets, smoothing=smoothing, pad_id=0)
    expected = F.cross_entropy(theirs.flatten(0, -2), targets.flatten(), ignore_index=0, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
    loss.backward(), expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=0)


def test_a_loss_in_low_precision_is_computed_in_float32():
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(200) % 50
    loss = label_smoothed_loss(logits, targets.int(), smoothing=0.1, pad_id=0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, label_smoothed_loss(logits.float(), targets, smoothing=0.1, pad_id=0), atol=0, rtol=0)


def test_without_padding_every_target_counts_also_the_one_that_torch_ignores():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="the id -100"):
        label_smoothed_loss(logits, torch.tensor([1, -100, 2]), smoothing=0.1, pad_id=None)


@errors
def test_targets_that_are_no_tokens_are_refused():
    logits, options = torch.zeros(3, 5), dict(smoothing=0.1, pad_id=9)
    label_smoothed_loss(logits, torch.tensor([1, 9, 4]), **options)  # padding may be any number
    with pytest.raises(ValueError, match="targets has the id 5; the logits have 5 tokens"):
        label_smoothed_loss(logits, torch.tensor([1, 9, 5]), **options)
    with pytest.raises(TypeError, match="targets has dtype torch.float32"):
        label_smoothed_loss(logits, torch.tensor([1.7, 2, 3]), **options)


@errors
@pytest.mark.parametrize(("shape", "smoothing", "says"), [((2, 5), 0.1, r"shape \(2, 5\)"), ((2, 4), -0.1, "-0.1"), ((2, 4), 1.1, "1.1")])
def test_a_loss_that_makes_no_sense_is_refused(shape, smoothing, says):
    with pytest.raises(ValueError, match=says):
        label_smoothed_loss(torch.zeros(2, 4, 7), torch.zeros(shape, dtype=torch.long), smoothing=smoothing, pad_id=0)


# --- one update -----------------------------------------------------------------------------------------------------


def by_hand(model, pairs, steps, *, warmup, smoothing=0.1, clip=1.0, factor=1.0, ema=0.0, max_tokens=10_000):
    "What `fit` does when all pairs are one batch, with torch's own parts; losses, weights, average."
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: factor * model.config.d_model**-0.5 * min((i + 1) ** -0.5, (i + 1) * warmup**-1.5)
    )
    average, losses = weights(model), []
    for step in range(1, steps + 1):
        src, tgt = translation.collate(pairs)
        logits = model(src, tgt[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), tgt[:, 1:], ignore_index=0, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        length = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= min(1, clip / (length + 1e-6))  # as torch has it
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        beta = min(ema, (1 + step) / (10 + step))
        average = {name: beta * average[name] + (1 - beta) * p for name, p in weights(model).items()}
    return losses, weights(model), average


@pytest.mark.parametrize("clip", [1.0, 0.05], ids=["rarely clipped", "always clipped"])
def test_fit_is_the_textbook_recipe(clip):
    pairs = backwards(12)
    ours, theirs = small(dtype=torch.float64, dropout=0.0), small(dtype=torch.float64, dropout=0.0)
    losses, expected, _ = by_hand(theirs, pairs, 8, warmup=4, clip=clip)
    history = fit(ours, pairs, steps=8, warmup=4, clip=clip, ema=0.0, max_tokens=10_000, log_every=1, progress=False)
    assert [row["loss"] for row in history] == pytest.approx(losses, abs=1e-9)
    assert [row["lr"] for row in history] == pytest.approx([noam_schedule(s, 16, 4) for s in range(1, 9)])
    assert_same(weights(ours), expected, atol=1e-7)


def test_the_averaged_weights_are_what_remains_and_what_is_validated():
    pairs = backwards(12)
    ours, theirs = small(dtype=torch.float64, dropout=0.0), small(dtype=torch.float64, dropout=0.0)
    _, last, average = by_hand(theirs, pairs, 12, warmup=4, ema=0.7)
    history = fit(ours, pairs, pairs, steps=12, warmup=4, ema=0.7, max_tokens=10_000, progress=False)
    assert_same(weights(ours), average, atol=1e-7)
    assert not ours.training and not torch.equal(weights(ours)["tgt_embedding.weight"], last["tgt_embedding.weight"])
    assert history[-1]["valid_loss"] == pytest.approx(validation_loss(ours, pairs), abs=1e-12)


def test_validation_is_per_real_token_without_smoothing_or_dropout_and_leaves_the_mode():
    model, pairs = small(dropout=0.5), backwards(40, seed=3)
    with torch.no_grad():
        nll = n = 0
        model.eval()
        for pair in pairs:
            src, tgt = translation.collate([pair])
            nll += F.cross_entropy(model(src, tgt[:, :-1])[0], tgt[0, 1:], reduction="sum").item()
            n += tgt.shape[1] - 1
    model.train()
    for max_tokens in (12, 100, 1000):
        assert validation_loss(model, pairs, max_tokens=max_tokens) == pytest.approx(nll / n, rel=1e-5)
    assert model.training


@errors
def test_a_validation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="pairs is empty"):
        validation_loss(small(), [])
    with pytest.raises(ValueError, match="pair 0 has the id 0 in it"):
        validation_loss(small(), [([5, 2], [0, 0])])


def test_validation_leaves_each_part_in_its_mode_also_after_an_error():
    model = small()
    model.encoder.eval()
    modes = [part.training for part in model.modules()]
    validation_loss(model, backwards(5))
    assert [part.training for part in model.modules()] == modes
    with pytest.raises(Exception):
        validation_loss(model, [([5, 2], [99, 2])])  # no such token
    assert [part.training for part in model.modules()] == modes


def test_accumulated_batches_are_one_large_batch():
    pairs = backwards(30)
    one, many = small(dtype=torch.float64, dropout=0.0), small(dtype=torch.float64, dropout=0.0)
    options = dict(steps=6, warmup=4, ema=0.0, log_every=1, progress=False)
    whole = fit(one, pairs, max_tokens=10_000, **options)
    parts = fit(many, pairs, max_tokens=30, accumulate=1000, **options)  # all batches of an epoch, of unequal size
    assert len(translation.token_batches(pairs, 30)) > 5
    assert [row["loss"] for row in parts] == pytest.approx([row["loss"] for row in whole], abs=1e-10)
    assert [row["epoch"] for row in parts] == [1, 2, 3, 4, 5, 6]
    assert_same(weights(many), weights(one), atol=1e-8)


class AnyModel(nn.Module):
    "Knows nothing of `decode_hidden`; returns all logits."

    def __init__(self, inner):
        super().__init__()
        self.inner, self.d_model = inner, inner.config.d_model

    def forward(self, src, tgt):
        return self.inner(src, tgt)


def test_a_model_that_only_returns_logits_is_trained_alike():
    pairs = backwards(30)
    ours, plain = small(dtype=torch.float64, dropout=0.0), AnyModel(small(dtype=torch.float64, dropout=0.0))
    options = dict(steps=5, **QUICK)
    a, b = fit(ours, pairs, **options), fit(plain, pairs, **options)
    assert [row["loss"] for row in a] == pytest.approx([row["loss"] for row in b], abs=1e-10)


class Counting(AnyModel):
    "With buffers that training changes."

    def __init__(self, inner):
        super().__init__(inner)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, src, tgt):
        return self.norm(super().forward(src, tgt).flatten(0, 1)).unflatten(0, tgt.shape)


def test_an_average_of_the_weights_keeps_what_training_has_counted():
    model = Counting(small())
    fit(model, backwards(20), steps=5, **QUICK)
    assert model.norm.num_batches_tracked == 5 and model.norm.running_mean.abs().max() > 0


def test_pairs_can_be_made_anew_for_each_epoch():
    asked = []

    def train(generator):
        asked.append(torch.randint(1000, (), generator=generator).item())
        return backwards(20, seed=asked[-1])

    fit(small(), train, epochs=3, **QUICK)
    assert len(set(asked)) == len(asked) >= 3


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_is_computed_and_float32_is_kept(kind):
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    pairs, seen = backwards(30), set()
    model = small(dropout=0.0).to(kind)
    model.encoder.layers[0].feed_forward.w_in.register_forward_hook(lambda _, __, out: seen.add(out.dtype))
    half = fit(model, pairs, pairs, bf16=True, steps=4, **QUICK)
    assert seen == {torch.bfloat16} and {p.dtype for p in model.parameters()} == {torch.float32}
    full = fit(small(dropout=0.0).to(kind), pairs, pairs, bf16=False, steps=4, **QUICK)
    assert [row["loss"] for row in half] == pytest.approx([row["loss"] for row in full], rel=0.02)
    assert [row["loss"] for row in half] != [row["loss"] for row in full]


# --- where it stops -------------------------------------------------------------------------------------------------


def test_the_end_is_a_number_of_steps_of_epochs_or_a_time(monkeypatch):
    pairs = backwards(30)
    n = len(translation.token_batches(pairs, QUICK["max_tokens"]))
    assert fit(small(), pairs, steps=7, **QUICK)[-1]["step"] == 7
    history = fit(small(), pairs, epochs=2, **QUICK)
    assert history[-1]["step"] == 2 * n and history[-1]["epoch"] == 2
    assert fit(small(), pairs, steps=3, epochs=2, minutes=100.0, **QUICK)[-1]["step"] == 3
    now, update = [0.0], translation._Run.update  # a step takes a second
    monkeypatch.setattr(translation, "perf_counter", lambda: now[0])
    monkeypatch.setattr(translation._Run, "update", lambda run: (update(run), now.__setitem__(0, now[0] + 1)))
    last = fit(small(), pairs, minutes=9.5 / 60, **QUICK)[-1]
    assert (last["seconds"], last["step"]) == (10, 10)


def test_a_row_says_what_happened_since_the_last_one():
    pairs = backwards(30)
    each, some = (fit(small(), pairs, steps=10, **{**QUICK, "log_every": n}) for n in (1, 5))
    n = len(translation.token_batches(pairs, QUICK["max_tokens"]))
    assert [row["step"] for row in some] == sorted({5, 10, *range(n, 11, n)})
    for row in some:
        assert row["lr"] == pytest.approx(noam_schedule(row["step"], 16, 10)) and row["tokens_per_s"] > 0
    # a row's loss is a mean over tokens, not over updates
    groups = translation._groups(pairs, QUICK["max_tokens"], 1, 0, 0, 0, 0, 1, torch.device("cpu"))
    tokens = [group.tokens for group, _ in zip(groups, range(10))]
    first, losses = some[0]["step"], [row["loss"] for row in each]
    assert len(set(tokens[:first])) > 1
    assert some[0]["loss"] == pytest.approx(sum(l * t for l, t in zip(losses[:first], tokens)) / sum(tokens[:first]), rel=1e-9)


def test_the_generators_outside_are_left_alone_and_do_not_matter():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = small()
    torch.set_rng_state(before)
    first = fit(model, backwards(20), steps=4, **QUICK)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(77)
    random.seed(77)
    second = fit(small(), backwards(20), steps=4, **QUICK)
    other = fit(small(), backwards(20), steps=4, seed=1, **QUICK)
    assert lasting(first) == lasting(second) != lasting(other)


def test_generators_of_devices_that_are_not_asked_are_not_seeded(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    fit(small(), backwards(20), steps=2, **QUICK)  # `small` itself seeds all of them, once
    assert len(seeded) == 1


@errors
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(), "steps, epochs or minutes"),
        (dict(steps=0), "steps=0"),
        (dict(epochs=-1), "epochs=-1"),
        (dict(minutes=0.0), "minutes=0.0"),
        (dict(minutes=math.nan), "minutes=nan"),
        (dict(steps=1, warmup=0), "warmup=0"),
        (dict(steps=1, accumulate=0), "accumulate=0"),
        (dict(steps=1, clip=0), "clip=0"),
        (dict(steps=1, every=0), "every=0"),
        (dict(steps=1, ema=1.0), "ema=1.0"),
        (dict(steps=1, smoothing=-0.1), "smoothing=-0.1"),
        (dict(steps=1, max_tokens=3), "max_tokens=3"),
        (dict(steps=math.nan), "steps is a float"),
        (dict(steps="3"), "steps is a str"),
        (dict(epochs=math.inf), "epochs=inf; expected a finite number above 0"),
        (dict(steps=1, accumulate=1.5), "accumulate is a float"),
        (dict(steps=1, every=2.5), "every is a float"),
        (dict(steps=1, factor=math.inf), "factor=inf"),
        (dict(steps=1, factor="1"), "factor is a str"),
        (dict(steps=1, clip=math.nan), "clip=nan"),
        (dict(steps=1, ema=None), "ema is a NoneType"),
        (dict(steps=1, smoothing=True), "smoothing is a bool"),
        (dict(steps=1, resume="no"), "resume is a str; expected True or False"),
        (dict(steps=1, progress=0), "progress is a int"),
    ],
    ids=lambda x: "" if isinstance(x, str) else ",".join(x),
)
def test_arguments_that_make_no_sense_are_refused(options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        fit(small(), backwards(5), **{"progress": False, **options})


@errors
@pytest.mark.parametrize("empty", [[], lambda generator: []], ids=["a list", "a function"])
def test_no_pairs_are_refused_at_once(empty):
    with pytest.raises(ValueError, match="train has no pairs"):
        fit(small(), empty, steps=1, progress=False)


@errors
def test_a_later_epoch_without_pairs_is_refused():
    calls = []

    def train(generator):
        calls.append(1)
        return backwards(20) if len(calls) < 3 else []

    with pytest.raises(ValueError, match="train has no pairs in epoch 1"):
        fit(small(), train, epochs=3, **QUICK)


@errors
def test_padding_within_a_pair_is_refused():
    for pair in (([5, 2], [5, 0, 2]), ([5, 0, 2], [5, 2])):
        with pytest.raises(ValueError, match="pair 2 has the id 0 in it"):
            fit(small(), [*backwards(2), pair], steps=1, progress=False)


@errors
@pytest.mark.parametrize("side", ["train", "valid"])
@pytest.mark.parametrize(("pairs", "error", "says"), [
    ([([5, 2], [5] * 61)], ValueError, "pair 0 has 2 source and 61 target tokens"),
    ([([5, 2], [2]), ([5, 2], [16, 2])], ValueError, "pair 1 has the id 16; the vocabulary has 0 to 15"),
    ([([-1, 2], [2])], ValueError, "pair 0 has the id -1"),
    ([([5.5, 2], [2])], TypeError, "integer"),
    ((pair for pair in [([5, 2], [2])]), TypeError, "a generator; expected a list of pairs"),
    ("a text", ValueError, "not enough values"),
], ids=["too long", "no such id", "below 0", "no id", "a generator", "a text"])
def test_pairs_that_cannot_be_trained_on_are_named_before_the_training(side, pairs, error, says, tmp_path):
    model, data = small(), {"train": backwards(20), side: pairs}
    untouched = weights(model)
    with pytest.raises(error, match=f"^{side}(:| is) .*{says}"):
        fit(model, **data, epochs=1, folder=tmp_path / "new", **QUICK)
    assert_same(weights(model), untouched)
    assert not (tmp_path / "new").exists()


@errors
def test_a_model_without_weights_is_refused():
    model = nn.ReLU()
    model.d_model = 8
    for call in (lambda: fit(model, backwards(5), steps=1), lambda: validation_loss(model, backwards(5))):
        with pytest.raises(ValueError, match="ReLU without parameters"):
            call()


@errors
def test_models_and_pairs_that_cannot_be_trained_are_refused():
    with pytest.raises(ValueError, match="no pairs"):
        fit(small(), [], steps=1)
    with pytest.raises(ValueError, match="pad_id=None"):
        fit(small(pad_id=None), backwards(5), steps=1)
    with pytest.raises(ValueError, match="Linear has neither config.d_model nor d_model"):
        fit(nn.Linear(2, 2), backwards(5), steps=1)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_never_reaches_weights_or_checkpoint(where, tmp_path):
    model, pairs, calls = small(), backwards(30), []
    norm = model.decoder.layers[0].norm_feed_forward

    def spoil(value):
        calls.append(1)
        return value * math.nan if len(calls) == 6 else value

    def forward_hook(module, inputs, output):
        if not module.training:
            return output
        if where == "loss":
            return spoil(output)
        output.register_hook(spoil)  # the loss is fine, the gradient is not
        return output

    norm.register_forward_hook(forward_hook)
    with pytest.raises(FloatingPointError, match=r"^step 6: the loss is .*those of step 5"):
        fit(model, pairs, steps=20, folder=tmp_path, every=2, **QUICK)
    assert all(p.isfinite().all() for p in model.parameters())
    state, parts = load_checkpoint(tmp_path)
    assert state["step"] == 4 and all(t.isfinite().all() for part in parts.values() for t in part.values())
    resumed = fit(small(), pairs, steps=20, folder=tmp_path, every=2, **QUICK)  # with a sound model it goes on
    assert lasting(resumed) == lasting(fit(small(), pairs, steps=20, every=2, **QUICK))


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_what_it_was_given(tmp_path):
    parts = {"a": {"x.y": torch.randn(2, 3).T, "z": torch.tensor(3)}, "b": {"x.y": torch.ones(2, dtype=torch.bfloat16)}}
    save_checkpoint(tmp_path / "one.safetensors", {"step": 3, "loss": 0.1 + 0.2, "none": None}, **parts)
    state, found = load_checkpoint(tmp_path / "one.safetensors")
    assert state == {"step": 3, "loss": 0.1 + 0.2, "none": None} and found.keys() == parts.keys()
    for part in parts:
        assert_same(found[part], parts[part])
    assert os.listdir(tmp_path) == ["one.safetensors"]


def test_nothing_is_pickled_and_two_checkpoints_are_kept(tmp_path):
    fit(small(), backwards(20), steps=7, every=2, folder=tmp_path, **QUICK)
    assert sorted(os.listdir(tmp_path)) == ["step-00000006.safetensors", "step-00000007.safetensors"]
    from safetensors import safe_open

    with safe_open(tmp_path / "step-00000007.safetensors", "pt") as file:  # a format that holds tensors and text only
        assert json.loads(file.metadata()["state"])["step"] == 7
        kinds = {name.split("/")[0] for name in file.keys()}
    assert kinds == {"model", "average", "optimizer"}


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_saved_once_and_stay_tied(tied, tmp_path):
    model = small(tie_output=tied, share_embeddings=tied)
    fit(model, backwards(20), steps=3, folder=tmp_path, **QUICK)
    again = load_model(tmp_path)
    assert not again.training and again.config == model.config
    assert_same(weights(again), weights(model))
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in small(tie_output=tied, share_embeddings=tied).parameters())

    torch.manual_seed(0)
    plain = AnyModel(small())
    plain.again = plain.inner.tgt_embedding  # one parameter under two names
    fit(plain, backwards(20), steps=3, folder=tmp_path / "plain", **QUICK)
    names = load_checkpoint(tmp_path / "plain")[1]["model"].keys()
    assert "inner.tgt_embedding.weight" in names and "again.weight" not in names
    resumed = AnyModel(small(seed=1))
    resumed.again = resumed.inner.tgt_embedding
    fit(resumed, backwards(20), steps=3, folder=tmp_path / "plain", **QUICK)
    assert resumed.again.weight is resumed.inner.tgt_embedding.weight
    assert_same(weights(resumed), weights(plain))
    with pytest.raises(ValueError, match="without a `TransformerConfig`"):
        load_model(tmp_path / "plain")


@pytest.mark.parametrize(
    ("stop", "options"),
    [(1, {}), (9, {}), (10, {}), (9, dict(accumulate=2, ema=0.0)), (8, dict(bf16=True))],
    ids=lambda x: f"after step {x}" if isinstance(x, int) else ",".join(x) or "plain",
)
def test_a_stopped_training_goes_on_as_if_it_had_not_stopped(stop, options, tmp_path):
    pairs, options = backwards(), {**QUICK, **options}
    whole = small()
    expected = fit(whole, pairs, pairs[:10], steps=14, every=5, **options)
    fit(small(), pairs, pairs[:10], steps=stop, every=5, folder=tmp_path, **options)
    for name in os.listdir(tmp_path):  # as if it had been killed: what it did at its end is undone
        if stop % 5 and name == f"step-{stop:08}.safetensors":
            os.unlink(tmp_path / name)
    resumed = small(seed=9)  # its weights come from the checkpoint
    assert load_checkpoint(tmp_path)[0]["step"] == stop // 5 * 5
    found = fit(resumed, pairs, pairs[:10], steps=14, every=5, folder=tmp_path, **options)
    assert lasting(found) == lasting(expected)
    assert_same(weights(resumed), weights(whole))
    seconds = [row["seconds"] for row in found]
    assert seconds == sorted(seconds)


def test_a_finished_training_is_only_read(tmp_path):
    first, again = small(), small(seed=1)
    history = fit(first, backwards(20), steps=4, folder=tmp_path, **QUICK)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in os.listdir(tmp_path)}
    assert fit(again, backwards(20), steps=4, folder=tmp_path, **QUICK) == history
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in os.listdir(tmp_path)} == before
    assert_same(weights(again), weights(first))


@errors
@pytest.mark.parametrize(
    ("model", "pairs", "options", "says"),
    [
        (dict(d_ff=32), {}, {}, "model.d_ff was 24, now 32"),
        (dict(dropout=0.2), {}, {}, "model.dropout was 0.1, now 0.2"),
        (dict(dtype=torch.float64), {}, {}, "dtype was 'float32', now 'float64'"),
        ({}, dict(seed=1), {}, "train was '20 pairs"),
        ({}, dict(n=19), {}, "now '19 pairs"),
        ({}, {}, dict(max_tokens=50), "max_tokens was 60, now 50"),
        ({}, {}, dict(accumulate=2), "accumulate was 1, now 2"),
        ({}, {}, dict(warmup=11), "warmup was 10, now 11"),
        ({}, {}, dict(seed=1, ema=0.0), "ema was 0.9, now 0.0; seed was 0, now 1"),
        ({}, {}, dict(resume=False), "resume=True goes on"),
    ],
    ids=lambda x: "" if isinstance(x, str) else ",".join(x),
)
def test_another_training_in_the_folder_is_refused_and_kept(model, pairs, options, says, tmp_path):
    fit(small(), backwards(20), steps=3, folder=tmp_path, **QUICK)
    before = sorted(os.listdir(tmp_path))
    other = small(**model)
    untouched = weights(other)
    with pytest.raises(ValueError, match=re.escape(says)):
        fit(other, backwards(**{"n": 20, **pairs}), steps=6, folder=tmp_path, **{**QUICK, **options})
    assert sorted(os.listdir(tmp_path)) == before
    assert_same(weights(other), untouched)


@errors
@pytest.mark.parametrize("first", [True, False], ids=["frozen later", "frozen before"])
def test_adams_means_never_go_to_other_weights(first, tmp_path):
    model, other = small(), small()
    (other if first else model).encoder.requires_grad_(False)
    fit(model, backwards(20), steps=3, folder=tmp_path, **QUICK)
    with pytest.raises(ValueError, match=r"frozen was .*encoder\.layers" if not first else r"frozen was None, now \['encoder\.layers"):
        fit(other, backwards(20), steps=6, folder=tmp_path, **QUICK)


@errors
@pytest.mark.parametrize("name", ["0/exp_avg", "99/exp_avg"], ids=["another shape", "no such weight"])
def test_means_that_fit_no_weight_are_refused(name, tmp_path):
    fit(small(), backwards(20), steps=3, folder=tmp_path, **QUICK)
    state, parts = load_checkpoint(tmp_path)
    parts["optimizer"][name] = torch.zeros(3)
    save_checkpoint(tmp_path / "step-00000004.safetensors", state, **parts)
    model = small()
    untouched = weights(model)
    with pytest.raises(ValueError, match=f"means of other weights: {name} has shape"):
        fit(model, backwards(20), steps=6, folder=tmp_path, **QUICK)
    assert_same(weights(model), untouched)


class Negated(Transformer):
    "The same weights, and another model."

    def unembed(self, hidden):
        return -super().unembed(hidden)


@errors
def test_a_checkpoint_of_another_class_is_no_transformer(tmp_path):
    fit(Negated(small().config), backwards(20), steps=3, folder=tmp_path, **QUICK)
    with pytest.raises(ValueError, match="holds a Negated; make it yourself"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="class was 'Negated', now None"):
        fit(small(), backwards(20), steps=6, folder=tmp_path, **QUICK)
    assert fit(Negated(small().config), backwards(20), steps=6, folder=tmp_path, **QUICK)[-1]["step"] == 6


def test_whether_a_training_is_there_is_what_the_first_process_saw(tmp_path, monkeypatch):
    "A slower process finds the checkpoint that the first one has just written; that is no earlier training."
    fit(small(), backwards(20), steps=3, folder=tmp_path, **QUICK)
    monkeypatch.setattr(translation._Run, "agreed", lambda run, number: number if run.state["step"] else 0.0)
    history = fit(small(), backwards(20), steps=2, folder=tmp_path, resume=False, **QUICK)
    assert [row["step"] for row in history] == [1, 2]


@errors
@pytest.mark.parametrize("spoil", [
    lambda state, parts: state.pop("options"),
    lambda state, parts: parts.clear(),
    lambda state, parts: parts["model"].pop("tgt_embedding.weight"),
    lambda state, parts: parts["model"].update({"tgt_embedding.weight": torch.zeros(1, 16)}),  # it would be repeated for each token
    lambda state, parts: parts["model"].update({"decoder.norm.weight": torch.ones(16)}),  # it would be left out
    lambda state, parts: state["options"].update({"ema": 0.9}),
    lambda state, parts: state["options"].update({"dtype": "float33"}),
    lambda state, parts: state["options"].update({"model.n_heads": 3}),
], ids=["no options", "no model", "a weight is missing", "another shape", "a weight too many", "no average", "no dtype", "no model has it"])
def test_a_checkpoint_that_holds_no_such_model_is_named(spoil, tmp_path):
    fit(small(), backwards(20), steps=1, folder=tmp_path, **{**QUICK, "ema": 0.0})
    state, parts = load_checkpoint(tmp_path)
    spoil(state, parts)
    save_checkpoint(tmp_path / "other.safetensors", state, **parts)
    with pytest.raises(ValueError, match="`fit` has not written|is not of this model: |a model that cannot be made: "):
        load_model(tmp_path / "other.safetensors")


@errors
def test_checkpoints_that_fit_did_not_write_are_named_and_other_names_passed_over(tmp_path):
    save_checkpoint(tmp_path / "step-00000001.safetensors", [], model=small().state_dict())
    with pytest.raises(ValueError, match="`fit` has not written"):
        fit(small(), backwards(20), steps=1, folder=tmp_path, **QUICK)
    folder = tmp_path / "new"
    fit(small(), backwards(20), steps=1, folder=folder, **QUICK)
    (folder / "step-00000009.safetensors").mkdir()
    (folder / "step-zz.safetensors").write_bytes(b"")
    assert load_checkpoint(folder)[0]["step"] == 1


@errors
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path):
    pairs = backwards(20)
    expected = fit(small(), pairs, steps=6, every=2, **QUICK)
    fit(small(), pairs, steps=4, every=2, folder=tmp_path, **QUICK)
    latest = tmp_path / "step-00000004.safetensors"
    for damaged in (latest.read_bytes()[:-100], b"", b"x" * 1000):
        latest.write_bytes(damaged)
        with pytest.warns(UserWarning, match="step-00000004.safetensors is damaged"):
            assert load_checkpoint(tmp_path)[0]["step"] == 2
    with pytest.warns(UserWarning, match="damaged"):
        assert lasting(fit(small(), pairs, steps=6, every=2, folder=tmp_path, **QUICK)) == lasting(expected)
    latest.write_bytes(b"")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="step-00000004.safetensors is damaged or no checkpoint$"):
        load_checkpoint(latest)
    (tmp_path / "empty").mkdir()
    for nothing in ("nowhere", "empty"):
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            load_checkpoint(tmp_path / nothing)


# --- kill -9 --------------------------------------------------------------------------------------------------------

# One process imports torch and then forks a child for each way to die. So each child starts at once, and dies alone.
NURSERY = """
import json, os, random, signal, sys, traceback
import torch, torch._dynamo  # which optimizers import when they are first used: once is enough
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from test_translation_training import QUICK, backwards, fit, small
from attention_course import translation

root, ran = sys.argv[1], {}

def train(folder):
    fit(small(), backwards(), backwards()[:10], steps=16, every=4, folder=folder, **QUICK)

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def after(n, f, instead=None, then=None):
    "`f`, but its n-th call is the last thing that happens."
    calls = []
    def wrapped(*a, **k):
        calls.append(1)
        if len(calls) == n and instead:
            instead(*a, **k)
            die()
        result = f(*a, **k)
        if len(calls) == n and then:
            then(*a, **k)
            die()
        return result
    return wrapped

def half(path, data):
    with open(path.with_name(path.name + ".0.part"), "wb") as file:
        file.write(data[: len(data) // 2])

nothing = lambda *a, **k: None
replace, update, average, gradient, unlink = os.replace, translation._Run.update, translation._update_average, translation._Run.gradient, translation.Path.unlink
ways = {
    "while the first checkpoint is written": lambda: setattr(translation, "_write_file", after(1, translation._write_file, half)),
    "while a checkpoint is written": lambda: setattr(translation, "_write_file", after(3, translation._write_file, half)),
    "before a checkpoint gets its name": lambda: setattr(os, "replace", after(4, replace, nothing)),
    "after a checkpoint got its name": lambda: setattr(os, "replace", after(4, replace, then=nothing)),
    "while old checkpoints are deleted": lambda: setattr(translation.Path, "unlink", after(4, unlink, nothing)),
    "in the first step": lambda: setattr(translation._Run, "gradient", after(1, gradient, nothing)),
    "in the middle of an epoch": lambda: setattr(translation._Run, "update", after(7, update, then=nothing)),
    "between weights and average": lambda: setattr(translation, "_update_average", after(10, average, nothing)),
}

def child(prepare, folder):
    pid = os.fork()
    if not pid:
        try:
            prepare()
            train(folder)
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return pid

for way, prepare in ways.items():
    ran[way] = os.waitpid(child(prepare, f"{root}/{way}"), 0)[1]

# Again and again, each time after a number of calls that nobody chose: calls, since a clock would let a fast machine end
# before it is killed. No life does more than a third of the work, so that there are three deaths at least.
def counted(limit=None):
    "Counts calls of Python's and C's functions; the one after `limit` kills."
    def count(frame, event, arg):
        if event in ("call", "c_call"):
            calls[0] += 1
            if calls[0] == limit:
                die()
    calls = [0]
    sys.setprofile(count)
    return calls

def whole():
    calls = counted()
    train(None)
    sys.setprofile(None)
    with open(f"{root}/calls", "w") as file:
        file.write(str(calls[0]))

os.waitpid(child(whole, None), 0)
calls = int(open(f"{root}/calls").read())
rng, deaths, status = random.Random(int(sys.argv[3])), 0, signal.SIGKILL
while status == signal.SIGKILL:
    limit = rng.randrange(1, calls // 3) if deaths < 25 else None
    status = os.waitpid(child(lambda: counted(limit), f"{root}/again and again"), 0)[1]
    deaths += status == signal.SIGKILL
json.dump({"ran": ran, "deaths": deaths, "ended": status}, open(f"{root}/ran.json", "w"))
"""
WAYS = re.findall(r'^    "(.+)": lambda', NURSERY, re.M)


def python(arguments, tmp_path, **environment):
    "Run a script in a process of its own, without shape checks."
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAXTYPING_DISABLE": "1", **environment}
    ran = subprocess.run([sys.executable, *map(str, arguments)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    root = tmp_path_factory.mktemp("killed")
    python(["-c", NURSERY, root, os.path.dirname(__file__), 0], root)
    ran = json.loads((root / "ran.json").read_text())
    assert ran["ran"] == dict.fromkeys(WAYS, signal.SIGKILL)
    assert ran["deaths"] >= 3 and ran["ended"] == 0
    whole = small()
    return root, fit(whole, backwards(), backwards()[:10], steps=16, every=4, **QUICK), weights(whole)


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, "again and again"])
def test_a_killed_training_goes_on_as_if_nobody_had_killed_it(way, killed):
    root, expected, right = killed
    if way in WAYS:  # half a file is left only where one was being written
        left = [name for name in os.listdir(root / way) if name.endswith(".part")]
        assert bool(left) == ("is written" in way or "gets its name" in way)
    resumed = small()
    found = fit(resumed, backwards(), backwards()[:10], steps=16, every=4, folder=root / way, **QUICK)
    assert lasting(found) == lasting(expected)
    assert_same(weights(resumed), right)
    assert sorted(os.listdir(root / way)) == ["step-00000012.safetensors", "step-00000016.safetensors"]


# --- several processes ----------------------------------------------------------------------------------------------

SHARED = """
import json, os, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from test_translation_training import QUICK, backwards, fit, small, validation_loss, weights
from attention_course import translation
from safetensors.torch import save_file

root, rank = sys.argv[1], int(os.environ["RANK"])
pairs = backwards(57)
seen, clip = [], torch.nn.utils.clip_grad_norm_

def look(parameters, *a, **k):
    seen.append([p.grad.clone() for p in parameters])
    return clip(parameters, *a, **k)

torch.nn.utils.clip_grad_norm_ = look
for accumulate in (1, 2):
    model = small(seed=rank, dtype=torch.float64, dropout=0.0)  # the first process decides where to begin
    history = fit(model, pairs, pairs[:13], epochs=2, accumulate=accumulate, folder=f"{root}/{accumulate}", **QUICK)
    save_file({k: v for k, v in weights(model).items()}, f"{root}/{accumulate}-{rank}.safetensors")
    json.dump(history, open(f"{root}/{accumulate}-{rank}.json", "w"))
save_file({f"{s}.{i}": g for s, grads in enumerate(seen) for i, g in enumerate(grads)}, f"{root}/seen-{rank}.safetensors")

# dropout differs between processes; stopped and resumed, it is the same again
whole = fit(small(), pairs, steps=9, **QUICK)
fit(small(), pairs, steps=4, folder=f"{root}/stopped", **QUICK)
resumed = fit(small(seed=5 + rank), pairs, steps=9, folder=f"{root}/stopped", **QUICK)
assert [r["loss"] for r in whole] == [r["loss"] for r in resumed]

# the clock of the first process decides, so that none waits for another
steps = torch.tensor([fit(small(), pairs, minutes=0.5 / 60, **QUICK)[-1]["step"]])
torch.distributed.all_reduce(steps)
assert steps.item() % 2 == 0

class Bad(torch.nn.Module):
    "Not a number in one process only."
    def __init__(self):
        super().__init__()
        self.inner, self.d_model, self.calls = small(), 16, 0
    def forward(self, src, tgt):
        self.calls += 1
        return self.inner(src, tgt) * (float("nan") if rank == 1 and self.calls == 3 else 1)

try:
    fit(Bad(), pairs, steps=9, **QUICK)
except FloatingPointError as error:
    assert str(error).startswith("step 3:")
else:
    raise AssertionError("nobody minded")
os.write(1, f"rank {rank} is well\\n".encode())  # in one piece: both write to one pipe
"""


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path):
    from safetensors.torch import load_file

    (tmp_path / "shared.py").write_text(SHARED)
    said = python(
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "shared.py", tmp_path, os.path.dirname(__file__)],
        tmp_path, CUDA_VISIBLE_DEVICES="",
    )
    assert "rank 0 is well" in said and "rank 1 is well" in said
    pairs, grads, clip = backwards(57), [], nn.utils.clip_grad_norm_

    def look(parameters, *a, **k):
        grads.append([p.grad.clone() for p in parameters])
        return clip(parameters, *a, **k)

    n = len(translation.token_batches(pairs, QUICK["max_tokens"]))
    assert n % 2 and n % 4  # the last group of an epoch is too small for all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.utils, "clip_grad_norm_", look)
        for accumulate in (1, 2):
            alone = small(dtype=torch.float64, dropout=0.0)
            expected = fit(alone, pairs, pairs[:13], epochs=2, accumulate=2 * accumulate, **QUICK)
            for rank in (0, 1):
                found = json.loads((tmp_path / f"{accumulate}-{rank}.json").read_text())
                for key in ("step", "epoch", "lr"):
                    assert [row[key] for row in found] == [row[key] for row in expected]
                for key in ("loss", "valid_loss"):
                    assert [r[key] for r in found if r[key] is not None] == pytest.approx([r[key] for r in expected if r[key] is not None], abs=1e-9)
                assert_same(load_file(tmp_path / f"{accumulate}-{rank}.safetensors"), weights(alone), atol=1e-8)
            assert_same(weights(load_model(tmp_path / str(accumulate))), weights(alone), atol=1e-8)
    for rank in (0, 1):
        seen = load_file(tmp_path / f"seen-{rank}.safetensors")
        assert len(seen) == len(grads) * len(grads[0])
        for s, at_step in enumerate(grads):
            for i, grad in enumerate(at_step):
                torch.testing.assert_close(seen[f"{s}.{i}"], grad, atol=1e-10, rtol=1e-6)
    with pytest.raises(ValueError, match="processes was 2, now 1"):
        fit(small(dtype=torch.float64, dropout=0.0), pairs, epochs=3, folder=tmp_path / "1", **QUICK)


# --- what one sees of it --------------------------------------------------------------------------------------------


def test_without_a_terminal_there_are_plain_lines(capsys):
    fit(small(), backwards(20), backwards(5), steps=6, **{**QUICK, "progress": True})
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 6 · loss \d\.\d{3} · validation \d\.\d{3} · [\d,]+ tokens/s · 0:0\d in all", lines[-1]), lines
    fit(small(), backwards(20), steps=3, **QUICK)
    assert capsys.readouterr().out == ""


def test_in_a_terminal_there_is_a_bar(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fit(small(), backwards(20), steps=3, **{**QUICK, "progress": True})
    shown = capsys.readouterr()
    assert "100%" in shown.err and "step 3 · loss" in shown.err and not shown.out


def test_the_curve_of_a_notebook_is_drawn_from_the_history():
    rows = [{"step": s, "loss": 5 - s / 100, "valid_loss": None} for s in range(0, 400, 10)] + [{"step": 400, "loss": 1.0, "valid_loss": 1.5}]
    for history in ([], rows[:1], rows):
        figure = translation._curve(history, "step 400 & counting")
        assert figure._repr_html_().count("<svg") == 1 and "step 400 &amp; counting" in figure._repr_html_()
    points = re.findall(r'points="([^"]*)"', figure._repr_html_())
    assert points[0].startswith("40.0,10.0") and points[0].endswith("400.0,150.0") and points[1].startswith("400.0,132.5")


def test_in_a_notebook_the_curve_is_one_display_that_changes(monkeypatch):
    import types

    shown = []
    handle = types.SimpleNamespace(update=shown.append)
    fake = types.ModuleType("IPython")
    fake.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    display = types.ModuleType("IPython.display")
    display.display = lambda figure, display_id: shown.append(figure) or handle
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    fit(small(), backwards(20), steps=5, **{**QUICK, "progress": True})
    assert len(shown) == 2 and "step 5" in shown[-1]._repr_html_()
