# `make demo` runs the main job, `make test` all checks and tests. Each installs what is missing first, once.
PYTHON ?= python3
BIN := .venv/bin
OUT ?= out

.PHONY: demo test check bench clean

demo: .venv/demo.stamp
	$(BIN)/halotile demo --ranks 2 --out $(OUT)

test: .venv/dev.stamp check
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/test_fleet.py
	$(BIN)/python -m pytest tests/test_fleet.py

check: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: .venv/dev.stamp
	$(BIN)/python bench/tile_ratio.py
	$(BIN)/python bench/shard_ratio.py
	$(BIN)/python bench/shard_floor.py
	$(BIN)/python bench/shard_memory.py
	$(BIN)/python bench/stream_first.py
	$(BIN)/python bench/stream_memory.py
	$(BIN)/python bench/denoise_ratio.py
	$(BIN)/python bench/auto_choice.py

.venv/demo.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "halotile needs Python 3.10 or newer, $(PYTHON) is older; run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0 --editable '.[all]'
	touch $@

.venv/dev.stamp: .venv/demo.stamp
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv $(OUT) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
