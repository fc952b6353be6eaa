"""Builds wheel and sdist into dist/, unless the ones there are of today's sources.

    python tools/package.py            builds, and lets twine check the metadata
"""
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"


def package_hash():
    "Changes with anything that the package holds or that decides what an installed copy of it does."
    digest = hashlib.sha256()
    package = [p for p in (ROOT / "attention_course").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    for path in sorted([*package, ROOT / "pyproject.toml", ROOT / "constraints.txt"]):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def wheel():
    "The path of an up-to-date wheel."
    state = hashlib.sha256((package_hash() + (ROOT / "README.md").read_text()).encode()).hexdigest()
    stamp, found = DIST / ".of", sorted(DIST.glob("*.whl"))
    if len(found) == 1 and stamp.exists() and stamp.read_text() == state:
        return found[0]
    # Fresh folders, for setuptools puts whatever it finds in an old build/ into the next wheel.
    for old in (DIST, ROOT / "build"):
        shutil.rmtree(old, ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout + "\nThe wheel could not be built; the reason is in the lines above.")
    stamp.write_text(state)
    return next(DIST.glob("*.whl"))


if __name__ == "__main__":
    path = wheel()
    checked = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, DIST.glob("*-*"))],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if checked.returncode:
        sys.exit(checked.stdout)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB, metadata checked")
