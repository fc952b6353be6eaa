"""The measuring core that all benchmarks share: calls timed in turn, ratios with their spread, rows written as they come.

A benchmark is a module of this folder with

    the first line of its docstring      what is compared with what
    DEVICE                               "cpu" or "cuda"
    HOURS                                True if it takes hours: then it runs only when it is named
    cases(quick)                         the cases to measure, dictionaries, the most important first
    rows(case, timed)                    the rows of one case, dictionaries; `timed(calls)` times calls in turn

and `if __name__ == "__main__": measure.main(__file__)`. Only torch and the package itself are needed. It may also have

    GOES_ON                              True: a case that fails becomes a row with an `error`, and the run goes on
    MINUTES                              how long a run may take; what no longer fits is left out, and named
    expected(case)                       seconds that a case will take, for MINUTES
    prepare(cases)                       what to do before the cases of a section, all of the same case["section"]
    rehearse()                           get ready for --dry-run, on a CPU
    summary(rows)                        text for the end of a run
"""
import argparse
import contextlib
import datetime
import functools
import gc
import importlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import statistics
import sys
from pathlib import Path
from time import perf_counter

START = perf_counter()      # of the run: importing torch counts

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


def device_seconds(call, times):
    """Seconds that a GPU takes for a call, the median of `times`: from one event to the next in the stream.

    Each call finds the L2 cache full of other things. The GPU waits at first, so that it never waits for Python later.
    """
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    torch.cuda._sleep(700_000 * min(times, 50))      # cycles: about 0.35 ms for each call to come
    for start, end in events:
        _other_things().zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1000


@functools.cache
def _other_things():
    return torch.empty(1 << 28, dtype=torch.int8, device="cuda")


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


def wanted(cases, only):
    "The cases that agree with one of the choices, such as `length=64,causal=true`; words alone are names of sections."
    def agrees(case, choice):
        parts = choice.split(",")
        sections = [part for part in parts if "=" not in part]
        pairs = [part.split("=", 1) for part in parts if "=" in part]
        return (not sections or case.get("section") in sections) and all(str(case.get(name)).lower() == value.lower() for name, value in pairs)

    for choice in only:
        known = dict.fromkeys(name for case in cases for name in case)
        sections = dict.fromkeys(str(case["section"]) for case in cases if "section" in case)
        for part in choice.split(","):
            name = part.split("=")[0]
            if "=" in part and name not in known:
                sys.exit(f"--only {choice}: a case has {', '.join(known)}, but no {name}")
            if "=" not in part and name not in sections:
                sys.exit(f"--only {choice}: " + (f"there is no section {name}; there are {', '.join(sections)}" if sections else f"{name} has no value"))
    return [case for case in cases if not only or any(agrees(case, choice) for choice in only)]


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


BEGUN = "was begun, and did not end"
GRACE = 30          # seconds beyond its time after which a process must hang
GPU_LOST = 99       # exit status of a process to which the GPU refuses all further work


def failed(rows):
    return [row for row in rows if "error" in row]


def perform(name, module, options, clock=perf_counter):
    "Measures the benchmark's cases, and returns the path of its results."
    device, quick = module.DEVICE, options.quick
    if options.dry_run:
        if not hasattr(module, "rehearse"):
            sys.exit(f"{name} has no --dry-run: it needs no GPU. --quick tries it out.")
        device, quick = "cpu", True
        module.rehearse()
    cases = list(module.cases(quick))
    chosen = wanted(cases, options.only)
    if not chosen:
        sys.exit(f"--only {' '.join(options.only)}: no case of {name} is like that")
    if options.list:
        print("\n".join(map(shown, chosen)))
        return None
    if device == "cuda" and not torch.cuda.is_available():
        print(f"{name}: needs a GPU that torch can use; there is none here.")
        return None
    torch.set_num_threads(options.threads)
    machine = hardware(device)
    about = {"benchmark": name, "says": says(module), "hardware": machine, "threads": torch.get_num_threads(),
             "versions": versions(device), "date": datetime.date.today().isoformat(), "quick": quick}
    place = Path(options.out) if options.out else TRIALS if quick else RESULTS
    path = place if place.suffix == ".json" else place / f"{name}-{machine['kind']}.json"
    try:
        results = Results(path, about, keep=options.resume or bool(options.only))
    except ValueError as error:
        sys.exit(f"{error}. Without --resume and --only all is measured anew; --out FOLDER writes elsewhere.")
    print(f"{name}: {says(module)}\n{machine['name']}, threads: {about['threads']}, torch {torch.__version__} -> {results.path}", flush=True)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    if load > os.cpu_count() / 4:
        print(f"Something else is running here (load {load:.1f}): ratios will spread, and a quiet minute is worth waiting for.")
    on_gpu = device == "cuda"
    budget = options.budget if options.budget is not None else 0.2 if quick else 0.25 if on_gpu else 1.0
    minutes = options.minutes if options.minutes is not None else getattr(module, "MINUTES", math.inf)

    def timed(calls, timer=device_seconds if on_gpu else seconds):
        return in_turn(calls, budget=budget, timer=timer, slice_=0.002 if on_gpu else 0.005)

    clean_up(results, chosen, module, options)
    left_out, longest, section = [], {}, object()
    for case in chosen:
        if options.resume and results.of(case):
            continue
        takes = max(longest.get(case.get("section"), 0), module.expected(case) if hasattr(module, "expected") else 0)
        if clock() + takes > START + 60 * minutes:
            left_out.append(case)
            continue
        if getattr(module, "GOES_ON", False):
            results.add(case, [{"error": BEGUN}])       # what is there to see, should the process end here
        if hasattr(module, "prepare") and case.get("section") != section and not options.died:
            prepare(module, [c for c in chosen if c.get("section") == case["section"] and (c == case or not (options.resume and results.of(c)))])
        section, start = case.get("section"), clock()
        measure_case(module, results, case, timed)
        longest[section] = max(longest.get(section, 0), clock() - start)
        for row in results.of(case):
            print(shown(row), flush=True)
    results.write(complete=all(results.of(case) for case in cases))
    conclude(module, results, left_out, minutes)
    return results.path


def measure_case(module, results, case, timed):
    "Adds the rows of a case; where the benchmark goes on, an error is a row, too."
    try:
        results.add(case, module.rows(case, timed))
    except Exception as error:
        if not getattr(module, "GOES_ON", False):
            raise
        still_there(error)
        results.add(case, [{"error": told(error)}])


def prepare(module, cases):
    try:
        module.prepare(cases)
    except Exception as error:      # the cases will meet it again, and say so
        still_there(error)
        print(f"not prepared: {told(error)}", flush=True)


def still_there(error):
    "Ends this process if the GPU refuses all further work of it."
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception:
            print(error, flush=True)
            os._exit(GPU_LOST)


def told(error):
    "An exception in one line."
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def clean_up(results, chosen, module, options):
    "What a process that ended has left: a case that was begun. It is measured now, unless it is what ended that process."
    if not getattr(module, "GOES_ON", False):
        return
    for case in chosen:
        begun = any(row.get("error") == BEGUN for row in results.of(case))
        if begun and options.died:
            results.add(case, [{"error": f"the process {options.died}"}])
            print(shown(results.of(case)[0]), flush=True)
        elif begun or not options.resume:
            results.rows = [row for row in results.rows if row not in results.of(case)]


def conclude(module, results, left_out, minutes):
    "What to read at the end of a run."
    lost = slower(results.rows)
    if hasattr(module, "summary"):
        print(module.summary(results.rows))
    print(f"{len(results.rows)} rows; ours is the slower one, beyond the spread, in {len(lost)}{':' if lost else '.'}")
    for row in [] if hasattr(module, "summary") else lost:
        print(" ", shown(row))
    if left_out:
        print(f"{len(left_out)} cases did not fit into {minutes:g} minutes; --resume measures them:")
        for case in left_out:
            print(" ", shown(case))
    if wrong := failed(results.rows):
        print(f"{len(wrong)} ROWS HAVE AN ERROR:")
        for row in wrong:
            print(" ", shown(row))


def run(name, module, options):
    """`perform`, and what to tell the shell: 1 if a row has an error.

    What needs a GPU runs in a process of its own. Where a case ends that process (a compiler that aborts, a GPU that refuses all
    further work, a kernel that never returns), another one goes on with the next case.
    """
    def work():
        path = perform(name, module, options)
        return 1 if path and failed(json.loads(path.read_text(encoding="utf-8"))["rows"]) else 0

    if module.DEVICE != "cuda" or options.dry_run or options.list or not hasattr(os, "fork"):
        return work()
    minutes = options.minutes if options.minutes is not None else getattr(module, "MINUTES", None)
    for _ in range(30):
        process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(work()))
        process.start()
        process.join(minutes and max(0, START + 60 * minutes - perf_counter()) + GRACE)
        if process.is_alive():
            process.kill()
            process.join()
            options.died = "never came back"
        elif 0 <= process.exitcode != GPU_LOST:
            return process.exitcode
        else:
            options.died = "lost the GPU" if process.exitcode == GPU_LOST else f"was ended by signal {-process.exitcode}"
        print(f"The process {options.died}; a new one goes on.", flush=True)
        options.resume = True
    return 1


def options(several=True):
    parser = argparse.ArgumentParser(description="Measures ours against peers, in the same run.")
    if several:
        parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks (none: all that this machine can run in minutes)")
    parser.add_argument("--list", action="store_true", help="only say which there are: benchmarks, or the cases of those that are named")
    parser.add_argument("--quick", action="store_true", help="few cases and rounds, to try things out; written to build/bench")
    parser.add_argument("--dry-run", action="store_true", help="what needs a GPU, rehearsed on the CPU: tiny sizes; written to build/bench")
    parser.add_argument("--only", action="append", default=[], metavar="FIELD=VALUE,...",
                        help="only these cases (or sections: SECTION,...); the other rows are kept")
    parser.add_argument("--resume", action="store_true", help="only the cases that the file lacks, after a run that was stopped")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (2)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="how long to go on with a case once it has six rounds")
    parser.add_argument("--minutes", type=float, help="begin nothing that would take the run beyond this (gpu: 5)")
    parser.add_argument("--out", metavar="FOLDER", help="where to write (benchmarks/results); a file, if it ends in .json")
    parser.set_defaults(died="")
    return parser


def main(path):
    "A benchmark run as a script of its own."
    name = Path(path).stem
    sys.exit(run(name, importlib.import_module(name), options(several=False).parse_args()))
