# From a fresh clone, with Python 3.11 to 3.13 and nothing else:
#
#   make lab                    open the workbook (prints the address without a browser)
#   make test                   run every test
#
#   make bench                  measure labkit beside transformers
#   make notebooks              execute all notebooks and store their outputs
#   make clean                  remove what tests and builds left; .venv stays
#
# Variables: PYTHON=/path/to/python3.12 names the interpreter of .venv;
# TORCH_INDEX=ADDRESS adds a package index for torch (see README, "Set-up");
# ARGS="..." goes to the command that the target runs.

PYTHON ?=
TORCH_INDEX ?=
ARGS ?=

BIN := .venv/bin
STATE := $(CURDIR)/.venv/state
ALLOW_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3.13 python3.12 python3.11 python3)
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))

.PHONY: lab test bench notebooks clean setup

# A Python that can make an environment is preferred to a newer one that cannot.
setup:
	@for needs in "import ensurepip, venv" "pass"; do \
	  for python in $(CANDIDATES); do \
	    if "$$python" -c "$$needs; $(SUITABLE)" 2>/dev/null; then \
	      exec "$$python" .ci/setup.py --torch-index "$(TORCH_INDEX)"; \
	    fi; \
	  done; \
	done; \
	echo "labkit needs Python 3.11, 3.12 or 3.13, and found none of: $(CANDIDATES)." \
	  "Install one, or name it: make lab PYTHON=/path/to/python3.12" >&2; exit 1

# Settings, history and workspaces stay in .venv, so that the book leaves no trace.
lab notebooks: export JUPYTER_CONFIG_DIR := $(STATE)/jupyter
lab notebooks: export JUPYTER_DATA_DIR := $(STATE)/jupyter/data
lab notebooks: export JUPYTER_RUNTIME_DIR := $(STATE)/jupyter/runtime
lab notebooks: export JUPYTERLAB_SETTINGS_DIR := $(STATE)/jupyter/settings
lab notebooks: export JUPYTERLAB_WORKSPACES_DIR := $(STATE)/jupyter/workspaces
lab notebooks: export IPYTHONDIR := $(STATE)/ipython
# Defaults of the book, which the settings above override: no pop-up asks for news.
lab: export JUPYTER_CONFIG_PATH := $(CURDIR)/.ci/jupyter
lab: setup
	@$(BIN)/python -m jupyterlab $(ALLOW_ROOT) --ServerApp.root_dir="$(CURDIR)" \
	  --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb \
	  --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate \
	  --LabApp.news_url=None $(ARGS)

test: setup
	@$(BIN)/python tests/run_all.py $(ARGS)

bench: setup
	@status=0; for script in tests/benchmarks/bench_*.py; do \
	  echo "===== $$script ====="; $(BIN)/python "$$script" $(ARGS) || status=1; \
	done; exit $$status

notebooks: setup
	@$(BIN)/python -m labkit notebooks --execute $(ARGS)

clean:
	rm -rf build test-artifacts *.egg-info .pytest_cache .ruff_cache .hypothesis
	find labkit tests .ci -name __pycache__ -prune -exec rm -rf {} +
	find notebooks -name .ipynb_checkpoints -prune -exec rm -rf {} +
