"""The measuring core that all benchmarks share: calls timed in turn, ratios with their spread, rows written as they come.

A benchmark is a module of this folder with

    the first line of its docstring      what is compared with what
    DEVICE                               "cpu" or "cuda"
    HOURS                                True if it takes hours: then it runs only when it is named
    cases(quick)                         the cases to measure, dictionaries, the most important first
    rows(case, timed)                    the rows of one case, dictionaries; `timed(calls)` times calls in turn

and `if __name__ == "__main__": measure.main(__file__)`. Only torch and the package itself are needed.
"""
import argparse
import contextlib
import datetime
import gc
import importlib
import itertools
import json
import math
import os
import platform
import re
import statistics
import sys
from pathlib import Path
from time import perf_counter

import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "attention_course" / "results"      # benchmarks/results is a link to it: the package carries the rows
TRIALS = HERE.parent / "build" / "bench"                    # where --quick writes: nobody should mistake it for a result
sys.path.insert(0, str(HERE.parent))                        # what is measured is this checkout, installed or not


# --- time ------------------------------------------------------------------------------------------------------------


def seconds(call, times, clock=perf_counter):
    "Seconds per call over `times` calls in a row; on a GPU, until all of them are done."
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = clock()
    for _ in range(times):
        call()
    wait()
    return (clock() - start) / times


def in_turn(calls, *, budget=1.0, least=6, most=40, slice_=0.005, timer=seconds):
    """Seconds per call, for each of the named `calls`: one figure per round.

    A round times every call once, and the next round takes them in the opposite order (A B, B A, A B, ...), so that what
    drifts, such as heat or a neighbour's load, falls on all alike. A call shorter than `slice_` seconds is repeated that
    long. Rounds go on until `budget` seconds are spent, but there are at least `least` and at most `most`, always an even number.
    """
    for call in calls.values():     # warm up: caches, lazy initialisation, memory that the allocator keeps
        call()
    times = math.ceil(slice_ / min(timer(call, 1) for call in calls.values()))
    taken, spent = {name: [] for name in calls}, 0.0
    with no_garbage():
        for rounds in itertools.count(1):
            for name in list(calls) if rounds % 2 else reversed(list(calls)):
                taken[name].append(timer(calls[name], times))
                spent += taken[name][-1] * times
            if rounds % 2 == 0 and rounds >= least and (spent >= budget or rounds + 2 > most):
                return taken


@contextlib.contextmanager
def no_garbage():
    "Python's collector waits until the timing is over."
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


NUMBERS = ("ratio", "q1", "q3", "min", "max", "ours_ms", "peer_ms", "rounds")


def compared(ours, peer):
    "The row's numbers: the median of the rounds' ratios ours / peer, its quartiles and extremes, the median times of both."
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    numbers = {"ratio": middle, "q1": low, "q3": high, "min": min(ratios), "max": max(ratios),
               "ours_ms": 1000 * statistics.median(ours), "peer_ms": 1000 * statistics.median(peer)}
    return {**{name: float(f"{x:.4g}") for name, x in numbers.items()}, "rounds": len(ratios)}


# --- where and with what ---------------------------------------------------------------------------------------------


def hardware(device):
    "What the rows were measured on; `kind` is part of the file's name."
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        return {"kind": kind(about.name), "name": about.name, "capability": f"{about.major}.{about.minor}",
                "multiprocessors": about.multi_processor_count, "memory_GiB": round(about.total_memory / 2**30)}
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        if found := re.search(r"(?m)^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text()):
            name = found[1].strip()
    capability = getattr(torch.backends.cpu, "get_cpu_capability", lambda: "unknown")()
    return {"kind": "cpu", "name": name, "cores": os.cpu_count(), "instructions": capability}


def kind(name):
    "A GPU's name, short enough for a file: `NVIDIA H200` is h200, `NVIDIA A100-SXM4-80GB` is a100."
    words = re.sub(r"(?i)\b(nvidia|tesla|geforce|quadro|amd|instinct)\b", "", name).split()
    short = "-".join(words).lower()
    found = re.match(r"[a-z]{1,3}\d+[a-z]?(?=-|$)", short)
    return found[0] if found else re.sub(r"[^a-z0-9]+", "-", short).strip("-") or "gpu"


def versions(device):
    import attention_course

    found = {"python": platform.python_version(), "torch": torch.__version__, "attention_course": attention_course.__version__}
    if device == "cuda":
        found["cuda"] = torch.version.cuda
        with contextlib.suppress(ImportError):
            found["triton"] = importlib.import_module("triton").__version__
    return found


# --- rows ------------------------------------------------------------------------------------------------------------


class Results:
    "A file of rows. Each `add` writes it anew and whole, so that a run may be killed at any time."

    def __init__(self, path, about, keep=False):
        self.path, self.about, self.rows = Path(path), about, []
        if keep and self.path.exists():
            before = json.loads(self.path.read_text(encoding="utf-8"))
            differ = [name for name in about if before.get(name) != about[name]]
            if differ:
                told = "; ".join(f"{name}: {before.get(name)} there, {about[name]} here" for name in differ)
                raise ValueError(f"{self.path.name} cannot be continued, since one file is one machine, one day and one set of versions ({told})")
            self.rows = before["rows"]

    def of(self, case):
        "The rows of a case: those that agree with it in all that it names."
        return [row for row in self.rows if case.items() <= row.items()]

    def add(self, case, rows, complete=False):
        "The rows of a case, in the place of those that it had."
        rows = [{**case, **row} for row in rows]
        if not rows:
            raise ValueError(f"no rows for {case}")
        for row in rows:
            for name, value in row.items():
                if not isinstance(value, str | int | float | None) or isinstance(value, float) and not math.isfinite(value):
                    raise ValueError(f"{name}={value!r} is no text, whole or finite number, in {row}")
        old = self.of(case)
        place = self.rows.index(old[0]) if old else len(self.rows)
        rest = [row for row in self.rows if row not in old]
        self.rows = [*rest[:place], *rows, *rest[place:]]
        self.write(complete)

    def write(self, complete):
        "One row a line, for readable diffs; the new file takes the place of the old one in a single step."
        head = [f' "{name}": {json.dumps(value, ensure_ascii=False)},' for name, value in {**self.about, "complete": complete}.items()]
        rows = ",\n".join("  " + json.dumps(row, allow_nan=False, ensure_ascii=False) for row in self.rows)
        text = "\n".join(["{", *head, ' "rows": [', rows, " ]", "}", ""])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, self.path)


# --- a run -----------------------------------------------------------------------------------------------------------


def benchmarks():
    "The modules of this folder that measure something."
    names = sorted(p.stem for p in HERE.glob("*.py") if p.stem not in ("measure", "run"))
    return {name: importlib.import_module(name) for name in names}


def says(module):
    return module.__doc__.strip().split("\n")[0]


def wanted(case, only):
    "Does the case agree with one of the choices, such as `length=64,causal=true`?"
    def agrees(choice):
        pairs = [pair.split("=", 1) for pair in choice.split(",")]
        if unknown := [name for name, *_ in pairs if name not in case]:
            sys.exit(f"--only {choice}: a case has {', '.join(case)}, but no {unknown[0]}")
        return all(str(case[name]).lower() == value.lower() for name, value in pairs)

    return not only or any(agrees(choice) for choice in only)


def shown(row):
    "One line for one row, the case as `--only` takes it."
    case = ",".join(f"{name}={value}" for name, value in row.items() if name not in NUMBERS)
    if "ratio" not in row:
        return case
    return (f"{row['ratio']:5.2f} ({row['q1']:.2f} to {row['q3']:.2f})  {row['ours_ms']:8.3f} ms against {row['peer_ms']:8.3f} ms,"
            f" {row['rounds']:2} rounds  {case}")


def slower(rows):
    "The rows in which ours took longer, by more than the spread: three rounds of four or more were lost."
    return [row for row in rows if row.get("q1", 0) > 1]


def perform(name, module, options):
    "Measures the benchmark's cases, and returns the path of its results."
    if module.DEVICE == "cuda" and not torch.cuda.is_available():
        print(f"{name}: needs a GPU that torch can use; there is none here.")
        return None
    torch.set_num_threads(options.threads)
    machine = hardware(module.DEVICE)
    about = {"benchmark": name, "says": says(module), "hardware": machine, "threads": torch.get_num_threads(),
             "versions": versions(module.DEVICE), "date": datetime.date.today().isoformat(), "quick": options.quick}
    folder = Path(options.out) if options.out else TRIALS if options.quick else RESULTS
    try:
        results = Results(folder / f"{name}-{machine['kind']}.json", about, keep=options.resume or bool(options.only))
    except ValueError as error:
        sys.exit(f"{error}. Without --resume and --only all is measured anew; --out FOLDER writes elsewhere.")
    print(f"{name}: {says(module)}\n{machine['name']}, threads: {about['threads']}, torch {torch.__version__} -> {results.path}", flush=True)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    if load > os.cpu_count() / 4:
        print(f"Something else is running here (load {load:.1f}): ratios will spread, and a quiet minute is worth waiting for.")
    cases = list(module.cases(options.quick))
    chosen = [case for case in cases if wanted(case, options.only)]
    if not chosen:
        sys.exit(f"--only {' '.join(options.only)}: no case of {name} is like that")
    budget = options.budget if options.budget is not None else 0.2 if options.quick else 1.0

    def timed(calls):
        return in_turn(calls, budget=budget)

    for case in chosen:
        if not (options.resume and results.of(case)):
            results.add(case, module.rows(case, timed))
            for row in results.of(case):
                print(shown(row), flush=True)
    results.write(complete=all(results.of(case) for case in cases))
    lost = slower(results.rows)
    print(f"{len(results.rows)} rows; ours is the slower one, beyond the spread, in {len(lost)}{':' if lost else '.'}")
    for row in lost:
        print(" ", shown(row))
    return results.path


def options(several=True):
    parser = argparse.ArgumentParser(description="Measures ours against peers, in the same run.")
    if several:
        parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks (none: all that this machine can run in minutes)")
        parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument("--quick", action="store_true", help="few cases and rounds, to try things out; written to build/bench")
    parser.add_argument("--only", action="append", default=[], metavar="FIELD=VALUE,...", help="only these cases; the other rows are kept")
    parser.add_argument("--resume", action="store_true", help="only the cases that the file lacks, after a run that was stopped")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (2)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="how long to go on with a case once it has six rounds")
    parser.add_argument("--out", metavar="FOLDER", help="where to write (benchmarks/results)")
    return parser


def main(path):
    "A benchmark run as a script of its own."
    name = Path(path).stem
    perform(name, importlib.import_module(name), options(several=False).parse_args())
