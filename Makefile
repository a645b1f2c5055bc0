# make demo    train a small model on real images, and show what it sees (minutes, no GPU)
# make mm      install MMDetection and MMSegmentation as well (compiles mmcv, 7 minutes once)
# make test    install what the tests need and run them
# The first call makes $(VENV); the next ones start at once. PYTHON= and VENV= choose the interpreter and the folder.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python

# libgomp's threads wait for each other by spinning; where other programs want the same cores, that costs tens of times
# the work. A short spin costs nothing measurable when the machine is idle.
export GOMP_SPINCOUNT ?= 10000

.PHONY: help demo mm test test-slow test-timm lint clean

help:
	@sed -n 's/^# //p' Makefile

demo: $(VENV)/.subquad-demo
	$(PY) -m subquad.tools demo

mm: $(VENV)/.subquad-mm

test: $(VENV)/.subquad-test lint
	$(PY) -m pytest -m 'not slow'

test-slow: $(VENV)/.subquad-test
	$(PY) -m pytest

# timm's own test-suite, from its source distribution, on our names.
test-timm: $(VENV)/.subquad-test
	.ci/timm-suite $(PY)

lint: $(VENV)/.subquad-test
	$(PY) -m ruff check .

$(VENV)/.subquad-%: setup.py constraints.txt pyproject.toml .ci/setup
	.ci/setup '$(PYTHON)' '$(VENV)' $*
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
