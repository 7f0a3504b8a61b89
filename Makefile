# Everything a developer runs. `make` alone lists the goals.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export OMP_NUM_THREADS ?= 1

BIN := .venv/bin
SOURCES := kvstore engine_adapters tests scripts
PYTEST_ARGS ?=

.PHONY: help env demo test check unit slow long torture matrix vllm vllm-bench proto format bench clean

help: ## list the goals
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: ## build .venv (again only when the pins changed)
	@scripts/env.sh

demo: env ## the main job on real input: a model's prefix goes in, survives a restart and comes back
	@$(BIN)/kvstore demo

test: check unit ## the fast stage: generated code, format, lint, types, tidy, tests

check: env ## everything of the fast stage except the tests; every check runs, also after one that failed
	@status=0; \
	run() { echo "$$*"; "$$@" || status=1; }; \
	run scripts/generate_proto.sh --check; \
	run $(BIN)/ruff format --check $(SOURCES); \
	run $(BIN)/ruff check $(SOURCES); \
	run $(BIN)/mypy; \
	exit $$status

unit: env ## the tests of the fast stage (PYTEST_ARGS="-k name" to select)
	$(BIN)/python -m pytest -m "not slow and not long" $(PYTEST_ARGS)

slow: env ## the tests that take longer
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=0 -o timeout=420 $(PYTEST_ARGS) || [ $$? = 5 ] # 5: no test is marked so

torture: env ## kill, stop and restart daemon and clients by a plan (SEED=1 SECONDS=60 KILLS=200 CLIENTS=3)
	$(BIN)/python -m tests.torture --seed $(or $(SEED),1) --seconds $(or $(SECONDS),60) \
		$(if $(KILLS),--kills $(KILLS)) $(if $(CLIENTS),--clients $(CLIENTS))

long: env ## the searches that take minutes each: crash points, rot, histories against the oracle
	$(BIN)/python -m pytest -m long -o faulthandler_timeout=0 -o timeout=3600 $(PYTEST_ARGS)

vllm: env ## the real vLLM with a real model, in an environment of its own (PYTEST_ARGS="-k name" to select)
	@mapfile -t folders < <(scripts/vllm_env.sh); trap 'rm -rf "$${folders[1]}"' EXIT; \
	KVSTORE_VLLM="$${folders[0]}:$${folders[1]}" $(BIN)/python -m pytest tests/engines \
		-o faulthandler_timeout=0 -o timeout=900 $(PYTEST_ARGS)

vllm-bench: env ## measure vLLM with the store (BENCH_ARGS="--quick --json FILE")
	@mapfile -t folders < <(scripts/vllm_env.sh); trap 'rm -rf "$${folders[1]}"' EXIT; \
	KVSTORE_VLLM="$${folders[0]}:$${folders[1]}" OMP_NUM_THREADS=1 $(BIN)/kvstore bench vllm $(BENCH_ARGS)

matrix: env ## the base install alone, under every generation of protobuf that engines ship
	scripts/base_matrix.sh

proto: ## regenerate the code from proto/ with the oldest supported toolchain
	scripts/generate_proto.sh

format: env ## format the code and apply the safe fixes
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: env ## measure (BENCH_ARGS="host put --json FILE")
	$(BIN)/kvstore bench $(BENCH_ARGS)

clean: ## remove what was built here (the data of a running daemon is not touched)
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
