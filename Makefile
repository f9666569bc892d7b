# Needs make and Python 3.11 or newer, nothing else: every target sets up its own .venv first (once; quick afterwards).
#
#   make demo      train the example language model on four local processes and compare with one process;
#                  with ARGS=--kill another one, of which a process is killed halfway, and see it go on
#   make test-fast each property once, without processes: at each change
#   make test      the tests that need no GPU, but for what only tries more of the same
#   make test-all  all of them
#   make gpu-test  on a machine with a CUDA device, in twenty minutes: probes, tests, kernels, training steps, on one page in
#                  benchmarks/results; DRY=1 tries the command without a device; tests/gpu/run.py has its options
#   make docs      the site, in docs/_build/html; a broken link or a name that does not exist is an error
#   make lint      ruff, pyright and the layers of imports (import-linter)
#   make clean     remove .venv and what builds and tests leave behind
#
# PYTHON=/path/to/python3.x chooses the interpreter, ARGS="..." adds arguments to the demo's, pytest's or gpu-test's command line.

TORCH := torch==2.13.0
TRITON := triton==3.7.1
EXTRAS := viz,test,dev,docs,jax-oracle

PY := .venv/bin/python
# Byte code is written when a module is first imported, but for what every process imports, which $(READY) compiles.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
READY := .venv/ready
FIND_PYTHON := for p in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done

# Beside the other, as what has CUDA is often the machine's own torch.
GPU_PY := .venv/gpu/bin/python
GPU_PIP := $(GPU_PY) -m pip install --quiet --disable-pip-version-check
GPU_READY := .venv/gpu/ready

# One worker more than cores, since some tests mostly wait, at most 16. Each gets the groups that take longest first (tests/tiers.py).
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS := $(shell expr $(CORES) + 1)
TEST := $(PY) -m pytest -n $(WORKERS) --maxprocesses 16 --dist loadgroup --no-loadscope-reorder

# What is imported may be kept compiled, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-all gpu-test docs lint clean

demo: $(READY)
	$(PY) $(if $(filter --kill,$(ARGS)),examples/elastic.py,examples/train_lm.py --compare) $(ARGS)

test-fast: $(READY)
	$(TEST) -m fast $(ARGS)

test: $(READY)
	$(TEST) -m "not gpu and not slow" $(ARGS)

test-all: $(READY)
	$(TEST) -m "not gpu" --hypothesis-profile thorough $(ARGS)

gpu-test: $(if $(DRY),$(READY),$(GPU_READY))
	$(if $(DRY),$(PY) -m tests.gpu.run --stand-in,$(GPU_PY) -m tests.gpu.run) $(ARGS)

docs: $(READY)
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright
	cd .venv/src && ../bin/lint-imports ../../pyproject.toml --no-cache

clean:
	rm -rf .venv build dist docs/_build docs/api docs/_static/switcher.json *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch first and pinned, so that nothing installed later chooses another. The links are for pyright: the package as it is installed.
$(READY): pyproject.toml Makefile
	@python=$$($(FIND_PYTHON)); test -n "$$python" || { echo "make: Python 3.11 or newer is needed: PYTHON=/path/to/it"; exit 1; }; \
	test -x $(PY) || { echo "make: creating .venv with $$python"; "$$python" -m venv .venv; }
	@echo "make: installing $(TORCH) and the rest into .venv"
	$(PIP) $(TORCH)
	if [ "$$(uname -s)" = Linux ]; then $(PIP) $(TRITON); fi
	$(PIP) "setuptools>=77" numpy einops
	$(PIP) --no-build-isolation --editable ".[$(EXTRAS)]"
	@# Some files of torch are in the syntax of a newer Python.
	cd .venv/lib/python3*/site-packages && { ../../../bin/python -m compileall -qq -j 0 torch sympy numpy || true; }
	rm -rf .venv/src/shardmesh && mkdir -p .venv/src/shardmesh
	cd .venv/src/shardmesh && ln -s ../../../shardmesh/* ../../../mesh ../../../sharding ../../../kernels .
	touch $(READY)

# On top of the machine's own torch where it is new enough, else with one from PyPI, which has CUDA; PYTHON=... says whose torch.
$(GPU_READY): pyproject.toml Makefile
	@python=$$($(FIND_PYTHON)); test -n "$$python" || { echo "make: Python 3.11 or newer is needed: PYTHON=/path/to/it"; exit 1; }; \
	test -x $(GPU_PY) || "$$python" -m venv --system-site-packages .venv/gpu
	$(GPU_PIP) "setuptools>=77"
	$(GPU_PIP) --no-build-isolation --editable ".[gpu,test,viz]"
	@$(GPU_PY) -c "import torch; assert torch.cuda.is_available(), f'torch {torch.__version__} finds no CUDA device'"
	touch $(GPU_READY)
