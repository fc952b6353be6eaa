"""Compile one kernel with good and bad tiles for GPUs that are not here: why the table of tiles is what it is.

    python tools/aot_tiles.py          all cases, into attention_course/results/tiles-aot.json: two minutes

The kernel is that of rungs 4 and 5 of chapter 13. There are no limits here: that some tiles spill, or need more shared memory than
there is, is what the chapter shows. tools/aot.py has the limits, for the kernel that is shipped.
"""
import argparse
import datetime
import sys
import tempfile
from pathlib import Path

import aot
import measure
import torch

SAYS = "What the compiler made of one kernel of chapter 13 with different tiles: causal, bfloat16, 4096 tokens."
TILES = {  # by the width of a head: rows of queries, rows of keys, warps, stages
    64: ((64, 64, 4, 2), (128, 64, 4, 3), (128, 128, 4, 3), (128, 128, 8, 3)),
    128: ((64, 64, 4, 2), (128, 64, 4, 2), (128, 128, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2)),
    256: ((64, 64, 4, 2), (64, 64, 8, 2), (128, 64, 8, 2), (128, 128, 8, 2)),
}


def cases():
    for sm in (80, 90):
        for d, tiles in TILES.items():
            for tile in tiles:
                yield {"sm": sm, "d": d, "tile": ",".join(map(str, tile))}


def row(case):
    "What the compiler made of a case. Run by a worker."
    from attention_course import flash_forward

    def call():
        q, k, v = (torch.empty(2, 16, 4096, case["d"], dtype=torch.bfloat16, device="cuda") for _ in range(3))
        tile = tuple(map(int, case["tile"].split(",")))
        flash_forward._run_rung("5-table", q, k, v, causal=True, tile=tile)

    ((kernel, arguments),) = aot.recorded(call, case["sm"])
    found = aot.compile_kernel(kernel, arguments, case["sm"])
    return {**{name: found[name] for name in ("registers", "stack", "shared")}, "fits": found["shared"] <= 1024 * aot.SHARED[case["sm"]]}


def main():
    parser = argparse.ArgumentParser(description="Compile one kernel with good and bad tiles for GPUs that are not here.")
    parser.add_argument("--out", type=Path, default=measure.RESULTS, help="where to write (attention_course/results)")
    options = parser.parse_args()
    about = {
        "benchmark": "tiles", "says": SAYS, "hardware": {"kind": "aot", "name": "compiled for GPUs that were not there"},
        "threads": 1, "versions": aot.versions(), "date": datetime.date.today().isoformat(), "quick": False,
        "kernel": aot.fingerprint(),
    }  # fmt: skip
    results = measure.Results(options.out / "tiles-aot.json", about)
    faults, chosen = [], list(cases())
    with tempfile.TemporaryDirectory() as cache:
        for case, found in aot.compiled(chosen, [aot.Worker(cache, (sys.executable, __file__, "--worker"))]):
            print(*case.values(), *found.values(), sep="  ", flush=True)
            if "error" in found:
                faults.append(case)
            else:
                results.add(case, [found])
    results.write(complete=not faults)
    print(f"{len(chosen)} cases, {len(faults)} faults -> {results.path}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(aot.work(row) if "--worker" in sys.argv else main())
