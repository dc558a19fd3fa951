# make demo    a sweep of two jobs of two ranks on this machine
# make test    linters, types, layers, then the tests on both supported versions of Hydra
# Both set up what they need in .venv and .venv-hydra14; Python 3.11 or later is all they ask for.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
# Most tests wait for processes to start; a file of tests shares runs, so it stays in one process.
PARALLEL = --numprocesses 2 --dist loadfile

.PHONY: demo test lint tests soak mutants bench clean

demo: .venv/.project
	.venv/bin/python examples/digits/train.py -m hydra/launcher=torchrun \
		hydra.launcher.nproc_per_node=2 optimizer=sgd,adam

test: lint tests

lint: .venv/.project
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy --strict
	.venv/bin/lint-imports --no-cache
	.venv/bin/python tests/size_limits.py

tests: .venv/.project .venv-hydra14/.project | lint
	.venv/bin/python -m pytest $(PARALLEL)
	.venv-hydra14/bin/python -m pytest tests -m "hydra_versions and not soak" $(PARALLEL)

soak: .venv/.project
	.venv/bin/python -m pytest -m soak

mutants: .venv/.project
	.venv/bin/python tests/mutants.py

bench: .venv/.project
	.venv/bin/python benchmarks/launch.py
	.venv/bin/python benchmarks/nodes.py

clean:
	rm -rf .venv .venv-hydra14 .mypy_cache .pytest_cache .ruff_cache

# An environment's packages are installed again when their list changes, this project when its
# metadata does; its code is used where it lies.
.venv/.packages: constraints.txt
.venv-hydra14/.packages: constraints-hydra14.txt
.venv/.packages .venv-hydra14/.packages:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --requirement $<
	touch $@

%/.project: %/.packages pyproject.toml
	$(@D)/bin/python $(PIP_INSTALL) --no-build-isolation --no-deps --editable .
	$(@D)/bin/python -m pip --disable-pip-version-check check
	touch $@
