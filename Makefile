# `make help` says what there is.

PYTHON ?= python3 python3.13 python3.12 python3.11# the first of these that is Python 3.11 to 3.13 makes the environment
WORKERS ?= 2#                             test processes

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 120# one thread each: bit equality, and WORKERS processes fit as many cores
RUN_READY := $(VENV)/ready-to-run
TEST_READY := $(VENV)/ready-to-test
DOCS_READY := $(VENV)/ready-for-docs

.DEFAULT_GOAL := help
.PHONY: help run test check slow network bench clean lint
.NOTPARALLEL:

help:
	@echo 'make run     install, run a small federation with three methods side by side, write a report page; takes minutes'
	@echo 'make test    lint, types, import rules and all tests but slow, gpu and network (what CI runs)'
	@echo 'make check   the inner loop: lint, types, import rules, tests/unit and tests/properties'
	@echo 'make slow    the tests marked slow'
	@echo 'make network the tests marked network: every method over Flower on this machine, kills, the page about federations'
	@echo 'make bench   list the benchmarks and how to run one'
	@echo 'make docs    write the reference pages from the code, then the site of docs/ to site/index.html; a broken link is an error'
	@echo 'make clean   remove $(VENV) and caches; runs/ and data/ stay'
	@echo
	@echo 'PYTHON=python3.12 chooses the interpreter, WORKERS=4 the number of test processes.'

run: $(RUN_READY)
	$(BIN)/fedloom compare quickstart --methods perfedsde,fedavg,local
	@echo 'Pages to open in your browser, about all three and about perfedsde:'
	@$(BIN)/fedloom report runs/compare-quickstart
	@$(BIN)/fedloom report runs/compare-quickstart/perfedsde-0

test: $(TEST_READY) lint
	$(PYTEST) -q -n $(WORKERS) --dist worksteal

check: $(TEST_READY) lint
	$(PYTEST) -q -n $(WORKERS) --dist worksteal tests/unit tests/properties

slow: $(TEST_READY)
	$(PYTEST) -q -m "slow and not gpu" --timeout 1800 || [ $$? -eq 5 ]  # 5: there are none

network: $(TEST_READY)
	$(PYTEST) -q -m network --timeout 600

lint: $(TEST_READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench:
	@for script in benchmarks/*.py; do \
	  [ -e "$$script" ] || { echo 'There is no benchmark yet.'; exit 0; }; \
	  printf '%-36s %s\n' "$$script" "$$(sed -n '1s/"""//gp' "$$script")"; \
	done
	@echo 'Run one with: $(BIN)/python benchmarks/NAME.py'

.PHONY: docs
docs: $(DOCS_READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html -d build/docs docs site
	@echo 'Open site/index.html'

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist site src/*.egg-info
	find . \( -path ./runs -o -path ./data -o -path ./.git \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. Modules are compiled when they are first imported: most never are. The stamps are older than a changed pyproject.toml or constraints.txt, which brings it up to date.

$(RUN_READY): pyproject.toml constraints.txt
	$(make_environment)
	@$(PIP) install --no-compile --no-build-isolation -c constraints.txt -e .
	@touch $@

$(TEST_READY): pyproject.toml constraints.txt
	$(make_environment)
	@$(PIP) install --no-compile --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $(RUN_READY) $@

$(DOCS_READY): pyproject.toml constraints.txt
	$(make_environment)
	@$(PIP) install --no-compile --no-build-isolation -c constraints.txt -e '.[docs]'
	@touch $(RUN_READY) $@

define make_environment
@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
  found=; \
  for python in $(PYTHON); do \
    if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then found=$$python; break; fi; \
  done; \
  if [ -z "$$found" ]; then \
    echo "Fedloom needs Python 3.11, 3.12 or 3.13, and none of these is: $(strip $(PYTHON)). Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
    exit 1; \
  fi; \
  echo "making the environment in $(VENV) with $$($$found --version) ..."; \
  $$found -m venv --clear $(VENV); \
}
@echo 'installing fedloom and what it needs into $(VENV) (torch is large: this may take minutes) ...'
@$(PIP) install -c constraints.txt setuptools wheel
endef
