# Every chore of this repository. `make help` lists them.
SHELL := /bin/sh
.DEFAULT_GOAL := help

RAYSERVE := .venv/bin/rayserve
PYTHON := .venv/bin/python

.PHONY: help setup browser demo check lint lint-ansible format unit contract engine test lock wheel wheelhouse \
    hosts-up hosts-down test-site bench bench-planner soak badinput test-faults test-false-kills clean

help: ## list these chores
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

setup: ## make .venv from the locks (a second time: nothing to do)
	@scripts/setup

browser: setup ## a headless Chromium for the test of the plan's page (Debian, as root)
	@$(PYTHON) scripts/setup_browser.py

demo: setup ## serve a tiny model end to end on this machine, then stop everything
	@$(RAYSERVE) demo

check: setup ## lint and unit tests: what to run before a commit (under 3 minutes)
	@$(PYTHON) scripts/run_tests.py lint unit

lint: setup ## ruff, mypy, layer contract, locks; then the playbooks as lint-ansible does
	@scripts/setup_ansible
	@$(PYTHON) scripts/run_tests.py lint ansible

format: setup ## let ruff rewrite what it can
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

unit: setup ## unit tests
	@$(PYTHON) scripts/run_tests.py unit

contract: setup browser ## tests against the installed Ray and vLLM, without an engine
	@$(PYTHON) scripts/run_tests.py contract

engine: setup ## tests that start a real engine, Ray and Serve
	@$(PYTHON) scripts/run_tests.py engine

test: setup browser ## everything that CI runs: lint, unit, contract, engine, the playbooks' lint
	@scripts/setup_ansible
	@$(PYTHON) scripts/run_tests.py lint unit contract engine ansible

lint-ansible: setup ## yamllint, syntax of every playbook, ansible-lint (production)
	@scripts/setup_ansible
	@$(PYTHON) scripts/run_tests.py ansible

wheel: setup ## rayserve as a wheel, for the hosts
	@$(PYTHON) scripts/build_wheels.py

wheelhouse: setup ## the same, and a wheel for each line of cpu.lock (LOCK=gpu: of gpu.lock)
	@$(PYTHON) scripts/build_wheels.py --lock $(or $(LOCK),cpu)

hosts-up: wheelhouse ## two Debian test hosts, and inventories/lab to reach them (Linux, root, Podman)
	@$(PYTHON) -m rayserve.demo.model build/lab/model
	@tests/hosts/enter python3 tests/hosts/lab.py up

hosts-down: ## remove the test hosts
	@tests/hosts/enter python3 tests/hosts/lab.py down

test-site: setup ## two bare test hosts become a serving cluster, twice, and are asked from outside
	@scripts/setup_ansible
	@$(PYTHON) scripts/run_tests.py hosts

lock: setup ## resolve pyproject.toml anew into requirements/*.lock
	@$(PYTHON) scripts/lock.py

bench: ## overhead against vLLM's own server and ray.serve.llm
	@scripts/setup bench
	@$(PYTHON) -m benchmarks.overhead

soak: setup ## twice a thousand streams with disconnecting clients: does anything leak?
	@$(PYTHON) -m benchmarks.soak

badinput: setup ## bad requests and bad specs: is each answered with the right error?
	@$(PYTHON) -m benchmarks.badinput

bench-planner: setup ## all of the planner's benchmarks, one table (CASES="a.json b.json" CONFIGS=models.json)
	@$(PYTHON) -m benchmarks.planner_report $(CASES) $(if $(CONFIGS),--configs $(CONFIGS))

test-faults: setup ## engines that die and hang under load: seconds to detect and recover, what was lost
	@$(PYTHON) -m benchmarks.faults

test-false-kills: setup ## half an hour of full load: is a busy replica ever given up?
	@$(PYTHON) -m benchmarks.false_kills

clean: ## remove .venv and everything built; what `make bench` measured stays
	rm -rf .venv .venv-ansible dist *.egg-info .hypothesis .import_linter_cache
	if [ -d build ]; then find build -mindepth 1 ! -path build/bench ! -path build/bench/runs \
	    ! -path 'build/bench/runs/*' -delete; fi
	find rayserve tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
