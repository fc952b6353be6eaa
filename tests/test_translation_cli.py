"""Chapter 07, the command line: what it says, what it leaves in a folder, and what becomes of it when something goes wrong.

All of it runs in this process, through `main`, but for what only a process of its own can show.
"""

import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("tokenizers", reason="needs attention-course[translation]")
pytest.importorskip("safetensors", reason="needs attention-course[translation]")

from attention_course import translation
from attention_course.transformer import Transformer, TransformerConfig
from attention_course.translation import (
    RECIPES, beam_search, date_pairs, load_checkpoint, load_translator, main, sample, train_translator, translate,
)

errors = pytest.mark.usefixtures("no_shape_check")

MODEL = dict(d_model=16, n_heads=2, d_ff=16, n_layers=1, dropout=0.1)
FIT = dict(max_tokens=300, warmup=4, factor=1.0, smoothing=0.1, ema=0.9, every=2)
TINY = {
    "dates": {"data": dict(pairs=60, held_out=20), "model": MODEL, "fit": FIT | dict(steps=6)},
    "cpu": {"data": dict(vocabulary=90), "model": MODEL, "fit": FIT | dict(epochs=1)},
    "quick": {"data": dict(vocabulary=90), "model": MODEL, "fit": FIT | dict(epochs=1, warmup=3)},
    "gpu": {"data": dict(vocabulary=80, bpe_dropout=0.3), "model": MODEL, "fit": FIT | dict(epochs=2)},
}
WORDS = "der Hund läuft die Katze schläft ein Mann singt eine Frau tanzt im Schnee am Haus".split()
CORPUS = {
    split: [(" ".join(WORDS[(i * k + j) % len(WORDS)] for j in range(2 + i % 5)), f"a line with {i} of them") for i in range(1, n)]
    for k, (split, n) in enumerate({"train": 40, "val": 9, "test": 12}.items(), start=3)
}


def make_tiny(patch, known=TINY):
    "The same recipes, only small; and a corpus of a few lines in place of Multi30k."
    for name, recipe in known.items():
        patch.setitem(translation.RECIPES, name, recipe)
    patch.setattr(translation, "load_multi30k", lambda folder=None: CORPUS)


@contextmanager
def one_thread():
    "Sums are rounded by the number of threads, and only the same number gives the same bits."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_and_alone(monkeypatch, tmp_path):
    "Tiny recipes, one thread, an empty folder, and no word of `torchrun`."
    make_tiny(monkeypatch)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with one_thread():
        yield


@pytest.fixture(scope="module")
def dates(tmp_path_factory):
    "A translator of dates that has been trained for six steps: it knows nothing, but it speaks."
    folder = tmp_path_factory.mktemp("trained") / "dates"
    with pytest.MonkeyPatch.context() as patch, one_thread():
        make_tiny(patch)
        train_translator(folder, task="dates", progress=False)
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "sentences"
    with pytest.MonkeyPatch.context() as patch, one_thread():
        make_tiny(patch)
        train_translator(folder, progress=False)
    return folder


def run(*arguments):
    "The exit code of the command; 0 if it came to its end."
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        if isinstance(end.code, str):  # as Python does when nobody catches it
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


@pytest.fixture
def said(capsys):
    "Runs the command; its exit code, and the lines of standard output and of standard error."

    def say(*arguments):
        capsys.readouterr()
        code = run(*arguments)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return say


def tensors(folder):
    "All that the latest checkpoint holds of weights, averages and moments."
    _, parts = load_checkpoint(folder)
    return {f"{part}/{name}": t for part, named in parts.items() for name, t in named.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


def typed(monkeypatch, data, terminal=False, **options):
    "Standard input, opened as Python opens it."
    stdin = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", **options)
    stdin.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stdin)


def echo(model, src, **_):
    "A decoder that answers with the source."
    return src.tolist()


# --- what is asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command,options", [
    ((), ("train", "evaluate", "translate")),
    (("train",), ("--out", "--task", "--recipe", "--data", "--epochs", "--steps", "--minutes", "--seed", "--device", "--threads")),
    (("evaluate",), ("--model", "--split", "--data", "--output", "--beam", "--alpha", "--device", "--threads")),
    (("translate",), ("--model", "--beam", "--alpha", "--sample", "--temperature", "--top-k", "--top-p", "--seed", "--device", "--threads")),
])
def test_each_command_explains_itself(command, options, said):
    code, out, err = said(*command, "--help")
    assert code == 0 and not err
    for option in options:
        assert re.search(rf"^  {option}( |$)", out, re.M) or not option.startswith("-") and option in out, option
    described = re.findall(r"^  (--[\w-]+)(?: (?:[A-Z]+|\{.*\}))?(?:\n +|  +)(\S.*)", out, re.M)
    assert len(described) >= len([o for o in options if o.startswith("--")])  # none without a word of help


def test_what_help_calls_the_default_is_the_default(said):
    defaults = {
        name: parameter.default
        for function in (beam_search, sample)
        for name, parameter in inspect.signature(function).parameters.items()
    }
    for command in ("evaluate", "translate"):
        out = " ".join(said(command, "--help")[1].split())
        for option in {"evaluate": ("beam", "alpha"), "translate": ("beam", "alpha", "temperature")}[command]:
            shown = re.search(rf"--{option} [A-Z] [^(]*\((\d+)\)", out)[1]
            assert float(shown) == defaults[option]


@pytest.mark.parametrize("arguments,says", [
    ([], "train|evaluate|translate"),
    (["learn"], "learn"),
    (["train", "--steps", "0"], "argument --steps: '0'; expected a whole number above 0"),
    (["train", "--steps", "many"], "argument --steps: 'many'"),
    (["train", "--epochs", "1.5"], "argument --epochs: '1.5'"),
    (["train", "--minutes", "nan"], "argument --minutes: 'nan'; expected a number above 0"),
    (["train", "--minutes", "inf"], "argument --minutes: 'inf'"),
    (["train", "--steps", "3", "--epochs", "3"], "argument --epochs: not allowed with argument --steps"),
    (["train", "--task", "poems"], "argument --task"),
    (["train", "--recipe", "soup"], "argument --recipe"),
    (["train", "--task", "dates", "--recipe", "gpu"], "argument --recipe: gpu is not one for --task dates"),
    (["train", "--recipe", "dates"], "argument --recipe: dates is not one for --task multi30k"),
    (["train", "--task", "dates", "--data", "here"], "argument --data"),
    (["train", "--seed", "-1"], "argument --seed: '-1'; expected a whole number from 0"),
    (["train", "--seed", str(2**64)], "argument --seed"),
    (["train", "--threads", "0"], "argument --threads"),
    (["evaluate", "--beam", "0"], "argument --beam"),
    (["evaluate", "--alpha", "-1"], "argument --alpha: '-1'; expected a number from 0 to 10"),
    (["evaluate", "--alpha", "1000"], "argument --alpha: '1000'; expected a number from 0 to 10"),
    (["evaluate", "--split", "train"], "argument --split"),
    (["evaluate", "a text"], "a text"),
    (["translate", "--temperature", "0", "--sample", "x"], "argument --temperature: '0'; expected a number above 0"),
    (["translate", "--top-p", "1.1", "--sample", "x"], "argument --top-p: '1.1'; expected a number above 0, at most 1"),
    (["translate", "--top-k", "0", "--sample", "x"], "argument --top-k"),
    (["translate", "--temperature", "1", "x"], "argument --temperature: only with --sample"),
    (["translate", "--top-k", "3", "x"], "argument --top-k: only with --sample"),
    (["translate", "--top-p", "1", "x"], "argument --top-p: only with --sample"),
    (["translate", "--seed", "0", "x"], "argument --seed: only with --sample"),
    (["translate", "--sample", "--beam", "4", "x"], "argument --beam: not allowed with --sample"),
    (["translate", "--sample", "--alpha", "0", "x"], "argument --alpha: not allowed with --sample"),
])
def test_wrong_usage_ends_with_2_and_names_the_argument(arguments, says, said, tmp_path):
    code, out, err = said(*arguments)
    assert code == 2 and not out and not os.listdir(tmp_path)
    assert says in err and err.startswith("usage: python -m attention_course.translation")


# --- what goes wrong ------------------------------------------------------------------------------------------------


@errors
@pytest.mark.parametrize("command", [("translate", "x"), ("evaluate",)])
def test_without_a_translator_there_is_a_plain_word_and_1(command, said, tmp_path):
    code, out, err = said(*command, "--model", "nowhere")
    assert code == 1 and not out
    assert err.startswith(f"{command[0]}: there is no translator in nowhere") and "train" in err and err.count("\n") == 1
    (tmp_path / "empty").mkdir()
    assert said(*command, "--model", "empty")[::2] == (1, err.replace("nowhere", "empty"))


@errors
@pytest.mark.parametrize("device", ["banana", "meta", "cuda:99"])
def test_a_device_that_cannot_compute_is_refused(device, said, dates, tmp_path):
    for command in (("translate", "--model", dates, "x"), ("evaluate", "--model", dates), ("train", "--task", "dates")):
        code, out, err = said(*command, "--device", device)
        assert code == 1 and not out and err.startswith(f"{command[0]}: --device {device}: ") and err.count("\n") == 1
    assert not os.listdir(tmp_path)


@errors
@pytest.mark.parametrize("missing,command", [
    ("tokenizers", ("train", "--task", "dates")), ("safetensors", ("train", "--task", "dates")),
    ("tokenizers", ("translate", "x")), ("safetensors", ("translate", "x")), ("sacrebleu", ("evaluate",)),
])
def test_a_missing_library_is_named_with_its_extra(missing, command, said, sentences, monkeypatch):
    for name in [missing, *(name for name in sys.modules if name.startswith(missing + "."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(translation, "translate", lambda *_, **__: pytest.fail("translated before it looked"))
    model = () if command[0] == "train" else ("--model", sentences)
    code, out, err = said(*command, *model)
    assert code == 1 and not out
    assert err == f"{command[0]}: attention_course.translation needs {missing}: pip install 'attention-course[translation]'\n"


@errors
def test_help_needs_no_library(said, monkeypatch):
    for missing in ("tokenizers", "safetensors", "sacrebleu", "tqdm"):
        monkeypatch.setitem(sys.modules, missing, None)
    assert said("train", "--help")[0] == 0


@errors
def test_data_that_is_not_there_is_named_with_what_can_be_done(said, monkeypatch, tmp_path):
    monkeypatch.undo()  # the true `load_multi30k`
    monkeypatch.chdir(tmp_path)
    code, out, err = said("train", "--data", "no/such/folder")
    assert code == 1 and not out and not os.listdir(tmp_path)
    assert "no/such/folder" in err and "--data" in err and "ATTENTION_COURSE_MULTI30K" in err


@errors
def test_the_folder_of_another_translator_is_refused_and_kept(said, dates, sentences):
    for folder, other in ((dates, ()), (sentences, ("--task", "dates")), (sentences, ("--recipe", "gpu"))):
        kept = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
        code, _, err = said("train", "--out", folder, *other)
        assert code == 1 and err.startswith(f"train: {folder} holds a translator with ") and "choose another folder" in err
        assert "'dates'" in err or "'vocabulary': 90" in err
        assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == kept


@errors
@pytest.mark.parametrize("arguments,says", [(("--seed", 1), "seed was 0, now 1"), (("--recipe", "quick"), "warmup was 4, now 3")])
def test_another_training_of_the_same_task_is_refused(arguments, says, said, sentences):
    code, _, err = said("train", "--out", sentences, *arguments)
    assert code == 1 and says in err and err.count("\n") == 1


@errors
@pytest.mark.parametrize("damage", [
    b"", b"{", b"[]", b"null", b"17", b'{"task": "dates"}', b'{"task": "dates", "recipe": 3}', b"\xff\xfe",
    b'{"task": "dates", "recipe": {}}', b'{"task": "dates", "recipe": {"pairs": 60, "held_out": 0}}',
    b'{"task": "dates", "recipe": {"pairs": 60, "held_out": 2.5}}', b'{"task": "foo", "recipe": {}}',
])
def test_a_damaged_task_file_is_named(damage, said, dates, tmp_path):
    copy(dates, tmp_path / "model")
    (tmp_path / "model/task.json").write_bytes(damage)
    for command in (("evaluate", "--model", "model"), ("train", "--task", "dates", "--out", "model")):
        code, _, err = said(*command)
        assert code == 1 and re.search(r"^\w+: model.task\.json .*damaged$", err, re.M)
    assert (tmp_path / "model/task.json").read_bytes() == damage


def copy(folder, to):
    to.mkdir()
    for name in os.listdir(folder):
        (to / name).write_bytes((folder / name).read_bytes())


@errors
def test_a_damaged_vocabulary_is_named_and_made_again_when_it_is_deleted(said, dates, tmp_path):
    copy(dates, tmp_path / "model")
    vocabulary = tmp_path / "model/vocabulary.json"
    whole = vocabulary.read_bytes()
    for damaged in (whole[:-20], b"", b"{}"):
        vocabulary.write_bytes(damaged)
        for command in (("translate", "--model", "model", "x"), ("train", "--task", "dates", "--out", "model")):
            code, _, err = said(*command)
            assert code == 1 and re.search(r"^\w+: model.vocabulary\.json ", err, re.M)
        assert "delete this file" in err and vocabulary.read_bytes() == damaged
    vocabulary.unlink()
    assert said("train", "--task", "dates", "--out", "model")[0] == 0
    assert vocabulary.read_bytes() == whole


@errors
def test_vocabulary_and_model_must_belong_together(said, dates, sentences, tmp_path):
    copy(dates, tmp_path / "model")
    (tmp_path / "model/vocabulary.json").write_bytes((sentences / "vocabulary.json").read_bytes())
    code, out, err = said("translate", "--model", "model", "x")
    assert code == 1 and not out and "vocabulary.json has 90 tokens, the model " in err


@errors
def test_a_damaged_checkpoint_is_passed_over_with_a_word_and_two_are_too_many(said, dates, tmp_path):
    copy(dates, tmp_path / "model")
    first, last = sorted((tmp_path / "model").glob("step-*"))
    last.write_bytes(last.read_bytes()[:-100])
    code, out, err = said("translate", "--model", "model", "--beam", 1, "1 May 2000")
    assert code == 0 and out.count("\n") == 1
    assert err.count("\n") == 1 and err.startswith(f"translate: {last.relative_to(tmp_path)} is damaged")
    first.write_bytes(b"")
    code, out, err = said("translate", "--model", "model", "x")
    assert code == 1 and not out and "damaged" in err.splitlines()[-1]
    code, _, err = said("train", "--task", "dates", "--out", "model")
    assert code == 1 and err.splitlines()[-1].startswith("train: model") and "damaged" in err.splitlines()[-1]


@errors
def test_a_folder_that_cannot_be_written_is_named(said, tmp_path):
    (tmp_path / "file").write_text("in the way")
    code, _, err = said("train", "--task", "dates", "--out", "file")
    assert code == 1 and "file" in err and (tmp_path / "file").read_text() == "in the way"


@errors
def test_a_loss_that_is_not_finite_ends_the_training_with_a_word(said, monkeypatch):
    monkeypatch.setitem(RECIPES, "dates", TINY["dates"] | {"fit": TINY["dates"]["fit"] | dict(factor=1e30)})
    code, _, err = said("train", "--task", "dates")
    assert code == 1 and re.match(r"train: step \d+: the loss is ", err) and err.count("\n") == 1


# --- training -------------------------------------------------------------------------------------------------------


def test_train_evaluate_translate_one_after_the_other(said):
    code, out, err = said("train", "--task", "dates")
    assert code == 0 and not err
    assert set(os.listdir("translator")) == {"task.json", "vocabulary.json", "step-00000004.safetensors", "step-00000006.safetensors"}
    assert re.search(r"^6 steps, [\d.]+ minutes; validation loss [\d.]+ nats per token$", out, re.M)
    following = re.search(r"^Next: python -m attention_course\.translation (.+)$", out, re.M)[1]
    code, out, _ = said(*following.split())
    assert code == 0 and re.match(r"[\d.]+% of 20 days exactly right\n20 sentences in [\d.]+ s\n$", out)
    code, out, _ = said("translate", "3 March 1987", "一九八七年三月三日")
    assert code == 0 and out.count("\n") == 2


def test_the_command_does_what_the_function_does(said, dates):
    assert said("train", "--task", "dates", "--out", "here")[0] == 0
    assert_same(tensors("here"), tensors(dates))
    assert all((dates / name).read_bytes() == open(f"here/{name}", "rb").read() for name in ("task.json", "vocabulary.json"))


def test_a_finished_training_says_so_and_a_later_end_lets_it_go_on(said, dates):
    for steps, line in ((3, None), (3, "complete"), (6, "going on from step 3")):
        code, out, _ = said("train", "--task", "dates", "--out", "here", "--steps", steps)
        assert code == 0 and ("complete" in out) == (line == "complete") and (line is None or line in out)
        assert f"\n{steps} steps" in out
    assert_same(tensors("here"), tensors(dates))


@pytest.fixture
def listening():
    "Ctrl-C reaches Python, also where the tests were started in the background, which ignores it."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_ctrl_c_ends_with_130_and_the_same_command_goes_on_as_if_nothing_had_been(said, monkeypatch, dates):
    steps, update = [], translation._Run.update

    def interrupted(self):
        update(self)
        steps.append(1)
        if len(steps) == 5:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(translation._Run, "update", interrupted)
        code, _, err = said("train", "--task", "dates", "--out", "here")
    assert code == 130 and err == "\nStopped. The same command goes on from the latest checkpoint.\n"
    assert "step-00000004.safetensors" in os.listdir("here")
    code, out, _ = said("train", "--task", "dates", "--out", "here")
    assert code == 0 and out.startswith("here holds a training; going on from step 4\n")
    assert_same(tensors("here"), tensors(dates))


@pytest.mark.usefixtures("listening")
def test_ctrl_c_while_translating(said, monkeypatch, dates):
    monkeypatch.setattr(translation, "beam_search", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert said("translate", "--model", dates, "x") == (130, "", "\nStopped.\n")


def test_seed_and_limits_reach_the_training(said):
    for seed in (1, 2):
        assert said("train", "--task", "dates", "--steps", 1, "--seed", seed, "--out", seed)[0] == 0
    one, two = tensors("1"), tensors("2")
    assert any(not torch.equal(one[name], two[name]) for name in one)
    code, out, _ = said("train", "--task", "dates", "--epochs", 2, "--out", "epoch")
    state, _ = load_checkpoint("epoch")
    assert code == 0 and state["epoch"] == 2 and state["done"] == 0 and state["step"] > 6  # where the recipe ends
    assert said("train", "--task", "dates", "--minutes", 1e-9, "--out", "time")[0] == 0
    assert load_checkpoint("time")[0]["step"] == 1


def test_words_are_drawn_anew_where_the_recipe_says_so(said, monkeypatch):
    calls, encode = [], translation.Vocabulary.encode_batch
    monkeypatch.setattr(
        translation.Vocabulary, "encode_batch",
        lambda self, texts, **options: calls.append(options.get("dropout", 0.0)) or encode(self, texts, **options),
    )
    assert said("train", "--recipe", "gpu", "--out", "here", "--device", "cpu")[0] == 0
    assert 0.3 in calls and 0.0 in calls  # training, and validation


def test_training_leaves_the_generators_outside_alone(said):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    said("train", "--task", "dates", "--steps", 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_are_set_before_the_work(said, monkeypatch, dates):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(translation, "beam_search", lambda *_, **__: pytest.fail("too late") if threads != [2] else [[translation.Hypothesis([2], 0.0, 0.0)]])
    assert said("translate", "--model", dates, "--threads", 2, "x")[:2] == (0, "\n")
    assert threads == [2]


@errors
@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_only_the_first_process_speaks_and_each_has_its_own_gpu(rank, said, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(translation, "date_pairs", lambda n, seed: print("hear me") or date_pairs(n, seed=seed))
    monkeypatch.setattr(translation, "fit", partial(fit_nothing, inspect.signature(translation.fit)))
    code, out, err = said("train", "--task", "dates", "--device", "cpu")
    assert code == 0 and not err
    if rank:
        assert not out and not os.path.exists("translator")
    else:
        assert out.startswith("hear me\n7 steps") and set(os.listdir("translator")) == {"task.json", "vocabulary.json"}
    seen = []
    monkeypatch.setattr(torch, "zeros", lambda *_, device: seen.append(device) or torch.ones(1))
    for options in ((), ("--device", "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        translation._device(translation._parser().parse_args(["train", *options]))
    assert seen == [f"cuda:{rank}"] * 2


def fit_nothing(signature, model, train, valid=None, **options):
    signature.bind(model, train, valid, **options)
    return [dict(step=7, seconds=60.0, valid_loss=1.0)]


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_is_one_that_model_and_training_take(name, monkeypatch):
    monkeypatch.undo()
    recipe = translation.RECIPES[name]
    assert set(recipe) == {"data", "model", "fit"}
    TransformerConfig(100, **recipe["model"])
    inspect.signature(translation.fit).bind(None, None, None, folder=None, seed=0, **recipe["fit"])
    assert len({"steps", "epochs", "minutes"} & recipe["fit"].keys()) == 1
    assert translation._recipe("dates" if name == "dates" else "multi30k", name, {}) == recipe


@errors
@pytest.mark.parametrize("options,says", [
    (dict(task="poems"), "task='poems' is neither"),
    (dict(recipe="soup"), "recipe='soup'; there are dates, cpu"),
    (dict(task="dates", recipe="cpu"), "recipe='cpu' is not one for task='dates'"),
    (dict(recipe="dates"), "recipe='dates' is not one for task='multi30k'"),
    (dict(task="dates", data="here"), "data='here'"),
    (dict(task="dates", held_out=-3), "held_out=-3; expected at least 1"),  # days that are judged would be trained on
    (dict(task="dates", pairs=0), "pairs=0; expected at least 1"),
    (dict(vocabulary=0, task="dates"), "vocabulary is no part of the recipe 'dates'"),
    *((({name: 1}), f"{name} is no part of the recipe 'cpu'") for name in ("d_modle", "train", "valid", "vocab_size", "model")),
])
def test_what_no_translator_can_be_made_from_is_refused(options, says, tmp_path):
    with pytest.raises(ValueError, match=re.escape(says)):
        train_translator(tmp_path / "new", **options)
    assert not os.listdir(tmp_path)


@errors
def test_what_was_refused_leaves_no_trace_that_refuses_the_right_call():
    tiny = dict(task="dates", steps=1, held_out=5, progress=False)
    for wrong in (dict(d_model=7), dict(max_tokens=5), dict(every=0.5)):
        with pytest.raises((TypeError, ValueError)):
            train_translator("new", **tiny, **wrong)
        assert not os.path.exists("new") or not [name for name in os.listdir("new") if name.startswith("step")]
    with pytest.raises(ValueError):
        train_translator("other", **tiny, pairs=30, d_model=7)
    train_translator("other", **tiny, pairs=40)


def test_words_can_be_drawn_anew_with_any_recipe_for_sentences(monkeypatch):
    dropouts, encode = [], translation.Vocabulary.encode_batch

    def listening(self, texts, **options):
        dropouts.append(options.get("dropout", 0.0))
        return encode(self, texts, **options)

    monkeypatch.setattr(translation.Vocabulary, "encode_batch", listening)
    train_translator("new", bpe_dropout=0.2, steps=1, progress=False)
    assert 0.2 in dropouts
    with pytest.raises(ValueError, match="bpe_dropout is no part of the recipe 'dates'"):
        train_translator("dates", task="dates", bpe_dropout=0.2, steps=1)


def test_weights_are_drawn_without_seeding_other_devices(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    train_translator("new", task="dates", steps=1, progress=False)
    assert not seeded


def test_changes_of_the_recipe_and_another_model():
    seen = []

    def make(config):
        seen.append(config)
        return Transformer(config)

    model, vocabulary, history = train_translator(
        "new", task="dates", steps=1, d_model=8, pairs=30, log_every=1, progress=False, make_model=make
    )
    assert seen == [model.config] and model.config.d_model == 8 and model.config.vocab_size == len(vocabulary)
    assert history[-1]["step"] == 1 and json.load(open("new/task.json"))["recipe"]["pairs"] == 30
    assert TINY["dates"]["model"]["d_model"] == 16 and "progress" not in TINY["dates"]["fit"]  # the table is as it was
    again, words = load_translator("new")
    assert not again.training and words.tokenizer.to_str() == vocabulary.tokenizer.to_str()
    assert_same(dict(again.named_parameters()), dict(model.named_parameters()))


# --- translating ----------------------------------------------------------------------------------------------------


def test_translations_come_in_the_order_of_the_texts(dates):
    model, vocabulary = load_translator(dates)
    texts = [source for source, _ in date_pairs(80, seed=3)]
    texts[5], texts[17], texts[40] = "", "  \t", "1" * 300  # nothing, nothing to read, more than fits
    known = ["".join(c for c in t if c in vocabulary.tokenizer.get_vocab()) for t in texts]
    sizes = []

    def answer(model, src):
        sizes.append(tuple(src.shape))
        return echo(model, src)

    answers = translate(texts, model, vocabulary, decode=answer, max_tokens=200)
    assert [a for i, a in enumerate(answers) if i not in (5, 17)] == [k for i, k in enumerate(known) if i not in (5, 17)]
    assert answers[5] == answers[17] == ""
    assert len(sizes) > 1 and max(rows * width for rows, width in sizes) <= 301
    assert translate([], model, vocabulary) == []


def test_neighbours_and_batches_do_not_matter(dates):
    model, vocabulary = load_translator(dates)
    texts = ["3 March 1987", "Tuesday the 3rd of March, 1987", "二〇〇八年八月八日"]
    assert translate(texts, model, vocabulary) == [translate([text], model, vocabulary)[0] for text in texts]


@errors
@pytest.mark.parametrize("texts", ["one text", ["a", None], [b"a"]])
def test_what_is_no_list_of_texts_is_refused(texts, dates):
    with pytest.raises(TypeError, match="texts is one string|text [01] is a "):
        translate(texts, *load_translator(dates))


@errors
def test_any_texts_are_translated_but_not_by_any_model(dates):
    model, vocabulary = load_translator(dates)
    assert translate({"3 March": 0}, model, vocabulary) == translate(["3 March"], model, vocabulary)
    with pytest.raises(ValueError, match="ReLU without parameters"):
        translate(["3 March"], nn.ReLU(), vocabulary)


def test_lines_of_standard_input_and_texts_are_translated_alike(said, monkeypatch, dates):
    heard = []
    monkeypatch.setattr(translation, "greedy_decode", echo)
    monkeypatch.setattr(translation, "translate", lambda texts, *a, **k: heard.append(list(texts)) or translate(texts, *a, **k))
    lines = ["3 March 1987", "", "一九八七年三月三日", "31 1 2000", "   ", "2000年1月1日"]
    expected = "".join(f"{line.strip()}\n" for line in lines)
    command = ("translate", "--model", dates, "--beam", 1)
    for end in ("\n", "\r\n"):
        for last in (end, ""):
            typed(monkeypatch, (end.join(lines) + last).encode())
            assert said(*command) == (0, expected, "")
    assert said(*command, *lines) == (0, expected, "")
    assert heard == [lines] * 5  # without the ends of lines
    typed(monkeypatch, b"")
    assert said(*command) == (0, "", "")


def test_many_lines_and_long_ones(said, monkeypatch, dates):
    monkeypatch.setattr(translation, "greedy_decode", echo)
    lines = [str(i % 2000) for i in range(2500)] + ["1" * 5000, "2"]
    typed(monkeypatch, "\n".join(lines).encode())
    code, out, _ = said("translate", "--model", dates, "--beam", 1)
    assert code == 0 and out.split("\n") == [*lines, ""]


def test_what_the_model_has_never_seen_is_no_reason_to_stop(said, monkeypatch, dates):
    typed(monkeypatch, "🦜 §±\n\x00\n\u2028\n".encode())
    code, out, err = said("translate", "--model", dates, "--beam", 2)
    assert code == 0 and out.count("\n") == 3 and not err


@errors
def test_input_that_is_no_text_is_refused(said, monkeypatch, dates):
    typed(monkeypatch, b"3 March\xff 1987\n")
    code, out, err = said("translate", "--model", dates)
    assert code == 1 and not out and "utf-8" in err and err.count("\n") == 1
    code, out, err = said("translate", "--model", dates, "3 March\udcff")  # how Python hands on such an argument
    assert code == 1 and not out and err.startswith("translate: text 0 is not Unicode: ") and err.count("\n") == 1
    typed(monkeypatch, b"3 March\n\xff\n", errors="surrogateescape")  # what Python does in a container's usual locale
    assert said("translate", "--model", dates) == (1, "", "translate: line 2 of standard input is not UTF-8\n")
    monkeypatch.setattr(sys, "stdin", None)  # closed
    code, out, err = said("translate", "--model", dates)
    assert code == 1 and not out and err.startswith("translate: standard input is closed") and err.count("\n") == 1


@errors
def test_arithmetic_that_fails_ends_with_a_word(said, monkeypatch, dates):
    monkeypatch.setattr(translation, "translate", lambda *_, **__: 10.0**400)
    code, out, err = said("translate", "--model", dates, "3 March")
    assert code == 1 and not out and err.startswith("translate: ") and err.count("\n") == 1


def test_in_a_terminal_each_line_is_answered_at_once(said, monkeypatch, dates):
    some = []
    monkeypatch.setattr(translation, "translate", lambda texts, *_, **__: some.append(list(texts)) or ["so"])
    typed(monkeypatch, b"one\ntwo\n", terminal=True)
    code, out, err = said("translate", "--model", dates)
    assert (code, out, some) == (0, "so\nso\n", [["one"], ["two"]]) and "Ctrl-D" in err


def test_the_options_reach_the_decoders(said, monkeypatch, dates):
    calls = []

    def decoder(name, answer):
        def record(model, src, **options):
            generator = options.pop("generator", None)
            calls.append((name, options, generator and generator.initial_seed()))
            return [answer] * len(src)

        return record

    monkeypatch.setattr(translation, "beam_search", decoder("beam", [translation.Hypothesis([2], 0.0, 0.0)]))
    monkeypatch.setattr(translation, "greedy_decode", decoder("greedy", [2]))
    monkeypatch.setattr(translation, "sample", decoder("sample", [2]))
    for options in (
        (), ("--beam", 7, "--alpha", 0), ("--beam", 1), ("--sample",),
        ("--sample", "--temperature", 0.5, "--top-k", 3, "--top-p", 0.9, "--seed", 8),
    ):
        assert said("translate", "--model", dates, "x", *options)[0] == 0
    said("evaluate", "--model", dates, "--beam", 2, "--alpha", 0.6)
    assert calls == [
        ("beam", {}, None), ("beam", dict(beam=7, alpha=0.0), None), ("greedy", {}, None),
        ("sample", dict(temperature=1.0, top_k=None, top_p=None), 0),
        ("sample", dict(temperature=0.5, top_k=3, top_p=0.9), 8),
        ("beam", dict(beam=2, alpha=0.6), None),
    ]


def test_draws_are_those_of_the_seed_and_do_not_repeat_from_batch_to_batch(said, monkeypatch, dates):
    monkeypatch.setattr(translation, "translate", partial(translate, max_tokens=40))
    command = ("translate", "--model", dates, "--sample", "--temperature", 100, *["1 May 2000"] * 6)
    first, again, other = (said(*command, "--seed", seed)[1] for seed in (1, 1, 2))
    assert first == again != other
    lines = first.split("\n")
    assert lines[:3] != lines[3:6]  # three to a batch: two batches of one shape


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
def test_no_temperature_is_too_much(temperature, said, dates):
    assert said("translate", "--model", dates, "--sample", "--temperature", temperature, "1 May 2000")[0] == 0


def test_a_reader_who_leaves_is_no_error_worth_a_word(monkeypatch, capsys, dates):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run("translate", "--model", dates, "--beam", 1, "1 May 2000") == 1
    assert capsys.readouterr().err == ""


# --- evaluating -----------------------------------------------------------------------------------------------------


def test_days_are_judged_that_no_training_has_seen(said, monkeypatch, dates):
    asked = []

    def answer(texts, *_, **__):
        asked.append(list(texts))
        return [right[text] if i % 4 else "?" for i, text in enumerate(texts)]

    right = dict(date_pairs(100, seed=0))
    splits = translation._pairs("dates", TINY["dates"], None)
    known = {day for _, day in splits["train"]}
    monkeypatch.setattr(translation, "translate", answer)
    for split in ("val", "test"):
        code, out, _ = said("evaluate", "--model", dates, "--split", split)
        assert code == 0 and out.startswith("75.0% of 20 days exactly right\n")
        assert not known & {right[text] for text in asked[-1]}
    said("evaluate", "--model", dates)
    assert asked[2] == asked[1] and not set(asked[0]) & set(asked[1])
    assert len(known) == 60


@errors
def test_days_that_were_held_out_are_kept_with_the_model(said, monkeypatch):
    train_translator("few", task="dates", pairs=30, held_out=5, steps=1, progress=False)
    code, out, _ = said("evaluate", "--model", "few", "--beam", 1)
    assert code == 0 and "% of 5 days" in out
    code, _, err = said("evaluate", "--model", "few", "--data", "x")
    assert code == 1 and "data='x'" in err


def test_sentences_get_a_bleu_with_its_signature_and_a_file(said, monkeypatch, sentences, tmp_path):
    pytest.importorskip("sacrebleu")
    answers = [english for _, english in CORPUS["test"]]
    monkeypatch.setattr(translation, "translate", lambda texts, *_, **__: answers if list(texts) == [g for g, _ in CORPUS["test"]] else [])
    code, out, err = said("evaluate", "--model", sentences, "--output", "new/answers.txt")
    assert code == 0 and re.match(r"BLEU 100\.00  nrefs:1\|case:mixed\|.*tok:13a\|.*\n11 sentences in [\d.]+ s\n$", out)
    assert err == "Translating 11 sentences …\n"
    assert (tmp_path / "new/answers.txt").read_bytes() == "".join(f"{line}\n" for line in answers).encode()
    assert os.listdir("new") == ["answers.txt"]


def test_a_file_of_translations_is_there_whole_or_not_at_all(said, monkeypatch, dates, tmp_path):
    (tmp_path / "answers.txt").write_text("those of yesterday")

    def out_of_space(*_):
        raise OSError(28, "No space left on device")

    command = ("evaluate", "--model", dates, "--beam", 1, "--output", "answers.txt")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", out_of_space)
        code, _, err = said(*command)
    assert code == 1 and "No space left on device" in err
    assert os.listdir(tmp_path) == ["answers.txt"] and (tmp_path / "answers.txt").read_text() == "those of yesterday"
    assert said(*command)[0] == 0
    assert (tmp_path / "answers.txt").read_bytes().count(b"\n") == 20


def test_the_score_is_said_also_where_the_file_cannot_be_written(said, dates, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    code, out, err = said("evaluate", "--model", dates, "--beam", 1, "--output", "file/answers.txt")
    assert code == 1 and "20 days exactly right" in out and "file" in err


def test_a_folder_in_place_of_a_file_is_refused_before_the_work(said, dates, tmp_path):
    (tmp_path / "folder").mkdir()
    code, out, err = said("evaluate", "--model", dates, "--beam", 1, "--output", "folder")
    assert (code, out, err) == (1, "", "evaluate: --output folder is a folder; expected the name of a file\n")


def test_a_link_stays_a_link_and_a_pipe_a_pipe(said, dates, tmp_path):
    command = ("evaluate", "--model", dates, "--beam", 1, "--output")
    (tmp_path / "there.txt").write_text("those of yesterday")
    (tmp_path / "link.txt").symlink_to("there.txt")
    (tmp_path / "dangling.txt").symlink_to("new.txt")
    for link, goal in (("link.txt", "there.txt"), ("dangling.txt", "new.txt")):
        assert said(*command, link)[0] == 0
        assert (tmp_path / link).is_symlink() and (tmp_path / goal).read_bytes().count(b"\n") == 20
    if hasattr(os, "mkfifo"):
        os.mkfifo("pipe")
        reader = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdout.write(open('pipe').read())"], stdout=subprocess.PIPE)
        try:
            assert said(*command, "pipe")[0] == 0
            assert (tmp_path / "pipe").is_fifo()
            assert reader.communicate(timeout=20)[0].count(b"\n") == 20
        finally:
            reader.kill()


# --- processes of their own -----------------------------------------------------------------------------------------


def python(*arguments, code=0, **options):
    "Run Python in a process of its own, without shape checks and without a GPU."
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAXTYPING_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
    ran = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, encoding="utf-8", timeout=500, **options
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout, ran.stderr


def test_it_is_a_module_that_python_runs(dates):
    out, err = python("-m", "attention_course.translation", "translate", "--model", dates, "--beam", 1, input="1 May 2000\n\n2000年1月1日")
    assert re.fullmatch(r".*\n\n.*\n", out) and not err
    out, err = python("-m", "attention_course.translation", "translate", "--model", "nowhere", "x", code=1)
    assert not out and err.startswith("translate: there is no translator in nowhere") and err.count("\n") == 1


KILLED = """
import os, signal, sys
import torch, torch._dynamo
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
import pytest
from test_translation_cli import main, make_tiny, translation

make_tiny(pytest.MonkeyPatch())
write, update = translation._write_file, translation._Run.update

def after(n, f):
    calls = []
    def last(*a, **k):
        result = f(*a, **k)
        calls.append(1)
        if len(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return last

ways = {
    "vocabulary": ("_write_file", after(1, write)), "task": ("_write_file", after(2, write)),
    "begin": ("_write_file", after(3, write)), "step": (None, after(3, update)),
}
for way, (name, f) in ways.items():
    pid = os.fork()
    if not pid:
        try:
            setattr(*((translation, name) if name else (translation._Run, "update")), f)
            main(["train", "--task", "dates", "--out", way])
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, way
"""


@pytest.mark.slow
def test_after_kill_9_the_same_command_goes_on_as_if_nothing_had_been(said, dates):
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    python("-c", KILLED, os.path.dirname(__file__))
    steps = {"vocabulary": None, "task": None, "begin": 0, "step": 2}
    assert set(os.listdir()) == set(steps)
    for way, step in steps.items():
        code, out, _ = said("train", "--task", "dates", "--out", way)
        assert code == 0
        assert (step is not None and f"going on from step {step}" in out) or (step is None and "going on" not in out)
        assert_same(tensors(way), tensors(dates))
        assert sorted(os.listdir(way)) == sorted(os.listdir(dates))


@pytest.mark.slow
def test_two_processes_train_what_one_would_and_speak_once(said, monkeypatch, tmp_path):
    monkeypatch.undo()  # the true recipe
    monkeypatch.chdir(tmp_path)
    command = ("attention_course.translation", "train", "--task", "dates", "--steps", 2, "--device", "cpu")
    out, _ = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", *command, "--out", "two")
    assert out.count("2 steps, ") == out.count("Next: ") == 1
    assert sorted(os.listdir("two")) == ["step-00000000.safetensors", "step-00000002.safetensors", "task.json", "vocabulary.json"]
    alone, _, _ = train_translator("one", task="dates", steps=2, accumulate=2, progress=False)
    found, _ = load_translator("two")
    for (name, one), two in zip(alone.named_parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")
    code, _, err = said("train", "--task", "dates", "--steps", 3, "--device", "cpu", "--out", "two")
    assert code == 1 and "processes was 2, now 1" in err
