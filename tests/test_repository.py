"""What people and machines read beside the book: workflows, licences, CONTRIBUTING, CHANGELOG, CITATION. They must be valid and true."""
import configparser
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

parser = configparser.ConfigParser()
parser.read(ROOT / "settings.ini")
SETTINGS = parser["DEFAULT"]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def files():
    "Text files that are in git, or would be."
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in sorted(set(listed.stdout.split("\n"))):
        path = ROOT / name
        if name and path.is_file() and not path.is_symlink():
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue        # a picture


def valid(schema, *paths):
    "By a schema that check-jsonschema carries with it: no network."
    done = subprocess.run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --- workflows ------------------------------------------------------------------


def test_workflows_are_valid_and_end_in_time():
    assert {w.stem for w in WORKFLOWS} == {"tests", "book", "release", "weekly"}
    valid("vendor.github-workflows", *WORKFLOWS)
    valid("custom.github-workflows-require-timeout", *WORKFLOWS)
    valid("vendor.dependabot", ROOT / ".github" / "dependabot.yml")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_a_workflow_may_little_and_names_no_owner(path):
    flow = yaml.safe_load(path.read_text())
    assert flow["permissions"] == {"contents": "read"}, "more is for a single job to ask"
    assert flow["concurrency"]["group"]
    for name, job in flow["jobs"].items():
        more = set(job.get("permissions", {}).items())
        assert more <= {("pages", "write"), ("id-token", "write")}, f"{name} may {more}"
        assert not more or name == "publish"
        for step in job.get("steps", []):
            if "uses" in step:
                assert re.search(r"@(v\d+|release/v\d+)$", step["uses"]), f"{step['uses']}: pin the major version"
            run = step.get("run", "")
            assert not re.search(r"\$\{\{\s*github\.(?!sha\b)", run), f"put it into `env`, quoted by the shell: {run}"
            for target in re.findall(r"\bmake ([a-z-]+)", run):
                assert target in targets(), f"there is no make target {target}"
    assert SETTINGS["user"] not in path.read_text()


def test_unit_tests_run_on_every_python_with_the_lowest_and_the_newest_torch():
    matrix = yaml.safe_load(read(".github/workflows/tests.yml"))["jobs"]["unit"]["strategy"]["matrix"]["include"]
    pythons = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert [m["python"] for m in matrix] == [p for p in pythons for _ in "ab"]
    assert all(m["torch"] == "newest" for m in matrix[1::2]) and all(m["torch"] != "newest" for m in matrix[::2])
    lowest = next(r for r in PROJECT["dependencies"] if r.startswith("torch")).split(">=")[1]
    assert re.match(rf"{re.escape(lowest)}(\.|$)", matrix[0]["torch"]), f"pyproject.toml allows torch {lowest}, the oldest job has {matrix[0]['torch']}"


def test_a_release_is_checked_before_it_is_published():
    flow = yaml.safe_load(read(".github/workflows/release.yml"))
    assert flow[True]["push"] == {"tags": ["v*"]}       # YAML takes the key `on` for a truth value
    commands = [s["run"] for s in flow["jobs"]["build"]["steps"] if "run" in s]
    assert "make publish-check" in commands[0] and "make test" in commands and flow["jobs"]["publish"]["needs"] == "build"
    assert any(s.get("uses", "").startswith("pypa/gh-action-pypi-publish@") for s in flow["jobs"]["publish"]["steps"])
    assert not re.search(r"(?i)secrets\.|password|token:(?! write)", read(".github/workflows/release.yml"))


def test_scripts_of_the_weekly_run_are_python_and_find_links():
    sys.path.insert(0, str(ROOT / ".github" / "scripts"))
    import colab_image
    import dead_links

    found = dead_links.links()
    assert "https://arxiv.org/abs/1706.03762" in found
    assert not [a for a in found if f"/{SETTINGS['user']}/" in a or a.endswith((".", ",", ")"))]
    text = "numpy==2.1.3\nPillow == 11.3.0\ntorch @ https://example.org/cpu/torch-2.11.0%2Bcpu-cp313-cp313-linux_x86_64.whl#sha256=0\n# x==1\n"
    assert colab_image.versions(text) == {"numpy": "2.1.3", "pillow": "11.3.0", "torch": "2.11.0"}


# --- documents -------------------------------------------------------------------


def targets():
    return set(re.findall(r"(?m)^([a-z][a-z-]*):", read("Makefile")))


DOCUMENTS = ["README.md", "CONTRIBUTING.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_names_only_commands_and_files_that_exist(name):
    text = read(name)
    code = re.findall(r"(?s)```\w*\n(.*?)```|`([^`\n]+)`", text)
    snippets = [block or inline for block, inline in code]
    for snippet in snippets:
        for target in re.findall(r"(?m)(?:^|\s)make ([a-z][a-z-]*)", snippet):
            assert target in targets(), f"{name}: there is no `make {target}`"
    tracked = {n for n, _ in files()}
    known = tracked | {str(p) for n in tracked for p in Path(n).parents}
    made_up = {"nbs/NN_topic.ipynb", "nbs/exercises/topic.ipynb", "nbs/05_positions.ipynb", "attention_course/positions.py", "tests/test_positions.py",
               "attention_course/figures/name.js", "build/bench"}       # examples, and what a run makes
    for path in {s.rstrip("/") for s in snippets if re.fullmatch(r"[\w.-]+(?:/[\w.*-]+)+/?|[\w-]+\.(?:md|ini|toml|yml|cff|ipynb)|\.[\w-]+(?:/[\w.-]+)+", s)}:
        if path in made_up or path.startswith(".venv/"):
            continue
        beside = {Path(k).name for k in known}
        found = any(Path(k).match(path) for k in known) if "*" in path else path in known or ("/" not in path and path in beside)
        assert found, f"{name} speaks of `{path}`, which is not there"
    for address in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text):
        assert (ROOT / address).exists(), f"{name} links to {address}, which is not there"


def test_contributing_covers_what_contributors_do():
    text = read("CONTRIBUTING.md")
    for heading in ("What to touch", "Change a chapter", "Add a chapter", "Add an exercise", "Add an interactive figure", "Add a claim",
                    "Measure again", "How the tests are laid out", "Release"):
        assert f"\n## {heading}" in text
    public = {t for t in re.findall(r"(?m)^([a-z][a-z-]*):[^#\n]*## ", read("Makefile"))}
    rest = {t for t in public if not re.search(rf"make {t}\b", text)} - {"clean", "quarto", "wheel"}
    assert not rest, f"CONTRIBUTING.md does not mention {sorted(rest)}"
    listed = set(re.findall(r"`tests/(test_\w+\.py)`", text))
    assert {p.name for p in (ROOT / "tests").glob("test_*.py")} <= listed | {f"test_{p.stem[3:]}.py" for p in (ROOT / "nbs").glob("[0-9]*.ipynb")}


def test_the_examples_of_contributing_are_the_chapters_own():
    "The exercise that it shows stands in chapter 02, word for word."
    cells = ["".join(c["source"]) for c in json.loads(read("nbs/02_attention.ipynb"))["cells"]]
    blocks = [b.strip() for b in re.findall(r"(?s)```python\n(.*?)```", read("CONTRIBUTING.md"))]
    assert len(blocks) == 3
    for block in blocks:
        assert any(block in cell for cell in cells), f"chapter 02 no longer has\n{block}"


def test_the_changelog_tells_of_this_version_first():
    versions = re.findall(r"(?m)^## (\d+\.\d+\.\d+) \((\d{4}-\d{2}-\d{2})\)$", read("CHANGELOG.md"))
    assert versions and versions[0][0] == SETTINGS["version"]
    numbers = [tuple(map(int, v.split("."))) for v, _ in versions]
    assert numbers == sorted(numbers, reverse=True) and [d for _, d in versions] == sorted((d for _, d in versions), reverse=True)
    assert "\n## " not in read("CHANGELOG.md").split(f"## {SETTINGS['version']}")[0], "a section without version and date"


def test_the_citation_is_valid_and_current():
    valid("vendor.citation-file-format", ROOT / "CITATION.cff")
    citation = yaml.safe_load(read("CITATION.cff"))
    assert str(citation["version"]) == SETTINGS["version"]
    assert f"## {SETTINGS['version']} ({citation['date-released']})" in read("CHANGELOG.md")
    assert citation["authors"] == [{"name": SETTINGS["author"]}]
    assert citation["repository-code"] == SETTINGS["git_url"]


def test_licences_are_whole():
    code, text = read("LICENSE"), read("LICENSE-text")
    assert "Apache License" in code and "END OF TERMS AND CONDITIONS" in code and len(code) > 11_000
    assert "Attribution 4.0 International" in text and "Section 8 -- Interpretation" in text and "creativecommons.org/licenses/by/4.0" in text
    assert SETTINGS["author"] in text and PROJECT["license"] == "Apache-2.0"


# --- all files -------------------------------------------------------------------

MACHINE = re.compile(r"(?<![\w.~:/])/(?:home|work|tmp|root|Users|opt)/[\w.]")
MERGE = re.compile(r"(?m)^(?:<{7}|>{7}|={7}|\|{7})(?: |$)")
LATER = re.compile(r"\b(?:TODO|FIX" + r"ME|XXX)\b")


def test_no_file_speaks_of_one_machine_or_of_an_unfinished_merge():
    for name, text in files():
        for pattern, what in ((MACHINE, "a path of somebody's machine"), (MERGE, "a merge marker")):
            found = None if name == "tests/test_repository.py" else pattern.search(text)
            assert not found, f"{name}, line {text[:found.start()].count(chr(10)) + 1}: {what}: {text[found.start():found.start() + 60]!r}"


def test_nothing_was_left_for_later():
    for name, text in files():
        if name.endswith((".py", ".ipynb", ".js", ".css", ".yml")) and name != "tests/test_repository.py":
            found = LATER.search(text)
            assert not found, f"{name}, line {text[:found.start()].count(chr(10)) + 1}: {found[0]}"


def test_text_files_end_with_one_line_break_and_have_no_stray_blanks():
    for name, text in files():
        if text and not name.endswith((".svg", ".ipynb")):
            assert text.endswith("\n") and not text.endswith("\n\n"), f"{name} does not end with exactly one line break"
            if not name.endswith(".md") and name not in ("LICENSE", "LICENSE-text"):
                line = next((i for i, l in enumerate(text.split("\n"), 1) if l != l.rstrip()), None)
                assert line is None, f"{name}, line {line}: blanks at its end"
