"""What measures speed: calls in turn, honest spreads, files that a killed run leaves whole, and the rows that the book quotes."""
import datetime
import gc
import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
# What was compiled ahead of time was not timed: tests/test_aot.py has that file.
RESULTS = sorted(p for p in (ROOT / "attention_course" / "results").glob("*.json") if not p.stem.endswith("-aot"))

sys.path.insert(0, str(ROOT / "benchmarks"))
import measure


class Clock:
    "Time passes only where a call says so."

    def __init__(self):
        self.now, self.log = 0.0, []

    def __call__(self):
        return self.now

    def takes(self, name, durations):
        "A call that lasts as long as the script says, and the last entry from then on."
        durations = list(durations)

        def call():
            self.log.append(name)
            self.now += durations.pop(0) if len(durations) > 1 else durations[0]

        return call

    def timer(self, call, times):
        return measure.seconds(call, times, clock=self)


# --- time --------------------------------------------------------------------------


def test_rounds_take_the_calls_in_turn_and_then_in_the_opposite_order():
    clock = Clock()
    taken = measure.in_turn({"a": clock.takes("a", [1]), "b": clock.takes("b", [2])}, budget=0, least=4, timer=clock.timer)
    warm, rounds = clock.log[:4], clock.log[4:]
    assert sorted(warm) == list("aabb") and "".join(rounds) == "abbaabba"
    assert taken == {"a": [1] * 4, "b": [2] * 4}


def test_what_drifts_falls_on_both_sides_alike():
    "Each call is slower than the one before it, by the same step: the mean ratio of a round and its reverse says that they are equal."
    clock = Clock()
    clock.steps = 0.0

    def call():
        clock.steps += 0.001
        clock.now += 1 + clock.steps

    taken = measure.in_turn({"a": call, "b": call}, budget=0, least=20, timer=clock.timer)
    found = measure.compared(taken["a"], taken["b"])
    assert found["ratio"] == pytest.approx(1, abs=1e-3)
    assert found["q1"] < 1 < found["q3"]


def test_one_disturbed_round_moves_the_extreme_and_not_the_median():
    clock = Clock()
    ours, peer = clock.takes("a", [1, 1, 1, 1, 1, 9, 1]), clock.takes("b", [2])
    taken = measure.in_turn({"a": ours, "b": peer}, budget=0, least=8, timer=clock.timer)
    found = measure.compared(taken["a"], taken["b"])
    assert (found["ratio"], found["min"], found["max"]) == (0.5, 0.5, 4.5)


def test_a_short_call_is_repeated_until_the_clock_can_tell():
    clock = Clock()
    taken = measure.in_turn({"a": clock.takes("a", [0.001]), "b": clock.takes("b", [0.004])}, budget=0, least=2, slice_=0.005, timer=clock.timer)
    assert clock.log[4:9] == ["a"] * 5 and clock.log.count("a") == clock.log.count("b") == 2 + 2 * 5
    assert taken["a"] == pytest.approx([0.001] * 2) and taken["b"] == pytest.approx([0.004] * 2)        # per call, not per round


@pytest.mark.parametrize("budget, rounds", [(0, 6), (24, 8), (23, 8), (1000, 40)], ids=str)
def test_rounds_go_on_until_the_budget_is_spent(budget, rounds):
    clock = Clock()
    taken = measure.in_turn({"a": clock.takes("a", [1]), "b": clock.takes("b", [2])}, budget=budget, timer=clock.timer)
    assert len(taken["a"]) == len(taken["b"]) == rounds


def test_the_collector_waits_and_comes_back():
    seen = []

    def call():
        seen.append(gc.isenabled())
        if len(seen) > 3:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        measure.in_turn({"a": call})
    assert seen[-1] is False and gc.isenabled()


def test_a_row_has_the_median_of_the_ratios_and_their_spread():
    found = measure.compared([5, 1, 4, 2, 3], [1, 1, 1, 1, 2])
    assert found == {"ratio": 2.0, "q1": 1.5, "q3": 4.0, "min": 1.0, "max": 5.0, "ours_ms": 3000.0, "peer_ms": 1000.0, "rounds": 5}
    assert measure.slower([{**found, "n": 1}, {"ratio": 1.1, "q1": 0.9}, {"tflops": 500}]) == [{**found, "n": 1}]
    with pytest.raises(ValueError):
        measure.compared([1, 2, 3], [1, 2])     # rounds that do not belong together


# --- files -------------------------------------------------------------------------

ABOUT = {"benchmark": "fake", "hardware": {"kind": "cpu"}, "date": "2026-01-01"}


def test_a_file_is_readable_after_each_row_and_has_a_row_a_line(tmp_path):
    results = measure.Results(tmp_path / "new" / "fake-cpu.json", ABOUT)
    for n in (1, 2, 3):
        results.add({"n": n}, [{"form": "split", "ratio": n / 2}, {"form": "fused", "ratio": 0.1}])
        found = json.loads(results.path.read_text())
        assert len(found["rows"]) == 2 * n and found["complete"] is False
    lines = results.path.read_text().splitlines()
    assert sum(line.startswith('  {"n": ') for line in lines) == 6
    before = set(lines)
    results.add({"n": 2}, [{"form": "split", "ratio": 7.0}, {"form": "fused", "ratio": 0.1}])      # measured again: in its old place
    changed = [line for line in results.path.read_text().splitlines() if line not in before]
    assert changed == ['  {"n": 2, "form": "split", "ratio": 7.0},']
    assert [row["n"] for row in results.rows] == [1, 1, 2, 2, 3, 3]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    results = measure.Results(tmp_path / "fake-cpu.json", ABOUT)
    results.add({"n": 1}, [{"ratio": 0.5}])
    before = results.path.read_text()

    def full(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="disk full"):
        results.add({"n": 2}, [{"ratio": 0.5}])
    assert results.path.read_text() == before


@pytest.mark.parametrize("value", [math.nan, math.inf, [1], torch.tensor(1.0)], ids=str)
def test_what_is_no_finite_number_is_refused(tmp_path, value):
    results = measure.Results(tmp_path / "fake-cpu.json", ABOUT)
    with pytest.raises(ValueError, match="ratio="):
        results.add({"n": 1}, [{"ratio": value}])
    with pytest.raises(ValueError, match="no rows"):
        results.add({"n": 1}, [])
    assert not results.path.exists()


def fake(stop_at=None):
    "A benchmark of five cases; it may break down in one of them."
    log = []

    def rows(case, timed):
        if case["n"] == stop_at:
            raise KeyboardInterrupt
        log.append(case["n"])
        return [measure.compared([1, 2, 3], [2, 2, 2])]

    cases = [{"n": n, "causal": n % 2 == 0} for n in range(5)]
    return types.SimpleNamespace(__doc__="Nothing against nothing.\n\nMore.", DEVICE="cpu", cases=lambda quick: cases, rows=rows, log=log)


def run(module, folder, *arguments):
    options = measure.options(several=False).parse_args(["--budget", "0", "--threads", str(torch.get_num_threads()), "--out", str(folder), *arguments])
    return json.loads(measure.perform("fake", module, options).read_text())


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(fake(stop_at=3), tmp_path)
    left = json.loads((tmp_path / "fake-cpu.json").read_text())
    assert [row["n"] for row in left["rows"]] == [0, 1, 2] and not left["complete"]
    second = fake()
    found = run(second, tmp_path, "--resume")
    assert second.log == [3, 4] and [row["n"] for row in found["rows"]] == [0, 1, 2, 3, 4] and found["complete"]
    third = fake()
    run(third, tmp_path)
    assert third.log == [0, 1, 2, 3, 4]     # without --resume all is measured anew


def test_a_killed_process_leaves_a_file_that_can_be_read(tmp_path):
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import measure
results = measure.Results({str(tmp_path / "fake-cpu.json")!r}, {ABOUT!r})
replace, count = os.replace, []
def killed(*names):
    count.append(names)
    if len(count) == 3:
        os.kill(os.getpid(), 9)
    replace(*names)
os.replace = killed
for n in range(9):
    results.add({{"n": n}}, [{{"ratio": 1.0}}])
"""
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == -9
    assert [row["n"] for row in json.loads((tmp_path / "fake-cpu.json").read_text())["rows"]] == [0, 1]


def test_single_cases_are_measured_again_and_the_rest_is_kept(tmp_path, capsys):
    first = run(fake(), tmp_path)
    again = fake()
    found = run(again, tmp_path, "--only", "n=1", "--only", "causal=true,n=4")
    assert again.log == [1, 4] and found["complete"]
    assert [row for row in found["rows"] if row["n"] in (0, 2, 3)] == [row for row in first["rows"] if row["n"] in (0, 2, 3)]
    assert re.search(r"5 rows; ours is the slower one, beyond the spread, in \d", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="a case has n, causal, but no length"):
        run(fake(), tmp_path, "--only", "length=64")
    with pytest.raises(SystemExit, match="no case of fake is like that"):
        run(fake(), tmp_path, "--only", "n=9")


def test_rows_of_two_machines_or_days_are_never_mixed(tmp_path):
    run(fake(), tmp_path)
    path = tmp_path / "fake-cpu.json"
    path.write_text(path.read_text().replace(datetime.date.today().isoformat(), "2020-02-02"))
    for argument in ("--resume", "--only=n=1"):
        with pytest.raises(SystemExit, match=r"one machine, one day.*date: 2020-02-02 there"):
            run(fake(), tmp_path, argument)
    assert "2020-02-02" not in json.dumps(run(fake(), tmp_path))


def test_quick_trials_do_not_land_among_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "TRIALS", tmp_path / "trials")
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    options = measure.options(several=False).parse_args(["--quick", "--budget", "0", "--threads", str(torch.get_num_threads())])
    assert measure.perform("fake", fake(), options).parent == tmp_path / "trials"
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name, short", [
    ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H100 80GB HBM3", "h100"), ("Tesla T4", "t4"), ("NVIDIA L40S", "l40s"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("AMD Instinct MI300X", "mi300x"), ("???", "gpu"),
])
def test_a_gpus_name_becomes_a_part_of_a_files_name(name, short):
    assert measure.kind(name) == short


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_benchmark_for_gpus_says_so_where_there_is_none(tmp_path, capsys):
    module = fake()
    module.DEVICE = "cuda"
    assert measure.perform("fake", module, measure.options(several=False).parse_args(["--out", str(tmp_path)])) is None
    assert "needs a GPU" in capsys.readouterr().out and not list(tmp_path.iterdir())


# --- what was measured ---------------------------------------------------------------


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_results_say_what_was_measured_where_and_when(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    assert path.stem == f"{found['benchmark']}-{found['hardware']['kind']}"
    assert found["benchmark"] in measure.benchmarks(), "nothing in benchmarks/ could measure this again"
    assert found["says"] == measure.says(measure.benchmarks()[found["benchmark"]]), "the benchmark now says something else: measure again"
    assert found["hardware"]["name"].strip() and found["threads"] >= 1
    assert {"python", "torch", "attention_course"} <= set(found["versions"])
    assert datetime.date(2026, 1, 1) <= datetime.date.fromisoformat(found["date"])
    assert found["complete"] is True and found["quick"] is False, "only whole runs are kept"
    assert found["rows"]
    for row in found["rows"]:
        assert all(isinstance(x, str | int | float | None) for x in row.values()), row
        assert all(math.isfinite(x) for x in row.values() if isinstance(x, float)), row
        if "ratio" in row:
            assert set(measure.NUMBERS) <= set(row)
            assert 0 < row["min"] <= row["q1"] <= row["ratio"] <= row["q3"] <= row["max"], row
            assert row["rounds"] >= 6 and row["ours_ms"] > 0 and row["peer_ms"] > 0


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_results_hold_the_cases_of_today(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    cases = list(measure.benchmarks()[found["benchmark"]].cases(quick=False))
    for case in cases:
        assert [row for row in found["rows"] if case.items() <= row.items()], f"{path.name} lacks {case}: measure again"
    for row in found["rows"]:
        assert any(case.items() <= row.items() for case in cases), f"{path.name} has a case that is measured no more: {row}"


def test_benchmarks_results_is_where_the_package_keeps_them():
    assert (ROOT / "benchmarks" / "results").resolve() == measure.RESULTS == ROOT / "attention_course" / "results"
    strays = [p.name for p in measure.RESULTS.iterdir() if p.suffix != ".json"]
    assert not strays, f"left by a run that was killed: {strays}"


# --- whole runs ------------------------------------------------------------------------


def script(*arguments):
    return subprocess.run([sys.executable, ROOT / "benchmarks" / "run.py", *map(str, arguments)], capture_output=True, text=True)


def test_multi_head_runs_from_end_to_end(tmp_path):
    done = script("multi_head", "--quick", "--budget", 0, "--threads", 1, "--out", tmp_path, "--only", "length=64,d_model=128,batch=1")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "multi_head-cpu.json").read_text())
    assert found["threads"] == 1 and found["quick"] is True and found["complete"] is False
    assert {(row["mode"], row["causal"], row["form"]) for row in found["rows"]} == {
        (mode, causal, form) for mode in ("eval", "train", "step") for causal in (False, True) for form in ("split", "fused")}
    assert "against" in done.stdout and len(found["rows"]) == 12


def test_what_is_compared_is_the_same():
    "Outputs and gradients are compared before anything is timed: a difference stops the run."
    multi_head = measure.benchmarks()["multi_head"]
    case = {"length": 5, "d_model": 8, "n_heads": 2, "batch": 3, "causal": True, "mode": "step"}
    calls, x = multi_head.calls_of(case)
    multi_head.same(calls, x)
    other, _ = multi_head.calls_of({**case, "causal": False})
    with pytest.raises(AssertionError):
        multi_head.same({**calls, "split": other["split"]}, x)


TINY = {"small": dict(vocab_size=50, d_model=16, n_heads=2, d_ff=32, n_layers=2)}


def test_the_models_that_are_compared_are_the_same(monkeypatch):
    "Ours and `nn.Transformer` agree in loss and gradient, and write the same; and a different model is noticed."
    transformer = measure.benchmarks()["transformer"]
    monkeypatch.setattr(transformer, "SIZES", TINY)
    case = {"what": "train", "size": "small", "dropout": 0.1, "batch": 5, "length": 7}
    transformer.same_training(case)
    original = transformer.Torch.encode
    monkeypatch.setattr(transformer.Torch, "encode", lambda self, src, mask, positions=None: 1.1 * original(self, src, mask))
    with pytest.raises(AssertionError):
        transformer.same_training(case)


def test_a_step_of_training_and_writing_are_timed_from_end_to_end(monkeypatch):
    transformer = measure.benchmarks()["transformer"]
    monkeypatch.setattr(transformer, "SIZES", TINY)
    monkeypatch.setattr(transformer, "sides", lambda: transformer.SIDES[:2])
    monkeypatch.setattr(transformer, "peak_mb", lambda side, case: 1.0)

    def timed(calls):
        return measure.in_turn(calls, budget=0)

    (row,) = transformer.rows({"what": "train", "size": "small", "dropout": 0.0, "batch": 5, "length": 7}, timed)
    assert row["peer"] == "nn.Transformer" and row["ours_parameters"] == row["peer_parameters"] and row["ours_per_s"] > 0
    (row,) = transformer.rows({"what": "greedy", "size": "small", "beam": 1, "batch": 5, "length": 7, "new": 6}, timed)
    assert row["rounds"] >= 6
    with pytest.raises(SystemExit, match="pip install transformers"):
        transformer.rows({"what": "beam", "size": "small", "beam": 3, "batch": 5, "length": 7, "new": 6}, timed)


def test_what_torch_has_learned_is_written_by_ours(monkeypatch):
    "The stacks of `nn.Transformer` are copied into ours, after which both give the same logits."
    translation = measure.benchmarks()["translation"]
    from attention_course import TransformerConfig

    for norm_first in (False, True):
        model = translation.peer(TransformerConfig(**TINY["small"], norm_first=norm_first)).eval()
        src, tgt = torch.randint(1, 50, (2, 3, 6))
        src[0, 4:] = 0
        writer = translation.ours(model)
        torch.testing.assert_close(writer(src, tgt), model(src, tgt), atol=1e-5, rtol=1e-4)
    assert translation.ours(writer) is writer


def test_the_runner_lists_what_there_is_and_refuses_what_there_is_not():
    done = script("--list")
    assert done.returncode == 0 and re.search(r"(?m)^multi_head +cpu +`MultiHeadAttention`", done.stdout)
    done = script("sums")
    assert done.returncode == 1 and "There is no benchmark sums; there are gpu, gpu_tiles, multi_head" in done.stderr
