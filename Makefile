# Everything a person or CI does here. Each target sets up what it needs; the second time that takes seconds.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMOED := $(VENV)/.installed-demo
DOCS   := .venv-docs
DOCSED := $(DOCS)/.installed
MIKE    = NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(DOCS))/bin:$$PATH" mike
NAMES  ?= dev
PUSH   ?= --push
# pip would compile every module of every package, half of its processor time; Python compiles and keeps those that are imported.
PIP    := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --progress-bar off --constraint constraints.txt
ARGS   ?=
COMMA  := ,
# Half of the time of a test is waiting, so two at once take little more than half as long. Each worker has up to 1 GB of modules.
WORKERS ?= 2
PEERS  := .venv-peers
PEERED := $(PEERS)/.installed
ENGINES  := .venv-engines
ENGINED  := $(ENGINES)/.installed
SHIM     := .venv-shim
SHIMMED  := $(SHIM)/.installed
VERL     := .venv-verl
VERLED   := $(VERL)/.installed
WEB      := .venv-web
WEBBED   := $(WEB)/.installed
OTHERS    := .venv-others
OTHERED   := $(OTHERS)/.installed
MOONCAKE  := .venv-mooncake
MOONCAKED := $(MOONCAKE)/.installed
NIXL      := .venv-nixl
NIXLED    := $(NIXL)/.installed
LINTERS   := .venv-linters
LINTED    := $(LINTERS)/.installed
STACKS    := .venv-stacks
STACKED   := $(STACKS)/.installed
NEMO      := .venv-nemo
NEMO_FROM ?= https://github.com/NVIDIA-NeMo/RL
NEMO_AT   ?= 7ea279abfbeb698b092856d0dab61e7cf39bc909
NEMOED    := $(NEMO)/.installed-$(NEMO_AT)
SLIME_FROM ?= https://github.com/THUDM/slime
SLIME_AT  ?= 624b824a898ab0ec1fcb4d373004c7f3852bf515
SLIMED    := $(NEMO)/.slime-$(SLIME_AT)
ROLL_FROM ?= https://github.com/alibaba/ROLL
ROLL_AT   ?= 8eb27cc2dc34c4d1310b169d9b86d339004d811a
ROLLED    := $(VERL)/.roll-$(ROLL_AT)

export PYTHONUTF8 := 1
# The tests start several hundred processes. Where the environment forbids to keep compiled modules, as images of containers do, each compiles
# the package anew, which is a quarter of their processor time.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: help setup check test docs docs-publish docs-pictures dist test-long test-all test-engines test-shim test-verl test-stacks test-nemo test-slime test-roll test-ray test-mooncake test-nixl test-gpu test-others test-web test-deploy engines-matrix fuzz soak demo bench bench-quick bench-micro lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything that checks, tests and the demo need

# torch goes first: its version is pinned to one that has a CPU build, and what follows must not pick another.
define INSTALL
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'make: $(PYTHON) is missing or older than Python 3.11; name another: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@test -x $(BIN)/python || { echo 'setup: creating $(VENV)'; $(PYTHON) -m venv $(VENV); }
	@echo 'setup: installing torch, then the package with [$(1)], as constraints.txt pins them'
	@$(PIP) torch hatchling
	@$(PIP) --no-build-isolation --editable '.[$(1)]'
	@touch $@
endef

# The demo alone needs less than the tools, which go into the same environment.
$(DEMOED): pyproject.toml constraints.txt
	$(call INSTALL,demo)

$(STAMP): pyproject.toml constraints.txt
	$(call INSTALL,demo$(COMMA)dev)
	@touch $(DEMOED)

check: $(STAMP) ## ruff, mypy --strict, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

test: check ## the checks, then the tests, WORKERS at once (minutes); ARGS goes to pytest, -n 0 in it: one after another
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-long: $(STAMP) ## tests that only repeat, with many seeds, kills, rows and examples (half an hour)
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -m 'long or hypothesis' --timeout 1200 $(ARGS)

TARGETS ?= test test-ray test-engines test-shim test-verl test-stacks test-nemo test-slime test-roll test-mooncake test-nixl test-gpu test-others test-web test-deploy
test-all: ## every test target but test-long, one after another, and a table of them; TARGETS="test-ray test-web": these
	@$(PYTHON) -m tests.targets $(TARGETS)

# What builds the site reads the package's source and does not import it: an environment of its own, without torch.
$(DOCSED): pyproject.toml constraints.txt
	@test -x $(DOCS)/bin/python || { echo 'docs: creating $(DOCS) with what builds the site'; $(PYTHON) -m venv $(DOCS); }
	@$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])" | \
		xargs $(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --constraint constraints.txt
	@touch $@

# The site needs no network once this is installed: pages fetch nothing, and search is theirs.
docs: $(DOCSED) ## the documentation as a site in build/docs: strict, links, anchors and twenty searches checked (half a minute; ARGS goes to mkdocs)
	$(DOCS)/bin/python docs/site/prepare.py build/docs-source
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml $(ARGS)
	$(DOCS)/bin/python docs/site/searches.py build/docs
	@echo 'docs: open build/docs/index.html, or, for its search, python -m http.server --directory build/docs'

docs-publish: docs ## the site as one version on the branch gh-pages, beside the others (NAMES="v0.1.0 latest"; PUSH= pushes nothing)
	$(MIKE) deploy --config-file docs/site/mkdocs.yml --update-aliases $(PUSH) $(NAMES)
	$(MIKE) set-default --config-file docs/site/mkdocs.yml $(PUSH) $$($(MIKE) list --config-file docs/site/mkdocs.yml latest >/dev/null 2>&1 && echo latest || echo dev)

docs-pictures: docs $(WEBBED) ## each page of the site in Chromium, on a desktop and a phone: is anything cut off? Pictures in build/pictures (3 minutes)
	$(WEB)/bin/python -m tests.web.site_pictures build/docs --out build/pictures

dist: $(STAMP) ## wheel and sdist in dist/, twine check, the first pages in a bare environment of each Python (ARGS="--python PATH")
	$(BIN)/python -m tests.dist $(ARGS)

demo: $(DEMOED) ## asynchronous GRPO of a small transformer, every stage a process; ARGS goes to `transferqueue demo`
	$(BIN)/transferqueue demo $(ARGS)

# The incumbent's wheel installs top-level packages named tests, scripts and more: an environment of its own. Without
# Redis or the peers, `make bench` still runs and says what it left out.
$(PEERED): bench/peers.txt
	@test -x $(PEERS)/bin/python || { echo 'bench: creating $(PEERS) for what we are compared with'; $(PYTHON) -m venv $(PEERS); }
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off 'torch==2.13.0' && \
		$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --requirement bench/peers.txt && \
		touch $@ || echo 'bench: the peers could not be installed; the record will say that they were not measured' >&2

# vLLM's CPU build and what it pins: an environment of its own. Its torchvision is a build for CUDA, which would break
# the import of transformers.
$(ENGINED): tests/engines/engines.txt pyproject.toml
	@test -x $(ENGINES)/bin/python || { echo 'engines: creating $(ENGINES) with vLLM (CPU), transformers and TRL'; $(PYTHON) -m venv $(ENGINES); }
	@$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off 'torch==2.13.0'
	@$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --requirement tests/engines/engines.txt
	@$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

test-engines: $(ENGINED) ## the adapters against real engines: vLLM (CPU), transformers, TRL (minutes; ARGS goes to pytest)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(ENGINES)/bin/python -m pytest -m '' tests/engines tests/cluster/test_job_on_ray.py $(ARGS)

engines-matrix: $(ENGINED) ## test-engines, and the tables of docs/reference/engines.md from what the conformance kits found
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(ENGINES)/bin/python -m pytest -m '' tests/engines --conformance docs/conformance $(ARGS)
	$(ENGINES)/bin/python -m tests.engines.matrix --records docs/conformance --into docs/reference/engines.md

fuzz: $(STAMP) ## typed extremes and kills, attacks on the bulk port, mutated frames, garbage (2 minutes; ARGS: --messages N, --seed N, ...)
	$(BIN)/python -m tests.fuzz $(ARGS)

SEED ?= 0
soak: test-long ## test-long, then simulator, fuzz, damaged files, chaos, all long (over an hour; SEED=N begins elsewhere)
	$(BIN)/python -m tests.simulator --seeds 10000 --first $(SEED)
	for kind in mixed disk backlog full-disk interned interned-disk continued continued-disk; do \
		$(BIN)/python -m tests.simulator --kind crowded-$$kind --seeds 2000 --first $(SEED) || exit 1; done
	$(BIN)/python -m tests.fuzz --frames 5000000 --messages 1000000 --attacks 20000 --seed $(SEED)
	$(BIN)/python -m tests.damage state --count 10000 --seed $(SEED)
	$(BIN)/python -m tests.damage snapshots --count 10000 --seed $(SEED)
	$(BIN)/python -m tests.chaos --seconds 180 --seed $(SEED)
	$(BIN)/python -m tests.chaos --seconds 60 --seed $(SEED) --spill

$(SHIMMED): tests/engines/shim.txt pyproject.toml
	@test -x $(SHIM)/bin/python || { echo 'shim: creating $(SHIM) with TransferQueue 0.1.11 and Ray'; $(PYTHON) -m venv $(SHIM); }
	@$(SHIM)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off 'torch==2.13.0'
	@$(SHIM)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --requirement tests/engines/shim.txt
	@$(SHIM)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

test-shim: $(SHIMMED) ## the drop-in for transfer_queue, by its own tests and against the original's public tests (3 minutes)
	$(SHIM)/bin/python -m pytest tests/engines/test_shim.py tests/adapters/test_transfer_queue_*.py $(ARGS)

$(VERLED): tests/engines/verl.txt pyproject.toml
	@test -x $(VERL)/bin/python || { echo 'verl: creating $(VERL) with verl 0.9.1 and what its data path needs'; $(PYTHON) -m venv $(VERL); }
	@$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off 'torch==2.13.0'
	@$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --requirement tests/engines/verl.txt
	@$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --no-deps 'verl==0.9.1'
	@$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

test-verl: $(VERLED) ## verl 0.9.1's agent loop, replay buffer, bridge, padding and checkpoint on the drop-in; its losses beside ours (a minute)
	$(VERL)/bin/python -m pytest tests/engines/test_verl.py tests/engines/test_loss_agreement.py tests/engines/test_adopt_stacks.py $(ARGS)

# verl's trainer whole, beside the original: its Ray workers import one or the other by their PYTHONPATH.
$(STACKED): tests/engines/stacks.txt pyproject.toml
	@test -x $(STACKS)/bin/python || { echo 'stacks: creating $(STACKS) with verl 0.9.1, its trainer and TransferQueue 0.1.11'; $(PYTHON) -m venv $(STACKS); }
	@$(STACKS)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off 'torch==2.13.0'
	@$(STACKS)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --requirement tests/engines/stacks.txt
	@$(STACKS)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --no-deps 'verl==0.9.1'
	@$(STACKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

test-stacks: $(STACKED) ## verl 0.9.1 trains on a CPU over Ray, on the original, on the drop-in and beside the adopted job: the same results (minutes; ARGS goes to pytest)
	RAY_ADDRESS=local $(STACKS)/bin/python -m pytest -m '' tests/engines/test_stacks.py tests/engines/test_adopt_verl.py $(ARGS)

# Some folders of a public repository, of one commit: where to, from where, which commit, which folders. Where from may also be a copy on this
# machine (make test-roll ROLL_FROM=/path/to/ROLL), of which only those folders need be whole: git serves a part of it, as the public one does.
define SOURCE
	@rm -rf $(1) && git init --quiet $(1)
	@git -C $(1) remote add origin $(2)
	@git -C $(1) config remote.origin.uploadpack 'git -c uploadpack.allowFilter=true -c uploadpack.allowAnySHA1InWant=true upload-pack'
	@git -C $(1) sparse-checkout set $(4)
	@git -C $(1) fetch --quiet --depth 1 --filter=blob:none origin $(3)
	@git -C $(1) checkout --quiet FETCH_HEAD
endef

# The folders of its source that the data plane and its tests are in, of one commit. It asks for a newer Python than its data plane needs.
$(NEMOED): tests/engines/nemo.txt pyproject.toml
	@test -x $(NEMO)/bin/python || { echo 'nemo: creating $(NEMO) with the data plane of NeMo-RL and what it needs'; $(PYTHON) -m venv $(NEMO); }
	@$(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off 'torch==2.13.0'
	@$(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --requirement tests/engines/nemo.txt
	$(call SOURCE,$(NEMO)/src,$(NEMO_FROM),$(NEMO_AT),nemo_rl tests/unit/data_plane)
	@$(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --ignore-requires-python --editable $(NEMO)/src
	@$(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

test-nemo: $(NEMOED) ## NeMo-RL's data plane on the queue, by its own tests too (a minute; NEMO_AT=main: as it is today)
	RAY_ADDRESS=local $(NEMO)/bin/python -m pytest tests/engines/test_nemo.py $(ARGS)

# slime's own package alone, of one commit: its data source needs neither SGLang nor Megatron, and nothing that NeMo-RL's data plane does not.
$(SLIMED): $(NEMOED)
	$(call SOURCE,$(NEMO)/slime,$(SLIME_FROM),$(SLIME_AT),slime)
	@touch $@

test-slime: $(SLIMED) ## slime's data source with its buffer in the queue, on slime's code (minutes; SLIME_AT=main: as it is today)
	PYTHONPATH=$(NEMO)/slime $(NEMO)/bin/python -m pytest tests/engines/test_slime.py tests/engines/test_adopt_stacks.py $(ARGS)

# ROLL's own package alone, of one commit, with the patch that its users apply: its batches need nothing that verl's data path does not.
$(ROLLED): $(VERLED) examples/stacks/roll.patch
	$(call SOURCE,$(VERL)/roll,$(ROLL_FROM),$(ROLL_AT),roll)
	@git -C $(VERL)/roll apply --unidiff-zero ../../examples/stacks/roll.patch
	@touch $@

test-roll: $(ROLLED) ## ROLL's batches in the drop-in, on ROLL's code over Ray (a minute; ROLL_AT=main: as it is today)
	PYTHONPATH=$(VERL)/roll $(VERL)/bin/python -m pytest tests/engines/test_roll.py $(ARGS)

test-ray: $(SHIMMED) ## a deployment, and a training job, on Ray clusters of several nodes (minutes)
	$(SHIM)/bin/python -m pytest tests/cluster tests/deploy $(ARGS)

$(MOONCAKED): tests/engines/mooncake.txt pyproject.toml
	@test -x $(MOONCAKE)/bin/python || { echo 'mooncake: creating $(MOONCAKE) with Mooncake Store; libibverbs1 and librdmacm1 come from the system'; $(PYTHON) -m venv $(MOONCAKE); }
	@$(MOONCAKE)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --requirement tests/engines/mooncake.txt
	@$(MOONCAKE)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

test-mooncake: $(MOONCAKED) ## shards whose bytes lie in a real Mooncake Store (a minute; skipped without libibverbs1 and librdmacm1)
	$(MOONCAKE)/bin/python -m pytest tests/engines/test_mooncake.py $(ARGS)

# Without what its wheels ask for: torch and a second CUDA build, which nothing here uses.
$(NIXLED): tests/engines/nixl.txt pyproject.toml
	@test -x $(NIXL)/bin/python || { echo 'nixl: creating $(NIXL) with NIXL and what the tests need'; $(PYTHON) -m venv $(NIXL); }
	@$(NIXL)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@$(NIXL)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --requirement tests/engines/nixl.txt
	@$(NIXL)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

test-nixl: $(NIXLED) ## columns read and put one-sided by NIXL, over TCP and between processes of this host (5 minutes; ARGS="-m long": chaos on both, 7 minutes)
	$(NIXL)/bin/python -m pytest tests/engines/test_nixl.py $(ARGS)

# A torch for CUDA is the user's: GPU_PYTHON is a python that has it, and what the package and its tests need; nothing is installed then.
GPU_PYTHON ?=
test-gpu: $(if $(GPU_PYTHON),,$(STAMP)) ## columns on a GPU: bytes and figures (a minute; skipped without CUDA); GPU_PYTHON=python3: one with a torch for CUDA
	PYTHONPATH=. $(or $(GPU_PYTHON),$(BIN)/python) -m pytest tests/gpu -s -m '' $(ARGS)

$(OTHERED): tests/others.txt pyproject.toml
	@test -x $(OTHERS)/bin/python || { echo 'others: creating $(OTHERS) with OpenTelemetry, polars, pandas, duckdb, datasets and Jupyter'; $(PYTHON) -m venv $(OTHERS); }
	@$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --requirement tests/others.txt
	@$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

test-others: $(OTHERED) ## with libraries that few need: traces by OpenTelemetry, data frames in and out, a snapshot in polars and duckdb, the notebook in Jupyter (seconds)
	$(OTHERS)/bin/python -m pytest tests/observe/test_tracing.py tests/adapters/test_snapshot_readers.py tests/client/test_data_frame_libraries.py tests/examples/test_notebook.py tests/storage/test_row_files.py tests/bench/test_record_queries.py $(ARGS)

$(WEBBED): tests/web/browser.txt pyproject.toml
	@test -x $(WEB)/bin/python || { echo 'web: creating $(WEB) with selenium; Chromium and chromedriver come from the system'; $(PYTHON) -m venv $(WEB); }
	@$(WEB)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --requirement tests/web/browser.txt
	@$(WEB)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

test-web: $(WEBBED) ## the page in headless Chromium (seconds; skipped without chromium and chromedriver)
	$(WEB)/bin/python -m pytest tests/web/test_browser.py tests/web/test_rollouts.py tests/web/test_rollouts_browser.py $(ARGS)

$(LINTED): tests/deploy/linters.txt pyproject.toml
	@test -x $(LINTERS)/bin/python || { echo 'deploy: creating $(LINTERS) with actionlint, hadolint, shellcheck and schemas'; $(PYTHON) -m venv $(LINTERS); }
	@$(LINTERS)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --requirement tests/deploy/linters.txt
	@$(LINTERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

test-deploy: $(LINTED) ## workflows, container and compose file, manifests and scripts, by linters and the schemas of their formats (seconds)
	$(LINTERS)/bin/python -m pytest tests/deploy/test_linters.py tests/deploy/test_files.py tests/deploy/test_grafana.py $(ARGS)

bench: $(STAMP) $(PEERED) ## the queue beside its peers and the machine's limits: record, table (25 minutes)
	$(BIN)/python -m bench.run $(ARGS)
	$(BIN)/python -m bench.table

bench-quick: $(STAMP) $(PEERED) ## what the table of required figures needs (4 minutes)
	$(BIN)/python -m bench.run --quick $(ARGS)
	$(BIN)/python -m bench.table

bench-micro: $(STAMP) ## ledger, codec, storage, one operation at a time (pytest-benchmark)
	$(BIN)/python -m pytest bench/micro -p no:cacheprovider --benchmark-columns=median,iqr,min,rounds $(ARGS)

lock: $(STAMP) $(DOCSED) ## rewrite constraints.txt from what is installed now
	@{ echo '# What `make setup` installs, pinned; written by `make lock`.'; \
	   { $(BIN)/python -m pip freeze --exclude-editable; $(DOCS)/bin/python -m pip freeze; } | sed 's/+cpu$$//' | LC_ALL=C sort -fu; } > constraints.txt
	@touch $(DEMOED) $(STAMP) $(DOCSED)

clean: ## remove .venv, .venv-peers, caches, builds (runs/ stays)
	rm -rf $(VENV) $(PEERS) $(ENGINES) $(SHIM) $(VERL) $(STACKS) $(WEB) $(NEMO) $(MOONCAKE) $(NIXL) $(OTHERS) $(DOCS) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
