# make demo    train a small GPT over four processes on this machine, about two minutes; with MODEL=bert,
#                 MODEL=t5 or MODEL=mamba another model, with MODEL=rl a GPT that learns from rewards
# make test    run the tests; with FILE=minimegatron/core/x.py, or with CHANGED=1 for what differs from the
#                 last commit, those that a change needs, in under two minutes
# make test-map  record which tests enter which file, for FILE and CHANGED; an hour
# make test-full  the same, and slower tests of the same things; its log is
#                 tests/full_log.jsonl
# make test-gloo  the tests whose ranks exchange tensors, as on systems without memory shared by ranks
# make test-stress  run those that start processes ten times beside busy loops; goes on where it stopped
# make lint    check style
# make docs    build the documentation into site/; make docs-serve shows it on this machine
# make docs-version  build it as one of several versions, into the branch gh-pages
# make release-check  sdist and wheel from what is committed, and a new user's first commands; into dist/
# make notebooks open the notebooks in JupyterLab
# make bench   measure speed beside megatron-core and others, about 45 minutes, into docs/benchmarks
# make gpu-check  checks the GPUs of this machine, each figure beside what was expected; without make
#                 and .venv: python3 -m tests.gpu
# make torch-check  the tests with the newest torch in a clone of this commit; notes the result for the
#                 page "Held against"; NEWER=torch==2.15.0 takes another
# make traces    record anew the runs that the documentation replays, into docs/recordings
# make rosetta  record anew what the installed megatron-core offers, for the page Rosetta
# make timeline  record four paced stages on real ranks and draw docs/images/timeline.png
#
# Each makes .venv first and installs there what it needs; release-check and torch-check use folders of
# their own. Settings, for example
# `make demo PYTHON=python3.12 LAYOUT="--pipeline-model-parallel-size 4"`:

PYTHON ?= python3
# The version the tests run with. Give another requirement, or one with a CPU-only build in pip's
# own configuration (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS), to download less.
TORCH  ?= torch==2.13.0
NPROC  ?= $(or $(NPROC_$(MODEL)),4)
# What to train: gpt, bert, t5, mamba or rl; see make demo MODEL=bert.
MODEL  ?= gpt
LAYOUT ?= $(LAYOUT_$(MODEL))

VENV   := .venv
BIN    := $(VENV)/bin

TP2_PP2 := --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

LAYOUT_gpt   := $(TP2_PP2)
LAYOUT_bert  := $(TP2_PP2)
LAYOUT_t5    := $(TP2_PP2) --pipeline-model-parallel-split-rank 1
LAYOUT_mamba := $(TP2_PP2)
LAYOUT_rl    := --pipeline-model-parallel-size 2
NPROC_rl     := 2

# T5 has as many layers twice, its encoder and its decoder. Weights that begin larger than usual let BERT
# and T5 find out sooner where to look.
SIZE_gpt   := --num-layers 4 --position-embedding-type rope --sample-tokens 150
SIZE_bert  := --num-layers 2 --position-embedding-type rope --init-method-std 0.12
SIZE_t5    := --num-layers 2 --decoder-seq-length 32 --init-method-std 0.06
SIZE_mamba := --num-layers 4 --hybrid-override-pattern MM*M --mamba-head-dim 24 --mamba-num-groups 2 \
  --mamba-state-dim 32 --sample-tokens 150

# BERT learns from every seventh token only: more steps, and shorter sequences, in which the neighbours
# are found sooner. 8 microbatches: --global-batch-size / (--micro-batch-size x copies of the model).
STEPS      := --seq-length 64 --max-position-embeddings 64 --micro-batch-size 8 --global-batch-size 64 \
  --train-iters 200
STEPS_bert := --seq-length 32 --max-position-embeddings 32 --micro-batch-size 16 --global-batch-size 128 \
  --train-iters 400

LAUNCH = OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(NPROC)

DEMO = $(or $(DEMO_$(MODEL)),$(DEMO_of_text))

DEMO_of_text = $(LAUNCH) -m minimegatron.pretrain_$(MODEL) \
  --hidden-size 96 --num-attention-heads 4 $(SIZE_$(MODEL)) \
  $(or $(STEPS_$(MODEL)),$(STEPS)) --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 30 \
  --adam-beta2 0.95 --weight-decay 0.1 --hidden-dropout 0 --attention-dropout 0 \
  --log-interval 25 --eval-iters 10 $(LAYOUT)

# 32 prompts x 8 answers are one batch of 4 microbatches, learned from twice: 100 rollouts. `rl.demo` runs
# it, then once more with rewards dealt out by lot, and fails if the one has learned less than 8 of 10
# answers, or the other anything.
SIZE_rl := --num-layers 2 --hidden-size 64 --num-attention-heads 4
DEMO_rl = $(LAUNCH) -m minimegatron.train_rl \
  $(SIZE_rl) --seq-length 8 --max-position-embeddings 8 --micro-batch-size 64 --global-batch-size 256 \
  --grpo-prompts-per-step 32 --grpo-group-size 8 --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.2 \
  --lr 1e-3 --lr-decay-style constant --train-iters 200 --log-interval 40 $(LAYOUT)
JUDGED_rl = $(BIN)/python -m minimegatron.rl.demo

.PHONY: bench gpu-check torch-check demo test test-map test-full test-gloo test-stress lint timeline traces \
  docs docs-serve docs-version release-check chromium notebooks

define OTHERS_gpt
Other layouts of the same model, one line each:
  make demo LAYOUT="--pipeline-model-parallel-size 4"                   four stages
  make demo LAYOUT="$(LAYOUT) --num-virtual-stages-per-pipeline-rank 2"
                                                                        virtual stages
  make demo LAYOUT="--tensor-model-parallel-size 2"                     two copies (dp=2)
  make demo LAYOUT="--context-parallel-size 2 --sample-tokens 0"        two ranks share a sequence
  make demo LAYOUT= NPROC=1                                             one process

A second token predicted too, by a layer more:
  make demo LAYOUT="--mtp-num-layers 1 --pipeline-model-parallel-size 2"

Experts in place of the MLPs, on as many ranks; about the same work per token:
  make demo LAYOUT="--num-experts 8 --expert-model-parallel-size 2 --moe-ffn-hidden-size 192 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01"

Other models through the same step: make demo MODEL=bert, MODEL=t5 or MODEL=mamba
The same model, learning from rewards: make demo MODEL=rl
endef

define OTHERS_bert
Other layouts of the same model, one line each:
  make demo MODEL=bert LAYOUT="--pipeline-model-parallel-size 4 --num-layers 4"
                                                                        four stages
  make demo MODEL=bert LAYOUT="--tensor-model-parallel-size 2"          two copies (dp=2)
  make demo MODEL=bert LAYOUT= NPROC=1                                  one process
endef

define OTHERS_t5
Other layouts of the same model, one line each:
  make demo MODEL=t5 LAYOUT="--pipeline-model-parallel-size 4 --pipeline-model-parallel-split-rank 2"
                                                                        four stages
  make demo MODEL=t5 LAYOUT="--tensor-model-parallel-size 2"            two copies (dp=2)
  make demo MODEL=t5 LAYOUT= NPROC=1                                    one process
endef

define OTHERS_mamba
Other layouts of the same model, one line each:
  make demo MODEL=mamba LAYOUT="--pipeline-model-parallel-size 4"       four stages
  make demo MODEL=mamba LAYOUT="--tensor-model-parallel-size 2"         two copies (dp=2)
  make demo MODEL=mamba LAYOUT= NPROC=1                                 one process
endef

define OTHERS_rl
Other layouts of the same model, one line each:
  make demo MODEL=rl LAYOUT="--tensor-model-parallel-size 2"            two ranks share each layer
  make demo MODEL=rl LAYOUT="--context-parallel-size 2"                 two ranks share each row
  make demo MODEL=rl LAYOUT= NPROC=1                                    one process
endef

# BERT and T5 read WordPiece, which is in the extra `data`.
demo: $(VENV)/.installed$(if $(filter bert t5,$(MODEL)),-data)
	$(if $(SIZE_$(MODEL)),,$(error MODEL is $(MODEL); give gpt, bert, t5, mamba or rl))
	$(info The command that runs now:)
	$(info )
	$(info $() $() $(DEMO))
	$(info )
	$(info $(OTHERS_$(MODEL)))
	$(info )
	@$(JUDGED_$(MODEL)) $(DEMO)

# Three workers on two processors: many tests wait. What takes longest comes first, see tests/conftest.py.
SPREAD := -n 3 --dist loadfile --no-loadscope-reorder

# Files, or the commit from which they differ; 1 stands for the last one. See tests/chosen.py.
FILE    :=
CHANGED :=
SINCE   := $(if $(filter 1,$(CHANGED)),HEAD,$(CHANGED))
CHOSEN   = tests.chosen $(FILE:%=--file %) $(if $(SINCE),--changed $(SINCE))

# The tests start some hundred processes: with this set, each would compile the package again.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.installed-conformance chromium
	$(BIN)/python -m $(strip $(if $(FILE)$(CHANGED),$(CHOSEN),pytest -v)) $(SPREAD)

# A `.pth` file in .venv starts the notes in each process, and is removed at the end.
test-map: export PYTHONDONTWRITEBYTECODE =
test-map: $(VENV)/.installed-conformance chromium
	$(BIN)/python -m tests.entering $(SPREAD)

test-full: export PYTHONDONTWRITEBYTECODE =
test-full: $(VENV)/.installed-conformance chromium
	$(BIN)/python -m tests.full $(SPREAD)

# What macOS has: `tests.ranks` lets ranks find no shared memory, and gloo carries all they exchange.
# Tests of shared memory itself are skipped.
test-gloo: export MINIMEGATRON_TESTS_WITHOUT_SHARED_MEMORY = 1
test-gloo: $(VENV)/.installed-conformance
	$(BIN)/python -m pytest -v $(SPREAD) -m 'processes and (full or not full)' \
	  tests/test_execution.py tests/test_failed_step.py tests/test_layout_parity.py tests/test_parity.py \
	  tests/conformance tests/convert tests/core tests/trace tests/training

# Every test that starts processes, STRESS_TIMES times, beside STRESS_BUSY processes that compute all the
# time, STRESS_WORKERS runs of pytest at once, each with STRESS_TOGETHER files of tests. The log is
# tests/stress_log.jsonl; hours on two processors.
STRESS_TIMES    ?= 10
STRESS_BUSY     ?= 4
STRESS_WORKERS  ?= 2
STRESS_TOGETHER ?= 4
test-stress: export PYTHONDONTWRITEBYTECODE =
test-stress: $(VENV)/.installed-conformance chromium
	STRESS_TIMES=$(STRESS_TIMES) STRESS_BUSY=$(STRESS_BUSY) STRESS_WORKERS=$(STRESS_WORKERS) \
	  STRESS_TOGETHER=$(STRESS_TOGETHER) $(BIN)/python -m tests.stress

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check minimegatron tests docs/tools
	$(BIN)/ruff format --check minimegatron tests docs/tools

bench: $(VENV)/.installed-conformance
	$(BIN)/python -m tests.benchmarks

# The page of what was found last is part of the site; see docs/tools/cases/gpu_page.py.
gpu-check: $(VENV)/.installed-conformance
	@$(BIN)/python -m tests.gpu

NEWER ?= torch
torch-check:
	@$(PYTHON) -m tests.torch_check --torch '$(NEWER)'

traces: $(VENV)/.installed
	$(BIN)/python docs/tools/record.py traces

rosetta: $(VENV)/.installed-conformance
	$(BIN)/python docs/tools/record.py megatron-core

timeline: $(VENV)/.installed-dev
	$(BIN)/python docs/tools/record.py timeline

# The variables silence advertisements for other generators.
MKDOCS := NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs

# Notebooks are run once, and again when they or the package have changed.
docs: $(VENV)/.installed-docs $(VENV)/.installed-notebooks
	$(BIN)/python docs/tools/build_docs.py --run-notebooks
	$(MKDOCS) build --strict --quiet
	@echo 'The site is in site/; open site/index.html, or: make docs-serve'

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

# Which version of the docs: the package's first two numbers, or VERSION=dev for what is not released.
# ALIAS=latest: a second address, where the root of the branch leads. PUSH=yes: to `origin` too.
# The site itself is not in site/, where `make docs` puts one that knows no other versions.
VERSION ?= $(shell sed -n 's/^__version__ = "\([0-9]*\.[0-9]*\).*/\1/p' minimegatron/__init__.py)
ALIAS   ?=
PUSH    ?=
MIKE    := PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true \
  MINIMEGATRON_SITE_DIR=build/version-site $(BIN)/mike --quiet

docs-version: $(VENV)/.installed-docs $(VENV)/.installed-notebooks
	$(BIN)/python docs/tools/build_docs.py --run-notebooks
	$(MIKE) deploy --update-aliases $(if $(PUSH),--push) $(VERSION) $(ALIAS)
	$(if $(ALIAS),$(MIKE) set-default $(if $(PUSH),--push) $(ALIAS))
	@echo 'Version $(VERSION) of the docs is in the branch gh-pages'

# It needs neither .venv nor torch for itself. TAG=v0.1.0: the commit's tag must name the package's version.
TAG ?=
release-check:
	@$(IS_NEW_ENOUGH)
	$(PYTHON) -B -m tests.release --torch '$(TORCH)' $(if $(TAG),--tag '$(TAG)')

# JupyterLab on this machine alone. It prints its address, with a password in it, and opens a browser
# where there is one; with PORT=9999 elsewhere. Ctrl-C ends it, and with it every rank. Its settings in
# docs/tools/jupyter: no question about news, and of a notebook's two files only the .ipynb is listed.
PORT ?= 8888
LAB  := PATH="$(CURDIR)/$(BIN):$$PATH" JUPYTER_CONFIG_PATH="$(CURDIR)/docs/tools/jupyter" \
  $(BIN)/jupyter lab --log-level=CRITICAL -y --port=$(PORT) \
  --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/01_ranks_and_groups.ipynb \
  $(if $(filter 0,$(shell id -u)),--allow-root)

notebooks: $(VENV)/.installed-notebooks
	@$(BIN)/python docs/tools/record.py notebooks --pairs
	@$(LAB)

# A browser for the tests of the site.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
	  { echo 'The tests need the browser chromium; install it (apt-get install chromium)'; exit 1; }

# -- .venv, made once; a stamp is written only when an installation is complete --

# pip would compile all it installs on one processor, which takes most of a minute. Some packages hold
# templates that are no Python yet: those stay as they are.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

IS_NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo 'minimegatron needs Python 3.11 or newer; try: make PYTHON=python3.12 ...'; exit 1; }

$(BIN)/python:
	@$(IS_NEW_ENOUGH)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(INSTALL) '$(TORCH)' --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-data: pyproject.toml | $(VENV)/.installed
	$(INSTALL) --editable '.[data]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	@$(COMPILE)
	@touch $@

# Everything in one run of pip, which saves time. megatron-core and transformers are compared against,
# where pip can have them; the tests that do say why they were skipped, if not.
$(VENV)/.installed-conformance: pyproject.toml | $(BIN)/python
	@echo "Installing torch, the tests' tools and what they compare with into $(VENV); a minute or two"
	@$(INSTALL) '$(TORCH)' --editable '.[dev,conformance,hf]' || { \
	  echo 'Not installed: megatron-core, transformers. The tests that compare with them are skipped.'; \
	  $(INSTALL) '$(TORCH)' --editable '.[dev]'; }
	@$(COMPILE)
	@touch $(VENV)/.installed $(VENV)/.installed-dev $@

$(VENV)/.installed-notebooks: pyproject.toml | $(VENV)/.installed
	$(INSTALL) --editable '.[notebooks]'
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.installed
	$(INSTALL) --editable '.[docs]'
	@$(COMPILE)
	@touch $@
