"""`MultiHeadAttention`, with split and with fused projections, against `nn.MultiheadAttention` with the same weights.

Self-attention in float32, with and without a causal mask, at lengths 64 to 4,096; either one sample, or as many as make
1,024 tokens. Three modes: `eval` is a forward pass in eval mode without gradients, where torch's module may take its native
fast path; `train` is a forward pass in training mode that records what the backward pass needs; `step` is forward and backward.
torch's module is called at its fastest: no weights asked for, its mask made beforehand and announced by `is_causal`.
"""
import torch
from torch import nn

import measure
from attention_course import MultiHeadAttention

DEVICE = "cpu"
TOKENS = 1024


def cases(quick):
    for length in (64, 256, 1024) if quick else (64, 128, 256, 512, 1024, 2048, 4096):
        for d_model, n_heads in ((512, 8), (128, 4)):
            for batch in sorted({1, max(1, TOKENS // length)}):
                for causal in (False, True):
                    for mode in ("eval", "train", "step"):
                        yield {"length": length, "d_model": d_model, "n_heads": n_heads, "batch": batch, "causal": causal, "mode": mode}


def calls_of(case):
    "Three calls that do the same: both forms of ours, and the peer."
    torch.manual_seed(0)
    n, d_model, causal = case["length"], case["d_model"], case["causal"]
    peer = nn.MultiheadAttention(d_model, case["n_heads"], batch_first=True)
    for bias in (peer.in_proj_bias, peer.out_proj.bias):        # torch starts them at zero, where a slip would not show
        nn.init.normal_(bias, std=0.1)
    split = MultiHeadAttention.from_torch(peer)
    fused = MultiHeadAttention.from_torch(peer).fuse()
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1) if causal else None
    x = torch.randn(case["batch"], n, d_model, requires_grad=case["mode"] == "step")
    gradient = torch.randn(case["batch"], n, d_model)

    def call(module, forward):
        module.train(case["mode"] != "eval")

        def evaluate():
            with torch.no_grad():
                return forward(x)

        def step():
            x.grad = None
            for parameter in parameters:
                parameter.grad = None
            output = forward(x)
            output.backward(gradient)
            return output

        parameters = list(module.parameters())
        return {"eval": evaluate, "train": lambda: forward(x), "step": step}[case["mode"]]

    return {
        "split": call(split, lambda x: split(x, causal=causal)),
        "fused": call(fused, lambda x: fused(x, causal=causal)),
        "peer": call(peer, lambda x: peer(x, x, x, attn_mask=hidden, is_causal=causal, need_weights=False)[0]),
    }, x


def same(calls, x):
    "Raises where the three do not agree, in outputs and in the gradient of x."
    answers = {}
    for name, call in calls.items():
        x.grad = None
        answers[name] = (call().detach(), x.grad)
    for name, (output, gradient) in answers.items():
        torch.testing.assert_close(output, answers["peer"][0], atol=1e-5, rtol=1e-4)
        if gradient is not None:
            torch.testing.assert_close(gradient, answers["peer"][1], atol=1e-4, rtol=1e-4)


def rows(case, timed):
    "One row for each of our forms, timed in the same rounds."
    calls, x = calls_of(case)
    same(calls, x)
    taken = timed(calls)
    return [{"form": form, **measure.compared(taken[form], taken["peer"])} for form in ("split", "fused")]


if __name__ == "__main__":
    measure.main(__file__)
