# Everything runs in virtual environments that are made here, on first use, from nothing but git,
# Python and the package registry. They are made again when this file or pyproject.toml changes.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Both ends of `make test` share two cores: one after the other, but for what `ready` starts.
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif

TORCH := torch==2.13.0
OLDEST_JAX := jax==0.10.2
# What compiles for NVIDIA GPUs, on a machine that has none, too: not beside JAX, which would look
# for one (tests/aot_mosaic.py). It is 140 MB, which take a few seconds, and has the version of JAX.
ifeq ($(shell uname -s),Linux)
install_cuda_plugin = $(1)/bin/python $(INSTALL) --no-deps --target $(1)/cuda-plugin \
	$$($(1)/bin/python -c 'import jax; \
		print(*(f"jax-cuda13-{part}<={jax.__version__}" for part in ("plugin", "pjrt")))')
endif

# A pyenv shim is on the PATH even where its version is switched off, and some systems ship Python
# without ensurepip: so each candidate is started, not only looked up.
PYENV_VERSIONS := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
find_python = $(shell for version in $(1); do \
	for candidate in python$$version "$(PYENV_VERSIONS)"/$$version.*/bin/python; do \
		if "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
			echo "$$candidate"; exit; \
		fi; \
	done; \
done)

ifndef PYTHON
PYTHON := $(or $(call find_python,3.11),python3)
endif
ifndef NEWEST_PYTHON
NEWEST_PYTHON := $(call find_python,3.13 3.12)
endif
HAS_GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)

OLDEST := .venv
NEWEST := .venv-newest
DEMO := .venv-demo
CUDA := .venv-cuda13
DOCS := .venv-docs

PYTEST_FLAGS ?= --numprocesses auto --maxprocesses 8 --dist worksteal

# Most of what is installed is never imported: its bytecode is left to the first import, which has
# to be allowed to write it.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := -m pip install --no-compile

# $(call make_venv,python,folder) starts from an empty folder: what an interrupted install left
# behind is not to be trusted.
define make_venv
@$(1) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	"ato-jax needs Python 3.11 or newer, and $(1) is " + sys.version.split()[0] + \
	": install one, or name it with `make PYTHON=...`")'
rm -rf $(2)
$(1) -m venv $(2)
endef

# The stamp comes last, so that only a finished install has one.
STAMP := .complete

.PHONY: help
help:
	@echo 'make test         linters, types, the site, and the tests on the oldest and the newest JAX'
	@echo 'make demo         linear attention against PyTorch, measured on this machine'
	@echo 'make bench        the whole report, on a GPU: benchmarks/results and docs/results.md'
	@echo 'make lint         linters and types alone'
	@echo 'make test-oldest  the tests on $(OLDEST_JAX), with PyTorch'
	@echo 'make test-newest  the tests on the newest JAX, without PyTorch'
	@echo 'make test-hidden  some tests on a JAX without its lowering to Triton, in a minute'
	@echo 'make test-newest-torch  those of ato_torch there, with PyTorch for CUDA: 6 GB'
	@echo 'make record-long  all tests, long ones too, and a record of those that passed'
	@echo 'make docs         the documentation site, built and checked, in site/'
	@echo 'make gpu-test     the tests that need an NVIDIA GPU; writes tests/gpu_receipt.json'
	@echo 'make venv         the virtual environment $(OLDEST), to work in'
	@echo 'make clean        away with everything that was made here'

# PyTorch by its exact pin and first: whatever else asks for it then finds it there.
$(OLDEST)/$(STAMP): pyproject.toml Makefile
	$(call make_venv,$(PYTHON),$(OLDEST))
	$(OLDEST)/bin/python $(INSTALL) $(TORCH)
	$(OLDEST)/bin/python $(INSTALL) $(OLDEST_JAX) --editable '.[bench,dev,transformers]'
	$(call install_cuda_plugin,$(OLDEST))
	touch $@

$(NEWEST)/$(STAMP): pyproject.toml Makefile
	$(call make_venv,$(NEWEST_PYTHON),$(NEWEST))
	$(NEWEST)/bin/python $(INSTALL) --editable '.[bench,dev]'
	$(call install_cuda_plugin,$(NEWEST))
	touch $@

$(DEMO)/$(STAMP): pyproject.toml Makefile
	$(call make_venv,$(PYTHON),$(DEMO))
	$(DEMO)/bin/python $(INSTALL) $(TORCH)
	$(DEMO)/bin/python $(INSTALL) --editable '.[bench,torch]'
	touch $@

# The same JAX as in the oldest: notebooks are executed by it.
$(DOCS)/$(STAMP): pyproject.toml Makefile
	$(call make_venv,$(PYTHON),$(DOCS))
	$(DOCS)/bin/python $(INSTALL) $(OLDEST_JAX) --editable '.[docs]'
	touch $@

# In one step, so that pip finds a JAX and a PyTorch whose CUDA libraries agree.
$(CUDA)/$(STAMP): pyproject.toml Makefile
	$(call make_venv,$(or $(NEWEST_PYTHON),$(PYTHON)),$(CUDA))
	$(CUDA)/bin/python $(INSTALL) --editable '.[bench,cuda13,dev,torch,transformers]'
	touch $@

.PHONY: venv
venv: $(OLDEST)/$(STAMP)

# The bytecode of all that the tests import, once: workers, which start together, would each make it.
IMPORTED := .imported
%/$(IMPORTED): %/$(STAMP)
	$*/bin/python -m pytest --collect-only --quiet --quiet > $@ || { cat $@; exit 1; }

# Each install keeps one core busy, and so do the linters and the imports.
.PHONY: ready
ready:
	@$(MAKE) --no-print-directory --jobs 2 SIDE_BY_SIDE=1 \
		$(if $(filter output-sync,$(.FEATURES)),--output-sync=target) \
		lint $(OLDEST)/$(IMPORTED) $(if $(NEWEST_PYTHON),$(NEWEST)/$(IMPORTED)) $(DOCS)/$(STAMP)

.PHONY: lint
lint: $(OLDEST)/$(STAMP)
	$(OLDEST)/bin/ruff check .
	$(OLDEST)/bin/mypy

.PHONY: test-oldest
test-oldest: $(OLDEST)/$(STAMP)
	$(OLDEST)/bin/python -m pytest $(PYTEST_FLAGS)

# About every 9th test, and fewer of hypothesis's examples: the other end has run the rest, and what
# differs between versions of JAX breaks more than one test.
.PHONY: test-newest
ifdef NEWEST_PYTHON
test-newest: $(NEWEST)/$(STAMP)
	ATO_SAMPLE=9 ATO_HYPOTHESIS_PROFILE=quick $(NEWEST)/bin/python -m pytest $(PYTEST_FLAGS)
else
test-newest:
	@echo '*** No Python 3.13 or 3.12 found: the newest JAX can NOT be tested here.' >&2
	@echo '*** Install one, or name it with `make NEWEST_PYTHON=...`.' >&2
	@exit 1
endif

# A JAX without Pallas's lowering to Triton: the tests that say which backend runs, and why. All that
# have passed with the lowering there run again, whatever the record of long tests says.
HIDDEN_TESTS := $(addprefix tests/test_,choices.py support.py errors.py frame.py tune.py \
	benchmark_choices.py)
.PHONY: test-hidden
test-hidden: $(OLDEST)/$(STAMP)
	ATO_HIDE_TRITON=1 ATO_LONG=run $(OLDEST)/bin/python -m pytest $(PYTEST_FLAGS) $(HIDDEN_TESTS)

# Runs what takes long, and keeps what passed in tests/long_tests.json: `make test` skips it then.
.PHONY: record-long
record-long: $(OLDEST)/$(STAMP) $(if $(NEWEST_PYTHON),$(NEWEST)/$(STAMP))
	ATO_LONG=record $(OLDEST)/bin/python -m pytest $(PYTEST_FLAGS)
	$(if $(NEWEST_PYTHON),ATO_LONG=record ATO_SAMPLE=9 ATO_HYPOTHESIS_PROFILE=quick \
		$(NEWEST)/bin/python -m pytest $(PYTEST_FLAGS))

# Not part of `make test`: for these versions of Python PyTorch comes with CUDA alone.
.PHONY: test-newest-torch
test-newest-torch: $(CUDA)/$(STAMP)
	JAX_PLATFORMS=cpu ATO_SAMPLE=11 $(CUDA)/bin/python -m pytest $(PYTEST_FLAGS) \
		tests/test_torch_*.py

# Without a newer Python the newest JAX is left out, and said to be; REQUIRE_NEWEST=1 fails instead.
.PHONY: test
test: ready test-docs test-oldest test-hidden $(if $(NEWEST_PYTHON)$(REQUIRE_NEWEST),test-newest)
ifndef NEWEST_PYTHON
	@echo '*** No Python 3.13 or 3.12 found: the tests on the newest JAX were SKIPPED.' >&2
endif

# A warning, a broken link or a figure without a text is an error.
BUILD_DOCS = NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --site-dir $(1) && \
	$(DOCS)/bin/python docs/site/check.py $(1)
.PHONY: docs
docs: $(DOCS)/$(STAMP)
	$(call BUILD_DOCS,site)
	@echo 'To read it: $(DOCS)/bin/python -m http.server --directory site'

# Without executing the notebooks, which tests/test_docs.py does.
.PHONY: test-docs
test-docs: $(DOCS)/$(STAMP)
	EXECUTE_NOTEBOOKS=false $(call BUILD_DOCS,build/site)

.PHONY: demo
demo: $(if $(HAS_GPU),$(CUDA),$(DEMO))/$(STAMP)
	$(<D)/bin/python -m benchmarks demo

# In parts of nine minutes, each of which goes on with what the files lack.
BENCH = $(<D)/bin/python -m benchmarks whole --folder=benchmarks/output/report --within_s=540
.PHONY: bench
ifdef HAS_GPU
bench: $(CUDA)/$(STAMP)
	$(BENCH) || $(BENCH) || $(BENCH) || $(BENCH)
	$(<D)/bin/python -m benchmarks report --new=benchmarks/output/report
else
bench:
	@echo '*** nvidia-smi finds no GPU here: `python -m benchmarks run --suite=report` runs small sizes.' >&2
	@exit 1
endif

# Without workers, which need XLA_PYTHON_CLIENT_PREALLOCATE=false to share the card's memory. With
#   GPU_PYTEST_FLAGS='--numprocesses 16 --dist load --maxschedchunk 1'
# a large card is done in minutes: the longest tests stand first, and most of the time is compiling.
.PHONY: gpu-test
ifdef HAS_GPU
gpu-test: $(CUDA)/$(STAMP)
	$(CUDA)/bin/python -m pytest -m gpu $(GPU_PYTEST_FLAGS)
else
gpu-test:
	@echo '*** nvidia-smi finds no GPU here: nothing was run.' >&2
	@exit 1
endif

.PHONY: clean
clean:
	rm -rf $(OLDEST) $(NEWEST) $(DEMO) $(CUDA) $(DOCS) build dist site
	rm -rf .aot_cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
