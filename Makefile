# `make test` and `make demo` set up .venv on a bare machine (Python 3.10 or later with its venv module) and run.
# torch and triton come first and by exact version: they are large, and everything else adapts to them.

PYTHON ?= python3
TORCH  ?= torch==2.13.0 triton==3.6.0
EXTRAS := test,dev,cli,bench,demo

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
PYTEST := $(BIN)/python -m pytest
# whose queue is empty takes from the other's: tests take from a millisecond to 20 s; of large tables a commit runs a part (tests/case_parts.py)
SPREAD := -n 2 --dist worksteal
# tests marked gpu need one; to look at each only to skip it takes half a minute of a core
GPU    := $(shell nvidia-smi -L 2>/dev/null)
MARKS  := not nightly$(if $(GPU),, and not gpu)
APT    := DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::http::Timeout=15

export PYTHONUTF8 := 1
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes import the same modules

.PHONY: test quick browser lint types unit interpreter pair triton_3_9 offline compiled pages docs drift pairs nightly demo \
  bench dist matrix install clean

# pyright takes one core, so something else runs beside it
test:
	$(MAKE) --no-print-directory -j2 install browser
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory -j3 types offline triton_3_9
	$(MAKE) --no-print-directory interpreter pair unit

# what a change of one module needs, in under two minutes
QUICK := test_laws test_contract test_cases test_reference test_docs problem/test_masks problem/test_bad_input \
  kernels/runtime/test_launch_cache selection/test_select ops/test_ops ops/test_dispatch \
  ops/test_decode ops/test_decode_bits ops/test_decode_torch compat/test_flash_attn compat/test_flash_attn_arguments cli/test_cli
quick: install lint
	$(PYTEST) $(SPREAD) -m "$(MARKS)" $(QUICK:%=tests/%.py)

install: $(STAMP)

# --no-compile: most of torch is never imported, and what is, Python compiles then
# a stamp that holds what was asked for: a new pin or a new dependency installs again, nothing else does
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$(EXTRAS)]'
	touch $@

# the ladder's page is tested in a browser; it comes from Debian where root has apt-get, and elsewhere those tests are skipped
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && $(APT) update && $(APT) install -y --no-install-recommends chromium; \
	then echo "installed chromium"; else echo "no Chromium here, and apt-get did not bring it: tests in a browser are skipped"; fi

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/pyright

# the portable kernels, run by Triton's interpreter on the CPU: a process of its own, since Triton reads the switch at import
INTERPRETED := tests/kernels/portable
interpreter:
	TRITON_INTERPRET=1 $(PYTEST) $(SPREAD) -m "$(MARKS)" $(INTERPRETED)

# the Blackwell backward by pairs of CTAs, simulated under Triton 3.9; `make pairs` also takes each synchronisation away
pair: triton_3_9
	.drift/3.9.0/bin/python -m pytest $(SPREAD) -p no:cacheprovider -m "$(MARKS)" tests/kernels/blackwell/test_pair_backward.py

# an environment with Triton 3.9 (.drift/3.9.0, 1 GB); all other packages are those of .venv
triton_3_9: install
	$(BIN)/python -c "from tools.proof.drift import environment; environment('3.9.0')"

# the GPU kernels, compiled for every GPU they claim and simulated, with no GPU here
OFFLINE := tests/tools tests/kernels/device tests/kernels/hopper tests/kernels/blackwell
offline:
	$(PYTEST) $(SPREAD) -m "$(MARKS)" $(OFFLINE)

# the same with nothing left out, into results/compiled.jsonl; Triton 3.6's disassembler does not know sm_103, 3.9's does
NEWER_NVDISASM = $(abspath $(firstword $(wildcard .drift/3.9.*/lib/python*/site-packages/triton/backends/nvidia/bin/nvdisasm)))
compiled: install
	$(BIN)/python -m tools.proof.compile $(addprefix --nvdisasm ,$(NEWER_NVDISASM))
	$(MAKE) --no-print-directory pages

# pages made from results: tables of compiled kernels and a page for each rung of the ladder, into docs/generated
pages: install
	$(BIN)/python -m tools.proof.record docs/generated/compiled.md
	$(BIN)/python -m ladder.harness.pages docs/generated/ladder

# the documentation site, into site/; a warning is an error
docs: pages $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[docs]'
	touch $@

# the kernels under newer versions of Triton, each in an environment of its own (.drift, 3 GB)
drift: install
	$(BIN)/python -m tools.proof.drift

# pairs of CTAs under Triton 3.9: the simulator's verdicts, and the Blackwell backward (.drift/3.9.0, 1 GB)
pairs: install
	$(BIN)/python -m tools.proof.drift --triton 3.9.0 --suite clusters --suite pairs

unit:
	$(PYTEST) $(SPREAD) -m "$(MARKS)" $(addprefix --ignore ,$(INTERPRETED) $(OFFLINE))

# tests that have passed on the same files are not run again: .nightly holds the outcomes, results/nightly.jsonl the counts.
# JOBS=32 for more processes; NIGHTLY='--read FILE' counts outcomes of another machine
JOBS ?= 2
nightly: install
	$(BIN)/python -m tools.nightly --jobs $(JOBS) $(NIGHTLY)

demo: install
	$(BIN)/python -m examples.demo

bench: install
	$(BIN)/strobe bench cpu

# the wheel and the source distribution in dist/, checked, and the wheel run in an empty environment (.release);
# with TAG=v1.2.3 it fails for another version
RELEASE := .release/tools
$(RELEASE)/installed: pyproject.toml
	$(PYTHON) -m venv --clear $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet 'build>=1.2' 'twine>=6.1' 'check-wheel-contents>=0.6'
	touch $@

dist: $(RELEASE)/installed
	$(RELEASE)/bin/python -m tools.release_check --torch '$(firstword $(TORCH))' $(TAG:%=--tag %)

# the smoke test under each Python that is here, with the oldest and the newest torch for CPUs (.matrix, 1 GB a pair):
# make matrix PYTHONS='3.10 3.14'
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
matrix: $(RELEASE)/installed
	$(RELEASE)/bin/python -m tools.matrix $(PYTHONS:%=--python %)

clean:
	rm -rf $(VENV) docs/generated dist .release .matrix site .demo .drift .pytest_cache .ruff_cache .hypothesis
