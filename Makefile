# Everything a clone needs, from set-up to a green test run. Settings that can be given on the command line:
#   PYTHON=python3.12        the Python that .venv is made with (3.10 or newer)
#   GPU=cuda|vulkan|metal    build llama-cpp-python for a GPU (stays so until GPU=cpu)
#   FUZZ_SECONDS=60          how long each reader is fuzzed
#   CMAKE_ARGS, CC, CXX, CFLAGS, CXXFLAGS    are passed on to that build

PYTHON ?= $(shell .venv/bin/python -c '' 2>/dev/null && echo .venv/bin/python || echo python3)
GPU =
FUZZ_SECONDS = 60
SETUP = @command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) found; install Python 3.10 or newer, or name one: make PYTHON=..." >&2; exit 1; }; \
	$(PYTHON) scripts/dev/setup_venv.py --gpu "$(GPU)"

unexport PYTHONPATH PYTHONHOME

.PHONY: help demo test sanitize fuzz format wheel lock sbom reproduce clean
.NOTPARALLEL:

help: ## List the targets (the default)
	@echo "llama-sidecar: a draft head for your model, and what it gains you"
	@sed -n 's/^\([a-z]*\):.*## /  make \1 | /p' Makefile | while IFS='|' read -r target text; do printf '%-17s%s\n' "$$target" "$$text"; done
	@echo "The first run of demo or test compiles llama-cpp-python (4 to 8 minutes on 2 cores); later runs re-use .venv."

demo: ## Set up, then convert the embedded model, chat and measure
	$(SETUP)
	@.venv/bin/llama-sidecar demo

test: ## Set up, then check format, lint and types, and run all tests
	$(SETUP)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy -p llama_sidecar.converter -p llama_sidecar.sidecars -p llama_sidecar.runtime -p llama_sidecar.scripts
	.venv/bin/pytest -n 2 --dist loadfile

sanitize: ## Run the native code's tests under AddressSanitizer and UBSan (half an hour at most)
	$(SETUP)
	.venv/bin/python scripts/dev/sanitize.py

fuzz: ## Read files broken on purpose, FUZZ_SECONDS (60) of each sort
	$(SETUP)
	@.venv/bin/python -m pip install -q -c constraints.txt atheris || echo "without atheris: nothing guides the inputs to new code"
	.venv/bin/python scripts/dev/fuzz/readers.py --seconds $(FUZZ_SECONDS)
	.venv/bin/python scripts/dev/fuzz/models.py --seconds $(FUZZ_SECONDS)
	.venv/bin/python scripts/dev/fuzz/native.py --seconds $(FUZZ_SECONDS)

format: ## Format the code and mend what the linter can
	$(SETUP) --tools-only
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

wheel: ## Build the wheel into dist/
	$(SETUP)
	@ls -l dist/*.whl

lock: ## Resolve and hash anew what development needs (UPGRADE=1: at the newest versions)
	$(PYTHON) scripts/dev/supply.py lock $(if $(UPGRADE),--upgrade)

sbom: ## Write the wheel's bill of materials (CycloneDX) into dist/
	$(SETUP)
	.venv/bin/python scripts/dev/supply.py sbom

reproduce: ## Build the wheel twice, in two places, and compare the bytes
	$(SETUP)
	.venv/bin/python scripts/dev/supply.py reproduce

clean: ## Remove .venv and all that was built
	rm -rf .venv .build dist demo-models .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find converter sidecars runtime scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
