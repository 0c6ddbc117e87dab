# make demo    set up, then the whole walk on a real model, from interactions to a verdict and a chat answer
# make check   lint, types, and the tests that start no process, server or model: about a minute
# make test    everything that CI runs: at most 6 minutes on 2 quiet cores
# make corpus  reads the corpus of rows again and prints what is read differently: at most 60 s
# make site    the documentation as pages that open without a server, below site/
# make size    lines, modules, settings, commands and words beside their budgets: a report, never a test
# make proof   lists the full counts behind docs/proof/*.json and which are stale; make proof NAME=kills runs one

PYTHON ?= python3
BIN := .venv/bin
SETUP_INPUTS := pyproject.toml requirements.lock tools/setup.py
export OMP_WAIT_POLICY ?= PASSIVE
# llama.cpp's converter lies in the user's home, which may be another one than at set-up. Half a second when it is there.
CONVERTER := $(BIN)/hivetune fetch llama.cpp > /dev/null
# Containers and CI often set it. Without kept bytecode each process that imports torch and transformers compiles their
# 3,000 modules again: 19 instead of 8 processor seconds, and the tests start about 400 such processes.
export PYTHONDONTWRITEBYTECODE :=
# Two workers more than cores, four at most: many tests wait for servers, kills and clocks, and with one more than cores a
# fifth of two cores was idle. Each holds about 1 GB. The tests of a file stay in one worker and in their order, so what
# a file's tests share is made once; tests/conftest.py puts the long files first. No test relies on a quiet machine: all
# passed beside other work at a load of 12 on 2 cores.
WORKERS ?= -n $(shell nproc | awk '{print ($$1 < 3 ? $$1 + 2 : 4)}') --dist loadfile --no-loadscope-reorder

.PHONY: demo check test corpus site size proof lint clean

.venv/.ready-demo: $(SETUP_INPUTS)
	@$(PYTHON) tools/setup.py train export serve
	@touch $@

.venv/.ready-dev: $(SETUP_INPUTS)
	@$(PYTHON) tools/setup.py train export serve redis parquet zst qlora judge dev
	@touch .venv/.ready-demo $@

demo: .venv/.ready-demo
	@$(CONVERTER)
	@$(BIN)/hivetune demo

lint: .venv/.ready-dev
	@$(BIN)/ruff format --check --quiet src tests tools bench
	@$(BIN)/ruff check --quiet src tests tools bench
	@$(BIN)/mypy
	@$(BIN)/vulture

check: lint
	@$(CONVERTER)
	@$(BIN)/python -m pytest -q $(WORKERS) -m "not slow and not proof"

test: lint
	@$(CONVERTER)
	@$(BIN)/python -m pytest -q $(WORKERS) -m "not proof"

corpus: .venv/.ready-dev
	@$(BIN)/python tools/corpus.py

site: .venv/.ready-dev
	@$(BIN)/mkdocs build --quiet --strict

size: .venv/.ready-dev
	@$(BIN)/python tools/size.py

proof: .venv/.ready-dev
	@$(BIN)/python tools/proof.py $(NAME)

clean:
	rm -rf .venv
