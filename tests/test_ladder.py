"""Chapter 13: each rung of the ladder of kernels against attention by tiles in float64, under Triton's interpreter or on a GPU."""
import pytest
import torch

pytest.importorskip("triton", minversion="3.4")
from attention_course import flash_forward, tiled_attention
from attention_course.flash_forward import _RUNGS, _rung_tile, _run_rung, _why_not_rung

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ARCH = flash_forward._arch(torch.device(DEVICE))
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def qkv(n, d, dtype, heads=1, batch=1):
    generator = torch.Generator().manual_seed(n + d)
    return torch.randn(3, batch, heads, n, d, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def close_to_float64(name, q, k, v, **options):
    if problem := _why_not_rung(name, ARCH):
        pytest.skip(problem)
    tile = options.pop("tile", None)
    output = _run_rung(name, q, k, v, tile=tile, **options)
    expected = tiled_attention(q.double(), k.double(), v.double(), **options)
    assert output.dtype == q.dtype and output.shape == q.shape
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


each_rung = pytest.mark.parametrize("name", _RUNGS)


@each_rung
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, d, dtype", [
    (1, 16, torch.float32), (1, 64, torch.float16), (17, 64, torch.float32), (17, 16, torch.float16),
])  # fmt: skip
def test_a_rung_gives_attention(name, causal, n, d, dtype):
    tile = (1, 32, 4, 2) if name == "1-rows" else (16, 16, 4, 1)
    close_to_float64(name, *qkv(n, d, dtype), causal=causal, tile=tile)


# A program for each row is slow: two cases of the four have all there is to see.
MANY = [(name, n, causal) for name in _RUNGS for n in (65, 130) for causal in (False, True) if name != "1-rows" or causal == (n == 130)]


@pytest.mark.parametrize("name, n, causal", MANY)
def test_a_rung_walks_many_tiles_and_a_ragged_end(name, n, causal):
    tile = (1, 128, 4, 2) if name == "1-rows" else (64, 32, 4, 2)
    d, dtype = (16, torch.float32) if n == 65 else (64, torch.float16)
    close_to_float64(name, *qkv(n, d, dtype), causal=causal, tile=tile)


@each_rung
def test_a_rung_keeps_the_heads_apart(name):
    tile = (1, 16, 4, 2) if name == "1-rows" else (16, 16, 4, 1)
    n = 5 if name == "1-rows" else 20
    close_to_float64(name, *qkv(n, 16, torch.float32, heads=3, batch=2), causal=True, tile=tile)


def test_heads_that_come_in_sets_are_all_computed(monkeypatch):
    "The last set has fewer heads than the others."
    monkeypatch.setattr(flash_forward, "_l2_bytes", lambda index: 2 * 2 * 2 * 20 * 16 * 4)  # half of it holds two heads
    monkeypatch.setattr(flash_forward, "_multiprocessors", lambda device: 3)
    for name in ("7-order", "7-persistent"):
        close_to_float64(name, *qkv(20, 16, torch.float32, heads=5), causal=True, tile=(16, 16, 4, 1))


def test_keys_may_be_longer_tiles_than_queries_and_shorter():
    for name in ("4-phases", "7-order"):
        for tile in ((16, 64, 4, 1), (64, 16, 4, 1)):
            close_to_float64(name, *qkv(70, 16, torch.float32), causal=True, tile=tile)


def test_the_scale_is_the_callers():
    for name in ("2-tiles", "3-exp2", "7-order"):
        close_to_float64(name, *qkv(20, 16, torch.float32), scale=0.7, tile=(16, 16, 4, 1))


@pytest.mark.usefixtures("no_shape_check")
def test_a_rung_says_what_it_cannot_take():
    q, k, v = qkv(4, 16, torch.float32)
    with pytest.raises(ValueError, match="'9-magic' is no rung; there are 1-rows"):
        _run_rung("9-magic", q, k, v)
    with pytest.raises(ValueError, match=r"shapes \(1, 1, 4, 16\), \(1, 1, 3, 16\)"):
        _run_rung("2-tiles", q, k[..., :3, :], v)
    with pytest.raises(ValueError, match="width 16, 32"):
        _run_rung("2-tiles", q[..., :5], k[..., :5], v[..., :5])
    with pytest.raises(ValueError, match="positive"):
        _run_rung("2-tiles", q, k, v, scale=-1.0)


def test_old_gpus_get_the_first_two_rungs_and_the_reason():
    assert [not _why_not_rung(name, 75) for name in _RUNGS] == [name[0] in "12" for name in _RUNGS]
    assert "no tensor cores on sm_75" in _why_not_rung("5-table", 75)
    assert [name for name in _RUNGS if _why_not_rung(name, 80)] == ["6-descriptors", "8-specialised"]
    assert not any(_why_not_rung(name, arch) for name in _RUNGS for arch in (None, 90, 100))


def test_every_tile_of_the_ladder_is_one_that_triton_takes():
    for name in _RUNGS:
        for arch in (75, 80, 86, 90, 120):
            for d in (16, 64, 128, 256):
                rows, keys, warps, stages = _rung_tile(name, arch, torch.float16, d)
                assert keys >= 16 and (rows >= 16 or name == "1-rows") and warps in (4, 8) and stages >= 1
