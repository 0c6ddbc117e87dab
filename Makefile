# make demo    set up, then the whole walk on a real model, from interactions to a verdict and a chat answer
# make check   seconds: lint, types, fast tests
# make test    everything that CI runs: at most 15 minutes on 2 cores
# make proof   the full counts behind docs/proof/*.json: resumable, hours at most, only what is named: make proof NAME=kills

PYTHON ?= python3
BIN := .venv/bin
SETUP_INPUTS := pyproject.toml requirements.lock tools/setup.py
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo check test proof lint clean

.venv/.ready-demo: $(SETUP_INPUTS)
	@$(PYTHON) tools/setup.py train export serve
	@touch $@

.venv/.ready-dev: $(SETUP_INPUTS)
	@$(PYTHON) tools/setup.py train export serve redis parquet zst qlora dev
	@touch .venv/.ready-demo $@

demo: .venv/.ready-demo
	@$(BIN)/hivetune demo

lint: .venv/.ready-dev
	@$(BIN)/ruff format --check --quiet src tests tools bench
	@$(BIN)/ruff check --quiet src tests tools bench
	@$(BIN)/mypy

check: lint
	@$(BIN)/python -m pytest -q -m "not slow and not proof"

test: lint
	@$(BIN)/python -m pytest -q -m "not proof"

proof: .venv/.ready-dev
	@$(BIN)/python tools/proof.py $(NAME)

clean:
	rm -rf .venv
