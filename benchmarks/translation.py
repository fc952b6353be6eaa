"""How good the translator of chapter 07 becomes, how fast, and how much of that is chance: BLEU on Multi30k, German to English.

The recipes are those of `python -m attention_course.translation train`. "hour" is the recipe `cpu`; "quarter" is the recipe `quick`,
ours with three seeds, and `nn.Transformer` (its stacks with our embeddings around them, trained by the same loop; its weights are
copied into ours to write). A training that was stopped goes on from its checkpoints in build/bench/translation. `minutes`
are those of the clock, which on a shared machine say little; `cpu_minutes` are those that the processor spent on it, where all was
done in one go.
Needs Multi30k: in the folder that ATTENTION_COURSE_MULTI30K names, or the package downloads it.
"""
import sys
import time

import torch

import measure
from attention_course import Transformer
from attention_course.translation import (
    RECIPES, beam_search, bleu, greedy_decode, load_multi30k, train_translator, translate,
)
from transformer import Torch

DEVICE = "cpu"
HOURS = True        # runs only when it is named
FOLDER = measure.TRIALS / "translation"
RUNS = {"hour": "cpu", "quarter": "quick"}
OUR_SENTENCES = (
    "Ein Mann hat seinem Hund einen roten Ball zugeworfen.",
    "Zwei Kinder spielen im Schnee.",
    "Eine ältere Frau mit Hut verkauft Blumen auf dem Markt.",
    "Der Junge, der auf dem Fahrrad sitzt, winkt seiner Mutter zu.",
    "Ein Straßenmusiker spielt vor einer Kirche Gitarre.",
    "Niemand spielt im Schnee.",
    "Die Zentralbank hat die Zinsen gesenkt.",
)


def cases(quick):
    yield {"run": "hour", "model": "ours", "seed": 0}
    for seed in range(3):
        yield {"run": "quarter", "model": "ours", "seed": seed}
    yield {"run": "quarter", "model": "nn.Transformer", "seed": 0}


def peer(config):
    return Torch(Transformer(config))


def ours(model):
    "The model that writes: torch's stacks are copied into ours."
    if isinstance(model, Transformer):
        return model
    writer = Transformer(model.config)
    writer.tgt_embedding.load_state_dict(model.outside.tgt_embedding.state_dict())
    copied = Transformer.from_torch(model.stacks, model.config.vocab_size)
    writer.encoder, writer.decoder = copied.encoder, copied.decoder
    return writer.eval()


def beam_of(beam, alpha):
    if beam == 1:
        return greedy_decode
    return lambda model, src: [found[0].ids for found in beam_search(model, src, beam=beam, alpha=alpha)]


def scored(model, vocabulary, pairs, beam, alpha):
    "BLEU, its signature, the seconds that it took to write, the length compared with the reference's."
    sources, references = zip(*pairs)
    began = time.perf_counter()
    hypotheses = translate(sources, model, vocabulary, decode=beam_of(beam, alpha))
    seconds = time.perf_counter() - began
    score, signature = bleu(hypotheses, references)
    import sacrebleu

    counted = sacrebleu.BLEU().corpus_score(list(hypotheses), [list(references)])
    return {"bleu": round(score, 2), "signature": signature, "decode_s": round(seconds, 1), "length_ratio": round(counted.sys_len / counted.ref_len, 3)}


def rows(case, timed):
    "Rows of kind recipe, curve, bleu and, for the first case, example."
    texts = load_multi30k()
    recipe = RECIPES[RUNS[case["run"]]]
    epochs = recipe["fit"]["epochs"]
    folder = FOLDER / "-".join(str(value) for value in case.values())
    fresh = not any(folder.glob("step-*"))
    found, history, spent = [], [], 0.0
    for epoch in range(1, epochs + 1):      # the same training as in one go: it resumes exactly
        if not history or history[-1]["epoch"] <= epoch:        # else a checkpoint of a later epoch was there
            began = time.process_time()
            model, vocabulary, history = train_translator(
                folder, recipe=RUNS[case["run"]], seed=case["seed"], epochs=epoch,
                make_model=Transformer if case["model"] == "ours" else peer, progress=sys.stderr.isatty(),
            )
            spent += time.process_time() - began
        last = next(row for row in reversed(history) if row["epoch"] <= epoch and row["valid_loss"] is not None)
        found.append({"kind": "curve", "epoch": epoch, "minutes": round(last["seconds"] / 60, 2),
                      "valid_loss": round(last["valid_loss"], 4)})
        if history[-1]["epoch"] <= epoch:
            found[-1]["bleu"] = scored(ours(model), vocabulary, texts["val"], 1, 0.0)["bleu"]
            print(f"  epoch {epoch}: BLEU {found[-1]['bleu']:.2f} on the validation split", flush=True)
    model = ours(model)
    about = {"kind": "recipe", "vocabulary": len(vocabulary), "parameters": sum(p.numel() for p in model.parameters()),
             **recipe["model"], **recipe["fit"], "threads": torch.get_num_threads()}
    if fresh:
        about["cpu_minutes"] = round(spent / 60, 1)
    if case["run"] == "hour" and case["model"] == "ours":
        about["command"] = "python -m attention_course.translation train --recipe cpu"
    found.insert(0, about)
    wide = case == next(cases(quick=True))
    for beam, alpha in ((1, 0.0), (4, 1.0), *(((2, 1.0), (8, 1.0), (4, 0.0), (8, 0.0)) if wide else ())):
        found.append({"kind": "bleu", "split": "test", "decoding": "greedy" if beam == 1 else "beam", "beam": beam, "alpha": alpha,
                      "epochs": epochs, "minutes": found[-1].get("minutes", last["seconds"] / 60), **scored(model, vocabulary, texts["test"], beam, alpha)})
    if wide:
        for german, best, greedy in zip(OUR_SENTENCES, *(translate(OUR_SENTENCES, model, vocabulary, decode=beam_of(*b)) for b in ((4, 1.0), (1, 0.0)))):
            found.append({"kind": "example", "german": german, "ours": best, "greedy": greedy})
    return found


if __name__ == "__main__":
    measure.main(__file__)
