# Everything a newcomer needs: `make demo` and `make test` install what they use. `make help` lists the rest.

PYTHON ?= python3
# `make test TORCH=2.14.1` tests with that version, in a virtual environment of its own.
TORCH  ?=
VENV   := .venv$(if $(TORCH),-torch-$(TORCH))
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Tests start a thousand processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-daemon test test-all tools quick mutate lint size types check format sim docs tables frameworks soak soak-sharded proof slurm benchmark torchft scale steps watching checkpoints sharded faults gpu page-picture clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 13

$(READY): pyproject.toml constraints-dev.txt
	@.ci/system-packages python
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' constraints-dev.txt >$(VENV)/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)  ## train digits on three nodes while a worker and a node are killed, one comes back and one leaves
	$(BIN)/python examples/demo.py

demo-daemon: $(READY)  ## three daemons and two jobs that share them; a daemon is killed and comes back
	$(BIN)/python examples/demo_daemon.py

TESTS_AT_ONCE ?= 4
# A file's tests run in one process, one after the other. tests/conftest.py puts the files of minutes first.
PYTEST = $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile --no-loadscope-reorder
test: $(READY) tools  ## the tests that each change must pass, in 10 to 12 minutes on 2 cores; what cannot run here is skipped
	$(PYTEST)

test-all: $(READY) tools  ## all tests, also those marked `long`: before a release
	$(PYTEST) -m 'long or not long'

tools: $(READY)
	@.ci/system-packages prometheus etcd network browser systemd
	@.ci/kubernetes-tools $(VENV)

# What needs neither torch nor another process, and draws no examples.
QUICK = $(shell grep -LwE 'torch|subprocess|hypothesis' tests/unit/test_*.py)
quick: $(READY)  ## the inner loop, in a minute: unit tests without torch, a short simulation, the contract of stores in memory
	SIMULATOR_SEEDS=30 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(QUICK) \
	    tests/sim/test_promises.py::test_no_seed_breaks_a_promise
	$(BIN)/python -m pytest -q tests/contract/test_store.py -k memory

MECHANISMS ?=
mutate: $(READY)  ## take out one mechanism of a promise after the other: a test must fail (MECHANISMS='I5 lease')
	$(BIN)/python -m tests.mutations $(MECHANISMS)

lint: $(READY) size  ## ruff: rules and format; and no folder has grown
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .

size: $(READY)  ## lines and files of the product's folders, against what they may be
	@$(BIN)/python .ci/size

types: $(READY)  ## mypy --strict over the package
	$(BIN)/mypy

check: lint types test  ## what CI runs

format: $(READY)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

SEEDS ?= 100000
sim: $(READY)  ## the long simulation: SEEDS=100000 seeds
	SIMULATOR_SEEDS=$(SEEDS) $(BIN)/python -m pytest tests/sim -k no_seed --timeout 0

KILLS ?= 200
SEED ?= 1
JOBS ?= 64
# In a virtual environment of its own: nothing of it is needed to run, test or develop.
DOCS := build/docs-venv
docs:  ## the documentation as a site, in build/site; fails for a link that leads nowhere
	@.ci/system-packages python
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check 'mkdocs-material>=9' 'mkdocstrings[python]>=1' ruff
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

tables: $(READY)  ## write the tables of the pages anew from the code's own: options, exit codes, metrics, causes
	$(BIN)/python -m docs.tables

# In a virtual environment of its own, too: users need none of these libraries.
FRAMEWORKS := build/frameworks-venv
frameworks:  ## transformers, Lightning, Accelerate, TorchX and Ultralytics, unmodified: workers killed, nodes join and leave
	@.ci/system-packages python
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -c constraints-dev.txt '.[frameworks]' \
	    pytest pytest-timeout hypothesis matplotlib opencv-python-headless polars psutil requests
	# By itself it would bring torchvision, whose wheels need a torch that is built for GPUs.
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -c constraints-dev.txt --no-deps \
	    ultralytics ultralytics-thop
	# Not from here: Python would find the package in this folder.
	cd $(FRAMEWORKS) && bin/python -m pytest -c $(CURDIR)/pyproject.toml -s --timeout 400 $(CURDIR)/tests/frameworks

soak: $(READY)  ## KILLS=200 kills of random workers, agents and nodes, with planned leaves between them, drawn from SEED=1; JOBS=64 jobs at once; a minute without etcd
	@.ci/system-packages etcd network
	SOAK_KILLS=$(KILLS) SOAK_SEED=$(SEED) SOAK_JOBS=$(JOBS) $(BIN)/python -m pytest -s -m 'long or not long' \
	    tests/chaos/test_soak.py tests/chaos/test_many_jobs.py
	STORE_OUTAGE_S=60 $(BIN)/python -m pytest tests/system/test_etcd_members.py -k gone_for_longer_than_a_lease

SHARDED_KILLS ?= 50
soak-sharded: $(READY)  ## SHARDED_KILLS=50 kills of random workers and nodes that train examples/elastic_fsdp.py, drawn from SEED=1
	@.ci/system-packages etcd
	SOAK_KILLS=$(SHARDED_KILLS) SOAK_SEED=$(SEED) $(BIN)/python -m pytest tests/chaos/test_sharded_soak.py -m long -s

proof: $(READY)  ## each kind of state through each disturbance, from memory, replicas and disk, in 15 to 30 minutes, and the table of it
	@.ci/system-packages etcd
	$(BIN)/python -m pytest tests/proof -m 'long or not long'

# As root. Slurm's daemons are the tests' own, on ports of this machine, without munge.
slurm: $(READY)  ## a real Slurm on this machine: srun, scancel, --signal, the time limit, 20 preemptions; SLURM_PREEMPTIONS=20
	@.ci/system-packages slurm
	SLURM_TESTS=1 $(BIN)/python -m pytest tests/slurm -v

benchmark: $(READY)  ## what faults cost, next to torchrun (and torchft, after `make torchft`), in one run
	@.ci/system-packages etcd network
	$(BIN)/python benchmarks/recovery.py

# In a folder of its own, beside the torch that is installed: nothing but the benchmark shall find it. torchft comes
# last, as pip puts each one's programs in place of those that are there.
TORCHFT := build/torchft
torchft: $(READY)  ## fetch torchft for the benchmark
	$(BIN)/pip install --quiet --disable-pip-version-check --target $(TORCHFT) --upgrade \
	    opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
	$(BIN)/pip install --quiet --disable-pip-version-check --target $(TORCHFT) --upgrade --no-deps torchft

steps: $(READY)  ## what step() costs, next to an empty Python call
	$(BIN)/python benchmarks/step_overhead.py

watching: $(READY)  ## what it costs to watch a job: hangs, stragglers, journal, evidence, next to the job with all that off
	$(BIN)/python benchmarks/watching.py

checkpoints: $(READY)  ## how long a checkpoint holds up training, next to torch's own
	$(BIN)/python benchmarks/checkpoint.py

faults: $(READY)  ## each kind of failure and hang: when it is seen, who is named, what is done; next to torchrun
	$(BIN)/python benchmarks/faults.py

sharded: $(READY)  ## what checkpoints of FSDP2's shards cost, and what faults cost with them, next to torch's own
	$(BIN)/python benchmarks/sharded.py

scale: $(READY)  ## seconds until N nodes form a world, next to torchrun's
	@.ci/system-packages etcd
	$(BIN)/python benchmarks/rendezvous_scale.py

# Not in the virtual environment of the others, whose torch is built for CPUs.
gpu:  ## pinning, and NCCL through a kill, on this machine's GPUs: PYTHON=... has a CUDA torch and '.[dev]'
	$(PYTHON) -m pytest tests/system/test_gpu.py -m long -rs -s

page-picture: $(READY)  ## take docs/page.png of a job of three agents, in four minutes, with Chromium
	@.ci/system-packages browser
	$(BIN)/python -m docs.page_picture docs/page.png

clean:  ## remove what the targets above made
	rm -rf .venv .venv-torch-* runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
