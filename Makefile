# hvd8bit: `make help` lists what can be made.

VENV ?= .venv
# The Python that makes the venv: 3.9 to 3.12. Once there is a venv, its own, so that every target stays with it.
PYTHON ?= $(firstword $(wildcard $(VENV)/bin/python) python3)
# TF is TensorFlow's version (2.15, 2.18, 2.21, or in three numbers), TF_PACKAGE the wheel: tensorflow-cpu, or tensorflow with its GPU support, or
# 'tensorflow[and-cuda]', which brings CUDA along. Empty means what the venv has, else 2.18.1 and tensorflow-cpu.
TF ?=
TF_PACKAGE ?=

# Where tensorflow-datasets has prepared MNIST.
DATA_DIR ?= ~/tensorflow_datasets

RUN := $(VENV)/bin
CC_FILES = $(shell find tf_ops tests/cc -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.inc' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest test-matrix soak bench-kernels experiments-quick lint format lock clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  variables: VENV=$(VENV) PYTHON=$(PYTHON) TF=2.18.1 TF_PACKAGE=tensorflow-cpu|tensorflow"

setup: ## .venv with TensorFlow, Horovod, the tools and this package; quick when all is there
	@$(PYTHON) tools/setup_env.py --venv $(VENV) --tensorflow '$(TF)' --tensorflow-package '$(TF_PACKAGE)'

demo: setup ## trains with 32- and 8-bit gradients on two workers and compares: out/demo.json, out/demo.png
	$(RUN)/python examples/demo.py --out out

test: setup ## unit, structure and parallel tests
	$(RUN)/python -m pytest tests/unit tests/structure tests/parallel

test-oldest: ## a file of each folder of tests on TensorFlow 2.15, the oldest, in a copy of the tree: minutes
	tools/test_matrix.sh --smoke 2.15

test-matrix: ## all tests on TensorFlow 2.15, 2.18 and 2.21, each in a copy of the tree: an hour and more
	tools/test_matrix.sh

soak: setup ## the long tests: minutes, and up to 8 GB of memory; leaves out/soak
	rm -rf out/soak
	HVD8BIT_SOAK=out/soak $(RUN)/python -m pytest -m soak tests/unit tests/structure tests/parallel

bench-kernels: setup ## micro-benchmarks of the CPU kernels (takes libbenchmark-dev)
	PYTHON=$(RUN)/python tests/cc/benchmark.sh

experiments-quick: setup ## trains MNIST with 32 and 8 bits, about 10 minutes, and compares with docs/results.md; DATA_DIR=...
	$(RUN)/python -m experiments quick --data_dir '$(DATA_DIR)'

lint: setup ## ruff, mypy, clang-format; changes nothing
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(if $(strip $(CC_FILES)),$(RUN)/clang-format --dry-run -Werror $(CC_FILES))

format: setup ## let ruff and clang-format rewrite the files
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .
	$(if $(strip $(CC_FILES)),$(RUN)/clang-format -i $(CC_FILES))

lock: ## pin everything anew, for every Python: requirements/lock-TF.txt
	$(PYTHON) tools/lock.py --tensorflow '$(TF)'

clean: ## what was built, not the venv
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis hvd8bit/_hvd8bit_ops.so hvd8bit/_build_info.json
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and the venv
	rm -rf $(VENV)
