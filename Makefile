# make demo   train a tiny chat model through all three stages (sets up .venv first)
# make test   pass the tests, two files at a time (sets up .venv first)
# make setup  make .venv, or bring it up to date
# make lint   ruff and mypy
# make docs   write the page that is made from code
# make site   write the documentation site to site/ (MkDocs Material; installs the extra `docs`)
# Variables: PYTHON=/path/to/python for the set-up, ARGS="..." for train.py and pytest.

PY := .venv/bin/python

.PHONY: demo test lint docs site setup

demo: setup
	@$(PY) train.py name=demo ranks=1 $(ARGS)

test: setup
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup
	@$(PY) -m ruff format --check --quiet .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

docs: setup
	@$(PY) -m pipeline.config.document

site: setup
	@$(PY) -m pip install --disable-pip-version-check --quiet --quiet --constraint constraints.txt 'mkdocs-material>=9.6'
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "site/index.html"

setup:
	@bash .ci/setup
