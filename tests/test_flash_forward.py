"""Chapter 13 on a machine without Triton, as on macOS. Its kernels are tested in test_ladder.py and test_flash_attention.py."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAPTER = Path(__file__).parents[1] / "nbs" / "13_flash_forward.ipynb"

READ = """
import json, linecache, sys
from pathlib import Path

sys.modules["triton"] = None  # importing it is an ImportError
sys.path.insert(0, sys.argv[2])
space = {"__name__": "__main__"}
for number, cell in enumerate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"]):
    if cell["cell_type"] == "code":
        source, name = "".join(cell["source"]).replace("    %pip", "    raise  # %pip"), f"<cell {number}>"
        linecache.cache[name] = len(source), None, source.splitlines(True), name
        exec(compile(source, name, "exec"), space)
"""


@pytest.mark.slow
@pytest.mark.checkout
def test_the_chapter_runs_to_its_end_without_triton_and_says_so():
    environment = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    arguments = [sys.executable, "-c", READ, str(CHAPTER), str(CHAPTER.parents[1])]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr[-3000:]
    assert "This machine is 'no kernels'" in done.stdout
    assert done.stdout.count("was not run") == 9 and "largest error" not in done.stdout
    solved = [line for line in done.stdout.splitlines() if line.startswith("✓ flash_forward.")]
    assert len(solved) == 6 and "NaN" not in done.stdout


def test_every_figure_that_waits_for_a_gpu_says_so_in_the_chapter():
    code = ["".join(cell["source"]) for cell in json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    waiting = [source for source in code if 'rows_of("' in source or "published_ladder()" in source]
    assert sum("not yet measured" in source for source in waiting) >= 4
