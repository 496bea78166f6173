# Two commands for a fresh machine: `make demo` and `make test`. Both make and reuse .venv.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
TORCH ?= torch==2.13.0
BIN := .venv/bin
OUT ?= build

.PHONY: demo test versions slow conformance integrations check format bench real gpu docs dist sanitize clean

demo: .venv/installed
	$(BIN)/lookahead demo

test: .venv/installed
	$(BIN)/python -m pytest -n auto

# Every version that is promised, each in an environment of its own: make versions CELLS="oldest no-compiler"
versions:
	"$(PYTHON)" tools/versions.py $(CELLS)

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

# Small pretrained models, downloaded once, in about 20 minutes: make real REAL=all (four) OUT=FOLDER
REAL ?= smollm2-135m,gemma3-270m
real: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[real]" "$(TORCH)"
	$(BIN)/python -m benchmarks.real --models "$(REAL)" --out "$(OUT)"

# All that only a CUDA device can show, in less than nine minutes: make gpu OUT=FOLDER
gpu: .venv/installed
	$(BIN)/python -m benchmarks.gpu --out "$(OUT)"

docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]" "$(TORCH)"
	$(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site

# Wheel and sdist, each tried in an environment of its own, from outside of this folder: the wheel with its C part, and
# the sdist with and without a compiler. What pip keeps of a build is left aside, and torch need not be fetched again.
dist: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	rm -rf dist build/lib build/smoke
	LOOKAHEAD_C=required $(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	try() { \
		rm -rf build/smoke && "$(PYTHON)" -m venv build/smoke && \
		build/smoke/bin/python -I -m pip install --quiet --disable-pip-version-check "$(TORCH)" && \
		CC="$$2" build/smoke/bin/python -I -m pip install --quiet --disable-pip-version-check --no-cache-dir "$$1" && \
		(cd build/smoke && bin/python -I "$(CURDIR)/tools/smoke.py" "$$3" && bin/lookahead demo --prompts 1 --rounds 1); \
	} && for file in "$(CURDIR)"/dist/*.whl "$(CURDIR)"/dist/*.tar.gz; do try "$$file" "$${CC:-cc}" built || exit 1; done && \
	try "$(CURDIR)"/dist/*.tar.gz /bin/false missing

# The tests of the C part under gcc's address and undefined-behaviour sanitizers, of which the first report ends the run.
# It is built into a folder of its own. Python keeps much to the end, so leaks are not looked for.
sanitize: .venv/installed
	rm -rf build/sanitized
	LOOKAHEAD_C=required CC=gcc LDSHARED="gcc -shared" \
		CFLAGS="-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
		$(BIN)/python setup.py --quiet build_ext --force --build-lib build/sanitized --build-temp build/sanitized/objects
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		PYTHONMALLOC=malloc FUZZ=4 $(BIN)/python -m pytest -p tools.sanitized -p no:cacheprovider -p no:faulthandler -x -s \
		tests/test_native_fuzz.py tests/test_native_twins.py tests/test_native.py tests/verify/test_exponential.py \
		tests/verify/test_shortlist.py tests/sources/test_perturbed.py tests/sources/test_successor_table.py

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
