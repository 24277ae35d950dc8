# All tasks of the project; `make` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# What `make up` starts.
# ENVOY=1 puts Envoy before the routers: gRPC-Web and JSON too, at one port.
# MODE, ENCODE, PREFILL, DECODE, EMBED, DIFFUSE, ROUTERS and ENGINE are the options of `baton up`, which has their defaults.
MODE ?=
ENCODE ?=
PREFILL ?=
DECODE ?=
EMBED ?=
DIFFUSE ?=
ROUTERS ?=
ENVOY ?=
# OPENAI is the port of OpenAI's API over HTTP, 8000 if empty; 0 serves none.
OPENAI ?=
ENGINE ?=
# SHARE_GPUS=1 starts more workers than there are GPUs.
SHARE_GPUS ?=
MODEL ?= models/demo
UP := $(if $(MODE),--mode $(MODE)) $(if $(ENCODE),--encode $(ENCODE)) $(if $(PREFILL),--prefill $(PREFILL)) $(if $(DECODE),--decode $(DECODE)) $(if $(EMBED),--embed $(EMBED)) $(if $(DIFFUSE),--diffuse $(DIFFUSE)) $(if $(ROUTERS),--routers $(ROUTERS)) $(if $(ENVOY),--envoy) $(if $(OPENAI),--openai $(OPENAI)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(SHARE_GPUS),--share-gpus) --model $(MODEL)

# What `make test` runs: `make test TESTS="tests/devtools -k doctor"`.
TESTS ?= tests
# As many processes at once as fit this machine: one more than it has cores, if there is memory for them.
JOBS ?= auto
AT_ONCE = -n $(JOBS) --dist worksteal
# Which implementation of gRPC's server they run on: grpcio or http2; empty is the default.
SERVER ?=

# What of the tests `make test` leaves out, unless ALL=1 or TESTS= asks for it: the last -m counts.
ALL ?=
NOT_SLOW := -m 'not slow and not requires_sglang and not requires_trtllm and not requires_vllm'
MARKS := $(if $(ALL)$(filter-out tests,$(TESTS)),,$(NOT_SLOW))
# A sample of the faults runs among the other tests: it waits for most of its time.
SAMPLED_FAULTS := $(if $(MARKS),yes)

# Which programs of examples/ `make clients` builds and tests.
CLIENTS ?= python node go java cpp openai-clients

# The trace of `make bench-routing`; generated if empty.
TRACE ?=
# How much `make fuzz` sends.
INPUTS ?= 10000
# How much `make fuzz-http2` sends.
FRAMES ?= 1000000
# What `make simulate` runs: SEEDS of a PROFILE (plain, clients, one_fault, storm, all), or new ones for HOURS; LOG= is a file for
# the event log of one seed. `make shrink SEED=n PROFILE=p` makes a plan of it that is as small as possible.
SEEDS ?= 0:200
PROFILE ?= all
LOG ?=
SEED ?=
SIMULATE = PYTHONPATH=tests:. $(BIN)/python -m simulation
# What `make soak` sends: HOURS of RATE requests a second.
HOURS ?= 8
RATE ?= 4
# CI reruns a test once if its process crashed, and reports it. The pattern matches no failure, so failed tests are not rerun.
RERUNS := $(if $(CI),--reruns 1 --only-rerun '(?!)' --rerun-show-tracebacks -rfER)
# A test process that hangs where its own time limits cannot stop it is killed, and another one continues.
STUCK := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

# What `make gpu` runs, with the engine on the GPU.
ON_A_GPU := tests/services/engines/pytorch tests/services/engines/contract tests/services/transports/test_cuda_ipc.py tests/services/transports/test_nixl_on_a_gpu.py \
	tests/services/engines/memory/test_device_file.py tests/e2e/test_same_ids.py tests/faults/test_embedded_engine.py tests/faults/test_kept_handoffs.py

# What `make bench` measures: so many requests at once, in turn, each with prompts of ISL tokens and answers of OSL. URL= is a
# server of OpenAI's API in the place of this cluster; BENCH= has more options of `baton bench sweep`.
CONCURRENCY ?= 1 2 4 8 16 32
ISL ?= 512
OSL ?= 128
REQUESTS ?= 100
URL ?=
RESULTS ?= .baton/bench
BENCH ?=

# How many questions of each task `make eval` asks.
SAMPLES ?= 210

# What `make images` builds: of router, cpu, cuda and trtllm. BASE= is an image with Python, TORCH_INDEX= an index with a torch
# without CUDA, HOST_PIP=1 uses this machine's pip configuration. BASE=debian makes one from Debian's packages. PURE=1 compiles
# nothing of the router.
TARGETS ?= router cpu
BASE ?=
HOST_PIP ?=
PURE ?=
IMAGE_OPTIONS = $(if $(BASE),--base $(BASE)) $(if $(filter undefined,$(origin TORCH_INDEX)),,--torch-index "$(TORCH_INDEX)") $(if $(HOST_PIP),--host-pip) $(if $(PURE),--pure)

# COMPILED=1 has `make wheel` compile the router's hot modules to machine code.
COMPILED ?=

# What `make vllm` runs, and the environment that it runs in.
VLLM_PYTHON ?= python3.11
VLLM_VENV := .venv-vllm
ON_VLLM := tests/services/engines/contract tests/services/engines/vllm/test_vllm_handoff.py \
	tests/services/engines/vllm/test_vllm_options.py tests/services/engines/vllm/test_vllm_lora.py
# Two engines serve all tests of a run, so all of them share an event loop.
VLLM_LOOP := -o asyncio_default_test_loop_scope=session -o asyncio_default_fixture_loop_scope=session

INSTALLED := $(VENV)/.installed
PROTOS := $(shell find protos -name '*.proto')
STUBS := protos/descriptors.binpb
TRANSCODING := deploy/envoy/descriptors.binpb

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install protos docs envoy up engines down status logs doctor test test-grpcio faults gpu vllm vllm-faults vllm-install bench eval eval-install bench-router bench-long-prompts bench-routing images compose containers wheel compiled dashboards clients web fuzz fuzz-http2 simulate shrink mutants soak lint check format clean check-all mutations

help: ## List all tasks
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  make up takes MODE=agg|disagg|epd, ENCODE=, PREFILL=, DECODE=, EMBED=, DIFFUSE=, ROUTERS=, ENVOY=1, OPENAI=PORT, ENGINE=pytorch|simulated|vllm, SHARE_GPUS=1, MODEL=FOLDER"

install: $(INSTALLED) ## Create or update .venv, at the versions of constraints.txt

$(INSTALLED): pyproject.toml packaging/client/pyproject.toml packaging/http2/pyproject.toml constraints.txt tools/install.py
	@$(PYTHON) tools/install.py $(VENV)
	@touch $@

protos: $(STUBS) ## Install if needed, and generate the Python stubs and the descriptor set

$(STUBS): $(PROTOS) $(INSTALLED) tools/stubs.py
	@$(BIN)/python tools/stubs.py

docs: $(STUBS) ## Write docs/api.md from the comments of the protos
	@$(BIN)/python tools/api_docs.py

envoy: $(TRANSCODING) ## Write the descriptors with which deploy/envoy/envoy.yaml transcodes JSON

$(TRANSCODING): $(STUBS) deploy/envoy/http_rules.yaml tools/transcoding.py
	@$(BIN)/python tools/transcoding.py $@

up: $(STUBS) $(if $(ENVOY),$(TRANSCODING)) ## Start etcd, the workers and a router here, and wait for a first completion
	@$(BIN)/baton up $(strip $(UP))

# `mock` is another name of the simulated engine.
engines: ## Start N workers that run whole requests, and a router: ENGINE=mock (the default), pytorch or vllm
	@$(MAKE) --no-print-directory up MODE=agg DECODE=$(or $(N),1) ENGINE=$(patsubst mock,simulated,$(or $(ENGINE),mock))

down: ## Stop everything that `make up` started
	@test ! -x $(BIN)/baton || $(BIN)/baton down

status: $(STUBS) ## Show the processes of `make up`
	@$(BIN)/baton status

logs: $(STUBS) ## Follow the logs of `make up`
	@$(BIN)/baton logs --follow

doctor: $(STUBS) ## Diagnose this installation
	@$(BIN)/baton doctor

# Even where an image says that Python is to write none: each of the many processes that tests start would compile all again.
test faults: export PYTHONDONTWRITEBYTECODE :=

test: $(STUBS) ## Run the tests (TESTS= selects, ALL=1 adds slow ones, JOBS= sets how many run at once, SERVER=grpcio uses grpcio's server)
	@BATON_TEST_SERVER=$(SERVER) $(if $(SAMPLED_FAULTS),BATON_FAULTS=sample) $(BIN)/python -m pytest $(AT_ONCE) $(STUCK) $(RERUNS) $(MARKS) $(TESTS) $(if $(filter tests,$(TESTS)),--ignore tests/containers $(if $(SAMPLED_FAULTS),,--ignore tests/faults))

faults: $(STUBS) ## Inject faults at every step of requests (SAMPLE=1: a few minutes of it)
	@BATON_FAULTS=$(if $(SAMPLE),sample,full) $(BIN)/python -m pytest $(if $(SAMPLE),$(AT_ONCE) $(NOT_SLOW),-s -n 0) tests/faults

gpu: $(STUBS) ## On a machine with an NVIDIA GPU: the suites that compute run on it, then the benchmarks
	@BATON_TEST_DEVICE=cuda BATON_FAULTS=full $(BIN)/python -m pytest -n 0 $(STUCK) $(ON_A_GPU)
	@PYTHONPATH=. $(BIN)/python benchmarks/gpu.py

vllm-install: $(STUBS) ## Create or complete .venv-vllm, with vLLM's build for CPUs (3.4 GB)
	@$(VLLM_PYTHON) tools/install_vllm.py $(VLLM_VENV)

vllm: vllm-install ## Run vLLM's contract, handoffs and faults, on CPUs (5 to 10 minutes)
	@PYTHONPATH=. $(VLLM_VENV)/bin/python -m pytest -p no:cacheprovider --timeout=900 $(VLLM_LOOP) -m requires_vllm $(ON_VLLM)
	@PYTHONPATH=. $(VLLM_VENV)/bin/python -m pytest -p no:cacheprovider -m requires_vllm tests/services/engines/vllm/test_vllm_process.py tests/services/engines/vllm/test_vllm_images.py tests/services/engines/vllm/test_vllm_answers_about_images.py

vllm-faults: vllm-install ## Inject faults into workers on vLLM, on CPUs (10 minutes; BATON_FAULTS=full runs the whole matrix, 40 minutes)
	@PYTHONPATH=. $(VLLM_VENV)/bin/python -m pytest -s -p no:cacheprovider -m requires_vllm tests/faults/test_vllm.py

bench: $(STUBS) ## Measure what `make up` runs, and write JSON, Markdown and a plot (URL=, MODE=agg|disagg, ISL=, OSL=, CONCURRENCY=, REQUESTS=, RESULTS=FOLDER)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt "matplotlib>=3.8"
	@mkdir -p $(RESULTS)
	@$(BIN)/baton bench sweep --wait 120 --warmup 16 --concurrency $(CONCURRENCY) --isl $(ISL) --osl $(OSL) --request-count $(REQUESTS) \
		$(if $(URL),--url $(URL)) $(if $(MODE),--mode $(MODE)) \
		--json $(RESULTS)/bench.json --markdown $(RESULTS)/bench.md --plot $(RESULTS)/bench.png $(BENCH)

eval-install: $(STUBS) ## Create .venv-eval, with lm-eval (650 MB)
	@$(BIN)/python tools/install_eval.py .venv-eval

eval: eval-install ## Evaluate the demonstration model by lm-eval, on the checkpoint and through Baton in several ways (SAMPLES=210 questions a task)
	@PYTHONPATH=. $(BIN)/python -m models.demo.eval.run --samples $(SAMPLES)

bench-router: $(STUBS) ## Compare the router, also compiled, with vllm-router, sglang-router, smg and Dynamo, from PyPI (15 minutes; BENCH= has options)
	@PYTHONPATH=. $(BIN)/python -m benchmarks.peers.environments $(filter --no-compiled,$(BENCH))
	@PYTHONPATH=. $(BIN)/python -m benchmarks.peers.compare --output benchmarks/results $(BENCH)

bench-long-prompts: $(STUBS) ## Compare what long prompts cost the router with what they cost vllm-router, sglang-router and smg (10 minutes)
	@PYTHONPATH=. $(BIN)/python -m benchmarks.peers.environments --no-compiled
	@PYTHONPATH=. $(BIN)/python -m benchmarks.peers.long_prompts --output benchmarks/results/long_prompts.md $(BENCH)

bench-routing: $(STUBS) ## Compare the routing policies in simulated time (TRACE=FILE replays one in Mooncake's format)
	@PYTHONPATH=. $(BIN)/python benchmarks/routing/simulation.py $(if $(TRACE),--trace $(TRACE),--seeds 1 2)

images: ## Build images with docker or podman (TARGETS="router cpu cuda trtllm", BASE=IMAGE|debian, TORCH_INDEX=URL, HOST_PIP=1, PURE=1)
	@$(PYTHON) -m tools.containers.images $(TARGETS) $(IMAGE_OPTIONS)

compose: $(STUBS) $(TRANSCODING) ## Run a Compose topology of these images through its life (MODE=agg|disagg|epd|envoy)
	@$(BIN)/python -m tools.containers.compose $(or $(MODE),disagg)

containers: $(STUBS) $(TRANSCODING) ## Build images and test them in containers; as root, with podman: tools/install_system_packages.sh containers
	@$(BIN)/python -m pytest -s -n 0 --timeout=0 tests/containers

wheel: $(STUBS) ## Build the three wheels into dist/ (COMPILED=1 compiles the router's hot modules, with mypyc and a C compiler)
	@cd packaging/client && $(abspath $(BIN))/python -m hatchling build --target wheel --directory $(CURDIR)/dist
	@cd packaging/http2 && HATCH_BUILD_HOOK_ENABLE_CUSTOM=$(if $(COMPILED),true,false) $(abspath $(BIN))/python -m hatchling build --target wheel --directory $(CURDIR)/dist
	@HATCH_BUILD_HOOK_ENABLE_CUSTOM=$(if $(COMPILED),true,false) $(BIN)/python -m hatchling build --target wheel --directory dist

compiled: $(STUBS) ## Compile the router's hot modules outside the checkout, and test them (minutes)
	@$(BIN)/python -m tools.compiled

dashboards: $(STUBS) ## Draw Grafana's dashboards from a run with a fault, as docs/images/dashboard_*.png; needs prometheus
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt "matplotlib>=3.8"
	@PYTHONPATH=tests:. $(BIN)/python -m tools.dashboards

clients: $(STUBS) ## Build and test the clients in other languages (CLIENTS="python node" selects)
	@BATON_CLIENTS="$(CLIENTS)" $(BIN)/python -m pytest -n 0 tests/examples

web: ## Serve the chat page of examples/web at http://127.0.0.1:8090, for `make up ENVOY=1`
	@echo "http://127.0.0.1:8090 (Ctrl-C ends it)"
	@$(MAKE) --silent -C examples/web serve

fuzz: $(STUBS) ## Send INPUTS (10000) random messages to every service
	@BATON_FUZZ_INPUTS=$(INPUTS) $(BIN)/python -m pytest -n 0 --timeout=0 tests/fuzz

fuzz-http2: $(STUBS) ## Send FRAMES (1,000,000) mutated frames to our own HTTP/2 server, and as many to its client
	@BATON_HTTP2_FRAMES=$(FRAMES) $(BIN)/python -m pytest -n 0 --timeout=0 tests/http2/test_mutated_frames.py tests/http2/test_client_mutated_frames.py

simulate: $(STUBS) ## Run the fleet in virtual time, by seeds (SEEDS=0:200 PROFILE=plain|clients|one_fault|storm|all, LOG=FILE for one; HOURS=8 runs new ones)
	@$(SIMULATE) --profile $(PROFILE) $(if $(LOG),--log $(LOG) --seeds $(SEEDS),--quiet $(if $(filter command line environment,$(origin HOURS)),--kept --seeds $$(date +%s): --seconds $$(($(HOURS) * 3600)),--kept --seeds $(SEEDS)))

shrink: $(STUBS) ## Find the smallest plan in which a seed still finds the same, and keep it (SEED=, PROFILE=)
	@$(SIMULATE) --profile $(PROFILE) --shrink $(SEED)

mutants: $(STUBS) ## Plant bugs, one at a time, and tell how long the simulation takes to find each (up to 10 minutes each)
	@PYTHONPATH=tests:. $(BIN)/python -m simulation.mutants

soak: $(STUBS) ## Send HOURS (8) of RATE (4) requests a second through our own HTTP/2, as fast as it goes, and look for growth (20 minutes)
	@PYTHONPATH=tests:. $(BIN)/python -m benchmarks.soak --hours $(HOURS) --rate $(RATE)

mutations: $(STUBS) ## Remove each guard of the TensorRT-LLM engine, and verify that a test fails (15 minutes)
	@$(BIN)/python tools/mutate.py tools/mutations/trtllm.yaml --jobs $(JOBS:auto=2)

lint: $(STUBS) ## Check style, types, import directions and protos
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@tools/buf/check.sh

check: $(STUBS) ## Everything that CI runs; the lint, of which most is one process, beside the tests on grpcio's server
	@$(MAKE) --no-print-directory --jobs 2 lint test-grpcio JOBS=1
	@$(MAKE) --no-print-directory test

test-grpcio: $(STUBS) ## Run the tests of rpc on grpcio's server, too
	@$(MAKE) --no-print-directory test TESTS="tests/rpc tests/engine_protocol -m 'not slow'" SERVER=grpcio

check-all: export BATON_DASHBOARD_ROUNDS := 60
check-all: lint ## Everything: also slow tests, on both servers, all faults, and fuzzing in full (hours)
	@$(MAKE) --no-print-directory test ALL=1 SERVER=grpcio
	@$(MAKE) --no-print-directory test ALL=1 SERVER=http2
	@$(MAKE) --no-print-directory faults
	@$(MAKE) --no-print-directory fuzz
	@$(MAKE) --no-print-directory fuzz-http2
	@$(MAKE) --no-print-directory compiled

format: $(STUBS) ## Format the code
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

clean: down ## Remove generated files, except .venv
	@rm -rf .baton dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis tools/buf/node_modules
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
	@rm -rf baton/engine baton/etcd baton/inference
	@for each in $(CLIENTS) web; do $(MAKE) --silent -C examples/$$each clean; done
	@rm -f $(STUBS) $(TRANSCODING)
