# `make help` lists the targets. Each does its own set-up (tools/env.py): in .venv, or in the active environment if
# that one has torch. A second run of anything is quick.

PYTHON ?= python3
PORT   ?= 8000
PY      = $(shell $(PYTHON) tools/env.py which 2> /dev/null)
PYTEST  = $(PY) -m pytest -q
# Several tests at a time, each with one thread.
MANY    = -n auto --maxprocesses 4 --dist worksteal
HTML    = book/_build/html

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Notebook tools would otherwise pick up a reader's own settings or packages.
export PYTHONNOUSERSITE := 1
export IPYTHONDIR := $(CURDIR)/book/_build/ipython
export PYDEVD_DISABLE_FILE_VALIDATION := 1
export JUPYTER_PLATFORM_DIRS := 1

.PHONY: help env lib test interpret aot test-checkout test-wheel book serve browser claims bench quarto wheel publish-check new hooks clean

help: ## this list
	@echo "attention_course: one set of notebooks, from which come a book, a library and Colab notebooks."
	@echo
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'
	@echo
	@echo "Variables: PYTHON=python3.12 (3.11 or newer), PORT=8000 (serve), CHAPTER=05_positions (new),"
	@echo "           CHROMIUM=/path (browser), CLAIMS='--only variance' (claims), BENCH='multi_head --quick' (bench),"
	@echo "           AOT='--only sm_90' (aot)"

env:
	@case "$(CURDIR)" in *" "*) echo "The path of this folder has a space in it, which make cannot handle: $(CURDIR)"; echo "Move the folder, then try again."; exit 1;; esac
	@command -v $(PYTHON) > /dev/null || { echo "There is no $(PYTHON) here. Name a Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) tools/env.py dev
	@mkdir -p $(IPYTHONDIR)

lib: env ## notebooks -> library, README and links; cleans the notebooks
	@$(PY) tools/lib.py

test: test-checkout test-wheel ## unit tests, on the checkout and on the installed wheel

test-checkout: env
	@OMP_NUM_THREADS=1 $(PYTEST) $(MANY) tests --ignore=tests/browser --ignore=tests/test_book.py

interpret: env ## the attention kernels in Triton's interpreter, in more combinations than `make test`
	@INTERPRET=all OMP_NUM_THREADS=1 $(PYTEST) $(MANY) tests/test_flash_attention.py tests/test_flash_backward.py tests/test_ladder.py

aot: env ## the attention kernels compiled for every GPU generation: registers, spills, shared memory
	@$(PY) tools/aot.py $(AOT)

test-wheel: env
	@OMP_NUM_THREADS=1 $(PY) tools/test_wheel.py $(MANY)

book: lib ## builds the book, runs changed chapters as Colab would, says where to open it
	@$(PY) tools/book.py

serve: ## shows the built book at http://localhost:PORT
	@test -f $(HTML)/index.html || { echo "There is no book yet: run 'make book' first."; exit 1; }
	@echo "http://localhost:$(PORT)/   (Ctrl-C stops it)"
	@$(PYTHON) -m http.server --bind 127.0.0.1 --directory $(HTML) $(PORT) || \
	  { code=$$?; test $$code -ge 128 || echo "Is port $(PORT) taken, or no number? Try: make serve PORT=8001"; exit $$code; }

browser: env ## tests the built book in Chromium
	@test -f $(HTML)/index.html || { echo "There is no book yet: run 'make book' first."; exit 1; }
	@$(PYTEST) tests/test_book.py tests/browser

claims: env ## breaks each claimed idea in the library and sees its check fail
	@$(PY) tools/claims.py $(CLAIMS)

bench: env ## measures against peers: the rows that chapters quote (BENCH=gpu: with a GPU, 5 minutes)
	@$(PY) benchmarks/run.py $(BENCH)

quarto: lib ## nbdev's own documentation, through Quarto where it is installed
	@$(PY) tools/quarto.py

wheel: lib ## builds wheel and sdist into dist/ and checks them
	@$(PY) tools/package.py

publish-check: lib ## what must hold before a release: owner, version, tag, changelog, wheel
	@$(PY) tools/publish_check.py

new: env ## a new chapter from the pattern: make new CHAPTER=05_positions
	@$(PY) tools/new_chapter.py "$(CHAPTER)"

hooks: env ## hooks for Jupyter and git that keep notebooks clean
	@$(PY) -c "from nbdev.clean import nbdev_install_hooks; nbdev_install_hooks()"
	@echo "Jupyter now cleans the notebooks of nbdev projects as it saves them (set in ~/.jupyter), and git merges them cell by cell."

clean: ## removes what was built; environments stay (delete .venv and .venv-colab by hand)
	@rm -rf build dist book/_build book/_static/mathjax _docs _proc .pytest_cache *.egg-info
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
