# Everything a checkout needs, on a machine that has python3.11 or newer and pip.
#   make serve ARGS="--port 8000"     make test ARGS="-k lossless"     make check     make docs
# JOBS=1 runs the tests one after the other. PYTHON=python3.12 picks the interpreter when the virtual environment is first made; `make clean` removes it.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# On two cores too: many tests wait for servers and processes.
JOBS ?= 3

python := $(VENV)/bin/python
serve_ready := $(VENV)/.serve-ready
test_ready := $(VENV)/.test-ready

# One thread: the tests' models are so small that threads spend their time waiting for each other. On two cores with
# other work, four files of tests/ took 25 s with one thread and 88 s with two. Bytecode is kept even where the
# environment says otherwise: tests start about a hundred processes, each of which would compile the package again.
test_environment := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

.PHONY: serve test check docs clean

serve: $(serve_ready)
	$(python) -m specserve.launch --speculative-algorithm EAGLE3 $(ARGS)

test: $(test_ready)
	$(test_environment) $(python) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(test_ready)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

docs: $(serve_ready)
	$(python) -m specserve.tools.reference build/docs

clean:
	rm -rf $(VENV)

# A stamp is as old as the last install; a changed pyproject.toml makes the next target install again.
$(python):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specserve needs Python 3.11 or newer; say which with PYTHON=")'
	$(PYTHON) -m venv $(VENV) || { \
	    $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(python) install pip; }

$(serve_ready): pyproject.toml | $(python)
	$(python) -m pip install --editable '.[grammar]'
	touch $@

$(test_ready): pyproject.toml | $(python)
	$(python) -m pip install --editable '.[test]'
	touch $(serve_ready) $@
