# make serve   a cluster on this machine, until Ctrl-C
# make test    what CI runs: lint, types, import contracts, tests
# make test-all  also the tests marked slow, as a nightly run does
# make lint    without the tests;  make fmt  let ruff write;  make clean  remove what make made
#
# PYTHON=python3.12   another interpreter (3.11 or later)
# TORCH_INDEX=URL     extra package index, e.g. https://download.pytorch.org/whl/cpu for torch without CUDA

PYTHON ?= python3
TORCH_INDEX ?=
CONFIG ?= deploy/cluster.yaml
PYTEST_ARGS ?=
TEST_WORKERS ?= 2# each takes a core and about 2 GB
PYTEST = $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder
OPENAI_2 := openai==2.54.0 distro==1.9.0# the examples are tested with this major version of the client, too
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := cluster router encoder_service prefill_service decode_service kv_transfer bench tests
STAMP := $(VENV)/.installed-$(shell cat requirements/cpu.lock pyproject.toml | sha256sum | cut -c1-16)

.PHONY: serve test test-all lint fmt clean env
env: $(STAMP)

$(STAMP):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/cpu.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/openai-2 --upgrade $(OPENAI_2)
	$(BIN)/python -m cluster.model.cpu.build
	rm -f $(VENV)/.installed-*
	touch $@

serve: $(STAMP)
	@exec $(BIN)/python -m cluster.serving.launch $(CONFIG)

test: lint
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: lint
	$(PYTEST) $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

fmt: $(STAMP)
	$(BIN)/ruff check --fix $(PACKAGES)
	$(BIN)/ruff format $(PACKAGES)

clean:
	rm -rf $(VENV) build dist *.egg-info .ruff_cache .hypothesis .import_linter_cache
	find $(PACKAGES) -name __pycache__ -prune -exec rm -rf {} +
