# make demo    test and draw a small PPMA of the package (seconds), then train it on real images (minutes, no GPU);
#              PRETRAINED=1 does not train
# make export  install the runtimes of phones and export a MobileViTv2 to each; MODEL= names another model
# make mm      install MMDetection and MMSegmentation as well (compiles mmcv, 7 minutes once)
# make test    install what the tests need and run them
# make docs    build the documentation into site/
# make dev     set up a checkout for development: editable install, tests, documentation, pre-commit hooks
# The first call creates $(VENV); later calls start at once. PYTHON= and VENV= choose the interpreter and the folder.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
MODEL ?= subquad_mobilevitv2_050
# Processes that `make test` runs side by side, with one thread each. A process that has nothing left to do takes over tests
# of the busiest one; otherwise the tests of a file stay together, with the weights and data that they share.
JOBS ?= auto
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal --durations=30

# Threads of libgomp wait for each other by spinning, which is many times slower when other programs use the same cores.
# A short spin has no measurable cost on an idle machine.
export GOMP_SPINCOUNT ?= 10000

.PHONY: help demo export mm test test-more test-slow test-network test-lowest test-litert test-timm sanitize docs dev lint clean

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

demo: $(VENV)/.subquad-demo
	$(PY) -m subquad demo $(if $(PRETRAINED),--pretrained)

export: $(VENV)/.subquad-export
	$(PY) -m subquad export $(MODEL) --format all

mm: $(VENV)/.subquad-mm

test: $(VENV)/.subquad-test lint
	$(PYTEST) -m 'not slow'

# What `make test` leaves out, but for the longest.
test-more: $(VENV)/.subquad-test
	$(PYTEST) -m 'slow and not long'

# All tests. The long ones run one after the other, with all threads.
test-slow: test test-more test-lowest
	$(PY) -m pytest -m long

# Download published weights and compare them with what is known of them.
test-network: $(VENV)/.subquad-test
	$(PY) -m pytest -m network

# The tests of the models on the lowest versions that setup.py allows.
test-lowest:
	.ci/lowest '$(PYTHON)' '$(VENV)-lowest'

# The tests of LiteRT, in an environment of its own, because it brings JAX and Transformers.
test-litert: $(VENV)-litert/.subquad-litert
	$(VENV)-litert/bin/python -m pip install -q --disable-pip-version-check 'pytest>=8' scikit-learn
	OMP_NUM_THREADS=1 $(VENV)-litert/bin/python -m pytest -m 'not slow' tests/exporters/test_to_litert.py \
		tests/exporters/test_examples.py -k litert

$(VENV)-litert/.subquad-litert: setup.py constraints.txt .ci/setup
	.ci/setup '$(PYTHON)' '$(VENV)-litert' litert
	@touch $@

# timm's own test suite, from its source distribution, on the models of this package.
test-timm: $(VENV)/.subquad-test
	.ci/timm-suite $(PY)

# Faults of memory in all Triton kernels, found in Triton's interpreter. `make test` runs a short form.
sanitize: $(VENV)/.subquad-test
	OMP_NUM_THREADS=1 $(PY) -W ignore -m lab.sanitize

docs: $(VENV)/.subquad-docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

dev: $(VENV)/.subquad-dev
	$(PY) -m pre_commit install

lint: $(VENV)/.subquad-test
	$(PY) -m ruff check .

# The extra `dev` contains all others.
$(VENV)/.subquad-dev: setup.py constraints.txt pyproject.toml .ci/setup
	.ci/setup '$(PYTHON)' '$(VENV)' dev
	@touch $(foreach extra,demo mm test docs dev,$(VENV)/.subquad-$(extra))

$(VENV)/.subquad-%: setup.py constraints.txt pyproject.toml .ci/setup
	.ci/setup '$(PYTHON)' '$(VENV)' $*
	@touch $@

clean:
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache
