"""Compile the kernels for GPUs that are not here, and see what became of them: registers, spills, shared memory, tensor cores.

    python tools/aot.py                                 all cases, into attention_course/results/flash-aot.json
    python tools/aot.py --only 'sm_90 causal'           those whose name has all these words, into build/bench
    python tools/aot.py --list                          only say which cases there are

A case is a call of the library: made with tensors that have a shape and a place on a GPU but no memory, it comes to the tile, the
path and the numbers that it would come to on that GPU, and Triton then specialises and compiles the kernel for it as in a real launch.
What every case has to keep to stands in `broken`. Cases are compiled in two processes of their own, for a compiler that breaks
down takes its process along.
"""
import argparse
import datetime
import hashlib
import inspect
import io
import json
import os
import platform
import queue
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
from contextlib import ExitStack, nullcontext
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import measure
import torch

# Shared memory that one block may have, in KiB: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# The instruction with which its tensor cores multiply matrices of 16-bit numbers. (On sm_75, Triton uses none.)
TENSOR = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
KERNELS = {"forward": "_flash_kernel", **{name: f"_{name}_kernel" for name in ("delta", "keys", "queries", "split", "merge")}}
TYPES, WIDTHS = ("bfloat16", "float16", "float32"), (16, 32, 64, 128, 256)
COUNTED = {  # what to count in the PTX code
    "mma.sync": r"\bmma\.sync", "wgmma.mma_async": r"\bwgmma\.mma_async", "tcgen05.mma": r"\btcgen05\.mma\b",
    "tma": r"\bcp\.async\.bulk\.tensor\S*\.global", "cp_async": r"\bcp\.async\.c[ag]\b",
}  # fmt: skip
FIGURES = ("registers", "stack", "shared", "mma", "tma", "cp_async", "linear", "seconds")
SAYS = "What the compiler made of the kernels of `flash_attention` for each GPU generation, kind of number, head size and kind of call."
PATIENCE = 300  # seconds until a case counts as stuck


# --- one kernel ------------------------------------------------------------------------------------------------------


class Stand:
    "What the compiler wants to know of a tensor: the kind of its numbers, and whether its address is a multiple of 16."

    def __init__(self, dtype, address=0):
        self.dtype, self.address = dtype, address

    def data_ptr(self):
        return self.address


class Driver:
    "A GPU as far as a compiler asks for one. Triton keeps what it compiled by device: here each architecture is one."

    def __init__(self, sm):
        self.sm = sm

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self):
        return self.sm

    def get_current_stream(self, device):
        return 0


def example(argument):
    "An argument as the compiler may see it: no tensor, but a stand-in."
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(argument, torch.Tensor):
        return Stand(argument.dtype, argument.storage_offset() * argument.element_size())
    if isinstance(argument, torch.dtype):
        return Stand(argument)
    if isinstance(argument, TensorDescriptor):
        base = argument.base if isinstance(argument.base, torch.dtype) else argument.base.dtype
        return TensorDescriptor(Stand(base), argument.shape, argument.strides, argument.block_shape)
    return tuple(map(example, argument)) if isinstance(argument, tuple | list) else argument


def resources(cubin):
    "Registers of a thread, and bytes of its stack: where spilled ones go."
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    return {"registers": int(found[1]), "stack": int(found[2])}


def compile_kernel(kernel, arguments, arch, **options):
    """What becomes of a kernel for a GPU of compute capability `arch`: a dictionary of figures.

    `arguments` are those of a launch, by name or in turn: numbers, `None`, tuples, tensors without memory (their dtype is
    enough: its address is then a multiple of 16), descriptors on such. Triton itself specialises them (1 and what is
    divisible by 16 become known to the compiler), so that this is the code that a launch would get. `options` are
    `num_warps` and so on. Needs a process without TRITON_INTERPRET, and may take it down.
    """
    from triton.runtime.driver import driver

    named = arguments if isinstance(arguments, dict) else dict(zip(kernel.arg_names, arguments))
    driver.set_active(Driver(arch))
    start = perf_counter()
    compiled = kernel.warmup(grid=(1,), **{name: example(x) for name, x in named.items()}, **options)
    seconds = perf_counter() - start
    kernel.device_caches.clear()
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    return {
        **resources(compiled.asm["cubin"]), "shared": compiled.metadata.shared,
        **{name: len(re.findall(pattern, ptx)) for name, pattern in COUNTED.items()},
        "linear": len(re.findall(r"local_alloc.*#linear", ttgir)),
        "seconds": round(seconds, 1),
    }  # fmt: skip


# --- calls of the library --------------------------------------------------------------------------------------------


def recorded(call, sm):
    """The kernels that `call()` launches where the GPU is an `sm`, each with its arguments by name and its options.

    Nothing is launched. Tensors that `call` makes may lie on "cuda", and have no memory.
    """
    from attention_course import flash_forward
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from triton.runtime.jit import KernelInterface

    def launcher(kernel, grid):
        return lambda *given, **named: found.append((kernel, {**dict(zip(kernel.arg_names, given)), **named}))

    found = []
    gpu = SimpleNamespace(major=sm // 10, minor=sm % 10, L2_cache_size=50 << 20, multi_processor_count=132, name=f"sm_{sm}")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", launcher))
        for name, answer in [("get_device_capability", divmod(sm, 10)), ("get_device_properties", gpu), ("device", nullcontext())]:
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", lambda x: x.storage_offset() * x.element_size()))
        stack.enter_context(FakeTensorMode())
        stack.callback(flash_forward._l2_bytes.cache_clear)  # a real GPU may have another
        call()
    return found


def flash(case):
    "The launch of a case: the kernel, and what it is given."
    from attention_course import flash_backward, flash_forward

    def call():
        queries, _, kind = case["call"].rpartition("-") if case["kernel"] == "split" else ("", "", case["call"])
        batch, n, d, d_v, gap = 2, 4096, case["d"], 128 if kind == "d_v=128" else case["d"], int(kind == "unaligned")
        if case["kernel"] == "ladder":
            q, k, v = torch.empty(3, batch, 32, n, d, dtype=getattr(torch, case["type"]), device="cuda").unbind()
            return flash_forward._run_rung(kind, q, k, v, causal=True)
        more = {"scale": 0.1}
        if kind in ("ragged", "everything"):
            n -= 95
        if kind in ("window", "everything"):
            more["reach"] = (1023, 0)
        elif kind != "full":
            more["reach"] = (None, 0)
        if kind == "packed":
            batch = 1
            more["starts_q"] = more["starts_k"] = torch.empty(9, dtype=torch.int32, device="cuda")
        if kind == "everything":
            more["keep"] = torch.empty(batch, n, dtype=torch.bool, device="cuda")
            more["slopes"] = torch.empty(32, device="cuda").expand(batch, 32)
            more["softcap"] = 50.0

        def tensor(heads, width, n=n):
            x = torch.empty(batch, heads, n, width + gap, dtype=getattr(torch, case["type"]), device="cuda")
            return x.narrow(-1, 0, width)

        k, v = tensor(8, d), tensor(8, d_v)
        if case["kernel"] in ("split", "merge"):
            flash_backward._launch_split(tensor(32, d, int(queries or 1)), k, v, **more)
        elif case["kernel"] == "forward":
            flash_forward._launch(tensor(32, d), k, v, **more)
        else:
            lse = torch.empty(batch, 32, n, device="cuda")
            d_lse = lse if kind == "everything" else None
            flash_backward._launch_back(tensor(32, d), k, v, tensor(32, d_v), lse, tensor(32, d_v), d_lse, **more)

    (launch,) = [x for x in recorded(call, case["sm"]) if case["kernel"] == "ladder" or x[0].fn.__name__ == KERNELS[case["kernel"]]]
    return launch


def calls(kernel, sm, kind, d):
    """The kinds of call to compile for; "16-causal" is one with 16 new queries, where there otherwise is one.

    Widths 16 and 32 take the tiles of 64, float16 gives the code of bfloat16 but for the names of instructions, float32 uses
    no tensor cores, and sm_89 has the tiles and instructions of sm_86: of those, only calls with little or with most to do.
    """
    little = ("causal", "everything")
    if kernel == "forward":
        if kind == "bfloat16" and sm != 89 and d >= 64:
            return ("full", "causal", "ragged", "packed", "window", "everything", *(["unaligned"] if d < 256 else []))
        return little if kind != "float16" and d > 16 else ("causal",) if kind != "float16" or d in (64, 128) else ()
    if kind == "float16" or d < 64 or sm == 89 or (kind == "float32" and sm == 86):
        return ()
    if kernel == "split":
        return (*little, "16-causal", "16-everything") if kind == "bfloat16" else ("everything",)
    if kind == "bfloat16" and sm in (80, 90) and d < 256:
        return "full", "causal", "ragged", "packed", "window", "everything", "unaligned"
    return little if kind == "bfloat16" else ("everything",)


def cases():
    "Every entry of the tables of tiles in every kind of call, and each rung of the ladder where it can run."
    from attention_course.flash_forward import _RUNGS, _why_not_rung

    for kernel in KERNELS:
        for sm in TENSOR:
            if kernel in ("delta", "merge"):
                yield {"kernel": kernel, "sm": sm, "type": "bfloat16", "d": 128, "call": "everything"}
                continue
            for d in WIDTHS:
                for kind in TYPES:
                    for call in calls(kernel, sm, kind, d):
                        yield {"kernel": kernel, "sm": sm, "type": kind, "d": d, "call": call}
            if kernel == "forward" or (kernel != "split" and sm != 89):
                yield {"kernel": kernel, "sm": sm, "type": "bfloat16", "d": 80, "call": "causal"}
                yield {"kernel": kernel, "sm": sm, "type": "bfloat16", "d": 64, "call": "d_v=128"}
    for sm in (75, 80, 90, 100):
        for rung in _RUNGS:
            if not _why_not_rung(rung, sm):
                yield {"kernel": "ladder", "sm": sm, "type": "float16", "d": 64 if sm == 75 else 128, "call": rung}


def name(case):
    return f"{case['kernel']} sm_{case['sm']} {case['type']} d={case['d']} {case['call']}"


def tile(case):
    "The tile that the library takes for a case: rows of queries, rows of keys, warps, stages, as far as the kernel has them."
    _, named = flash(case)
    return ",".join(str(named[part]) for part in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages") if part in named)


def fingerprint():
    "Changes with the code of the kernels, comments aside."
    from attention_course import flash_backward, flash_forward

    seen = {}
    for x in (*vars(flash_forward).values(), *vars(flash_backward).values()):
        if type(x).__name__ in ("JITFunction", "InterpretedFunction"):
            tokens = tokenize.generate_tokens(io.StringIO(inspect.getsource(x.fn)).readline)
            seen[x.fn.__name__] = [token.string.strip() for token in tokens if token.type not in (tokenize.COMMENT, tokenize.NL)]
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]


def row(case):
    "What the compiler made of a case. Run by a worker."
    kernel, arguments = flash(case)
    found = compile_kernel(kernel, arguments, case["sm"])
    any_will_do = case["type"] == "float32" or case["kernel"] == "split"  # 16 rows are too few for wgmma and tcgen05
    used = set(TENSOR.values()) if any_will_do else {TENSOR.get(case["sm"], "mma.sync")}
    found["mma"] = sum(found[instruction] for instruction in used)
    return {"tile": tile(case), **{name: found[name] for name in FIGURES}}


# --- what must hold --------------------------------------------------------------------------------------------------

# Bytes of stack that a case may need: those named here; none at widths 64 and 128 on sm_80 and sm_90; and elsewhere `FEW`,
# for the assembler spills as many by itself, to let two blocks onto one multiprocessor.
FEW = 32
MAY_SPILL = {
    "forward sm_90 bfloat16 d=128 unaligned": 48,
    "forward sm_100 bfloat16 d=64 packed": 72,
    "forward sm_100 bfloat16 d=128 packed": 104,
    "forward sm_100 bfloat16 d=80 causal": 56,
    "keys sm_90 bfloat16 d=128 unaligned": 240,
    "keys sm_90 bfloat16 d=256 causal": 56,
}
# What triton 3.7.1 spills beyond that; the kept figures are of 3.6.0.
MAY_SPILL_NEWER = {
    "forward sm_80 bfloat16 d=80 causal": 40,
    "forward sm_80 bfloat16 d=128 unaligned": 40,
    "keys sm_90 bfloat16 d=256 causal": 80,
    "keys sm_90 bfloat16 d=256 everything": 96,
    "keys sm_120 bfloat16 d=64 d_v=128": 104,
    "split sm_100 bfloat16 d=64 16-causal": 176,
}


def may_spill(case):
    main = case["sm"] in (80, 90) and case["d"] in (64, 128) and case["type"] != "float32" and case["call"] != "unaligned"
    return (MAY_SPILL | MAY_SPILL_NEWER).get(name(case), 0 if main else FEW)


def broken(row):
    "The limits that a row breaks, a sentence each."
    from attention_course.flash_backward import _WAVE

    found = []
    if row["shared"] > 1024 * SHARED[row["sm"]]:
        found.append(f"{row['shared']} bytes of shared memory; a block on sm_{row['sm']} has {1024 * SHARED[row['sm']]}")
    if row["stack"] > may_spill(row) and row["kernel"] != "ladder":
        found.append(f"{row['stack']} bytes of stack; at most {may_spill(row)} are allowed")
    if row["kernel"] == "split" and _WAVE * (row["shared"] + 1024) > 1024 * (SHARED[row["sm"]] + 1):  # the driver takes 1 KiB a block
        found.append(f"{row['shared']} bytes of shared memory; {_WAVE} blocks are to fit onto one multiprocessor")
    if not row["mma"] and row["type"] != "float32" and row["sm"] in TENSOR and multiplies(row):
        found.append(f"no {TENSOR[row['sm']]}: the tensor cores idle")
    if row["mma"] and row["type"] == "float32":
        found.append(f"{row['mma']} products of float32 numbers on tensor cores, which round them")
    if row["linear"] and row["sm"] == 90:
        found.append(f"{row['linear']} tiles stored by the layout #linear, which Triton 3.4 to 3.7 may miscompile for sm_90")
    if not row["tma"] and expects_tma(row):
        found.append("no tile is fetched by the copying engine (TMA)")
    return [f"{name(row)}: {what}" for what in found]


def multiplies(case):
    "Whether a kernel multiplies matrices."
    return case["kernel"] not in ("delta", "merge") and case["call"] != "1-rows"


def expects_tma(case):
    from attention_course.flash_backward import _WIDEST_TMA
    from attention_course.flash_forward import _WITH_TMA

    if case["type"] == "float32" or case["call"] in ("packed", "unaligned"):
        return False
    if case["kernel"] == "ladder":
        return case["sm"] in _WITH_TMA and case["call"][0] in "678"
    width = 128 if case["call"] == "d_v=128" else case["d"]
    widest = {sm: {"forward": 256, **_WIDEST_TMA[sm]} for sm in _WITH_TMA}
    return width <= widest.get(case["sm"], {}).get(case["kernel"], 0)


# --- a run -----------------------------------------------------------------------------------------------------------


def work(row=row):
    "A process of its own: a case in JSON per line of standard input, its row per line of standard output."
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else prints does not answer
    for line in sys.stdin:
        try:
            answer = row(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    "Compiles case after case in a process, and starts a new one when that has broken down."

    def __init__(self, folder, command=(sys.executable, __file__, "--worker")):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self.environment = {"TRITON_CACHE_DIR": folder, "OMP_NUM_THREADS": "1", **environment}
        self.command, self.process = command, None

    def start(self):
        self.told = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(self.command, env=self.environment, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.told)  # fmt: skip

    def __call__(self, case):
        if self.process is None:
            self.start()
        clock = threading.Timer(PATIENCE, self.process.kill)
        clock.start()
        print(json.dumps(case), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        clock.cancel()
        if line:
            return json.loads(line)
        code = self.process.wait()
        self.process = None
        self.told.seek(0)
        last = self.told.read().strip().splitlines()[-1:]
        return {"error": f"the compiler broke down (exit status {code}): {''.join(last)}"}

    def stop(self):
        if self.process:
            self.process.stdin.close()
            self.process.wait()


def compiled(chosen, workers):
    "Pairs of a case and its row, or `{'error': ...}`, as they are ready."
    todo, done = queue.Queue(), queue.Queue()
    for case in chosen:
        todo.put(case)

    def steadily(worker):
        while True:
            try:
                case = todo.get_nowait()
            except queue.Empty:
                return worker.stop()
            done.put((case, worker(case)))

    for worker in workers:
        threading.Thread(target=steadily, args=[worker], daemon=True).start()
    for _ in chosen:
        yield done.get()


def versions():
    import attention_course
    import triton
    from triton import knobs

    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    for tool in ("ptxas", "ptxas_blackwell"):
        if hasattr(knobs.nvidia, tool):
            found[tool] = getattr(knobs.nvidia, tool).version
    return {**found, "attention_course": attention_course.__version__}


def shown(row):
    return (f"{name(row):44} {row['tile']:13} {row['registers']:5} {row['stack']:6} {row['shared']:7}"
            f" {row['mma']:4} {row['tma']:4} {row['cp_async']:5} {row['seconds']:6}")  # fmt: skip


HEAD = f"{'case':44} {'tile':13} {'regs':>5} {'stack':>6} {'shared':>7} {'mma':>4} {'tma':>4} {'async':>5} {'s':>6}"


def main():
    parser = argparse.ArgumentParser(description="Compile the kernels for GPUs that are not here, and check what came out.")
    parser.add_argument("--only", metavar="WORDS", help="only cases whose name has all these words, such as 'sm_90 causal'")
    parser.add_argument("--list", action="store_true", help="only say which cases there are")
    parser.add_argument("--resume", action="store_true", help="only what the file lacks, or has with another tile")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--out", metavar="FOLDER", help="where to write (attention_course/results; with --only, build/bench)")
    options = parser.parse_args()
    words = set((options.only or "").split())
    chosen = [case for case in cases() if words <= set(name(case).split())]
    if not chosen:
        parser.error(f"no case has all of the words {options.only!r}; --list says which there are")
    if options.list:
        print(*map(name, chosen), sep="\n")
        return 0
    order = list(map(name, chosen))
    folder = Path(options.out) if options.out else measure.TRIALS if options.only else measure.RESULTS
    about = {
        "benchmark": "flash", "says": SAYS, "hardware": {"kind": "aot", "name": "compiled for GPUs that were not there"},
        "threads": 1, "versions": versions(), "date": datetime.date.today().isoformat(), "quick": False,
        "kernel": fingerprint(),
    }  # fmt: skip
    try:
        results = measure.Results(folder / "flash-aot.json", about, keep=options.resume)
    except ValueError as error:
        parser.error(f"{error}. Without --resume all is compiled anew")
    results.rows = [row for row in results.rows if any(name(row) == name(case) and row["tile"] == tile(case) for case in chosen)]
    faults = [fault for row in results.rows for fault in broken(row)]
    chosen = [case for case in chosen if not results.of(case)]
    print(HEAD)
    with tempfile.TemporaryDirectory() as cache:
        for case, found in compiled(chosen, [Worker(cache) for _ in range(min(options.workers, len(chosen)))]):
            if "error" in found:
                faults.append(f"{name(case)}: {found['error']}")
                print(faults[-1], flush=True)
                continue
            results.add(case, [found])
            print(shown(results.of(case)[0]), flush=True)
            faults += broken(results.of(case)[0])
    results.rows.sort(key=lambda row: order.index(name(row)))
    results.write(complete=len(results.rows) == len(list(cases())))
    print(*faults, sep="\n")
    print(f"{len(order)} cases, {len(faults)} faults -> {results.path}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(work() if "--worker" in sys.argv else main())
