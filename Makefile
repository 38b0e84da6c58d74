# Two commands do everything: `make demo` and `make test`. Needs Python 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= examples/demo.yaml
VARIANT ?= cpu

.PHONY: setup demo serve stop test check check-style calibrate clean

setup: $(VENV)/.done build/.demo-model

# Installed again only when the pins change.
$(VENV)/.done: pyproject.toml scripts/setup.sh
	sh scripts/setup.sh "$(PYTHON)" "$(VENV)" "$(VARIANT)"
	touch $@

build/.demo-model: $(VENV)/.done models/demo/manifest.json
	$(BIN)/eldr demo-model unpack
	touch $@

demo: setup
	$(BIN)/eldr demo $(CONFIG)

serve: setup
	$(BIN)/eldr demo $(CONFIG) --keep

stop:
	$(BIN)/eldr stop

test: setup
	$(BIN)/pytest

check: check-style
	$(BIN)/pytest -q tests/unit tests/property tests/golden

check-style: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The artifact that the demo ships with, made anew (about 5 minutes on 2 cores).
calibrate: setup
	$(BIN)/eldr calibrate capture examples/demo-jsq.yaml --prompts data/prompts --split train \
		--num 800 --max-tokens 64 --out out/demo-capture
	$(BIN)/eldr calibrate fit out/demo-capture --k 2 --workload domains-and-languages \
		--out models/demo/calibration
	$(BIN)/eldr calibrate show models/demo/calibration --out out/demo-calibration

clean:
	rm -rf build out
