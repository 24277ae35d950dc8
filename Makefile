# Every task of the project. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# What `make up` starts.
# ENVOY=1 puts Envoy before the routers: gRPC-Web and JSON too, at one port.
# ENCODE is by default 1 for a model that sees pictures, as the demonstration's does.
# MODE names one of the usual topologies: agg (whole requests on decode workers), disagg (prefill apart), epd (encode too).
MODE ?=
ENCODE ?= $(if $(MODE),$(if $(filter epd,$(MODE)),1,0))
PREFILL ?= $(if $(filter agg,$(MODE)),0,1)
ifneq ($(filter-out agg disagg epd,$(MODE)),)
$(error MODE=$(MODE): there are agg, disagg and epd)
endif
DECODE ?= 1
ROUTERS ?= 1
ENVOY ?=
ENGINE ?= pytorch
MODEL ?= models/demo

# What `make test` runs: `make test TESTS="tests/client -k doctor"`.
TESTS ?= tests
JOBS ?= 2

# Which programs of examples/ `make clients` builds and tests.
CLIENTS ?= python node go java cpp

# How much `make fuzz` sends.
INPUTS ?= 10000
# CI runs a failed test once more, and shows what failed at first; docs/decisions.md says why.
RERUNS := $(if $(CI),--reruns 1 --rerun-show-tracebacks -rfER)
# A test process that is stuck where its own time limits cannot reach it is ended, and another one goes on.
STUCK := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

INSTALLED := $(VENV)/.installed
PROTOS := $(shell find protos -name '*.proto')
STUBS := protos/descriptors.binpb
TRANSCODING := deploy/envoy/descriptors.binpb

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install protos docs envoy up down status logs doctor test faults clients web fuzz lint check format clean

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  make up ENCODE=$(or $(ENCODE),1) PREFILL=$(PREFILL) DECODE=$(DECODE) ENGINE=$(ENGINE) MODEL=$(MODEL)   (these are the defaults)"

install: $(INSTALLED) ## Create or renew .venv, at the versions of constraints.txt

$(INSTALLED): pyproject.toml constraints.txt tools/install.py
	@$(PYTHON) tools/install.py $(VENV)
	@touch $@

protos: $(STUBS) ## Install if needed, and generate the Python stubs and the descriptor set

$(STUBS): $(PROTOS) $(INSTALLED) tools/stubs.py
	@$(BIN)/python tools/stubs.py

docs: $(STUBS) ## Write docs/api.md from the comments of the protos
	@$(BIN)/python tools/api_docs.py

envoy: $(TRANSCODING) ## Write the descriptors that deploy/envoy/envoy.yaml transcodes JSON with

$(TRANSCODING): $(STUBS) deploy/envoy/http_rules.yaml tools/transcoding.py
	@$(BIN)/python tools/transcoding.py $@

up: $(STUBS) $(if $(ENVOY),$(TRANSCODING)) ## Start etcd, the workers and a router here, and wait for a first answer
	@$(BIN)/baton up$(if $(ENCODE), --encode $(ENCODE)) --prefill $(PREFILL) --decode $(DECODE) --engine $(ENGINE) --model $(MODEL)$(if $(filter-out 1,$(ROUTERS)), --routers $(ROUTERS))$(if $(ENVOY), --envoy)

down: ## End everything that `make up` started
	@test ! -x $(BIN)/baton || $(BIN)/baton down

status: $(STUBS) ## Show the processes of `make up`
	@$(BIN)/baton status

logs: $(STUBS) ## Follow the logs of `make up`
	@$(BIN)/baton logs --follow

doctor: $(STUBS) ## Say what is wrong with this installation
	@$(BIN)/baton doctor

test: $(STUBS) ## Run the tests (TESTS= selects, JOBS= runs so many at once)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(STUCK) $(RERUNS) $(TESTS) $(if $(filter tests,$(TESTS)),--ignore tests/faults)
	@$(if $(filter tests,$(TESTS)),$(MAKE) --no-print-directory faults SAMPLE=1)

faults: $(STUBS) ## Kill, pause, cut off and cancel everything at every step (SAMPLE=1: a few minutes of it)
	@BATON_FAULTS=$(if $(SAMPLE),sample,full) $(BIN)/python -m pytest -s -n 0 $(RERUNS) tests/faults

clients: $(STUBS) ## Build and test the clients in other languages (CLIENTS="python node" selects)
	@BATON_CLIENTS="$(CLIENTS)" $(BIN)/python -m pytest -n 0 tests/examples

web: ## Serve the chat page of examples/web at http://127.0.0.1:8090, for `make up ENVOY=1`
	@echo "http://127.0.0.1:8090 (Ctrl-C ends it)"
	@$(MAKE) --silent -C examples/web serve

fuzz: $(STUBS) ## Send INPUTS (10000) random messages to every service
	@BATON_FUZZ_INPUTS=$(INPUTS) $(BIN)/python -m pytest -n 0 --timeout=0 tests/fuzz

mutations: $(STUBS) ## Take each guard of the TensorRT-LLM engine away, and see that a test misses it (a quarter of an hour)
	@$(BIN)/python tools/mutate.py tools/mutations/trtllm.yaml --jobs $(JOBS)

lint: $(STUBS) ## Check style, types, import directions and protos
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@tools/buf/check.sh

check: lint test ## Everything that CI runs

format: $(STUBS) ## Put the code into shape
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

clean: down ## Remove what was generated, except .venv
	@rm -rf .baton dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis tools/buf/node_modules
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
	@find protos -name '*_pb2*.py*' -delete
	@for each in $(CLIENTS) web; do $(MAKE) --silent -C examples/$$each clean; done
	@rm -f $(STUBS) $(TRANSCODING)
