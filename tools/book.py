"""Builds the book: `make book`.

Chapters run as they would in a fresh Colab: in a clean environment (.venv-colab) that holds the wheel, its extras for chapters and
Jupyter, in an empty folder, with a stub for `google.colab` and no checkout in reach. torch is the one of the development
environment, linked, as Colab's torch is there before the book comes.
"""
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from hashlib import sha256
from pathlib import Path

from packaging.requirements import Requirement

import package

ROOT = Path(__file__).resolve().parent.parent
CLEAN = ROOT / ".venv-colab"
BUILD = ROOT / "book" / "_build"
PYTHON = CLEAN / "bin" / "python"
EXTRAS = "plots", "translation", "kernels"       # what the setup cells of chapters ask for


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        sys.exit(f"{done.stdout}\nThis failed, with its reasons above:\n  {' '.join(map(str, command))}")
    return done.stdout


def torch_parts():
    "The folders that torch and what it depends on have in this environment's site-packages."
    seen, todo, parts = set(), ["torch"], {}
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        for file in found.files or []:
            if file.parts[0] not in ("..", "__pycache__") and not file.name.endswith(".pth"):
                parts[file.parts[0]] = Path(found.locate_file(file.parts[0]))
        for requirement in map(Requirement, found.requires or []):
            if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return parts


def pip(*arguments):
    run(sys.executable, "-m", "pip", "--python", PYTHON, "install", "-qq", "--disable-pip-version-check", "--no-input", *arguments)


def clean_environment():
    "Make or update .venv-colab; quick when nothing has changed."
    torch = importlib.metadata.version("torch")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in EXTRAS), inspect.getsource(clean_environment)]
    base = sha256(repr([sys.version, torch, asked]).encode() + (ROOT / "constraints.txt").read_bytes()).hexdigest()
    wheel, stamp = package.wheel(), CLEAN / ".holds"
    wanted = f"{base} {package.package_hash()}"
    holds = stamp.read_text() if stamp.exists() else ""
    if holds == wanted:
        return
    if not holds.startswith(base):
        print("Making the clean environment in which chapters run (.venv-colab) ...", flush=True)
        run(sys.executable, "-m", "venv", "--clear", "--without-pip", CLEAN)
        site = Path(run(PYTHON, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        for name, place in torch_parts().items():
            (site / name).symlink_to(place)
        shutil.copytree(ROOT / "tests" / "colab_stub", site, dirs_exist_ok=True)
        lines = [l for l in (ROOT / "constraints.txt").read_text().splitlines() if not re.match(r"(?i)torch==", l)]
        with tempfile.TemporaryDirectory() as folder:
            limits = Path(folder) / "constraints.txt"
            limits.write_text("\n".join([*lines, f"torch=={torch}"]))
            pip("-c", limits, f"{wheel}[{','.join(EXTRAS)}]", "ipykernel")
    else:
        pip("--no-deps", "--force-reinstall", wheel)
    stamp.write_text(wanted)


CHECK = """
import importlib.util as u, os, sys
root = sys.argv[1]
origin = u.find_spec("attention_course").origin
assert origin.startswith(sys.prefix) and "site-packages" in origin, f"attention_course would come from {origin}"
reach = [p for p in sys.path if p and os.path.realpath(p).startswith(root + os.sep) and not p.startswith(sys.prefix)]
assert not reach, f"the checkout is in reach: {reach}"
extra = [name for name in ("nbdev", "sphinx", "pytest", "jupyter_book") if u.find_spec(name)]
assert not extra, f"a fresh Colab would not have {extra}"
assert u.find_spec("google.colab"), "the stub for google.colab is missing"
"""


def check_clean():
    "From an empty folder, as the kernel will be started: is it the installed package, and only that?"
    with tempfile.TemporaryDirectory() as folder:
        run(PYTHON, "-I", "-c", CHECK, ROOT, cwd=folder)


def kernelspec():
    "Where Jupyter finds the clean environment; `-I` keeps a reader's own settings and packages out."
    spec = BUILD / "jupyter" / "kernels" / "course"
    spec.mkdir(parents=True, exist_ok=True)
    start = [str(PYTHON), "-I", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": start, "display_name": "course", "language": "python"}))
    return spec.parents[1]


def mathjax():
    "MathJax from its wheel into _static: one script and its fonts, so that no page asks another host."
    target = ROOT / "book" / "_static" / "mathjax"
    version = importlib.metadata.version("django-static-mathjax")
    if (target / ".version").exists() and (target / ".version").read_text() == version:
        return
    found = importlib.metadata.distribution("django-static-mathjax")
    source = Path(found.locate_file("mathjax/static/mathjax/es5"))
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source / "output" / "chtml" / "fonts" / "woff-v2", target / "output" / "chtml" / "fonts" / "woff-v2")
    shutil.copy(source / "tex-mml-chtml.js", target)
    (target / ".version").write_text(version)


def readable(said):
    "The part of Sphinx's output that says what is wrong."
    said = re.sub(r"\x1b\[[\d;]*m", "", said)
    said = re.sub(r"\.ipynb:(\d+)(\d{4}):", lambda m: f".ipynb, cell {m[1]}, line {int(m[2])}:", said)
    if failed := re.search(r"nbclient\.exceptions\.(Cell\w+: .*?)\n\nThe above exception", said, re.DOTALL):
        where = re.search(r"ExecutionError: (\S+\.ipynb)", said)
        return f"A chapter fails where it runs as in Colab: {where[1] if where else ''}\n\n{failed[1]}"
    noise = ("Running Jupyter-Book", "Source Folder", "Config Path", "Output Path", "[IPKernelApp]", "=====")
    return "\n".join([line for line in said.splitlines() if line.strip() and not line.startswith(noise)][-80:])


def sphinx():
    caches = BUILD / "executed"
    cache = caches / package.package_hash()
    for old in caches.glob("*"):
        if old != cache:
            shutil.rmtree(old)
    environment = dict(os.environ, BOOK_CACHE=str(cache), JUPYTER_PATH=str(kernelspec()), NO_COLOR="1")
    command = [Path(sys.executable).parent / "jupyter-book", "build", "nbs", "--config", "book/_config.yml", "--toc",
               str(ROOT / "book" / "_toc.yml"), "--path-output", "book", "--all", "-W", "--keep-going", "-n", "-q"]
    # All pages are read and written each time (chapters still come from the cache): the sitemap lists only what a build
    # writes, and Sphinx would be silent the next time about pages that it has warned of.
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (BUILD / "log.txt").write_text(done.stdout)
    if done.returncode:
        print(readable(done.stdout))
        sys.exit("\nThe book was not built. Warnings count as errors; mend the first one above, or the chapter that failed.\n"
                 "(All that was said: book/_build/log.txt)")


def main():
    start = time.time()
    BUILD.mkdir(parents=True, exist_ok=True)
    clean_environment()
    check_clean()
    mathjax()
    print("Running what changed, and building the pages: seconds, or some minutes where every chapter has to run ...", flush=True)
    sphinx()
    page = BUILD / "html" / "index.html"
    print(f"\nThe book is built ({time.time() - start:.0f} s). Open it:\n\n    file://{page}\n\nor, with search, run: make serve\n")


if __name__ == "__main__":
    main()
