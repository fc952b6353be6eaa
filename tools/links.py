"""Every address of this project follows from settings.ini: repository, site, Colab links, install lines, tags.

    python tools/links.py            rewrites them in all tracked text files
    python tools/links.py --check    lists those that differ, and fails if there are any
"""
import configparser
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = {".ipynb", ".md", ".yml", ".yaml", ".toml", ".cff", ".py", ".js", ".html", ".txt", ".css", ""}


def settings():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "settings.ini")
    return parser["DEFAULT"]


def files():
    "Tracked and new files, ignored ones left out."
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\n") if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    paths = (ROOT / name for name in sorted(set(names)) if name)
    return [p for p in paths if p.suffix in KINDS and p.is_file() and not p.is_symlink() and p != Path(__file__)]


def rules(conf=None):
    "Pairs of pattern and replacement."
    conf = conf or settings()
    user, repo, tag, version = conf["user"], conf["repo"], conf["tag"], conf["version"]
    # The repository may have had another name when the links were last written: pyproject.toml remembers it.
    written = re.search(r'Repository = "https://github\.com/[^/"]+/([^/"]+)"', (ROOT / "pyproject.toml").read_text())
    ours = "(?:" + "|".join(sorted({re.escape(n) for n in (repo, conf["lib_name"], written[1] if written else repo)})) + ")"
    owner, end, ref = r"[\w.-]+", r"(?![\w-])", r"[\w.-]+"
    return [
        # https://github.com/OWNER/REPO/blob/TAG/..., with or without the rest, also in git+https://...@TAG
        (rf"\bgithub\.com/{owner}/{ours}{end}", f"github.com/{user}/{repo}"),
        (rf"(\bgithub\.com/{re.escape(user)}/{re.escape(repo)}/(?:blob|tree|raw)/){ref}", rf"\g<1>{tag}"),
        (rf"(\bgithub\.com/{re.escape(user)}/{re.escape(repo)}(?:\.git)?@){ref}", rf"\g<1>{tag}"),
        (rf"\braw\.githubusercontent\.com/{owner}/{ours}/{ref}", f"raw.githubusercontent.com/{user}/{repo}/{tag}"),
        (rf"\bcolab\.research\.google\.com/github/{owner}/{ours}/blob/{ref}",
         f"colab.research.google.com/github/{user}/{repo}/blob/{tag}"),
        (rf"\b{owner}\.github\.io/{ours}{end}", f"{user}.github.io/{repo}"),
        # single settings that repeat a value of settings.ini
        (r"(?m)^(  branch: )\S+(  # the tag)", rf"\g<1>{tag}\2"),
        (r"(?m)^version: \d+\.\d+\.\d+$", f"version: {version}"),  # CITATION.cff
    ]


def derived(text, table):
    for pattern, replacement in table:
        text = re.sub(pattern, replacement, text)
    return text


def differing():
    "Path, text and what the text should be, for each file that does not follow settings.ini."
    table = rules()
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if (new := derived(text, table)) != text:
            yield path, text, new


def rewrite():
    for path, _, new in list(differing()):
        path.write_text(new, encoding="utf-8")
        print(f"links follow settings.ini again: {path.relative_to(ROOT)}")


def check():
    "One line for each line that would change."
    found = []
    for path, text, new in differing():
        for number, (old, now) in enumerate(zip(text.split("\n"), new.split("\n")), 1):
            if old != now:
                found.append(f"{path.relative_to(ROOT)}:{number}: {old.strip()}\n    should be: {now.strip()}")
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if found := check():
            sys.exit("\n".join(found) + "\n\nThese do not follow settings.ini; `make lib` rewrites them.")
    else:
        rewrite()
