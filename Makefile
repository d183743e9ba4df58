# `make help` lists the targets. Nothing here is logic: each target is one or two commands.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= ViT-B-32
PRETRAINED ?= random
# Tiers that must be there when tests run; see CONTRIBUTING.md.
REQUIRE ?=
ARGS ?=
# What make demo writes last, and make demo-search needs.
SERVED := model_repository/clip_text_encoder/config.pbtxt

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-search test test-gpu check bless bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/installed ## make .venv with everything, and fetch the embedded Triton server

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV) || { echo "This Python has no venv. Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/clip-deploy server install
	touch $@

demo: setup ## the main job, end to end: MODEL and PRETRAINED choose the model
	$(BIN)/clip-deploy export $(MODEL) --pretrained $(PRETRAINED) --out build
	$(BIN)/clip-deploy render-config build --backend python --repository model_repository
	$(BIN)/clip-deploy smoke-test model_repository

demo-search: setup $(SERVED) ## the image search on what demo built, with photographs and its page; ARGS=--once ends it
	$(BIN)/python examples/demo_search.py model_repository $(ARGS)

$(SERVED):
	$(MAKE) demo

test: setup ## run the tests; REQUIRE=export,server,browser fails instead of skipping those tiers
	$(BIN)/python -m pytest --require '$(REQUIRE)' $(ARGS)

test-gpu: setup ## on a GPU machine: build plans and hold them against torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,gpu]'
	$(BIN)/python -m pytest --require gpu,export tests/test_gpu.py $(ARGS)

check: setup ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bless: setup ## rewrite golden files and generated docs
	$(BIN)/python -m pytest --bless -q tests/test_rendering.py tests/test_docs.py

bench: setup ## the ratios of benchmarks/
	$(BIN)/python benchmarks/main_path.py
	$(BIN)/python benchmarks/lint.py
	$(BIN)/python benchmarks/half.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/gateway.py

clean: ## remove what was built here, but not the environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find model_repository -mindepth 1 ! -name README.md -delete
