"""Chapter 07, decoding: against exhaustive search, a slow beam written out in Python, and reported faults G06, G14, G15, G43, G46, G47, G48."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from attention_course import Transformer, TransformerConfig
from attention_course.translation import (
    BOS, EOS, PAD, Hypothesis, beam_search, bleu, greedy_decode, keep_likely, sample,
)

ALPHAS = [0.0, 0.6, 1.0, 1.5]
A, B, C = 4, 5, 6  # words of scripted models, after the four special ids
each_alpha = pytest.mark.parametrize("alpha", ALPHAS)
cached = pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
unchecked = pytest.mark.usefixtures("no_shape_check")


# --- models whose every probability is known -------------------------------------------------------------------------


class ScriptCache:
    "What a cache is to a scripted model: the tokens so far."

    def __init__(self):
        self.reset()

    @property
    def length(self):
        return 0 if self.ids is None else self.ids.shape[1]

    def update(self, ids):
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], dim=1)
        return self.ids

    def reset(self):
        self.ids = None

    def reorder(self, index):
        self.ids = self.ids[index]


class Script(nn.Module):
    "A model of the same interface as `Transformer`; `table(source, prefix)` gives the next token's probabilities as {id: p}."

    def __init__(self, table, vocab=7):
        super().__init__()
        self.table, self.vocab = table, vocab
        self.dropout = nn.Dropout(0.5)  # nothing may be drawn
        self.rows = []  # how many rows each call of the decoder had

    def padding(self, src):
        return (src != PAD)[:, None, None, :]

    def encode(self, src, src_mask=None):
        return src[..., None].double()

    def new_cache(self):
        return [ScriptCache()]

    def decode(self, tgt, memory, memory_mask=None, tgt_mask=None, *, cache=None, positions=None):
        assert not self.training and not torch.is_grad_enabled()
        assert (tgt != PAD).all()
        whole = tgt if cache is None else cache[0].update(tgt)
        self.rows.append(len(tgt))
        out = torch.full((*tgt.shape, self.vocab), -math.inf, dtype=torch.float64)
        for row, (prefix, source, mask) in enumerate(zip(whole.tolist(), memory[..., 0].long().tolist(), memory_mask[:, 0, 0].tolist())):
            source = tuple(t for t, real in zip(source, mask) if real)
            if EOS in prefix:  # a row that only fills up the beam; all it says seems certain, so that taking it would show
                out[row, -1] = 0.0
                continue
            for token, p in self.table(source, tuple(prefix[1:])).items():
                out[row, -1, token] = math.log(p) if p else -math.inf
        return out


def random_table(seed, words=(A, B), sharp=1.0, end=0.0):
    "Random probabilities that depend on the source and on all that was written; `end` makes </s> likelier."
    known = {}

    def table(source, prefix):
        if (source, prefix) not in known:
            generator = torch.Generator().manual_seed(hash((seed, source, prefix)) % 2**31)
            logits = sharp * torch.randn(len(words) + 1, generator=generator, dtype=torch.float64)
            logits[0] += end
            known[source, prefix] = dict(zip((EOS, *words), logits.softmax(0).tolist()))
        return known[source, prefix]

    return table


def fixed(tree):
    return Script(lambda source, prefix: tree[prefix])


G47 = {(): {EOS: 0.6, A: 0.4}, (A,): {EOS: 0.95, A: 0.05}, (A, A): {EOS: 1.0}}
ONE = torch.tensor([[A, EOS]])  # a source when it does not matter


def all_of(table, source, max_len, alpha):
    "Every hypothesis there is, best first: (score, ids, log-probability)."
    done, live = [], [((), 0.0)]
    for n in range(1, max_len + 1):
        grown = [((*ids, t), lp + math.log(p)) for ids, lp in live for t, p in table(source, ids).items() if p]
        done += [h for h in grown if h[0][-1] == EOS or n == max_len]
        live = [h for h in grown if h[0][-1] != EOS]
    return sorted(((lp / len(ids) ** alpha, ids, lp) for ids, lp in done), reverse=True)


def slow_beam(table, source, max_len, alpha, beam, n_best=1, stop=True):
    "Beam search, as one would do it on paper."
    done, live = [], [((), 0.0)]
    for n in range(1, max_len + 1):
        grown = [((*ids, t), lp + math.log(p)) for ids, lp in live for t, p in sorted(table(source, ids).items()) if p]
        kept = sorted(grown, key=lambda h: -h[1])[:beam]
        done += [(lp / n**alpha, ids, lp) for ids, lp in kept if ids[-1] == EOS or n == max_len]
        done.sort(key=lambda h: -h[0])
        live = [h for h in kept if h[0][-1] != EOS]
        bound = max((lp for _, lp in live), default=-math.inf) / max_len**alpha
        if stop and len(done) >= n_best and bound <= done[n_best - 1][0]:
            break
    return done[:n_best]


def equal(found, expected, atol=1e-12):
    "The same hypotheses in the same order."
    assert [tuple(h.ids) for h in found] == [ids for _, ids, _ in expected]
    for h, (score, _, log_p) in zip(found, expected):
        assert h.score == pytest.approx(score, abs=atol) and h.log_probability == pytest.approx(log_p, abs=atol)


def batch_of(*sources, extra=0):
    longest = max(map(len, sources)) + extra
    return torch.tensor([[*s, *[PAD] * (longest - len(s))] for s in sources])


def texts(ids):
    "Rows without their padding."
    return [[t for t in row if t != PAD] for row in ids.tolist()]


# --- beam search against exhaustive search and against a slow beam -----------------------------------------------------


@each_alpha
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_that_holds_everything_finds_the_exact_n_best(alpha, seed):
    table, source = random_table(seed), (A, B, EOS)
    everything = all_of(table, source, 4, alpha)
    (found,) = beam_search(Script(table), torch.tensor([source]), beam=len(everything), alpha=alpha, n_best=len(everything), max_len=4)
    equal(found, everything)
    (few,) = beam_search(Script(table), torch.tensor([source]), beam=len(everything), alpha=alpha, n_best=3, max_len=4)
    equal(few, everything[:3])  # the early stop loses none of them


@each_alpha
@cached
@pytest.mark.parametrize("beam", [1, 2, 3, 5])
def test_small_beams_equal_a_beam_on_paper(alpha, beam, use_cache):
    sources = [(A, EOS), (B, A, C, EOS), (C, C, C, A, B, EOS)]
    for seed in range(3):
        table = random_table(seed, words=(A, B, C), sharp=1.5)
        n_best = min(beam, 2 + seed)
        found = beam_search(Script(table), batch_of(*sources), beam=beam, alpha=alpha, n_best=n_best, max_len=7, use_cache=use_cache)
        for hypotheses, source in zip(found, sources):
            equal(hypotheses, slow_beam(table, source, 7, alpha, beam, n_best))


@each_alpha
def test_stopping_early_changes_nothing(alpha):
    for seed in range(6):
        table, source = random_table(seed, words=(A, B, C), end=0.5), (A, EOS)
        (found,) = beam_search(Script(table), torch.tensor([source]), beam=3, alpha=alpha, n_best=2, max_len=9)
        equal(found, slow_beam(table, source, 9, alpha, 3, 2, stop=False))


def test_a_short_ending_does_not_hide_a_better_long_one():
    "After one step </s> leads; from alpha 0.3 on, the hypothesis that wins ends eight steps later."
    tree = {(): {EOS: 0.6, A: 0.4}, **{(A,) * n: {A: 0.99, EOS: 0.01} for n in range(1, 8)}, (A,) * 8: {EOS: 1.0}}
    for alpha, longer in ((0.0, False), (0.2, False), (0.4, True), (2.0, True)):
        for beam in (2, 4):
            ((best,),) = beam_search(fixed(tree), ONE, beam=beam, alpha=alpha, max_len=12)
            assert best.ids == ([A] * 8 + [EOS] if longer else [EOS])


@pytest.mark.parametrize(("alpha", "steps"), [(0.0, 1), (0.6, 2), (1.0, 4), (2.0, 5)])
def test_a_search_stops_as_soon_as_nothing_living_can_win_and_not_before(alpha, steps):
    "Worked out by hand: finished -log 2; after n steps the living has -log 2 + (n - 1) log 0.3, divided by 5^alpha."
    tree = {(): {EOS: 0.5, A: 0.5}, **{(A,) * n: {A: 0.3, B: 0.3, C: 0.3, EOS: 0.1} for n in range(1, 6)}}
    model = Script(lambda source, prefix: tree.get(prefix, {EOS: 1.0}))
    needed = next(n for n in range(1, 6) if n == 5 or (math.log(0.5) + (n - 1) * math.log(0.3)) / 5**alpha <= math.log(0.5))
    beam_search(model, ONE, beam=2, alpha=alpha, max_len=5)
    assert len(model.rows) == needed == steps


def test_g46_every_hypothesis_ends_once_and_none_comes_twice():
    table = random_table(3, end=1.0)
    for beam, n_best in ((3, 3), (3, 30), (30, 30)):
        (found,) = beam_search(Script(table), ONE, beam=beam, n_best=n_best, max_len=6)
        assert len({tuple(h.ids) for h in found}) == len(found) <= n_best
        assert len(found) == n_best or beam == 3
        for ids, score, log_p in found:
            assert ids.count(EOS) == (len(ids) < 6 or ids[-1] == EOS) and EOS not in ids[:-1]
            assert PAD not in ids and BOS not in ids and math.isfinite(score) and math.isfinite(log_p)


def test_g47_one_rule_for_all_lengths_and_the_end_counts():
    (found,) = beam_search(fixed(G47), ONE, beam=3, alpha=1.0, n_best=3, max_len=2)
    assert [h.ids for h in found] == [[A, EOS], [EOS], [A, A]]
    assert [h.score for h in found] == pytest.approx([-0.4838, -0.5108, -1.9560], abs=5e-5)
    for h in found:
        by_hand = sum(math.log(G47[tuple(h.ids[:i])][t]) for i, t in enumerate(h.ids))
        assert h.score * len(h.ids) == pytest.approx(by_hand, abs=1e-12) == h.log_probability


def test_beam_one_is_greedy_whatever_the_length_penalty():
    for seed in range(5):
        src = batch_of((A, EOS), (B, A, C, EOS), (C, EOS))
        table = random_table(seed, words=(A, B, C), sharp=2.0)
        greedy = texts(greedy_decode(Script(table), src, max_len=8))
        for alpha in ALPHAS:
            assert [h[0].ids for h in beam_search(Script(table), src, beam=1, alpha=alpha, max_len=8)] == greedy
            assert all(len(h) == 1 for h in beam_search(Script(table), src, beam=1, alpha=alpha, n_best=1, max_len=8))


def test_equals_are_taken_in_order():
    "Of equally likely tokens the smaller id; of equally good hypotheses the one that ended first, then the one ranked higher."
    even = Script(lambda source, prefix: {A: 0.25, B: 0.25, C: 0.25, EOS: 0.25})
    assert greedy_decode(even, ONE).tolist() == [[EOS]]
    (found,) = beam_search(even, ONE, beam=3, alpha=0.0, n_best=4, max_len=2)
    assert [h.ids for h in found[:4]] == [[EOS], [A, EOS], [A, A], [A, B]]
    words = Script(lambda source, prefix: {C: 0.5, A: 0.5} if len(prefix) < 2 else {EOS: 1.0})
    assert greedy_decode(words, ONE).tolist() == [[A, A, EOS]]
    for beam in (2, 3, 4):
        (found,) = beam_search(words, ONE, beam=beam, n_best=beam)
        assert [h.ids for h in found] == [[A, A, EOS], [A, C, EOS], [C, A, EOS], [C, C, EOS]][:beam]


def test_a_vocabulary_smaller_than_the_beam_and_impossible_tokens_do_no_harm():
    for beam in (2, 7, 50):
        (found,) = beam_search(fixed(G47), ONE, beam=beam, n_best=beam, max_len=4)
        assert [h.ids for h in found] == [[A, EOS], [EOS], [A, A, EOS]][: len(found)]
        assert len(found) == min(beam, 3)


def test_padding_and_start_never_come_next():
    eager = Script(lambda source, prefix: {PAD: 0.4, BOS: 0.4, A: 0.15, EOS: 0.05} if len(prefix) < 3 else {PAD: 0.9, EOS: 0.1})
    assert greedy_decode(eager, ONE).tolist() == [[A, A, A, EOS]]
    (found,) = beam_search(eager, ONE, beam=4, n_best=4)
    assert all(set(h.ids) <= {A, EOS} for h in found)
    assert found[0].log_probability == pytest.approx(3 * math.log(0.15) + math.log(0.1))  # theirs is not shared out
    drawn = sample(eager, ONE.expand(200, -1), generator=torch.Generator().manual_seed(0))
    assert set(drawn.unique().tolist()) == {PAD, A, EOS}  # padding after the end only
    assert all(len(row) == row.index(EOS) + 1 for row in texts(drawn))


# --- rows of a batch -----------------------------------------------------------------------------------------------------


def test_what_comes_back_from_greedy_decoding():
    "Row by row as if alone; <pad> after </s>; as long as the longest; rows that have ended leave the batch."
    lengths = {A: 1, B: 4, C: 2}
    model = Script(lambda source, prefix: {A: 1.0} if len(prefix) + 1 < lengths[source[0]] else {EOS: 1.0})
    out = greedy_decode(model, torch.tensor([[A], [B], [C]]))
    assert out.dtype == torch.int64
    assert out.tolist() == [[EOS, PAD, PAD, PAD], [A, A, A, EOS], [A, EOS, PAD, PAD]]
    assert model.rows == [3, 2, 1, 1]
    model.rows.clear()
    found = beam_search(model, torch.tensor([[A], [B], [C]]))
    assert [h[0].ids for h in found] == texts(out) and model.rows == [3, 8, 4, 4]


@cached
def test_lengths_are_limited_row_by_row(use_cache):
    endless = Script(lambda source, prefix: {A: 0.9, EOS: 0.1})
    src = batch_of((A, EOS), (A, B, C, A, EOS), extra=3)
    limits = [52, 55]
    for out in (greedy_decode(endless, src, use_cache=use_cache), sample(endless, src, top_k=1, use_cache=use_cache)):
        assert [len(row) for row in texts(out)] == limits and out.shape == (2, 55)
    (one,), (two,) = beam_search(endless, src, beam=1, use_cache=use_cache)
    assert [len(one.ids), len(two.ids)] == limits
    assert greedy_decode(endless, src, max_len=1, use_cache=use_cache).tolist() == [[A], [A]]
    (one, two), _ = beam_search(endless, src, beam=2, n_best=2, max_len=1, use_cache=use_cache)
    assert (one.ids, two.ids) == ([A], [EOS]) and one.score == pytest.approx(math.log(0.9))


def test_an_empty_batch_and_a_source_of_one_token():
    model = fixed(G47)
    nothing = torch.zeros(0, 3, dtype=torch.long)
    assert greedy_decode(model, nothing).shape == sample(model, nothing).shape == (0, 0)
    assert beam_search(model, nothing) == []
    assert greedy_decode(model, torch.tensor([[A]])).tolist() == [[EOS]]
    assert beam_search(model, torch.tensor([[A]]))[0][0].ids == [A, EOS]


def test_the_model_is_left_as_it_was():
    "Its parts too: one that was in eval mode on purpose stays so; and also when decoding fails."
    model = fixed(G47)
    model.frozen = nn.Dropout(0.5).eval()
    for decode in (greedy_decode, beam_search, sample):
        decode(model, ONE)
        assert model.training and model.dropout.training and not model.frozen.training
    model.table = None
    with pytest.raises(TypeError):
        greedy_decode(model, ONE)
    assert model.training and model.dropout.training and not model.frozen.training and torch.is_grad_enabled()


def test_what_was_written_can_be_trained_on():
    out = greedy_decode(fixed(G47), ONE)
    nn.Embedding(7, 3)(out).sum().backward()  # a tensor of inference mode would refuse


# --- sampling --------------------------------------------------------------------------------------------------------------


def draws(model, count, **options):
    return sample(model, ONE.expand(count, -1), generator=torch.Generator().manual_seed(7), **options)


def test_draws_follow_the_models_probabilities():
    "Chi-square over the whole sequences, 6 of them: below 20.5 in 999 of 1000 samples."
    count = 4000
    tree = {(): {EOS: 0.2, A: 0.5, B: 0.3}, (A,): {EOS: 0.7, B: 0.3}, (B,): {EOS: 0.4, A: 0.6}, (A, B): {EOS: 1.0}, (B, A): {EOS: 0.25, C: 0.75}, (B, A, C): {EOS: 1.0}}
    expected = {tuple(ids): math.exp(lp) for _, ids, lp in all_of(lambda s, p: tree[p], None, 5, 0)}
    assert len(expected) == 6 and sum(expected.values()) == pytest.approx(1)
    seen = [tuple(row) for row in texts(draws(fixed(tree), count))]
    chi = sum((seen.count(ids) - count * p) ** 2 / (count * p) for ids, p in expected.items())
    assert set(seen) == set(expected) and chi < 20.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_raises_probabilities_to_a_power(temperature):
    p = {EOS: 0.2, A: 0.5, B: 0.3}
    count = 4000
    first = draws(Script(lambda source, prefix: p if not prefix else {EOS: 1.0}), count, temperature=temperature)[:, 0]
    power = {t: x ** (1 / temperature) for t, x in p.items()}
    chi = sum(((first == t).sum().item() - count * x / sum(power.values())) ** 2 / (count * x / sum(power.values())) for t, x in power.items())
    assert chi < 13.8  # 2 degrees of freedom, 999 of 1000


@pytest.mark.parametrize(
    ("options", "support"),
    [({}, {EOS, A, B, C}), ({"top_k": 1}, {A}), ({"top_k": 2}, {A, B}), ({"top_k": 9}, {EOS, A, B, C}),
     ({"top_p": 0.05}, {A}), ({"top_p": 0.5}, {A}), ({"top_p": 0.51}, {A, B}), ({"top_p": 0.8}, {A, B}),
     ({"top_p": 0.81}, {A, B, C}), ({"top_p": 1.0}, {EOS, A, B, C}), ({"top_p": 1e-9}, {A}),
     ({"top_k": 2, "top_p": 0.62}, {A}), ({"top_k": 2, "top_p": 0.63}, {A, B}),  # of the two, A has 0.625
     ({"top_p": 0.8, "temperature": 0.25}, {A}), ({"top_p": 0.8, "temperature": 4.0}, {A, B, C})],
)
def test_which_tokens_can_be_drawn(options, support):
    p = {A: 0.5, B: 0.3, C: 0.15, EOS: 0.05}
    first = draws(Script(lambda source, prefix: p if not prefix else {EOS: 1.0}), 600, **options)[:, 0]
    assert set(first.tolist()) == support


def test_a_tail_is_cut_where_its_definition_says():
    log_p = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25] * 4, [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64).log()
    before = log_p.clone()
    for p in (0.3, 0.4, 0.5, 0.7, 0.75, 0.9, 0.95, 1.0):
        kept = keep_likely(log_p, top_p=p)
        for row, out in zip(log_p.exp(), kept):
            ranked = row.sort(descending=True).values
            count = int((out > -math.inf).sum())
            smallest = next(n for n in range(1, 5) if ranked[:n].sum() >= p - 1e-9)
            assert count == (smallest if p < 1 else (row > 0).sum())
            assert out[out > -math.inf].exp().sum() >= p - 1e-9
        assert torch.equal(kept[kept > -math.inf], log_p[kept > -math.inf])
    assert torch.equal(keep_likely(log_p, top_k=2) > -math.inf, torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 0]]).bool())
    assert torch.equal(log_p, before)
    assert (keep_likely(torch.tensor([1.0, 1e-9]).log(), top_p=1.0) > -math.inf).all()  # all is all, however unlikely
    for logits in (log_p.float() + 3, log_p[0], log_p[None]):  # logits do as well, with any axes in front
        assert torch.equal(keep_likely(logits, top_p=0.7) > -math.inf, (keep_likely(log_p, top_p=0.7) > -math.inf)[0 if logits.ndim == 1 else ...].view(logits.shape))


def test_a_generator_gives_the_same_again_and_leaves_the_global_one_alone():
    model, src = Script(random_table(0)), ONE.expand(20, -1)
    state = torch.get_rng_state()
    one, two = (sample(model, src, generator=torch.Generator().manual_seed(5), use_cache=c) for c in (True, False))
    assert torch.equal(one, two)
    greedy_decode(model, src), beam_search(model, src)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    first = sample(model, src)
    torch.manual_seed(5)
    assert torch.equal(first, sample(model, src)) and not torch.equal(torch.get_rng_state(), state)


# --- a real Transformer ---------------------------------------------------------------------------------------------------


class Terse(Transformer):
    "One whose random logits are helped to an end now and then, so that rows end at different times."

    end = 0.0

    def unembed(self, h):
        logits = super().unembed(h)
        logits[..., EOS] += self.end
        return logits


def transformer(seed=0, vocab=12, end=4.0, **changes):
    "Random weights, large enough that contexts matter; in training mode with dropout, for decoding has to see to that."
    torch.manual_seed(seed)
    model = Terse(TransformerConfig.tiny(vocab, **{"d_model": 32, "d_ff": 64, "dropout": 0.3, **changes})).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
    model.end = end
    return model


def drawn(*lengths, seed=1, vocab=12):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocab, (n,), generator=generator).tolist() for n in lengths]


def forced(model, src, ids):
    "Log-probabilities of every next token, the translation given: one pass, no cache."
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([src]), torch.tensor([[BOS, *ids]])).log_softmax(-1)[0]


def forced_sum(model, src, ids):
    return sum(forced(model, src, ids)[i, t].item() for i, t in enumerate(ids))


@cached
def test_g06_decoding_sees_the_logits_that_training_saw(use_cache, monkeypatch):
    model, (src,) = transformer(end=0.0), drawn(6)
    seen, decode = [], model.decode
    monkeypatch.setattr(model, "decode", lambda *a, **k: seen.append(decode(*a, **k)) or seen[-1])
    (ids,) = greedy_decode(model, torch.tensor([src]), max_len=5, use_cache=use_cache).tolist()
    monkeypatch.undo()
    steps = torch.stack([logits[0, -1] for logits in seen])
    model.eval()
    with torch.no_grad():
        right = model(torch.tensor([src]), torch.tensor([[BOS, *ids[:-1]]]))[0]
    torch.testing.assert_close(steps, right, atol=1e-10, rtol=0)


def test_g14_a_prefix_read_in_chunks_gives_what_one_pass_gives():
    model = transformer().eval()
    src, tgt = (torch.tensor(drawn(n, seed=n)) for n in (9, 16))
    with torch.no_grad():
        memory = model.encode(src)
        whole = model.decode(tgt, memory)
        for cuts in ((0, 7, 16), (0, 1, 15, 16), tuple(range(17))):
            cache = model.new_cache()
            parts = [model.decode(tgt[:, a:b], memory, cache=cache) for a, b in itertools.pairwise(cuts)]
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-10, rtol=0)


def test_g15_nothing_of_one_call_is_left_in_the_next():
    used, fresh = transformer(), transformer()
    long, short = (torch.tensor(drawn(*n, seed=3)) for n in ((6, 6, 6), (4,)))
    for decode in (greedy_decode, beam_search, partial(sample, top_k=1)):
        decode(used, long, max_len=8)
        one, two = decode(used, short, max_len=5), decode(fresh, short, max_len=5)
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


@cached
def test_g43_a_row_does_not_see_its_batch_nor_its_padding(use_cache):
    model, sources = transformer(4), drawn(3, 6, 1, 5)
    options = {"max_len": 6, "use_cache": use_cache}
    alone_greedy = [texts(greedy_decode(model, torch.tensor([s]), **options))[0] for s in sources]
    alone_beam = [beam_search(model, torch.tensor([s]), beam=3, n_best=3, **options)[0] for s in sources]
    assert len(set(map(len, alone_greedy))) > 1  # some leave the batch before others
    for extra, order in ((0, (0, 1, 2, 3)), (1, (3, 0, 2, 1)), (7, (2, 3, 1, 0))):
        src = batch_of(*(sources[i] for i in order), extra=extra)
        assert texts(greedy_decode(model, src, **options)) == [alone_greedy[i] for i in order]
        assert texts(greedy_decode(model, src, src_mask=model.padding(src), **options)) == [alone_greedy[i] for i in order]
        for found, i in zip(beam_search(model, src, beam=3, n_best=3, **options), order):
            equal(found, [(h.score, tuple(h.ids), h.log_probability) for h in alone_beam[i]], atol=1e-10)


@each_alpha
def test_g48_the_cache_follows_its_beam_and_memory_its_sample(alpha):
    for seed in range(2):
        model, sources = transformer(seed), drawn(5, 3, seed=seed)
        src = batch_of(*sources)
        one, two = (beam_search(model, src, beam=3, alpha=alpha, n_best=3, max_len=6, use_cache=c) for c in (True, False))
        for found, again, source in zip(one, two, sources):
            equal(found, [(h.score, tuple(h.ids), h.log_probability) for h in again], atol=1e-8)
            for h in found:
                assert h.log_probability == pytest.approx(forced_sum(model, source, h.ids), abs=1e-8)
                assert h.score == pytest.approx(h.log_probability / len(h.ids) ** alpha, abs=1e-12)


@each_alpha
def test_a_real_model_against_a_beam_on_paper(alpha):
    model, sources = transformer(4), drawn(4, 2, seed=4)
    found = beam_search(model, batch_of(*sources), beam=3, alpha=alpha, n_best=2, max_len=6)

    def table(source, prefix):
        return {t: p for t, p in enumerate(forced(model, source, prefix)[-1].exp().tolist()) if t not in (PAD, BOS)}

    for hypotheses, source in zip(found, sources):
        equal(hypotheses, slow_beam(table, source, 6, alpha, 3, 2), atol=1e-10)


def test_beam_one_is_greedy_on_a_real_model():
    model, src = transformer(2, end=2.0), batch_of(*drawn(4, 7, 2, seed=6))
    assert [h[0].ids for h in beam_search(model, src, beam=1, max_len=9)] == texts(greedy_decode(model, src, max_len=9))
    assert torch.equal(greedy_decode(model, src.int(), max_len=9), greedy_decode(model, src, max_len=9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_models_are_summed_in_float32_at_least(dtype, monkeypatch):
    model, src = transformer(end=0.0).to(dtype), batch_of(*drawn(6))
    seen, decode = [], model.decode
    monkeypatch.setattr(model, "decode", lambda *a, **k: seen.append(decode(*a, **k)) or seen[-1])
    ((best,),) = beam_search(model, src, beam=1, max_len=5)
    once = sum(logits[0, -1].float().log_softmax(-1)[t].item() for logits, t in zip(seen, best.ids, strict=True))
    assert seen[0].dtype == dtype and best.log_probability == pytest.approx(once, abs=1e-5)
    assert texts(greedy_decode(model, src, max_len=5)) == [best.ids]


# --- BLEU -------------------------------------------------------------------------------------------------------------------


def test_bleu_of_one_sentence_by_hand():
    "Papineni's four precisions and the brevity penalty; 8 words against 9."
    pytest.importorskip("sacrebleu")
    mine, right = "a dog runs over the green grass .", "a dog is running over the green grass ."
    score, signature = bleu([mine], [right])
    precisions = (7 / 8, 5 / 7, 3 / 6, 2 / 5)
    assert score == pytest.approx(100 * math.exp(1 - 9 / 8) * math.prod(precisions) ** 0.25, abs=1e-9)
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_bleu_counts_over_the_whole_corpus():
    pytest.importorskip("sacrebleu")
    mine, right = ["the dog sleeps in the sun .", "a man"], ["the dog sleeps in the sun .", "a man sings a song ."]
    assert bleu(right, right)[0] == pytest.approx(100)
    both = bleu(mine, right)[0]
    assert abs(both - sum(bleu([m], [r])[0] for m, r in zip(mine, right)) / 2) > 5  # no mean of sentences
    assert both == pytest.approx(100 * math.exp(1 - 13 / 9), abs=1e-9)  # every word is right, four are missing


@unchecked
def test_bleu_refuses_what_does_not_pair_up(monkeypatch):
    for bad in ((["a"], ["a", "b"]), ([], [])):
        with pytest.raises(ValueError, match=rf"{len(bad[0])} hypotheses and {len(bad[1])} references"):
            bleu(*bad)
    for bad in (("a dog", ["a dog"]), (["a"], [["a"]])):
        with pytest.raises(TypeError, match="list of strings"):
            bleu(*bad)
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    with pytest.raises(ImportError, match=r"attention-course\[translation\]"):
        bleu(["a"], ["a"])


# --- errors -----------------------------------------------------------------------------------------------------------------


@unchecked
@pytest.mark.parametrize("decode", [greedy_decode, beam_search, sample])
def test_a_source_that_is_none_is_refused(decode):
    model = fixed(G47)
    for error, says, src, options in [
        (TypeError, "src is a list", [[4]], {}),
        (TypeError, "src has dtype torch.float32", torch.ones(1, 2), {}),
        (TypeError, "src has dtype torch.int16", ONE.short(), {}),
        (ValueError, r"src has shape \(2,\); expected \(batch, n_s\)", ONE[0], {}),
        (ValueError, r"src has shape \(1, 0\)", ONE[:, :0], {}),
        (TypeError, "src_mask is torch.int64", ONE, {"src_mask": ONE[:, None, None]}),
        (ValueError, r"src_mask has shape \(1, 2\); .* here \(1, 1, 1, 2\)", ONE, {"src_mask": ONE > 0}),
        (ValueError, "max_len=0; expected at least 1", ONE, {"max_len": 0}),
        (TypeError, "max_len is a float", ONE, {"max_len": 2.0}),
        (TypeError, "use_cache is a str", ONE, {"use_cache": "no"}),
    ]:
        with pytest.raises(error, match=says):
            decode(model, src, **options)
    with pytest.raises(TypeError, match="model is a Linear; expected a Transformer"):
        decode(nn.Linear(2, 2), ONE)
    with pytest.raises(ValueError, match="model.config.pad_id=1; expected 0"):
        decode(Transformer(TransformerConfig.tiny(8, pad_id=1)), ONE)


@unchecked
@pytest.mark.parametrize(
    ("decode", "error", "says", "options"),
    [
        (beam_search, ValueError, "beam=0; expected at least 1", {"beam": 0}),
        (beam_search, TypeError, "beam is a float", {"beam": 2.0}),
        (beam_search, ValueError, "n_best=0; expected at least 1", {"n_best": 0}),
        (beam_search, ValueError, "alpha=-0.1; expected a number from 0 to 10", {"alpha": -0.1}),
        (beam_search, ValueError, "alpha=1000.0", {"alpha": 1000.0}),
        (beam_search, ValueError, "alpha=nan", {"alpha": math.nan}),
        (beam_search, ValueError, "alpha=inf", {"alpha": math.inf}),
        (beam_search, TypeError, "alpha is a str", {"alpha": "1"}),
        (sample, ValueError, "temperature=0; expected a finite number above 0", {"temperature": 0}),
        (sample, ValueError, "temperature=-1", {"temperature": -1}),
        (sample, ValueError, "temperature=inf", {"temperature": math.inf}),
        (sample, TypeError, "temperature is a bool", {"temperature": True}),
        (sample, ValueError, "top_k=0; expected at least 1", {"top_k": 0}),
        (sample, TypeError, "top_k is a float", {"top_k": 2.0}),
        (sample, ValueError, "top_p=0; expected a number above 0 and at most 1", {"top_p": 0}),
        (sample, ValueError, "top_p=1.1", {"top_p": 1.1}),
        (sample, ValueError, "top_p=nan", {"top_p": math.nan}),
    ],
)
def test_options_out_of_range_are_refused(decode, error, says, options):
    with pytest.raises(error, match=says):
        decode(fixed(G47), ONE, **options)


@unchecked
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"top_k": 0}, ValueError, "top_k=0; expected at least 1"),
        ({"top_k": -1}, ValueError, "top_k=-1"),
        ({"top_k": 2.0}, TypeError, "top_k is a float"),
        ({"top_p": 0}, ValueError, "top_p=0; expected a number above 0 and at most 1"),
        ({"top_p": -1.0}, ValueError, "top_p=-1.0"),
        ({"top_p": 2.0}, ValueError, "top_p=2.0"),
    ],
)
def test_a_tail_that_cannot_be_cut_off_is_refused(options, error, says):
    with pytest.raises(error, match=says):
        keep_likely(torch.zeros(4), **options)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("decode", [greedy_decode, beam_search, sample])
def test_a_model_that_has_lost_its_mind_writes_nothing(decode, bad):
    model = transformer()
    with torch.no_grad():
        model.decoder.layers[-1].feed_forward.w_out.weight[0, 0] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        decode(model, batch_of(*drawn(3, 5)))


def test_a_hypothesis_is_a_tuple_with_names():
    ((best,),) = beam_search(fixed(G47), ONE)
    assert isinstance(best, Hypothesis) and best == (best.ids, best.score, best.log_probability)
