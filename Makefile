# Two commands for a fresh machine: `make demo` and `make test`. Both make and reuse .venv.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
TORCH ?= torch==2.13.0
BIN := .venv/bin
OUT ?= build

.PHONY: demo test slow conformance integrations check format bench gpu docs dist clean

demo: .venv/installed
	$(BIN)/lookahead demo

test: .venv/installed
	$(BIN)/python -m pytest -n auto

slow: .venv/integrations
	$(BIN)/python -m pytest -n auto -m slow

conformance: .venv/installed
	$(BIN)/python -m pytest -n auto -m conformance

# What needs other projects: lm-evaluation-harness, torchao, a browser. Pages are not tested where there is no Chromium.
# One test after the other: many start processes that use all cores.
integrations: .venv/integrations
	$(BIN)/python -m pytest -m "integrations and not slow"

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/installed
	$(BIN)/python -m benchmarks.race --prompts 4 --modes greedy,t0.8 --new-tokens 64 --dtypes float32 \
		--methods lookup2,auto,w7 --out build/bench/race.json
	$(BIN)/python -m benchmarks.report --results build/bench --out build/bench/BENCHMARKS.md --allow-dirty

# All that only a CUDA device can show, in less than nine minutes: make gpu OUT=FOLDER
gpu: .venv/installed
	$(BIN)/python -m benchmarks.gpu --out "$(OUT)"

docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]" "$(TORCH)"
	$(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site

# Wheel and sdist, each tried in an environment of its own, from outside of this folder.
dist: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	rm -rf dist build/lib build/smoke
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	for file in "$(CURDIR)"/dist/*.whl "$(CURDIR)"/dist/*.tar.gz; do \
		rm -rf build/smoke && "$(PYTHON)" -m venv build/smoke && \
		build/smoke/bin/python -I -m pip install --quiet --disable-pip-version-check "$(TORCH)" "$$file" && \
		(cd build/smoke && bin/python -I "$(CURDIR)/tools/smoke.py" && bin/lookahead demo --prompts 1 --rounds 1) \
			|| exit 1; \
	done

.venv/installed: setup.py pyproject.toml $(wildcard lookahead/_c/*)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed. Try: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,train]"
	touch $@

.venv/integrations: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,train,integrations]" "$(TORCH)"
	touch $@

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
