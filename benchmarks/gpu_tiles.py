"""Other tiles for the kernels of `flash_attention`, warps and stages, against those of their tables.

    python benchmarks/gpu_tiles.py --only kernel=keys,d=128,causal=true     one kernel, one head size; --minutes 20 for more of the list

`forward` is the kernel of the output, `keys` that of the gradients of keys and values, `queries` that of the gradient of queries.
A ratio above 1 says that the other tile is the faster one on this GPU. What needs too much shared memory says so in `peer_error`.
For whoever tunes the tables for a GPU; it is measured only when it is named.
"""
import itertools
import math

import gpu
import measure
from gpu import WANT, compiled, contest, flops, launch, launches_back, of_case

DEVICE = "cuda"
GOES_ON = True
HOURS = True
MINUTES = 10.0
STAY, SUMS = {"forward": 1, "keys": 2, "queries": 2}, {"forward": 1, "keys": 2, "queries": 1}     # tensors in memory, in registers


def rehearse():
    gpu.rehearse()


def tiles(kernel, d):
    "Rows of a tile of queries and of keys, warps, stages: all that may fit a GPU of 227 KiB of shared memory, likely ones first."
    found = []
    for stay, pass_by, warps, stages in itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)):
        shared = 2 * d * (STAY[kernel] * stay + 2 * pass_by * stages)       # bytes: what stays, and what passes by in all stages
        sums = SUMS[kernel] * stay * d // (32 * warps)                      # in the registers of each thread
        if shared <= 227 * 1024 and 16 <= sums <= 160:
            found.append((*((pass_by, stay) if kernel == "keys" else (stay, pass_by)), warps, stages))
    return sorted(found, key=lambda tile: abs(math.log2(tile[0] * tile[1] / (128 * 64))))


def cases(quick):
    size = gpu.size
    for kernel in STAY:
        for d in size.heads:
            for causal in (True, False):
                for tile in tiles(kernel, d)[: 2 if quick else None]:
                    yield {"section": f"{kernel} {d}", "kernel": kernel, "d": d, "causal": causal, "length": size.middle,
                           "tile": "x".join(map(str, tile))}


def calls_of(case):
    (q, k, v), kernel = of_case(case), case["kernel"]
    tile = tuple(map(int, case["tile"].split("x")))
    if kernel == "forward":
        return (q, k, v), {"ours": launch(q, k, v, case["causal"]), "tile": launch(q, k, v, case["causal"], tile=tile)}
    call = launches_back(q, k, v, case["causal"], WANT[kernel])
    return (q, k, v), {"ours": call(), "tile": call(tiles={kernel: tile})}


def rows(case, timed):
    inputs, calls = calls_of(case)
    work = gpu.PRODUCTS[case["kernel"]] * flops(*inputs, case["causal"]) // 2
    with gpu.torch.no_grad():
        return contest(calls, timed if gpu.device == "cuda" else gpu.rehearsed, work=work, alike=0.02)


def expected(case):
    return 1.0 if gpu.device == "cuda" else 0.0


def prepare(chosen):
    if gpu.device == "cuda":
        print(f"{compiled(call for case in chosen for call in calls_of(case)[1].values())} kernels compiled", flush=True)


if __name__ == "__main__":
    measure.main(__file__)
