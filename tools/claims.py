"""Break the library, one line at a time, and see the chapters notice: the claims ledger, executed.

    python tools/claims.py [--only TEXT] [--sample N]

First every notebook runs as it is, and each of its labelled cells must pass. Then, for each entry of tests/claims.toml, the one
line is changed in a copy of the package and in the notebook's own cells, the notebook runs up to the claim's cell, and that cell
must fail with an AssertionError. Other cells may fail on the way: a broken library is expected to break more than one thing.
"""

import argparse
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
LABEL = re.compile(r"^#\|\s*label:\s*(claim-[\w-]+)\s*$", flags=re.M)


def cells(notebook: str) -> list[str]:
    "Sources of a notebook's code cells."
    page = json.loads((ROOT / "nbs" / f"{notebook}.ipynb").read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in page["cells"] if c["cell_type"] == "code"]


def notebooks() -> list[str]:
    return sorted(path.stem for path in (ROOT / "nbs").glob("*.ipynb"))


def labels(notebook: str) -> list[str]:
    "The claims that a notebook makes."
    return [name for source in cells(notebook) for name in LABEL.findall(source)]


def ledger() -> list[dict]:
    return tomllib.loads((ROOT / "tests" / "claims.toml").read_text(encoding="utf-8"))["claim"]


def change(text: str, old: str, new: str) -> tuple[str, int]:
    "`text` with the line `old` (indentation aside) replaced by `new`, and how often it stood there."
    return re.subn(rf"(?m)^([ \t]*){re.escape(old)}$", lambda found: found[1] + new, text)


def run(notebook: str, claim: dict | None = None) -> dict[str, str]:
    "Run a notebook, with the claim's change if one is given. Returns for each labelled cell 'passed' or the name of its error."
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "attention_course", Path(folder) / "attention_course")
        sources = cells(notebook)
        if claim:
            module = Path(folder) / "attention_course" / f"{claim['module']}.py"
            text, count = change(module.read_text(encoding="utf-8"), claim["old"], claim["new"])
            if count != 1:
                return {claim["cell"]: f"its line stands {count} times in {module.name}, not once: {claim['old']}"}
            module.write_text(text, encoding="utf-8")
            sources = [change(source, claim["old"], claim["new"])[0] for source in sources]
        job = json.dumps({"cells": sources, "stop": claim and claim["cell"]})
        environment = {**os.environ, "PYTHONPATH": folder, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, __file__, "--worker"], input=job, capture_output=True, text=True, env=environment, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{notebook} could not be run:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def worker() -> None:
    "In a process of its own: execute the cells that stand on standard input."
    from contextlib import redirect_stdout
    from io import StringIO

    from IPython.core.inputtransformer2 import TransformerManager

    job = json.load(sys.stdin)
    sys.modules["__main__"] = notebook = ModuleType("__main__")  # torch.compile looks a cell's names up there
    space = vars(notebook)
    space["get_ipython"] = lambda: None
    outcome = {}
    for number, source in enumerate(job["cells"]):
        label = next(iter(LABEL.findall(source)), None)
        code, name = TransformerManager().transform_cell(source), f"<cell {number}: {label}>"
        linecache.cache[name] = len(code), None, code.splitlines(True), name  # Triton reads the source of kernels
        try:
            with redirect_stdout(StringIO()):
                exec(compile(code, name, "exec"), space)
            result = "passed"
        except Exception as error:
            result = f"{type(error).__name__}: {error}".splitlines()[0]
        if label:
            outcome[label] = result
        if label and label == job["stop"]:
            break
    print(json.dumps(outcome))


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the library one line at a time and see the chapters notice.")
    parser.add_argument("--only", default="", help="claims whose cell contains this text")
    parser.add_argument("--sample", type=int, help="only this many claims, spread evenly over the ledger")
    options = parser.parse_args()
    claims = [c for c in ledger() if options.only in c["cell"]]
    if options.sample and options.sample < len(claims):
        claims = [claims[i * len(claims) // options.sample] for i in range(options.sample)]
    if not claims:
        parser.error(f"no claim's cell contains {options.only!r}")
    wanted = {c["notebook"] for c in claims}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        whole = dict(zip(wanted, pool.map(run, wanted)))
        broken = list(pool.map(lambda c: run(c["notebook"], c).get(c["cell"], "never reached"), claims))
    faults = [f"{n}: {cell} must pass as it stands, but: {r}" for n, results in whole.items() for cell, r in results.items() if r != "passed"]
    for claim, result in zip(claims, broken):
        noticed = result.startswith("AssertionError")
        print(f"{'✓' if noticed else '✗'} {claim['notebook']:16} {claim['cell']:28} {claim['says']}")
        if not noticed:
            faults.append(f"{claim['notebook']}: {claim['cell']} did not notice the change to `{claim['old']}`: {result}")
    print(*faults, sep="\n")
    print(f"{len(claims) - sum('did not notice' in f for f in faults)} of {len(claims)} claims fail when their line is broken; unbroken, {sum(map(len, whole.values()))} labelled cells ran")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(worker() if "--worker" in sys.argv else main())
