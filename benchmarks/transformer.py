"""`Transformer` against `nn.Transformer` and Marian of Hugging Face `transformers`: a training step, and writing.

Post-norm models of the same sizes on the same batches, like those of Multi30k: sentences of nearly equal length. A step is forward,
label-smoothed loss over the real tokens, backward and fused Adam. `nn.Transformer` gets the same embeddings, positions and
output around it and the same weights; without dropout both must agree in loss and gradients before they are timed. With dropout it
also drops attention weights and hidden units, as it always does. The models are made anew, each once as the first of all, since where
one lies in memory matters, too. Marian is of the same shape but for the biases of its output.
All write as many tokens as they are told: none may end. `nn.Transformer` has no cache and reads all it wrote at each step.
Peak memory is how much the resident set of a fresh process grows in three steps.
"""
import gc
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import measure
from attention_course import Transformer, TransformerConfig
from attention_course.translation import BOS, EOS, PAD, beam_search, greedy_decode, label_smoothed_loss

DEVICE = "cpu"
FORGET = Path("/proc/self/clear_refs")      # a 5 written there: the largest resident set so far is that of now
SIZES = {
    "small": dict(vocab_size=6000, d_model=256, n_heads=4, d_ff=512, n_layers=3),
    "base": dict(vocab_size=8000, d_model=512, n_heads=8, d_ff=2048, n_layers=6),
}


def cases(quick):
    for size, batch in (("small", 16),) if quick else (("small", 110), ("base", 24)):
        for dropout in (0.1, 0.0):
            yield {"what": "train", "size": size, "dropout": dropout, "batch": batch, "length": 18}
    for beam in (1, 4):
        yield {"what": "greedy" if beam == 1 else "beam", "size": "small", "beam": beam, "batch": 8 if quick else 64, "length": 18, "new": 24}


# --- the models ------------------------------------------------------------------------------------------------------


def losses(model, src, tgt, real, labels):
    "The label-smoothed loss; logits are made for real tokens only."
    mask = model.padding(src)
    hidden = model.decode_hidden(tgt, model.encode(src, mask), mask)
    return label_smoothed_loss(model.unembed(hidden.flatten(0, 1)[real]), labels, smoothing=0.1, pad_id=None)


class Torch(nn.Module):
    "`nn.Transformer` with the weights of ours and our embeddings around it, called as ours is. Padding is on the right."

    def __init__(self, ours):
        super().__init__()
        self.config, self.outside, self.stacks = ours.config, ours, ours.to_torch()
        ours.encoder = ours.decoder = None
        self.padding, self.unembed = ours.padding, ours.unembed

    def encode(self, src, mask, positions=None):
        return self.stacks.encoder(self.outside.embed(src, source=True)[0], src_key_padding_mask=~mask[:, 0, 0])

    def decode_hidden(self, tgt, memory, mask, positions=None):
        future = torch.ones(2 * tgt.shape[-1:], dtype=torch.bool).triu(1)
        return self.stacks.decoder(
            self.outside.embed(tgt, source=False)[0], memory, tgt_mask=future, tgt_is_causal=True, memory_key_padding_mask=~mask[:, 0, 0])

    def forward(self, src, tgt):
        return self.unembed(self.decode_hidden(tgt, self.encode(src, mask := self.padding(src)), mask))

    def write(self, src, new):
        "Greedy, without a cache."
        tgt, memory = torch.full((len(src), 1), BOS), self.encode(src, mask := self.padding(src))
        for _ in range(new):
            logits = self.unembed(self.decode_hidden(tgt, memory, mask)[:, -1])
            logits[:, EOS] = -torch.inf
            tgt = torch.cat([tgt, logits.argmax(-1, keepdim=True)], dim=1)
        return tgt[:, 1:]


def marian(config):
    "Marian of the same shape, called as ours is."
    import transformers

    model = transformers.MarianMTModel(transformers.MarianConfig(
        vocab_size=config.vocab_size, d_model=config.d_model, encoder_layers=config.n_layers, decoder_layers=config.n_layers,
        encoder_attention_heads=config.n_heads, decoder_attention_heads=config.n_heads, encoder_ffn_dim=config.d_ff,
        decoder_ffn_dim=config.d_ff, activation_function="relu", dropout=config.dropout, attention_dropout=0.0, activation_dropout=0.0,
        max_position_embeddings=512, scale_embedding=True, share_encoder_decoder_embeddings=True, tie_word_embeddings=True,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=BOS, forced_eos_token_id=None,
    ))

    def decode_hidden(tgt, memory, mask):
        return model.model.decoder(tgt, encoder_hidden_states=memory, encoder_attention_mask=mask, use_cache=False)[0]

    model.padding = lambda ids: (ids != PAD).long()
    model.encode = lambda src, mask: model.model.encoder(src, mask)[0]
    model.unembed = lambda h: model.lm_head(h) + model.final_logits_bias
    model.decode_hidden = decode_hidden
    return model


def model_of(side, case):
    torch.manual_seed(0)
    config = TransformerConfig(**SIZES[case["size"]], dropout=case.get("dropout", 0.0))
    if side == "Marian":
        return marian(config)
    ours = Transformer(config)
    return ours if side == "ours" else Torch(ours)


SIDES = "ours", "nn.Transformer", "Marian"


def sides():
    "The sides that can be measured here: Marian needs a package that nothing else needs."
    return SIDES if importlib.util.find_spec("transformers") else SIDES[:2]


# --- a training step -------------------------------------------------------------------------------------------------


def batch_of(case):
    "Sentences of 18, 17 or 16 tokens, padded to 18."
    generator = torch.Generator().manual_seed(1)
    rows, n, vocabulary = case["batch"], case["length"], SIZES[case["size"]]["vocab_size"]
    src, tgt = torch.randint(4, vocabulary, (2, rows, n), generator=generator)
    shorter = torch.randint(0, 3, (2, rows, 1), generator=generator)
    src = src.masked_fill(torch.arange(n) >= n - shorter[0], PAD)
    tgt = tgt.masked_fill(torch.arange(n) >= n - shorter[1], PAD)
    labels = tgt.flatten()
    real = labels.ne(PAD).nonzero()[:, 0]
    start = torch.full((rows, 1), BOS)
    return src, torch.cat([start, tgt[:, :-1]], dim=1).masked_fill(tgt == PAD, PAD), real, labels[real]


def step_of(side, case):
    "One call is one step of training."
    model = model_of(side, case).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-5, betas=(0.9, 0.98), eps=1e-9, fused=True)
    batch = batch_of(case)

    def step():
        optimizer.zero_grad(set_to_none=True)
        losses(model, *batch).backward()
        optimizer.step()

    return step, model


def same_training(case):
    "Raises where ours and `nn.Transformer` differ in loss or in the gradient of the embedding."
    case, answers = {**case, "dropout": 0.0}, {}
    for side in SIDES[:2]:
        model = model_of(side, case)
        loss = losses(model, *batch_of(case))
        loss.backward()
        answers[side] = loss.detach(), (model if side == "ours" else model.outside).tgt_embedding.weight.grad
    for a, b in zip(*answers.values()):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def peak_mb(side, case):
    "By how many MB a fresh process grows; `None` elsewhere than on Linux."
    if not FORGET.exists():
        return None
    command = [sys.executable, __file__, "--memory", side, json.dumps(case)]
    return round(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]))


def resident_mb(field):
    "The resident set of this program: `VmRSS` now, `VmHWM` at its largest. (What `resource` says on Linux is inherited from the parent.)"
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def grow(side, case):
    "Prints by how much three steps let the memory grow, from what the model alone takes: making a model can take more for a while."
    torch.set_num_threads(2)
    step, _ = step_of(side, case)
    gc.collect()
    before = resident_mb("VmRSS")
    FORGET.write_text("5")
    for _ in range(3):
        step()
    print(resident_mb("VmHWM") - before)


def training_rows(case, timed):
    same_training(case)
    taken, sizes = {side: [] for side in sides()}, {}
    for first in range(len(taken)):     # where in memory a model lies moves its time by more than its code does
        made = {side: step_of(side, case) for side in (*sides()[first:], *sides()[:first])}
        for side, times in timed({side: step for side, (step, _) in made.items()}).items():
            taken[side] += times
        sizes = {side: sum(p.numel() for p in model.parameters()) for side, (_, model) in made.items()}
        del made
    tokens, memory = len(batch_of(case)[2]), {side: peak_mb(side, case) for side in taken}
    return [row(taken, peer, tokens, ours_mb=memory["ours"], peer_mb=memory[peer], ours_parameters=sizes["ours"], peer_parameters=sizes[peer])
            for peer in taken if peer != "ours"]


# --- writing ---------------------------------------------------------------------------------------------------------


class Endless(Transformer):
    "Ours, but the end never comes."

    def unembed(self, h):
        logits = super().unembed(h)
        logits[..., EOS] = -torch.inf
        return logits


def writing_rows(case, timed):
    src, new, beam = batch_of(case)[0], case["new"], case["beam"]
    if beam > 1 and "Marian" not in sides():
        sys.exit("Only Marian has a beam search to compare with: pip install transformers, then go on with --resume.")
    ours, peer = model_of("ours", case).eval(), model_of("nn.Transformer", case).eval()
    ours.__class__ = Endless
    if beam == 1:
        calls = {"ours": lambda: greedy_decode(ours, src, max_len=new), "nn.Transformer": lambda: peer.write(src, new)}
    else:
        calls = {"ours": lambda: beam_search(ours, src, beam=beam, max_len=new)}
    if "Marian" in sides():
        theirs = model_of("Marian", case).eval()
        mask = (src != PAD).long()
        calls["Marian"] = lambda: theirs.generate(
            src, attention_mask=mask, num_beams=beam, do_sample=False, min_new_tokens=new, max_new_tokens=new, early_stopping=False)
    with torch.inference_mode():
        answers = {side: call() for side, call in calls.items()}
        if beam == 1:       # random models have close calls: nearly all rows must agree, in the first half at least
            agree = (answers["ours"] == answers["nn.Transformer"])[:, : new // 2].all(dim=1).float().mean()
            assert agree > 0.8, f"ours and nn.Transformer write different things: {agree:.0%} of the rows agree"
            assert answers["ours"].shape == (len(src), new)
        else:
            assert all(len(found[0].ids) == new for found in answers["ours"])
        if "Marian" in answers:
            assert answers["Marian"].shape == (len(src), new + 1)
        taken = timed(calls)
    return [row(taken, peer, len(src) * new) for peer in calls if peer != "ours"]


def row(taken, peer, tokens, **more):
    numbers = measure.compared(taken["ours"], taken[peer])
    rates = {"ours_per_s": round(1000 * tokens / numbers["ours_ms"]), "peer_per_s": round(1000 * tokens / numbers["peer_ms"])}
    return {"kind": "peer", "peer": peer, **numbers, **rates, **more}


def rows(case, timed):
    "One row for each peer, timed in the same rounds."
    return (training_rows if case["what"] == "train" else writing_rows)(case, timed)


if __name__ == "__main__":
    if "--memory" in sys.argv:
        grow(sys.argv[-2], json.loads(sys.argv[-1]))
    else:
        measure.main(__file__)
