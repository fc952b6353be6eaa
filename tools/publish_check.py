"""What must hold before a release; says everything that does not. `make publish-check`, and the release workflow."""
import re
import subprocess
import sys
from pathlib import Path

import links
import package

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = "your_github_name"


def problems():
    conf = links.settings()
    version, tag = conf["version"], conf["tag"]
    if conf["user"] == PLACEHOLDER:
        yield ("settings.ini: user is still the placeholder. Set the owner of the repository there, run `make lib`,\n"
               "  and take the note about the placeholder out of nbs/index.ipynb.")
    else:
        for path in links.files():
            if path.parent.name not in ("tools", "tests") and PLACEHOLDER in path.read_text(encoding="utf-8", errors="ignore"):
                yield f"{path.relative_to(ROOT)} still says {PLACEHOLDER}."
    if not re.fullmatch(r"\d+\.\d+\.\d+", version) or tag != f"v{version}":
        yield f"settings.ini: version {version!r} and tag {tag!r}; a release is 1.2.3 and v1.2.3."
    yield from links.check()
    changelog = ROOT / "CHANGELOG.md"
    entry = re.search(rf"(?m)^## \[?{re.escape(version)}\]?.*$", changelog.read_text()) if changelog.exists() else None
    if not entry:
        yield f"CHANGELOG.md has no section for {version}."
    elif not re.search(r"\d{4}-\d{2}-\d{2}", entry[0]):
        yield f"CHANGELOG.md: the section for {version} has no date ({entry[0]})."
    if f'__version__ = "{version}"' not in (ROOT / "attention_course" / "__init__.py").read_text():
        yield "attention_course/__init__.py has another version: run `make lib`."
    git = lambda *a: subprocess.run(["git", *a], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if git("status", "--porcelain"):
        yield "There are changes that are not committed."
    tagged = git("rev-list", "-n", "1", tag, "--")
    if not tagged:
        yield f"The tag {tag} does not exist: links to Colab and the install line need it. `git tag {tag}`, when all else is well."
    elif tagged != git("rev-parse", "HEAD"):
        yield f"The tag {tag} is on another commit than the one checked out."


def main():
    found = list(problems())
    if found:
        sys.exit("Not ready to publish:\n" + "\n".join(f"- {f}" for f in found))
    subprocess.run([sys.executable, Path(package.__file__)], check=True)
    print("Ready to publish.")


if __name__ == "__main__":
    main()
