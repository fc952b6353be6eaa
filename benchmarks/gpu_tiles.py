"""Other tiles for the kernel of `flash_attention`, warps and stages, against those of its table.

    python benchmarks/gpu_tiles.py --only d=128,causal=true         one head size; --minutes 20 for more of the list

A ratio above 1 says that the other tile is the faster one on this GPU. What needs too much shared memory says so in `peer_error`.
For whoever tunes the table for a GPU; it is measured only when it is named.
"""
import itertools
import math

import gpu
import measure
from gpu import compiled, contest, flops, launch, of_case

DEVICE = "cuda"
GOES_ON = True
HOURS = True
MINUTES = 10.0


def rehearse():
    gpu.rehearse()


def tiles(d):
    "Rows of a tile of queries and of keys, warps, stages: all that may fit a GPU of 227 KiB of shared memory, likely ones first."
    found = []
    for rows, keys, warps, stages in itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)):
        shared = 2 * d * (rows + 2 * keys * stages)         # bytes: queries, and keys and values of all stages
        sums = rows * d // (32 * warps)                     # of the output, in the registers of each thread
        if shared <= 227 * 1024 and 16 <= sums <= 160:
            found.append((rows, keys, warps, stages))
    return sorted(found, key=lambda tile: abs(math.log2(tile[0] * tile[1] / (128 * 64))))


def cases(quick):
    size = gpu.size
    for d in size.heads:
        for causal in (True, False):
            for tile in tiles(d)[: 2 if quick else None]:
                yield {"section": str(d), "d": d, "causal": causal, "length": size.middle, "tile": "x".join(map(str, tile))}


def calls_of(case):
    q, k, v = of_case(case)
    tile = tuple(map(int, case["tile"].split("x")))
    return (q, k, v), {"ours": launch(q, k, v, case["causal"]), "tile": launch(q, k, v, case["causal"], tile=tile)}


def rows(case, timed):
    inputs, calls = calls_of(case)
    with gpu.torch.no_grad():
        return contest(calls, timed if gpu.device == "cuda" else gpu.rehearsed, work=flops(*inputs, case["causal"]))


def expected(case):
    return 1.0 if gpu.device == "cuda" else 0.0


def prepare(chosen):
    if gpu.device == "cuda":
        print(f"{compiled(call for case in chosen for call in calls_of(case)[1].values())} kernels compiled", flush=True)


if __name__ == "__main__":
    measure.main(__file__)
