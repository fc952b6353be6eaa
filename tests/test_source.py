"""One source: library, README, table of contents and links all follow from the notebooks and settings.ini."""
import ast
import configparser
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
PAGES = [p for p in NOTEBOOKS if p.parent.name == "nbs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HAND_WRITTEN = {"__init__.py", "py.typed"}

parser = configparser.ConfigParser()
parser.read(ROOT / "settings.ini")
SETTINGS = parser["DEFAULT"]

sys.path.insert(0, str(ROOT / "tools"))
import links


def cells(path, kind="code"):
    return ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


def parsed(source):
    "A cell as Python sees it, without the lines that only Jupyter understands."
    return ast.parse(re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", source))


def name(path):
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    "A copy of the sources after `make lib`, without the library that was there."
    copy = tmp_path_factory.mktemp("rebuilt")
    for part in ("nbs", "tools", "attention_course"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    for part in ("settings.ini", "pyproject.toml", "README.md", "_quarto.yml"):
        shutil.copy(ROOT / part, copy)
    for module in (copy / "attention_course").rglob("*.py"):
        if module.relative_to(copy / "attention_course").as_posix() not in HAND_WRITTEN:
            module.unlink()
    (copy / "README.md").unlink()
    done = subprocess.run([sys.executable, "tools/lib.py"], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy


def test_the_library_is_what_the_notebooks_export(rebuilt):
    def modules(root):
        folder = root / "attention_course"
        return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.py") if "__pycache__" not in p.parts}

    have, want = modules(ROOT), modules(rebuilt)
    assert sorted(have) == sorted(want), "modules and notebooks are not the same set: run `make lib`, delete what no notebook exports"
    different = [m for m in want if have[m] != want[m]]
    assert not different, f"{different} differ from the notebooks: change the notebook, never the module, then run `make lib`"


def test_the_readme_is_made_from_the_index(rebuilt):
    assert (ROOT / "README.md").read_text() == (rebuilt / "README.md").read_text(), "change nbs/index.ipynb, then run `make lib`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_notebook_is_clean(path, rebuilt):
    book = json.loads(path.read_text())
    for number, cell in enumerate(book["cells"]):
        where = f"{name(path)}, cell {number}"
        assert cell["metadata"] == {}, f"{where} has metadata {cell['metadata']}: run `make lib`"
        assert not cell.get("outputs") and cell.get("execution_count") is None, f"{where} carries outputs: run `make lib`"
        assert cell.get("id"), f"{where} has no id"
    assert set(book["metadata"]) <= {"kernelspec", "accelerator", "colab"}, f"{name(path)}: metadata {list(book['metadata'])}"
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    cleaned = rebuilt / path.relative_to(ROOT)
    assert cleaned.read_text() == path.read_text(), f"nbdev would still clean {name(path)}: run `make lib`"


def test_every_page_is_in_both_tables_of_contents():
    pages = {p.stem for p in PAGES}
    toc = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())
    in_book = [toc["root"]] + [c["file"] for part in toc["parts"] for c in part["chapters"]]
    assert sorted(in_book) == sorted(pages), f"book/_toc.yml and nbs/ do not hold the same pages: {sorted(set(in_book) ^ pages)}"

    def flat(entries):
        for entry in entries:
            yield from flat(entry["contents"]) if isinstance(entry, dict) else [entry]

    quarto = yaml.safe_load((ROOT / "_quarto.yml").read_text())
    in_quarto = [Path(p).stem for p in flat(quarto["website"]["sidebar"]["contents"])]
    assert sorted(in_quarto) == sorted(pages), f"_quarto.yml and nbs/ do not hold the same pages: {sorted(set(in_quarto) ^ pages)}"
    assert (ROOT / "nbs" / "_quarto.yml").resolve() == ROOT / "_quarto.yml", "nbs/_quarto.yml must link to ../_quarto.yml"


def test_all_links_follow_settings():
    found = links.check()
    assert not found, "\n".join(found) + "\nrun `make lib`"


def test_a_changed_owner_changes_every_link():
    "No file keeps an old owner, repository or tag in an address once the settings say something else."
    new = dict(SETTINGS, user="somebody-else", repo="renamed", version="9.8.7", tag="v9.8.7")
    table = links.rules(new)
    old = re.compile(rf"{SETTINGS['user']}(?:/|\.github)|[@/]{re.escape(SETTINGS['tag'])}\b|repo(?:-url)?: .*{SETTINGS['user']}")
    for path in links.files():
        # These say what the placeholder is, tell of past versions, or are written by nbdev from the settings.
        if path.name in ("settings.ini", "CHANGELOG.md", "_modidx.py") or path.is_relative_to(ROOT / "tests"):
            continue
        rest = old.search(links.derived(path.read_text(encoding="utf-8", errors="replace"), table))
        assert not rest, f"{name(path)} would keep {rest[0]!r}: write the address so that tools/links.py knows it"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_colab_and_source_links_open_this_very_notebook(path):
    text = "\n".join(cells(path, "markdown"))
    for found in re.findall(r"colab\.research\.google\.com/github/[^)\s]+", text):
        assert found == f"colab.research.google.com/github/{SETTINGS['user']}/{SETTINGS['repo']}/blob/{SETTINGS['tag']}/{name(path)}"
    if chapter(path):
        assert "colab.research.google.com" in text, "a chapter has a link to Colab"
        assert f"{SETTINGS['git_url']}/blob/{SETTINGS['tag']}/{name(path)}" in text, "a chapter has a link to its source"


# --- what a fresh Colab would do ---------------------------------------------

IMAGE = dict(line.split("==") for line in (ROOT / "tests" / "colab_image.txt").read_text().split("\n") if "==" in line)
EXTRAS = {"07_translation": "plots,translation", "13_flash_forward": "plots,kernels", "14_flash_backward": "plots,kernels"}  # the other chapters need plots only


def setup_of(path):
    extras = EXTRAS.get(path.stem, "plots")
    return f'''try:
    import attention_course
except ModuleNotFoundError:  # a fresh Colab: its torch stays as it is
    %pip install -q "{SETTINGS['pypi_name']}[{extras}] @ git+{SETTINGS['git_url']}@{SETTINGS['tag']}"
from attention_course import setup

device = setup(seed=0)'''


def chapter(path):
    return path.parent.name == "nbs" and re.match(r"\d\d_", path.stem)


CHAPTERS = [p for p in PAGES if chapter(p)]


@pytest.mark.parametrize("path", CHAPTERS, ids=name)
def test_a_chapter_begins_with_the_setup_cell(path):
    first = next(c for c in cells(path) if not all(line.startswith("#|") for line in c.strip().split("\n")))
    assert first.strip() == setup_of(path)
    assert sum("%pip" in c or "!pip" in c for c in cells(path)) == 1, "only the setup cell installs"


def test_what_the_setup_cell_installs_exists_and_leaves_colabs_torch_alone():
    extras = {extra for asked in ("plots", *EXTRAS.values()) for extra in asked.split(",")}
    wanted = [Requirement(r) for r in PROJECT["dependencies"]]
    for extra in extras:
        assert extra in PROJECT["optional-dependencies"], f"the setup cell asks for an extra [{extra}] that is not there"
        wanted += [Requirement(r) for r in PROJECT["optional-dependencies"][extra]]
    for requirement in wanted:
        if requirement.name not in ("jaxtyping", "sacrebleu"):      # pure Python, not in the image: what gets installed
            assert requirement.name in IMAGE, f"{requirement.name} is not in Colab's image: is it worth an install?"
            assert requirement.specifier.contains(IMAGE[requirement.name]), (
                f"Colab has {requirement.name} {IMAGE[requirement.name]}, we ask for {requirement}: pip would replace it")
    assert Requirement("python" + PROJECT["requires-python"]).specifier.contains(Version(IMAGE["python"]))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_a_page_imports_only_what_colab_and_the_package_have(path):
    ours = {"attention_course", "google"} | {Requirement(r).name for r in PROJECT["dependencies"]}
    extras = EXTRAS.get(path.stem, "plots").split(",")
    ours |= {Requirement(r).name for extra in extras for r in PROJECT["optional-dependencies"][extra]}
    available = ours | set(IMAGE) | {"IPython", "PIL", "sklearn"} | sys.stdlib_module_names
    for source in cells(path):
        if "show_doc" in source:                # read by the book, never run (see book/_ext/api.py)
            continue
        for node in ast.walk(parsed(source)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for module in names:
                top = module.split(".")[0]
                assert top in available, f"{name(path)} imports {top}, which a fresh Colab with this package does not have"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_figure_is_the_last_word_of_its_cell(path):
    "Jupyter shows what the last line of a cell is worth: a figure made inside an `if`, or further up, is never seen."
    for source in cells(path):
        tree = parsed(source)
        expected_to_fail = {node for outer in ast.walk(tree) if isinstance(outer, ast.Try) for node in ast.walk(outer)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
                drawn = node.value.func.id in ("show", "interactive") or any(word.arg == "alt" for word in node.value.keywords)
                assert not drawn or node is tree.body[-1] or node in expected_to_fail, f"never seen: {ast.unparse(node)[:80]}"


def test_the_reference_lists_every_public_name_once():
    import attention_course

    found = re.findall(r"(?m)^show_doc\(([\w.]+)\)", "\n".join(cells(ROOT / "nbs" / "reference.ipynb")))
    assert len(found) == len(set(found)), "a name stands twice in nbs/reference.ipynb"
    missing, idle = set(attention_course.__all__) - set(found), set(found) - set(attention_course.__all__)
    assert not missing and not idle, f"nbs/reference.ipynb lacks show_doc for {sorted(missing)}, and has {sorted(idle)} too many"


def numbered():
    return [p for p in PAGES if re.match(r"\d\d_", p.stem)]


@pytest.mark.parametrize("path", numbered(), ids=name)
def test_a_chapter_is_written_tested_and_on_the_map(path):
    "`make new` gives a pattern; a chapter is done when nothing of it is left."
    import sys

    sys.path.insert(0, str(ROOT / "tools"))
    from new_chapter import PATTERN

    prompts = [line for kind, text in PATTERN if kind == "markdown" for line in text.splitlines()
               if len(line) > 12 and not re.search(r"[{}#]|bibliography|^At the end|CONTRIBUTING", line)]
    text = "\n".join(cells(path, "markdown"))
    assert not [p for p in prompts if p in text], "prompts of the pattern are still there"
    assert (ROOT / "tests" / f"test_{path.stem[3:]}.py").is_file(), f"tests/test_{path.stem[3:]}.py is missing"
    assert f"({path.name})" in "\n".join(cells(ROOT / "nbs" / "index.ipynb", "markdown")), "nbs/index.ipynb does not link it"
