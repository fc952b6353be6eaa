"""The Python environment that every `make` target works in. Standard library only, because it runs before anything is installed.

    python3 tools/env.py which    prints the interpreter to use
    python3 tools/env.py dev      creates or updates that environment; does nothing when it is up to date

An active environment (venv or conda) that already has torch is used, and its torch stays as it is. Otherwise it is
`.venv` beside the Makefile, with the versions of constraints.txt.
"""
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"


def stop(message):
    sys.exit("\n" + message + "\n")


def needs_python(version, where):
    if tuple(version) < OLDEST:
        stop("This project needs Python 3.11 or newer; {} is Python {}.{}.\n"
             "Name a newer one:  make PYTHON=python3.12 ...".format(where, *version[:2]))


def ask(python, code):
    "What `code` prints in another interpreter, as JSON."
    return json.loads(subprocess.run([str(python), "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout)


def active():
    "The interpreter of an active environment that has torch, or None."
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        prefix, first = os.environ.get(variable), shutil.which("python")
        if not prefix or not first or Path(prefix).resolve() == VENV:
            continue
        if Path(prefix).resolve() in Path(os.path.abspath(first)).parents or Path(prefix) in Path(first).parents:
            if ask(first, "import importlib.util as u, json; print(json.dumps(bool(u.find_spec('torch'))))"):
                return Path(first)
    return None


def which():
    return active() or VENV / "bin" / "python"


# What the versions of an environment's torch and of torch's own dependencies are: these are left alone.
TORCH = """
import importlib.metadata as m, json, re, sys
names = {re.split(r"[^\\w.-]", r, maxsplit=1)[0].lower().replace("_", "-") for r in m.requires("torch") or []}
print(json.dumps([m.version("torch"), sorted(names), sys.prefix, sys.version_info[:2]]))
"""


def constraints_beside(torch, dependencies, folder):
    "constraints.txt without torch and what torch depends on; torch itself is held at the version that is there."
    lines = ["torch==" + torch]
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name = line.split("==")[0].strip().lower().replace("_", "-")
        if name != "torch" and name not in dependencies:
            lines.append(line)
    path = Path(folder) / ".attention_course-constraints.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def key(*extra):
    "Changes whenever something must be installed: other pins, other requirements, another version of our own."
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [project[part] for part in ("name", "dependencies", "optional-dependencies", "entry-points")]
    version = re.search(r"(?m)^version = (.*)", (ROOT / "settings.ini").read_text()).group(1)
    return hashlib.sha256(repr([str(ROOT), ours, version, extra]).encode() + (ROOT / "constraints.txt").read_bytes()).hexdigest()


def pip(python, *arguments):
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input", *map(str, arguments)]
    if subprocess.run(command, cwd=ROOT).returncode:
        stop("pip could not install what this project needs (its message is above).\n"
             "Without a network? The first run needs one. A package it cannot find? Compare constraints.txt with\n"
             "what your Python {}.{} can install. Then run the same `make` command again.".format(*sys.version_info[:2]))


def usable(python):
    "Is there an interpreter of the version that was asked for?"
    return python.exists() and ask(python, "import sys; print(list(sys.version_info[:2]))") == list(sys.version_info[:2])


def dev():
    python = active()
    if python:
        torch, dependencies, prefix, version = ask(python, TORCH)
        needs_python(version, str(python))
        stamp, wanted = Path(prefix) / ".attention_course-ready", key(torch, version)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        print("Installing the development tools beside torch {} in {} ...".format(torch, prefix), flush=True)
        pip(python, "-c", constraints_beside(torch, dependencies, prefix), "-e", ".[dev]")
    else:
        needs_python(sys.version_info, sys.executable)
        python, stamp = VENV / "bin" / "python", VENV / ".ready"
        wanted = key(sys.version_info[:2])
        if python.exists() and stamp.exists() and stamp.read_text() == wanted:
            return
        if not usable(python):
            print("Setting up .venv with the versions of constraints.txt (once; torch is large) ...", flush=True)
            made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], stdout=subprocess.PIPE, text=True)
            if made.returncode:
                stop(made.stdout + "Python could not create a virtual environment. On Debian and Ubuntu: apt install python3-venv")
        else:
            print("Bringing .venv up to date ...", flush=True)
        pip(python, "-c", "constraints.txt", "-e", ".[dev]")
    stamp.write_text(wanted)


if __name__ == "__main__":
    needs_python(sys.version_info, sys.executable)
    if sys.argv[1:] == ["which"]:
        print(which())
    elif sys.argv[1:] == ["dev"]:
        dev()
    else:
        stop(__doc__)
