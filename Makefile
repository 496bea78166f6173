# Two commands for a fresh machine: `make demo` and `make test`. Both make and reuse .venv.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
TORCH ?= torch==2.13.0
BIN := .venv/bin
OUT ?= build

.PHONY: demo test slow conformance integrations check format bench gpu clean

demo: .venv/installed
	$(BIN)/lookahead demo

test: .venv/installed
	$(BIN)/python -m pytest -n auto

slow: .venv/installed
	$(BIN)/python -m pytest -n auto -m slow

conformance: .venv/installed
	$(BIN)/python -m pytest -n auto -m conformance

# What needs other projects: Ray, lm-evaluation-harness, notebooks, the docs site, a browser, fresh environments.
integrations: .venv/integrations
	$(BIN)/python -m pytest -m integrations

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

.venv/installed: setup.py pyproject.toml
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
