"""Chapters 13 and 14 on a machine without Triton, as on macOS.

Their kernels are tested in test_ladder.py, test_flash_attention.py and test_flash_backward.py.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

READ = """
import json, linecache, sys
from pathlib import Path
from types import ModuleType

sys.modules["triton"] = None  # importing it is an ImportError
sys.path.insert(0, sys.argv[2])
sys.modules["__main__"] = notebook = ModuleType("__main__")  # torch.compile looks names up there
space = vars(notebook)
for number, cell in enumerate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"]):
    if cell["cell_type"] == "code":
        source, name = "".join(cell["source"]).replace("    %pip", "    raise  # %pip"), f"<cell {number}>"
        linecache.cache[name] = len(source), None, source.splitlines(True), name
        exec(compile(source, name, "exec"), space)
"""


def told(chapter):
    "What a chapter prints where triton cannot be imported."
    environment = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    arguments = [sys.executable, "-c", READ, str(ROOT / "nbs" / f"{chapter}.ipynb"), str(ROOT)]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr[-3000:]
    solved = [line for line in done.stdout.splitlines() if line.startswith(f"✓ {chapter[3:]}.")]
    assert len(solved) == 6 and "NaN" not in done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.checkout
def test_chapter_13_runs_to_its_end_without_triton_and_says_so():
    said = told("13_flash_forward")
    assert "This machine is 'no kernels'" in said
    assert said.count("was not run") == 9 and "largest error" not in said


@pytest.mark.slow
@pytest.mark.checkout
def test_chapter_14_runs_to_its_end_without_triton_and_says_so():
    said = told("14_flash_backward")
    assert "The kernels are only read here" in said
    assert "test_schema" not in said and "one result" not in said


@pytest.mark.parametrize(("chapter", "least"), [("13_flash_forward", 4), ("14_flash_backward", 1)])
def test_every_figure_that_waits_for_a_gpu_says_so_in_the_chapter(chapter, least):
    cells = json.loads((ROOT / "nbs" / f"{chapter}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    waiting = [source for source in code if 'rows_of("' in source or "published_ladder()" in source or "def published(" in source]
    assert sum("not yet measured" in source for source in waiting) >= least
