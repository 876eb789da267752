# make setup      create .venv with the pinned packages and this checkout, and config/schema.json
# make reproduce  the default study, to figures/ and results/report.html, and ro-crate-metadata.json, which says what made what
# make reproduce-all  with it, all else that runs on a CPU: config/all.yaml
# make smoke      one figure from its pattern to its picture, in build/smoke, and what it proves
# make record     DEVICE=h200 MINUTES=28: run config/h200.yaml on this machine, or go on, and record its rows as expected/h200
# make archive    build/tilewright.tar.gz: the source of this commit, and the report and RO-Crate of the rows expected/$(RECORDED)
# make installs   wheel and source distribution in empty environments of $(PYTHONS)
# make test       the test-suite; it installs diffusers in build/hosts, or finds it in $TILEWRIGHT_HOSTS
# make test-all   with it, what takes minutes: the workflow on a SLURM of one node, which is installed where that can be
# make docs       the documents as a site, in build/site: open build/site/index.html
# make lint       check style and workflow; changes nothing
# make fix        let the formatters edit
# make lock       hashes for the pins of requirements.lock
# make schema     config/schema.json anew, for editors, from the types of the configuration
# make clean      remove what a run made (results, figures, logs, Snakemake's records); the environment stays
#
# PYTHON=python3.12 chooses the interpreter. TORCH_INDEX=<url> adds a package index for torch, e.g. the one of CPU-only builds,
# which are several gigabytes smaller than what PyPI gives for Linux.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# What editors show of config.yaml.
SCHEMA := $(BIN)/python -m tilewright_study.config > config/schema.json

.PHONY: setup reproduce reproduce-all smoke record archive installs test test-all docs lint fix lock schema clean

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; try make PYTHON=python3.12 " + "$(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "uv==0.13.8" $$(grep -o '^torch==[^ ]*' requirements.lock)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --compile-bytecode --require-hashes --requirement requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q src
	$(SCHEMA)
	touch $@

# What an archive ships was not made here: Snakemake would take it as it is.
reproduce: setup
	@test ! -d results -o -d .snakemake/metadata || { mkdir shipped && mv results figures ro-crate-metadata.json shipped; }
	$(BIN)/snakemake --cores all -- all ro-crate-metadata.json

reproduce-all: setup
	$(BIN)/snakemake --cores all --configfile config/all.yaml

smoke: setup
	$(BIN)/snakemake --cores all --directory build/smoke --configfile config/smoke.yaml -- figures/speedup.svg
	@$(BIN)/python workflow/scripts/prove.py --inputs build/smoke/results/logs/*/*.csv build/smoke/results/logs/*/*/*.csv --figure build/smoke/figures/speedup.svg

MINUTES ?= 28
record: setup
	$(BIN)/python workflow/scripts/record.py --device $(DEVICE) --minutes $(MINUTES) $(if $(OVERLAYS),--overlays $(OVERLAYS))

RECORDED ?= h200
archive: setup
	$(BIN)/python workflow/scripts/archive.py --recorded $(RECORDED) --output build/tilewright.tar.gz

PYTHONS ?= 3.11 3.12 3.13
installs: setup
	rm -rf build/dist
	$(BIN)/uv build --quiet --out-dir build/dist
	for python in $(PYTHONS); do for package in build/dist/*.whl build/dist/*.tar.gz; do \
	  $(BIN)/uv venv --quiet --clear --python $$python build/empty && \
	  $(BIN)/uv pip install --quiet --python build/empty/bin/python $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $$package && \
	  (cd build && empty/bin/python -P ../tests/helpers/installed.py $$PWD/empty) || exit 1; \
	done; done

TEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
test: setup
	$(TEST)

test-all: setup
	tests/study/slurm_node.sh install || echo "SLURM could not be installed"
	$(TEST) -m ""

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile rules workflow/Snakefile
	$(BIN)/snakemake --lint
	$(BIN)/snakemake --lint --snakefile workflow/Snakefile

fix: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/snakefmt Snakefile rules workflow/Snakefile

# What is new has no hash yet, which a set-up refuses: one from before has to be there.
lock:
	grep '^#' requirements.lock > requirements.lock.new
	$(BIN)/uv pip compile --quiet --no-deps --generate-hashes --no-annotate --no-header --python-version 3.11 requirements.lock >> requirements.lock.new
	mv requirements.lock.new requirements.lock

schema: setup
	$(SCHEMA)

clean:
	rm -rf results figures logs .snakemake ro-crate-metadata.json
