# make demo    train a small model on real images, and show what it sees (minutes, no GPU)
# make mm      install MMDetection and MMSegmentation as well (compiles mmcv, 7 minutes once)
# make test    install what the tests need and run them
# The first call makes $(VENV); the next ones start at once. PYTHON= and VENV= choose the interpreter and the folder.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
# Processes that `make test` runs side by side, with one thread each.
JOBS ?= auto

# libgomp's threads wait for each other by spinning; where other programs want the same cores, that costs tens of times
# the work. A short spin costs nothing measurable when the machine is idle.
export GOMP_SPINCOUNT ?= 10000

.PHONY: help demo mm test test-slow test-lowest test-timm lint clean

help:
	@sed -n 's/^# //p' Makefile

demo: $(VENV)/.subquad-demo
	$(PY) -m subquad.tools demo

mm: $(VENV)/.subquad-mm

test: $(VENV)/.subquad-test lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -m 'not slow' -n $(JOBS) --dist loadfile

# Everything, the long tests one after the other and with all threads.
test-slow: $(VENV)/.subquad-test test-lowest
	OMP_NUM_THREADS=1 $(PY) -m pytest -m 'not slow' -n $(JOBS) --dist loadfile
	$(PY) -m pytest -m slow

# The models on the lowest versions that setup.py allows.
test-lowest:
	.ci/lowest '$(PYTHON)' '$(VENV)-lowest'

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
