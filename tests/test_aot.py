"""The kernels as they are compiled for GPUs that are not here: a few cases, the kept figures, and that `make aot` can fail."""
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.checkout
pytest.importorskip("triton", minversion="3.4")
if sys.platform != "linux":
    pytest.skip("triton compiles on Linux", allow_module_level=True)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import aot
import aot_tiles
import attention_course
from attention_course import flash_backward, flash_forward

KEPT = json.loads((ROOT / "attention_course" / "results" / "flash-aot.json").read_text(encoding="utf-8"))
AGAIN = "the kernel or its tiles have changed: run `make aot`"


def case(sm, d, call, kind="bfloat16", kernel="forward"):
    return {"kernel": kernel, "sm": sm, "type": kind, "d": d, "call": call}


def kept(case):
    (row,) = [row for row in KEPT["rows"] if case.items() <= row.items()]
    return row


# --- the kept figures ------------------------------------------------------------------


def test_the_kept_figures_are_whole_and_say_where_they_come_from():
    assert (KEPT["benchmark"], KEPT["hardware"]["kind"], KEPT["says"]) == ("flash", "aot", aot.SAYS)
    assert {"python", "torch", "triton", "ptxas", "attention_course"} <= set(KEPT["versions"])
    assert KEPT["complete"] is True and KEPT["quick"] is False, "only whole runs are kept"
    assert [aot.name(row) for row in KEPT["rows"]] == list(map(aot.name, aot.cases())), AGAIN
    assert KEPT["kernel"] == aot.fingerprint(), AGAIN
    assert "triton" in attention_course.measured("flash-aot")["line"]


def test_all_kernels_count_in_the_fingerprint(monkeypatch):
    whole = aot.fingerprint()
    for module, kernel in (flash_forward, "_flash_kernel"), (flash_backward, "_keys_kernel"), (flash_backward, "_merge_kernel"):
        with monkeypatch.context() as without:
            without.delattr(module, kernel)
            assert aot.fingerprint() != whole


def test_the_kept_figures_keep_within_the_limits(monkeypatch):
    monkeypatch.setattr(aot, "MAY_SPILL_NEWER", {})  # they are of triton 3.6.0
    assert [fault for row in KEPT["rows"] for fault in aot.broken(row)] == []
    stack = {aot.name(row): row["stack"] for row in KEPT["rows"]}
    assert {name: most for name, most in aot.MAY_SPILL.items() if stack.get(name) != most} == {}, "leave that is not needed"


def test_the_kept_figures_are_of_the_tiles_that_the_library_takes_today():
    seen = set()
    for row in KEPT["rows"]:
        call = row["call"] in ("window", "everything"), row["call"] if row["kernel"] in ("split", "ladder") else ""
        if (entry := (row["kernel"], row["sm"], row["type"], row["d"], *call)) not in seen:
            seen.add(entry)
            assert row["tile"] == aot.tile({name: row[name] for name in case(0, 0, "")}), f"{aot.name(row)}: {AGAIN}"


@pytest.mark.parametrize("kernel, table, tile, says", [
    ("forward", flash_forward._TILES[90]["half"], (64, 32, 4, 2), "64,32,4,2"),
    ("keys", flash_backward._TILES_BACK[90]["keys"]["half"], (32, 64, 4, 2), "32,64,4,2"),
    ("queries", flash_backward._TILES_BACK[90]["queries"]["half"], (64, 32, 4, 2), "64,32,4,2"),
    ("split", flash_backward._TILES_SPLIT[90]["half"], (32, 8, 2), "16,32,8,2"),
])  # fmt: skip
def test_another_tile_is_noticed(kernel, table, tile, says, monkeypatch):
    some = case(90, 128, "causal", kernel=kernel)
    assert aot.tile(some) == kept(some)["tile"]
    monkeypatch.setitem(table, 128, tile)
    assert aot.tile(some) == says != kept(some)["tile"]


# --- a few, compiled now ---------------------------------------------------------------


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = aot.Worker(str(tmp_path_factory.mktemp("triton")))
    yield worker
    worker.stop()


FEW = [
    *(case(sm, 128, "causal") for sm in (80, 90, 100)), case(90, 64, "everything"), case(80, 32, "causal", "float32"),
    *(case(sm, 128, "causal", kernel=kernel) for sm in (80, 90) for kernel in ("keys", "queries", "split")), case(90, 128, "16-everything", kernel="split"),
    *(case(90, 128, "everything", kernel=kernel) for kernel in ("delta", "merge")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("few", FEW, ids=aot.name)
def test_a_case_compiles_to_what_was_kept_and_keeps_within_the_limits(worker, few):
    row = {**few, **worker(few)}
    assert "error" not in row, row["error"]
    assert aot.broken(row) == []
    if aot.versions()["triton"] == KEPT["versions"]["triton"]:
        assert {**row, "seconds": 0} == {**kept(few), "seconds": 0}, AGAIN


TOO_LARGE = [
    ("_TILES_BACK[80]['keys']['half']", case(80, 64, "causal", kernel="keys"), (64, 128, 4, 2), "bytes of stack; at most 0"),
    ("_TILES_BACK[86]['queries']['half']", case(86, 256, "causal", kernel="queries"), (64, 32, 8, 2), "a block on sm_86 has 101376"),
    ("_TILES_SPLIT[86]['half']", case(86, 128, "causal", kernel="split"), (64, 4, 3), "2 blocks are to fit onto one multiprocessor"),
]


@pytest.fixture(scope="module")
def careless(tmp_path_factory):
    "A worker for a library with tiles that are too large."
    tiles = "\n".join(f"flash_backward.{table}[{large['d']}] = {tile}" for table, large, tile, _ in TOO_LARGE)
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r})\nimport aot\nfrom attention_course import flash_backward\n{tiles}\naot.work()"
    worker = aot.Worker(str(tmp_path_factory.mktemp("triton")), (sys.executable, "-c", code))
    yield worker
    worker.stop()


@pytest.mark.slow
@pytest.mark.parametrize("large, tile, says", [some[1:] for some in TOO_LARGE])
def test_a_tile_that_is_too_large_breaks_a_limit(careless, large, tile, says):
    row = {**large, **careless(large)}
    assert ",".join(map(str, tile)) in row["tile"], row
    assert any(says in fault for fault in aot.broken(row)), row


def test_the_good_and_bad_tiles_are_of_todays_kernels_too():
    tiles = json.loads((ROOT / "attention_course" / "results" / "tiles-aot.json").read_text(encoding="utf-8"))
    assert tiles["complete"] and tiles["kernel"] == aot.fingerprint(), "run tools/aot_tiles.py"
    assert [{name: row[name] for name in ("sm", "d", "tile")} for row in tiles["rows"]] == list(aot_tiles.cases())


# --- the call of a case ----------------------------------------------------------------


def test_a_case_is_a_call_of_the_library():
    "Kind of numbers, path and features are those of the call, and nothing is run."
    kernel, call = aot.flash(case(90, 64, "everything", "float16"))
    assert kernel is flash_forward._flash_kernel
    assert all(call[name] for name in ("BACK", "AHEAD", "KEEP", "CAP", "ALIBI", "TMA")) and not call["EVEN"]
    assert call["K"].block_shape == [1, 1, call["BLOCK_N"], 64] and call["Q"].dtype == torch.float16
    _, call = aot.flash(case(80, 256, "full", "float32"))
    assert not any(call[name] for name in ("BACK", "AHEAD", "KEEP", "CAP", "ALIBI", "TMA")) and call["EVEN"] and call["PRECISION"] == "ieee"
    _, call = aot.flash(case(90, 128, "packed"))
    assert call["PACKED"] and not call["TMA"]
    _, call = aot.flash(case(90, 128, "8-specialised", kernel="ladder"))
    assert call["num_warps"] == 4 and call["CAUSAL"]
    _, call = aot.flash(case(80, 64, "d_v=128"))
    assert (call["WIDTH"], call["WIDTH_V"], call["D_V"]) == (64, 128, 128)


def test_the_backward_pass_and_decoding_are_calls_of_the_library_too():
    for kernel, written in ("keys", ("DK", "DV")), ("queries", ("DQ",)), ("delta", ("DELTA",)):
        found, call = aot.flash(case(90, 128, "everything", kernel=kernel))
        assert found is getattr(flash_backward, f"_{kernel}_kernel") and all(torch.is_tensor(call[name]) for name in written)
        assert call["WITH_LSE"] if kernel == "delta" else all(call[name] for name in ("BACK", "AHEAD", "KEEP", "CAP", "ALIBI"))
    rows = {call: aot.flash(case(90, 128, call, kernel="split"))[1]["BLOCK_M"] for call in ("causal", "16-causal", "16-everything")}
    assert rows == {"causal": 16, "16-causal": 64, "16-everything": 64}
    kernel, call = aot.flash(case(90, 128, "everything", kernel="merge"))
    assert kernel is flash_backward._merge_kernel and call["n_splits"] > 1


@pytest.mark.parametrize("kernel", ["forward", "keys", "queries"])
@pytest.mark.parametrize("call", ["causal", "packed", "unaligned"])
@pytest.mark.parametrize("sm, d", [(80, 64), (90, 64), (90, 128), (100, 128), (120, 64)])
def test_tiles_are_fetched_by_the_copying_engine_exactly_where_the_table_expects_it(sm, d, call, kernel):
    chosen = case(sm, d, call, kernel=kernel)
    assert aot.flash(chosen)[1]["TMA"] == aot.expects_tma(chosen)


def test_an_address_is_as_even_as_that_of_the_tensor():
    x = torch.empty(8, 8, dtype=torch.bfloat16, device="meta")
    assert aot.example(x).data_ptr() == 0 and aot.example(x[0, 1:]).data_ptr() == 2
    assert aot.example((x, None, 3))[1:] == (None, 3) and aot.example(torch.float16).dtype == torch.float16


# --- it can fail -----------------------------------------------------------------------


@pytest.mark.parametrize("change, says", [
    ({"shared": 232449}, "232449 bytes of shared memory; a block on sm_90 has 232448"),
    ({"stack": 8}, "8 bytes of stack; at most 0"),
    ({"sm": 100, "stack": 40}, "40 bytes of stack; at most 32"),
    ({"mma": 0}, "no wgmma.mma_async: the tensor cores idle"),
    ({"linear": 1}, "1 tiles stored by the layout #linear"),
    ({"tma": 0}, "no tile is fetched by the copying engine"),
    ({"type": "float32", "mma": 0, "tma": 0}, ""),
    ({"type": "float32", "mma": 12, "tma": 0}, "12 products of float32 numbers on tensor cores, which round them"),
    ({"call": "packed", "tma": 0}, ""),
    ({"kernel": "keys", "stack": 8}, "8 bytes of stack; at most 0"),
    ({"kernel": "keys", "tma": 0}, "no tile is fetched by the copying engine"),
    ({"kernel": "keys", "d": 128, "tma": 0}, ""),
    ({"kernel": "split", "tma": 0, "shared": 116000}, "116000 bytes of shared memory; 2 blocks are to fit onto one multiprocessor"),
    ({"kernel": "split", "tma": 0}, ""),
    ({"kernel": "split", "tma": 0, "shared": 71680, "mma": 0}, "the tensor cores idle"),
    ({"kernel": "merge", "tma": 0, "mma": 0}, ""),
])  # fmt: skip
def test_a_broken_limit_is_named(change, says):
    row = {**case(90, 64, "causal"), "registers": 200, "stack": 0, "shared": 115712, "mma": 24, "tma": 8, "cp_async": 0, "linear": 0}
    assert aot.broken(row) == aot.broken({**row, "sm": 100, "stack": 32}) == []
    faults = aot.broken({**row, **change})
    assert len(faults) == bool(says) and all(fault.startswith(f"{aot.name({**row, **change})}: ") and says in fault for fault in faults)


def test_a_compiler_that_breaks_down_takes_no_other_case_along(tmp_path):
    code = "import os, sys\nfor line in sys.stdin:\n    'causal' in line and (print('LLVM ERROR', file=sys.stderr, flush=True), os.abort())\n    print('{\"ok\": 1}', flush=True)"
    workers = [aot.Worker(str(tmp_path), (sys.executable, "-c", code))]
    found = {aot.name(case): row for case, row in aot.compiled([case(90, 64, call) for call in ("full", "causal", "ragged")], workers)}
    assert found["forward sm_90 bfloat16 d=64 full"] == found["forward sm_90 bfloat16 d=64 ragged"] == {"ok": 1}
    assert found["forward sm_90 bfloat16 d=64 causal"] == {"error": "the compiler broke down (exit status -6): LLVM ERROR"}


def test_a_stuck_compiler_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "PATIENCE", 0.5)
    worker = aot.Worker(str(tmp_path), (sys.executable, "-c", "import time; time.sleep(60)"))
    assert "exit status -9" in worker(case(90, 64, "full"))["error"]


def script(*arguments, **environment):
    return subprocess.run([sys.executable, ROOT / "tools" / "aot.py", *map(str, arguments)], capture_output=True, text=True,
                          env={**os.environ, **environment})  # fmt: skip


def test_unknown_words_are_refused_and_cases_listed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["aot.py", "--only", "sm_91"])
    with pytest.raises(SystemExit) as stop:
        aot.main()
    assert stop.value.code == 2 and "no case has all of the words 'sm_91'" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["aot.py", "--only", "float32 sm_90 causal", "--list"])
    assert aot.main() == 0
    assert capsys.readouterr().out.split("\n")[:2] == ["forward sm_90 float32 d=16 causal", "forward sm_90 float32 d=32 causal"]


@pytest.mark.slow
def test_a_run_writes_rows_names_the_limit_that_broke_and_resumes(tmp_path, monkeypatch, capsys):
    "The interpreter of the other tests is not in the workers' environment."
    words = "forward sm_80 bfloat16 d=16 causal"
    monkeypatch.setattr(sys, "argv", ["aot.py", "--only", words, "--out", str(tmp_path)])
    assert aot.main() == 0
    found = json.loads((tmp_path / "flash-aot.json").read_text())
    assert found["complete"] is False and [aot.name(row) for row in found["rows"]] == [words]
    assert all(isinstance(x, str) or math.isfinite(x) for x in found["rows"][0].values())
    monkeypatch.setitem(aot.SHARED, 80, 1)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    monkeypatch.setattr(aot, "Worker", None)  # nothing is left to compile
    assert aot.main() == 1
    assert f"{words}: {found['rows'][0]['shared']} bytes of shared memory; a block on sm_80 has 1024" in capsys.readouterr().out


@pytest.mark.slow
def test_a_kernel_that_cannot_be_compiled_is_a_fault_of_its_case_and_not_the_end_of_the_run(tmp_path):
    "Here the assembler knows its version, and refuses everything else."
    from triton import knobs

    assembler = tmp_path / "ptxas"
    assembler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {knobs.nvidia.ptxas.path} --version\necho no >&2; exit 255\n')
    assembler.chmod(0o755)
    done = script("--only", "forward sm_80 bfloat16 d=32 causal", "--out", tmp_path, TRITON_PTXAS_PATH=str(assembler))
    assert done.returncode == 1 and "1 cases, 1 faults" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("forward sm_80 bfloat16 d=32 causal: PTXASError: ") == 2  # as it comes, and at the end
