# Two commands: `make demo` and `make test`. Both set up what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.tenuto-setup
OLD_TRITON := $(VENV)/triton-3.6

.PHONY: setup demo test test-kernels check up bench soak clean

setup: $(STAMP)

$(STAMP): scripts/setup.sh pyproject.toml runtime/sdk/pyproject.toml constraints.txt tests/clients/node/package-lock.json
	PYTHON=$(PYTHON) bash scripts/setup.sh $(VENV)
	touch $(STAMP)

demo: setup
	$(BIN)/tenuto demo

up: setup
	$(BIN)/tenuto up

test: setup
	$(BIN)/tenuto model pull smollm2-135m-instruct
	$(BIN)/tenuto model pull qwen2.5-coder-0.5b-instruct
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

# The GPU's kernels on a machine with none: interpreted, and compiled for every target by both ends of what is supported.
test-kernels: setup
	bash scripts/old_triton.sh $(VENV) $(OLD_TRITON)
	$(BIN)/python -m pytest tests/kernels tests/bench/test_kernel_gate.py tests/bench/test_gpu.py -m '' --timeout=3600
	PYTHONPATH=$(OLD_TRITON) $(BIN)/python -m pytest -q tests/kernels/test_interpreter.py -p no:cacheprovider
	$(BIN)/python -m bench.kernel_gate --triton $(OLD_TRITON) --target sm_90 --worst
	$(BIN)/python -m bench.kernel_gate --worst

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m bench.resume
	$(BIN)/python -m bench.engine
	$(BIN)/python -m bench.eval
	$(BIN)/python -m bench.capacity
	$(BIN)/python -m bench.console
	$(BIN)/python -m bench.wake
	$(BIN)/python -m bench.replay
	$(BIN)/python -m bench.speculate
	$(BIN)/python -m bench.policy
	$(BIN)/python -m bench.steps
	$(BIN)/python -m bench.api
	$(BIN)/python -m bench.sandbox

soak: setup
	$(BIN)/python -m bench.crowd --seconds 300
	$(BIN)/python -m pytest tests/engine/test_schedules.py --hypothesis-profile=soak --timeout=3600
	$(BIN)/python -m pytest tests -m soak --timeout=3600
	$(BIN)/python -m bench.resume --seeds 20
	$(BIN)/python -m bench.faults --kills 300
	$(BIN)/python -m bench.endurance --steps 1000
	$(BIN)/python -m bench.sandbox_chaos --sandboxes 200

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
