"""The package as others get it: what the wheel holds, what its metadata says, what an import costs."""
import ast
import configparser
import email
import importlib.metadata
import json
import os
import re
import statistics
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import attention_course

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "attention_course"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES = sorted(p.stem for p in PACKAGE.glob("[!_]*.py"))

parser = configparser.ConfigParser()
parser.read(ROOT / "settings.ini")
SETTINGS = parser["DEFAULT"]

sys.path.insert(0, str(ROOT / "tools"))
import package


def python(code, *flags, **environment):
    "What `code` prints in a fresh interpreter."
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- metadata ------------------------------------------------------------------


def test_pyproject_agrees_with_settings():
    project = PROJECT["project"]
    assert project["name"] == SETTINGS["pypi_name"]
    assert project["description"] == SETTINGS["description"]
    assert project["requires-python"] == ">=" + SETTINGS["min_python"]
    assert project["keywords"] == SETTINGS["keywords"].split()
    assert [a["name"] for a in project["authors"]] == [SETTINGS["author"]]
    assert sorted(project["dependencies"]) == sorted(SETTINGS["requirements"].split())
    assert project["license"] == {"apache2": "Apache-2.0"}[SETTINGS["license"]]
    assert project["urls"]["Repository"] == SETTINGS["git_url"]
    assert project["urls"]["Homepage"] == SETTINGS["doc_host"] + SETTINGS["doc_baseurl"] + "/"
    assert project["entry-points"]["nbdev"] == {SETTINGS["lib_name"]: f"{SETTINGS['lib_name']}._modidx:d"}
    oldest = int(SETTINGS["min_python"].split(".")[1])
    listed = [int(c.rsplit(".", 1)[1]) for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert listed == list(range(oldest, max(listed) + 1))


def test_the_version_stands_in_settings_alone():
    assert attention_course.__version__ == SETTINGS["version"]
    assert importlib.metadata.version(SETTINGS["pypi_name"]) == SETTINGS["version"], "reinstall: delete .venv/.ready"
    assert "version" in PROJECT["project"]["dynamic"] and SETTINGS["tag"] == "v" + SETTINGS["version"]


def test_the_license_classifier_is_left_to_the_expression():
    "PyPI refuses both at once."
    assert not [c for c in PROJECT["project"]["classifiers"] if c.startswith("License")]


# --- wheel -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel():
    return package.wheel()


def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {n for n in archive.namelist() if ".dist-info/" not in n}
    expected = {p.relative_to(ROOT).as_posix() for pattern in ("**/*.py", "py.typed", "figures/*.js", "results/*.json") for p in PACKAGE.glob(pattern)}
    assert inside == expected
    assert {"attention_course/py.typed", "attention_course/__init__.py", "attention_course/figures/kit.js"} <= inside


def test_the_wheel_is_small(wheel):
    assert wheel.stat().st_size < 300_000


def test_the_metadata_is_complete(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        told = email.message_from_bytes(archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))))
    assert told["Name"] == SETTINGS["pypi_name"] and told["Version"] == SETTINGS["version"]
    assert told["License-Expression"] == "Apache-2.0" and any(n.endswith("licenses/LICENSE") for n in names)
    assert told["Requires-Python"] == ">=3.11" and told["Description-Content-Type"] == "text/markdown"
    assert "# " in told.get_payload() and told["Summary"] == SETTINGS["description"]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} == {u.split(",")[0] for u in told.get_all("Project-URL")}
    base = {Requirement(r).name for r in told.get_all("Requires-Dist") if "extra ==" not in r}
    assert base == {"torch", "einops", "jaxtyping"}


def test_twine_accepts_both_files(wheel):
    files = [str(p) for p in wheel.parent.glob("attention_course-*")]
    assert len(files) == 2
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- import ------------------------------------------------------------------------

FIRST = "scaled_dot_product_attention"


def test_an_import_loads_no_heavy_library():
    "And the package alone does not even load torch."
    heavy = {"triton", "matplotlib", "pandas", "IPython", "scipy", "sklearn", "transformers", "nbdev", "fastcore"}
    code = "import sys, json; {}; before = set(sys.modules); {}; print(json.dumps(sorted({{m.split('.')[0] for m in set(sys.modules) - before}})))"
    loaded = json.loads(python(code.format("import torch", f"from attention_course import {FIRST}")))
    assert not heavy & set(loaded)
    assert "torch" not in json.loads(python(code.format("pass", "import attention_course; dir(attention_course)")))


def test_nothing_loads_the_compiler_of_torch_before_somebody_compiles():
    "Which takes two seconds. What its mark of a constant does without it is what torch's own does."
    import torch
    from attention_course import flash_backward

    code = "import sys, attention_course; [getattr(attention_course, name) for name in dir(attention_course)]; print('torch._dynamo' in sys.modules)"
    assert python(code).strip() == "False"
    ours, torchs = flash_backward._asked_once(lambda: 0), torch.compiler.assume_constant_result(lambda: 0)
    assert vars(ours) == vars(torchs) != {}


def test_an_import_costs_little_over_torch():
    "At most 60 ms; the smallest of several runs counts, since noise only ever adds."
    code = f"import time, torch; t = time.perf_counter(); from attention_course import {FIRST}; print(time.perf_counter() - t)"
    python(code)        # writes the byte code
    times = []
    for _ in range(9):
        times.append(float(python(code)))
        if len(times) >= 3 and statistics.median(times) <= 0.060:
            return
    assert min(times) <= 0.060, f"{[round(1000 * t) for t in times]} ms"


def public_names(module):
    "`__all__` as the source has it."
    for node in ast.parse((PACKAGE / f"{module}.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


def test_the_package_offers_what_its_modules_do():
    offered = [n for module in MODULES for n in public_names(module)]
    assert len(offered) == len(set(offered)), "two modules export the same name"
    missing, idle = set(offered) - set(attention_course.__all__), set(attention_course.__all__) - set(offered)
    assert not missing and not idle, f"attention_course/__init__.py lacks {sorted(missing)} and has {sorted(idle)} too many"
    for name in attention_course.__all__:
        assert getattr(attention_course, name) is not None
        assert name in dir(attention_course)


def test_no_public_name_is_a_modules_name():
    assert not set(attention_course.__all__) & set(MODULES)


def test_type_checkers_see_every_module():
    "Lazy names are invisible to them: `if TYPE_CHECKING:` must import each module."
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    seen = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 1}
    assert seen == set(MODULES), f"in __init__.py, under TYPE_CHECKING: `from .NAME import *` for {sorted(seen ^ set(MODULES))}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        attention_course.no_such_name
    with pytest.raises(ImportError):
        exec("from attention_course import no_such_name")


def test_without_matplotlib_only_plots_are_missing():
    "And the error names what is missing."
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("matplotlib", "IPython"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import torch
from attention_course import interactive, scaled_dot_product_attention, setup, show
setup(seed=0)
scaled_dot_product_attention(*torch.randn(3, 2, 4))
try:
    show(None, alt="a line")
except ImportError as error:
    print(error)
"""
    assert "matplotlib" in python(code).splitlines()[-1]
