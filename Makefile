# make compare   how Flax, Equinox and PyTorch run a real language model here: proof, speed, memory, TPU cost
# make test      the whole test suite
#
# Variables: VENV=folder of the environment, PYTHON=interpreter that creates it, NO_VENV=1 to use the packages of PYTHON,
#            ARGS="--device=gpu --resume" for the command that runs, CONFIG=configs/suites/full.yaml for make compare,
#            WORKERS=processes of make test.
VENV ?= .venv
PYTHON ?= python3
NO_VENV ?=
CONFIG ?= configs/suites/default.yaml
ARGS ?=
WORKERS ?= 2

ifeq ($(NO_VENV),1)
  PY := $(PYTHON)
else
  PY := $(VENV)/bin/python
endif
export NO_VENV
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.DEFAULT_GOAL := help
.PHONY: help environment assets serve tensorboard compare bench parity gpu gpu_pack test lint peers clean

help:  ## this list
	@grep -hE '^[a-z_]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z_]+):[^#]*## */  make \1\t/' | expand -t 20

environment:  ## create the virtual environment if it is missing
	@.ci/environment $(VENV) $(PYTHON)

assets: environment  ## fetch the default model into the cache if it is missing
	@echo "==> default model and text"
	@$(PY) -m jaxbench.pretrained.assets

compare: assets  ## the comparison: parity, speed, memory and TPU cost (10 minutes)
	@echo "==> comparison: $(CONFIG)"
	@$(PY) experiments/compare.py --config=$(CONFIG) $(ARGS)

bench: assets  ## the long comparison: more launches, sequence and batch grids
	@echo "==> comparison: configs/suites/full.yaml"
	@$(PY) experiments/compare.py --config=configs/suites/full.yaml $(ARGS)

serve: assets  ## the default model behind OpenAI's interface on http://127.0.0.1:8000
	@$(PY) experiments/serve.py $(ARGS)

tensorboard: environment  ## what the runs in out/ wrote, on http://127.0.0.1:6006 (profiles: pip install xprof)
	@$(PY) -m tensorboard.main --logdir=out --port=6006 $(ARGS)

parity: assets  ## do the three backends compute the same function? every case
	@echo "==> parity of every case"
	@$(PY) experiments/parity.py --all $(ARGS)

gpu: environment  ## what waits for a GPU, stage by stage in 9 minutes (without one: ARGS=--rehearse)
	@$(PY) experiments/gpu.py $(ARGS)

gpu_pack: environment  ## code and wheels in one folder, for a GPU machine without a network: out/gpu-pack
	@$(PY) experiments/gpu.py --pack=out/gpu-pack $(ARGS)

# A file's tests stay in one process, whose fixtures and compiled programs they share. If a process dies, the run ends
# with its test's name: a new process would be waited for without end (pytest-xdist 3.8).
test: assets  ## the test suite, in two processes (WORKERS=0: in one, for --pdb)
	@echo "==> tests"
	@$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 $(ARGS)

lint: environment  ## style and structure, seconds
	@echo "==> ruff and the structure tests"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pytest -q --durations=0 tests/test_layout.py tests/test_mirror.py

peers: environment  ## add what jaxbench is compared with: MarkLLM, titans-pytorch, LLMLingua (environments of their own), llama.cpp (built from source)
	@.ci/peers/install $(VENV) $(PYTHON)

clean:  ## remove the environment and tool caches (results and downloads stay)
	rm -rf $(if $(filter .venv,$(VENV)),.venv) .venvs build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
