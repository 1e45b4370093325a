.PHONY: setup lint type test chaos netns surface bench docs demo clean

setup:  ## make .venv with everything a developer needs
	scripts/setup dev docs

lint: setup  ## format, lint, prose and the arrows between the folders
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/python scripts/check_prose.py
	.venv/bin/lint-imports

type: setup  ## mypy --strict
	.venv/bin/mypy

test:  ## set up, check, and run the default tests
	scripts/test

chaos:  ## hundreds of random faults; minutes
	scripts/test chaos

netns:  ## a second machine in a network namespace; needs root and iproute2
	scripts/test netns

bench: setup  ## every figure, as JSON and a table
	.venv/bin/python -m benchmarks

docs:  ## build docs/_build/html; warnings are errors
	scripts/docs

demo:  ## set up and run the main job
	scripts/demo

clean:  ## remove what was built, but not .venv
	rm -rf build dist docs/_build docs/reference/generated .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

surface: setup  ## freeze the public surfaces again, after an intended change
	SHOAL_FREEZE=1 .venv/bin/python -m pytest -q tests/surface
