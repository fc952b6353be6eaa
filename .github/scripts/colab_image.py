"""Does Colab's image still suit us? Compares its list of packages with tests/colab_image.txt.

    git clone --depth 1 https://github.com/googlecolab/backend-info
    python3 .github/scripts/colab_image.py backend-info/pip-freeze.txt

A changed version is worth a look and a new date in the file; a package that has gone breaks a chapter.
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def versions(text):
    "Names and versions of a list; `torch @ https://.../torch-2.11.0%2Bcpu-...whl` is a version too."
    found = {}
    for line in text.splitlines():
        if match := re.match(r"([\w.-]+)\s*(?:==\s*([^\s;]+)|@\s*\S+?/[\w.]+-(\d[\w.]*))", line):
            found[match[1].lower().replace("_", "-")] = re.split(r"\+|%2B", match[2] or match[3])[0]
    return found


def main(path):
    ours, theirs = versions((ROOT / "tests" / "colab_image.txt").read_text()), versions(Path(path).read_text())
    for name in "python", "triton":     # in other files of theirs; triton only where there is a GPU
        ours.pop(name, None)
    if len(theirs) < 100:
        sys.exit(f"{path} does not look like the list of Colab's image.")
    gone = [f"{name} {version}: gone" for name, version in ours.items() if name not in theirs]
    moved = [f"{name} {version}: now {theirs[name]}" for name, version in ours.items() if name in theirs and theirs[name] != version]
    print(*gone, *moved, sep="\n")
    if gone or moved:
        sys.exit("Colab's image has moved on: bring tests/colab_image.txt up to date, with its date and commit, and run `make test`.")
    print("Colab's image is as tests/colab_image.txt says.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
