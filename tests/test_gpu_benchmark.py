"""The benchmark that wants a GPU, without one: it is rehearsed on the CPU, so that no silly mistake is left for the minutes when there is a GPU."""
import datetime
import json
import math
import os
import re
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu
import gpu_tiles
import measure

pytest.importorskip("triton", minversion="3.4")
slow = pytest.mark.slow


def script(*arguments, name="gpu"):
    return subprocess.run([sys.executable, ROOT / "benchmarks" / f"{name}.py", "--threads", "1", *map(str, arguments)], capture_output=True, text=True,
                          env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"})


@pytest.fixture
def tiny(monkeypatch):
    "A rehearsal in this process, which interprets kernels already."
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted here")
    monkeypatch.setattr(gpu, "size", gpu.TINY)
    monkeypatch.setattr(gpu, "device", "cpu")
    return gpu


# --- a rehearsal -----------------------------------------------------------------------


@slow
def test_all_of_it_runs_from_end_to_end(tmp_path):
    done = script("--dry-run", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu-cpu.json").read_text())
    assert found["complete"] is True and found["quick"] is True and found["benchmark"] == "gpu"
    assert list(dict.fromkeys(row["section"] for row in found["rows"])) == list(gpu.SECTIONS), "each section has rows, in the order of the sections"
    for row in found["rows"]:
        assert "error" not in row, row
        assert all(isinstance(x, str | int | float | None) for x in row.values()), row
        if "ratio" in row:
            assert set(measure.NUMBERS) <= set(row) and row["ours_ms"] > 0 and row["peer"]
            units = ("tflops", "gb_per_s", "tokens_per_s")
            assert row["section"] == "launch" or any(row.get(f"ours_{unit}", 0) > 0 for unit in units)
    peers = {row["peer"] for row in found["rows"] if "ratio" in row}
    assert {"FLASH", "CUDNN", "EFFICIENT", "FlexAttention", "the shipped kernel", "without TMA", "our launcher alone"} <= peers
    assert {"torch's choice", "the kernel for many queries", "2 × as many splits"} <= peers
    for name, count in (("gate", "4"), ("gradients", "7"), ("matrix", r"\d+"), ("gradient matrix", r"\d+")):
        assert re.search(rf"^{name}: ALL RIGHT of {count} rows$", done.stdout, re.M)
    assert re.search(r"headline +d=32 causal=True .* × as fast", done.stdout)
    assert re.search(r"headline back +d=16 causal=True .* × as fast", done.stdout)
    assert done.stdout.count("\ngoal: ") == done.stdout.count(": not measured\n") == 4, "a rehearsal says nothing of a GPU"

    kept = (tmp_path / "gpu-cpu.json").read_text()      # once more: nothing is left to do
    again = script("--dry-run", "--out", tmp_path, "--resume")
    assert again.returncode == 0 and (tmp_path / "gpu-cpu.json").read_text() == kept
    assert "section=" not in again.stdout.split("ceilings:")[0]


@slow
def test_the_search_for_tiles_runs_too(tmp_path):
    done = script("--dry-run", "--only", "d=16,causal=true", "--out", tmp_path / "found.json", name="gpu_tiles")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["kernel"], row["tile"]) for row in rows] == [
        ("forward", "128x64x4x2"), ("forward", "128x64x4x3"), ("keys", "128x64x4x2"), ("keys", "128x64x4x3"),
        ("queries", "128x64x4x2"), ("queries", "128x64x4x3"),
    ]  # fmt: skip
    assert all(row["ratio"] > 0 and "error" not in row for row in rows)


def test_what_stays_in_memory_decides_on_the_tiles_that_are_tried():
    "For its gradient a tile of queries needs room for that of the output, too; keys and values have two sums."
    assert (128, 128, 8, 3) in gpu_tiles.tiles("forward", 128) and (128, 128, 8, 3) not in gpu_tiles.tiles("queries", 128)
    assert (128, 64, 4, 2) in gpu_tiles.tiles("queries", 128)
    assert (32, 128, 8, 2) in gpu_tiles.tiles("keys", 128) and (32, 128, 4, 2) not in gpu_tiles.tiles("keys", 128)


def test_cases_are_listed(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "course_or_none", lambda: types.SimpleNamespace(_RUNGS={"1-rows": "", "2-tiles": ""}))
    assert measure.run("gpu", gpu, measure.options(several=False).parse_args(["--list"])) == 0
    listed = capsys.readouterr().out
    assert listed.startswith("section=environment\nsection=ceilings,what=matmul\n")
    assert listed.count("section=backward") == 30 and listed.count("section=decode") == 7
    assert "section=gradients,dtype=bfloat16,d=128,causal=True\n" in listed
    assert "section=gradients,feature=groups,dtype=float32,n_q=1000\n" in listed
    assert listed.count("section=forward") == 36 and "section=forward,d=64,causal=False,length=1024" in listed
    assert "section=ladder,rung=1-rows,d=128,causal=True,length=1024\nsection=ladder,rung=2-tiles,d=128,causal=True,length=8192\n" in listed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = script("--only", "environment")
    assert done.returncode == 0 and "needs a GPU" in done.stdout


def test_sections_are_chosen_by_name():
    def chosen(*only):
        return {case["section"] for case in measure.wanted(list(gpu.cases(quick=False)), only)}

    assert chosen("headline") == {"headline"} and chosen("headline,ladder") == {"headline", "ladder"} == chosen("headline", "ladder")
    assert all(case["d"] == 64 and case["causal"] for case in measure.wanted(list(gpu.cases(quick=False)), ["forward,d=64,causal=true"]))
    with pytest.raises(SystemExit, match="there is no section headlines; there are environment, ceilings"):
        chosen("headlines")
    with pytest.raises(SystemExit, match="but no depth"):
        chosen("forward,depth=3")


def test_most_important_first_and_largest_first():
    sections = list(dict.fromkeys(case["section"] for case in gpu.cases(quick=False)))
    assert sections[:4] == ["environment", "ceilings", "gate", "gradients"], "nothing is timed before it is known to be right"
    assert sections[4:9] == ["headline", "headline back", "decode", "memory", "training"]
    (headline,) = gpu.headline_cases(quick=False)
    assert headline == {"d": 128, "causal": True, "length": 16384}
    grid = list(gpu.forward_cases(quick=False))
    assert len(grid) == 36 and [case["length"] for case in grid] == sorted((case["length"] for case in grid), reverse=True)
    assert list(gpu.headline_back_cases(quick=False)) == [{"d": d, "causal": True, "length": 8192} for d in (128, 64)]
    grid = list(gpu.backward_cases(quick=False))
    assert len(grid) == 30 and max(case["length"] for case in grid) == 16384 and min(case["length"] for case in grid) == 1024
    assert all(case["d"] == 256 for case in grid[20:]) and {case["d"] for case in grid[:20]} == {64, 128}
    decoded = list(gpu.decode_cases(quick=False))
    assert decoded[0] == {"d": 128, "batch": 16, "length": 131072, "padded": False} and decoded[-1]["padded"]
    assert len(list(gpu.cases(quick=True))) < len(list(gpu.cases(quick=False)))


def test_a_rehearsal_is_not_kept_among_the_results(tmp_path, monkeypatch, tiny):
    monkeypatch.setattr(measure, "TRIALS", tmp_path / "trials")
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    options = measure.options(several=False).parse_args(["--dry-run", "--only", "environment", "--threads", str(torch.get_num_threads())])
    assert measure.perform("gpu", tiny, options) == tmp_path / "trials" / "gpu-cpu.json"
    assert not (tmp_path / "results").exists()
    with pytest.raises(SystemExit, match="multi_head has no --dry-run"):
        measure.perform("multi_head", measure.benchmarks()["multi_head"], options)


# --- what is counted ------------------------------------------------------------------


def test_operations_are_counted_as_the_papers_do():
    q = k = v = torch.empty(2, 16, 8192, 128, device="meta")
    assert gpu.flops(q, k, v, False) == 4 * 2 * 16 * 8192**2 * 128 and gpu.flops(q, k, v, True) == gpu.flops(q, k, v, False) // 2
    assert gpu.flops(q[:, :, :1], k[..., :64], v, False) == 2 * 2 * 16 * 1 * 8192 * (128 + 128)
    grouped = torch.empty(2, 4, 8192, 128, device="meta")
    assert gpu.flops(q, grouped, grouped, False) == gpu.flops(q, k, v, False), "query heads do the work"


def worked(monkeypatch, rows, case):
    "What a section says that its calls work, and how often they are launched: the arguments of its contest."
    seen = []
    monkeypatch.setattr(gpu, "contest", lambda calls, timed, **options: seen.append(({**options}, calls)) or [])
    rows(case, None)
    return seen[0]


def test_work_is_counted(tiny, monkeypatch):
    monkeypatch.setattr(gpu, "trust", lambda case: None)
    case = {"d": 16, "causal": True, "length": 32}
    forward = 4 * 1 * 2 * 32**2 * 16        # batch, heads, length, width
    options, calls = worked(monkeypatch, gpu.backward, case)
    assert options["work"] == 2.5 * forward / 2 and list(calls) == ["ours", "FLASH", "CUDNN"]
    options, _ = worked(monkeypatch, gpu.backward, {**case, "causal": False})
    assert options["work"] == 2.5 * forward
    for kernel, products in (("keys", 4), ("queries", 3)):
        assert worked(monkeypatch, gpu.variants_back, {**case, "kernel": kernel})[0]["work"] == products * forward / 2 / 2
    heads, kv, *_ = gpu.size.decoded
    for rows in (gpu.decode, gpu.variants_split):
        options, _ = worked(monkeypatch, rows, {"d": 32, "batch": 2, "length": 24, "padded": False})
        assert options["unit"] == "gb_per_s"
        assert options["work"] == 2 * kv * 24 * (32 + 32) * 2, "keys and values once, 2 bytes a number"
    (case,) = gpu.training_cases(quick=True)
    options, _ = worked(monkeypatch, gpu.training, case)
    assert options["work"] == gpu.STEPS * case["batch"] * case["length"] and options["unit"] == "tokens_per_s"


def test_only_the_way_back_is_timed_and_gradients_do_not_add_up(tiny):
    x, forward = torch.ones(3, requires_grad=True), []
    call = gpu.back(lambda: forward.append(1) or x * x, [x], torch.ones(3))
    with torch.no_grad():
        assert all(torch.equal(call()[0], 2 * x) for _ in range(3))
    assert forward == [1] and x.grad is None


def test_several_results_are_compared_by_the_worst():
    x = torch.ones(4)
    assert gpu.differ((x, x), (x, x)) == 0 and gpu.differ((x, 1.5 * x), (x, x)) == pytest.approx(0.5)
    assert math.isnan(gpu.differ((x, math.nan * x, x), (x, x, x)))


def test_tokens_and_width_stay_the_same(tiny, monkeypatch):
    monkeypatch.setattr(gpu, "size", gpu.REAL._replace(tokens=64, width=128))
    for d, length in ((64, 32), (32, 64), (16, 128)):
        q, k, v = gpu.of_case({"d": d, "length": length})
        assert q.shape == k.shape == v.shape == (max(1, 64 // length), 128 // d, length, d) and q.dtype == torch.bfloat16
    assert gpu.REAL.tokens == 16384 and gpu.REAL.width == 2048 and gpu.REAL.lengths == tuple(2**i for i in range(15, 9, -1))


def test_rates_come_from_median_times(tiny):
    x = torch.ones(2)
    taken = {"ours": [0.001, 0.002, 0.003], "fast": [0.001, 0.001, 0.001], "slow": [0.004, 0.004, 0.004]}
    calls = dict.fromkeys(taken, lambda: x)
    fast, slower = gpu.contest(calls, lambda calls: taken, work=4e9)
    assert (fast["peer"], fast["ratio"], fast["ours_tflops"], fast["peer_tflops"]) == ("fast", 2.0, 2.0, 4.0)
    assert (slower["peer"], slower["ratio"], slower["peer_tflops"]) == ("slow", 0.5, 1.0)
    (fast, _) = gpu.contest(calls, lambda calls: taken, work=4e9, unit="gb_per_s")
    assert fast["ours_gb_per_s"] == 2000.0


def test_a_peer_that_cannot_is_said_to_and_the_others_are_measured(tiny):
    def missing():
        raise RuntimeError("No available kernel.\n  Aborting.")

    x = torch.ones(2)
    timed = []

    def timer(calls):
        timed.extend(calls)
        return {name: [1.0, 2.0] for name in calls}

    rows = gpu.contest({"ours": lambda: x, "CUDNN": missing, "FLASH": lambda: x}, timer, work=1e12)
    assert rows[0] == {"peer": "CUDNN", "peer_error": "RuntimeError: No available kernel. Aborting."}
    assert rows[1]["peer"] == "FLASH" and rows[1]["ratio"] == 1.0 and timed == ["ours", "FLASH"]
    _, alone = gpu.contest({"ours": lambda: x, "CUDNN": missing}, timer, work=1e12)
    assert alone == {"peer": "nobody", "ours_ms": 1500.0, "rounds": 2, "ours_tflops": 0.6667}
    with pytest.raises(RuntimeError, match="No available"):
        gpu.contest({"ours": missing, "FLASH": lambda: x}, timer)


@pytest.mark.parametrize("wrong", [1.02, math.nan])
def test_a_result_that_differs_is_an_error_beside_its_time(tiny, wrong):
    x = torch.ones(100)
    (row,) = gpu.contest({"ours": lambda: wrong * x, "FLASH": lambda: x}, lambda calls: {name: [1.0, 1.0] for name in calls})
    assert row["ratio"] == 1.0 and "WRONG: ours and FLASH differ by" in row["error"]
    (row,) = gpu.contest({"ours": lambda: 1.002 * x, "FLASH": lambda: x}, lambda calls: {name: [1.0, 1.0] for name in calls})
    assert "error" not in row


# --- is it right ------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.05, math.nan])
def test_the_gate_and_the_matrix_see_a_wrong_kernel(tiny, monkeypatch, factor):
    gate, matrix = {"dtype": "float16", "d": 16, "causal": True}, {"feature": "all at once", "dtype": "float16"}
    assert "error" not in gpu.gate(gate, None)[0] and "error" not in gpu.matrix(matrix, None)[0]
    right = gpu.ours

    def wrong(*args, **options):
        def call():
            found = right(*args, **options)()
            return (found[0] * factor, found[1]) if isinstance(found, tuple) else found * factor

        return call

    monkeypatch.setattr(gpu, "ours", wrong)
    for row in (gpu.gate(gate, None)[0], gpu.matrix(matrix, None)[0]):
        assert row["error"].startswith("WRONG") and all(math.isfinite(x) for x in row.values() if isinstance(x, float))


def test_the_matrix_sees_a_wrong_log_sum_exp(tiny, monkeypatch):
    right = gpu.ours
    monkeypatch.setattr(gpu, "ours", lambda *args, **options: lambda: (lambda output, lse: (output, lse + 0.1))(*right(*args, **options)()))
    (row,) = gpu.matrix({"feature": "causal", "dtype": "float16"}, None)
    assert row["failed"] == 1 and "WRONG: lse" in row["error"]


def wrong_gradients(monkeypatch, factor):
    "Gradients of keys are wrong from now on."
    back = gpu.course("flash_backward")
    right = back._launch_back

    def wrong(*args, **options):
        dq, dk, dv = right(*args, **options)
        return dq, dk * factor, dv

    monkeypatch.setattr(back, "_launch_back", wrong)


@pytest.mark.parametrize("factor", [1.05, math.nan])
def test_a_wrong_gradient_is_seen_and_nothing_is_timed(tiny, monkeypatch, factor):
    gate, feature = {"dtype": "float16", "d": 16, "causal": True}, {"feature": "all at once", "dtype": "float16", "n_q": 5}
    for case in (gate, feature):
        assert "error" not in gpu.gradients(case, None)[0]
    gpu.trust({"d": 16, "causal": True})
    wrong_gradients(monkeypatch, factor)
    for case in (gate, feature):
        (row,) = gpu.gradients(case, None)
        assert row["error"].startswith("WRONG: dk is off by") and row["error"].count("is off by") == 1
        assert all(math.isfinite(x) for x in row.values() if isinstance(x, float))

    def never(*_, **__):
        raise AssertionError("something was timed")

    monkeypatch.setattr(gpu, "contest", never)
    backward, training = {"d": 16, "causal": True, "length": 32}, next(gpu.training_cases(quick=True))
    for rows, case in ((gpu.backward, backward), (gpu.others_back, backward), (gpu.training, training)):
        with pytest.raises(RuntimeError, match="not timed, for the gradients are WRONG: dk is off by"):
            rows(case, never)


@slow
def test_losses_that_part_are_an_error(tiny, monkeypatch):
    "Gradients that are wrong by little leave the first loss as it is."
    (case,) = gpu.training_cases(quick=True)
    monkeypatch.setattr(gpu, "trust", lambda case: None)
    (row,) = gpu.training(case, gpu.rehearsed)
    assert "error" not in row and row["ours_loss"] == pytest.approx(row["peer_loss"], rel=2e-3)
    wrong_gradients(monkeypatch, 1.2)
    (row,) = gpu.training(case, gpu.rehearsed)
    assert row["error"].startswith("WRONG: ours and torch's choice differ by")


def test_padding_is_on_the_left(tiny):
    (q, k, v), mask = gpu.decode_inputs({"d": 16, "batch": 2, "length": 24, "padded": True})
    assert q.shape == (2, 4, 1, 16) and k.shape == v.shape == (2, 2, 24, 16) and mask.shape == (2, 1, 1, 24)
    assert [row.squeeze().int().tolist() for row in mask] == [24 * [1], 6 * [0] + 18 * [1]]


def test_what_is_wanted_is_met_or_missed():
    def said(*rows):
        named = [dict.fromkeys(("who", "what", "padded"), "") | row for row in rows]
        text = gpu.summary([{"section": "ceilings", "gb_per_s": 4000.0}, *named])
        return [line for line in text.split("\n") if line.startswith("goal: ")]

    def back(ratio, **more):
        numbers = {"ratio": ratio, "q1": ratio, "q3": ratio, "ours_tflops": 1.0, "peer_tflops": 1.0, "peer": "FLASH"}
        return {"section": "backward", "d": 128, "causal": True, "length": 2048, **numbers, **more}

    def decoded(speed, **more):
        numbers = {"ratio": 1.0, "q1": 1.0, "q3": 1.0, "ours_gb_per_s": speed, "peer_gb_per_s": 1.0, "peer": "FLASH, enable_gqa"}
        return {"section": "decode", "d": 128, "batch": 16, "length": 131072, "padded": False, **numbers, **more}

    def kept(much):
        return {"section": "memory", "what": "both", "who": "ours", "length": 32768, "extra_bytes": 1, "bytes_a_query": much}

    assert [line.rsplit(": ", 1)[1] for line in said()] == 4 * ["not measured"]
    others = back(2.0, peer="CUDNN"), back(2.0, length=1024), back(2.0, d=256), decoded(3000.0, length=32768)
    floor, target, decoding, memory = said(back(0.9), back(0.95), decoded(3300.0), kept(8.0), *others)
    assert "(floor): MET (1.05 × in the worst of 2 cases)" in floor and "(target): MISSED (1.05 ×" in target
    assert ": MET (82%" in decoding and ": MET (8 in" in memory
    floor, target, decoding, memory = said(back(0.8), back(0.8, error="WRONG"), decoded(3100.0), kept(12.0))
    assert "MISSED (1 rows have an error)" in floor and "MISSED (78%" in decoding and "MISSED (12 in" in memory
    assert "(floor): MISSED (0.99 ×" in said(back(1.01), back(0.5))[0] and "(target): MET (1.25 ×" in said(back(0.8))[1]


def test_every_feature_does_something(tiny):
    "Each changes the result, so that a kernel that forgot it would be seen; queries are the last of more keys."
    lengths = (9, 100, 16, 16)

    def found(name, **changes):
        inputs, options = gpu.feature(name, lengths, torch.float32)
        from attention_course import tiled_attention

        return tiled_attention(*inputs, **(options | changes))

    plain = found("none")
    assert set(gpu.FEATURES) - {"none"} and {"mask", "alibi_slopes"} <= set(gpu.feature("all at once", lengths, torch.float32)[1])
    for name in set(gpu.FEATURES) - {"none", "strides", "groups", "one key head"}:
        other = found(name)
        assert other.shape[0] != plain.shape[0] or (other - plain).abs().max() > 1e-3, name
    (q, k, v), _ = gpu.feature("strides", lengths, torch.float32)
    assert not q.is_contiguous() and q.storage_offset() > 0
    (q, k, v), _ = gpu.feature("groups", lengths, torch.float32)
    assert q.shape[1] == 2 * k.shape[1]


@pytest.mark.parametrize("what, needed, a_query", [("forward", 1, 4), ("both", 4, 8)])
def test_memory_that_should_not_be_used_is_an_error(tiny, monkeypatch, what, needed, a_query):
    "Output, and with gradients those of three tensors, are needed; so is the log-sum-exp, and then a number more."
    from unittest import mock

    case = {"what": what, "who": "ours", "d": 16, "length": 32}
    needed *= 2 * 32 * 16 * 2       # heads · length · width · bytes
    for extra, wrong in ((a_query * 2 * 32, False), ((a_query + 4) * 2 * 32, True)):
        peak = {"memory_allocated.return_value": 1000, "max_memory_allocated.return_value": 1000 + needed + extra}
        gauge = mock.MagicMock(**peak)
        monkeypatch.setattr(gpu, "mock", types.SimpleNamespace(MagicMock=lambda gauge=gauge, **_: gauge))
        (row,) = gpu.memory(case, None)
        assert row["extra_bytes"] == extra and row["bytes_a_query"] == extra / 64 and ("error" in row) == wrong


# --- a run that meets trouble -------------------------------------------------------------


def fake(cases, rows, **more):
    return types.SimpleNamespace(__doc__="Nothing.", DEVICE="cpu", GOES_ON=True, cases=lambda quick: cases, rows=rows, **more)


def options(folder, *arguments):
    return measure.options(several=False).parse_args(["--budget", "0", "--threads", str(torch.get_num_threads()), "--out", str(folder), *arguments])


def rows_of(folder):
    return json.loads((folder / "fake-cpu.json").read_text())["rows"]


CASES = [{"section": "a" if n < 3 else "b", "n": n} for n in range(5)]


def test_what_fails_becomes_a_row_and_the_rest_is_measured(tmp_path, capsys):
    def rows(case, timed):
        if case["n"] == 1:
            raise RuntimeError("out of\n memory " + 500 * "x")
        return [{"tflops": math.nan if case["n"] == 3 else 1.0}]

    assert measure.run("fake", fake(CASES, rows), options(tmp_path)) == 1
    found = rows_of(tmp_path)
    assert [row["n"] for row in found] == [0, 1, 2, 3, 4] and [row["n"] for row in measure.failed(found)] == [1, 3]
    assert found[3]["error"].startswith("ValueError: tflops=nan is no")
    assert found[1]["error"].startswith("RuntimeError: out of memory x") and len(found[1]["error"]) < 250
    assert "2 ROWS HAVE AN ERROR:\n  section=a,n=1,error=RuntimeError" in capsys.readouterr().out
    assert measure.run("fake", fake(CASES, lambda case, timed: [{"tflops": 1.0}]), options(tmp_path, "--only", "n=1", "--only", "n=3")) == 0
    assert not measure.failed(rows_of(tmp_path)) and len(rows_of(tmp_path)) == 5


def test_a_benchmark_that_does_not_say_so_stops_at_an_error(tmp_path):
    module = fake(CASES, lambda case, timed: 1 / 0)
    module.GOES_ON = False
    with pytest.raises(ZeroDivisionError):
        measure.run("fake", module, options(tmp_path))


def test_the_time_is_kept(tmp_path, monkeypatch, capsys):
    "Cases that would not be done in time are left out and named; --resume measures them, and cheaper ones may still fit."
    now = [0.0]
    monkeypatch.setattr(measure, "START", 0.0)
    cost = {0: 20, 1: 25, 2: 25, 3: 1, 4: 1}

    def rows(case, timed):
        now[0] += cost[case["n"]]
        return [{"tflops": 1.0}]

    def go(*arguments):
        now[0] = 0
        measure.perform("fake", fake(CASES, rows, expected=lambda case: 1, MINUTES=1.0), options(tmp_path, *arguments), clock=lambda: now[0])
        return [row["n"] for row in rows_of(tmp_path)]

    assert go() == [0, 1, 3, 4], "45 s were gone, and the longest case of the section had taken 25"
    out = capsys.readouterr().out
    assert "1 cases did not fit into 1 minutes; --resume measures them:\n  section=a,n=2" in out
    assert json.loads((tmp_path / "fake-cpu.json").read_text())["complete"] is False
    assert sorted(go("--resume")) == [0, 1, 2, 3, 4] and now[0] == 25
    assert go("--minutes", "0.1") == [0], "what takes longer than expected is noticed afterwards"


def test_kernels_are_prepared_section_by_section(tmp_path):
    seen = []
    module = fake(CASES, lambda case, timed: seen.append(case["n"]) or [{"tflops": 1.0}], prepare=lambda cases: seen.append([c["n"] for c in cases]))
    measure.perform("fake", module, options(tmp_path))
    assert seen == [[0, 1, 2], 0, 1, 2, [3, 4], 3, 4]

    def prepare(cases):
        raise RuntimeError("no memory")

    module.prepare = prepare
    measure.perform("fake", module, options(tmp_path))
    assert not measure.failed(rows_of(tmp_path))


def gpu_like(tmp_path, code):
    "A module that claims to need a GPU, in a process in which there seems to be one; returns the process and the rows."
    (tmp_path / "fake.py").write_text(f'''
"""Nothing."""
import os, signal, sys, time
DEVICE, GOES_ON, MINUTES = "cuda", True, 0.2
prepared = []
def cases(quick):
    return [{{"section": "a", "n": n}} for n in range(4)]
def prepare(cases):
    prepared.append(1)
def rows(case, timed):
    {code}
    return [{{"tflops": 1.0, "pid": os.getpid(), "prepared": len(prepared)}}]
''')
    (tmp_path / "go.py").write_text(f'''
import sys
sys.path[:0] = [{str(ROOT / "benchmarks")!r}, {str(tmp_path)!r}]
import measure, fake, torch
torch.cuda.is_available = lambda: True
measure.hardware = lambda device: {{"kind": "h0", "name": "H0"}}
measure.versions = lambda device: {{"torch": torch.__version__}}
measure.GRACE = 1
sys.exit(measure.run("fake", fake, measure.options(several=False).parse_args(sys.argv[1:])))
''')
    done = subprocess.run([sys.executable, tmp_path / "go.py", "--threads", "1", "--out", tmp_path], capture_output=True, text=True)
    return done, json.loads((tmp_path / "fake-h0.json").read_text())


@pytest.mark.parametrize("end, told", [
    ("os.kill(os.getpid(), signal.SIGABRT)", "the process was ended by signal 6"),
    ("os._exit(99)", "the process lost the GPU"),
])
def test_a_case_that_ends_the_process_is_named_and_another_process_goes_on(tmp_path, end, told):
    done, found = gpu_like(tmp_path, f"if case['n'] == 1: {end}")
    assert done.returncode == 1 and found["complete"], done.stderr
    assert [row.get("error") for row in found["rows"]] == [None, told, None, None]
    first, _, third, last = found["rows"]
    assert first["pid"] != third["pid"] == last["pid"] and (first["prepared"], third["prepared"]) == (1, 0)


@slow
def test_a_case_that_never_comes_back_is_left(tmp_path, monkeypatch):
    code = "if case['n'] == 1: time.sleep(1000)"
    done, found = gpu_like(tmp_path, code)
    assert done.returncode == 1, done.stderr
    assert found["rows"][1]["error"] == "the process never came back" and len(found["rows"]) == 2
    assert "2 cases did not fit into 0.2 minutes" in done.stdout


def test_a_run_that_was_killed_measures_the_case_that_it_was_at(tmp_path):
    def rows(case, timed):
        if case["n"] == 2:
            raise KeyboardInterrupt
        return [{"tflops": 1.0}]

    with pytest.raises(KeyboardInterrupt):
        measure.run("fake", fake(CASES, rows), options(tmp_path))
    assert [row.get("error") for row in rows_of(tmp_path)] == [None, None, measure.BEGUN]
    assert measure.run("fake", fake(CASES, lambda case, timed: [{"tflops": 2.0}]), options(tmp_path, "--resume")) == 0
    assert [row["tflops"] for row in rows_of(tmp_path)] == [1, 1, 2, 2, 2]


# --- time on a GPU, kernels compiled beforehand -------------------------------------------


def test_time_is_the_gpus_with_a_cold_cache_and_the_host_ahead(monkeypatch):
    "Of each call, only what lies between its two events; the cache is emptied before the first of them."
    log, now = [], [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")
            self.at = now[0]

        def elapsed_time(self, end):
            return end.at - self.at

    class Buffer:
        def zero_(self):
            log.append("flush")
            now[0] += 100

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(measure, "_other_things", Buffer)
    durations = iter([2, 4, 90])

    def call():
        log.append("call")
        now[0] += next(durations)

    assert measure.device_seconds(call, 3) == 0.004
    assert log == ["sleep", *["flush", "event", "call", "event"] * 3, "wait"]


COMPILE = f"""
import importlib, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Absent:
    get_current_device = get_current_stream = lambda *_: 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, *_):
        raise RuntimeError("no GPU")


driver.set_active(Absent())
import gpu

gpu.course = lambda name="flash_forward": importlib.import_module("attention_course." + name)
x = torch.randn(1, 2, 256, 64, dtype=torch.float16)
tile = (64, 64, 4, 2)
calls = [gpu.launch(x[:, :, :n], x[:, :, :n], x[:, :, :n], causal, tile=tile, tma=True) for n in (256, 128, 64) for causal in (False, True)]
calls += [gpu.launched(*4 * [x[:, :, :n]], causal=True) for n in (256, 128)]
print("kernels:", gpu.compiled([*calls, lambda: 1 / 0]))
print("again:", gpu.compiled(calls))
"""


@slow
def test_kernels_are_compiled_and_not_launched(tmp_path):
    "For an H200 that is not here: launching would fail. Lengths share kernels, and what was compiled is not compiled again."
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    kernels = 2 + 4     # with and without a mask; then output, delta, gradients of keys and values, of queries
    assert f"kernels: {kernels}\n" in done.stdout and "not compiled: ZeroDivisionError" in done.stdout
    assert done.stdout.count("not loaded: RuntimeError: no GPU") == 2 * kernels, "all of them, twice"
    assert len(list(tmp_path.rglob("*.cubin"))) == kernels


def test_every_section_prepares_the_kernels_that_its_rows_launch(tiny, monkeypatch):
    "Seen by what they hand to the kernels: all that decides on what is compiled."
    from triton.runtime.interpreter import GridExecutor

    seen, call = [], GridExecutor.__call__

    def watched(self, *args, **options):
        types_ = tuple((x.dtype, x.stride()) if isinstance(x, torch.Tensor) else type(x).__name__ for x in args)
        seen.append((self.fn.__name__, types_, tuple(sorted((name, str(value)) for name, value in options.items() if name.isupper() or name.startswith("num_")))))
        return call(self, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", watched)
    for name, section in gpu.SECTIONS.items():
        case = next(iter(section.cases(True)), None)
        if case is None or name == "others":        # as `forward`; FlexAttention takes its time
            continue
        seen.clear()
        with torch.no_grad():
            for kernel in section.kernels(case):
                kernel()
        prepared = set(seen)
        seen.clear()
        with torch.no_grad():
            section.rows(case, gpu.rehearsed)
        assert set(seen) == prepared, f"{name}: what is prepared is not what is launched"
