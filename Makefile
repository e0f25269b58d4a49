# A fresh machine needs Python 3.11 or newer, make and a package registry, then one of
#
#   make test    lint, types and the tests that every change needs, in some five minutes
#   make test-more the rest: whole matrices, more rounds of faults, servers of their own
#   make test-avx2 on a processor with AVX512 or AVX-VNNI: the kernels, runner and logits once more as on one that has AVX2
#                alone, and products as on one with the first AVX512, and on one with AVX-VNNI and no AVX512
#   make test-clients published clients (openai, anthropic, litellm, langchain-openai, instructor) against a server, and
#                programs that work with tools: openai-agents, and with node and npm codex, claude-code, opencode, the AI SDK
#   make test-ray servers on Ray Serve, on a Ray that is started for it, in an environment that has Ray besides
#   make test-vllm VLLM=folder vLLM's own server tests, from its unpacked source package: see tests/clients/vllm_tests
#   make test-kernels the CUDA kernels without a GPU: interpreted, compiled for three generations, and launched up to the
#                launch itself; some minutes
#   make test-gpu the CUDA kernels on this machine's NVIDIA GPU; started again, it goes on where it stopped
#   make test-gpu-engine the engine on this GPU, likewise: logits, preemption, images, load
#   make check-docker the steps of the CPU image and the services of the compose file, without Docker
#   make gpu-wheels what a GPU machine without a network lacks to run cairn, in build/gpu-wheels
#   make test-ui the cache page in a headless Chromium (Debian's package `chromium`, or CHROMIUM=path): screenshots in build/ui
#   make demo    a small trained model, real servers, and a table of what the prefix cache did
#   make demo-pd the same for a prefill and a decode server behind a proxy
#   make demo-ray the same for two replicas on Ray Serve
#
# TORCH_INSTALL_ARGS   what pip gets besides torch's version, e.g. an index with CPU builds: see README.md
# SERVE_ARGS           more flags for `make serve`
# TEST_ARGS            more arguments for pytest
# TEST_WORKERS         processes that run tests at a time, 3 unless given: on two cores some wait for sockets; 0 runs all in one
# GPU_PYTHON           what runs `make test-gpu`, python3 unless given: with torch for CUDA, pytest, hypothesis, msgspec, numba
# GPU_SECONDS          after how many it begins no further test, 420 unless given
# GPU_WORKERS          in how many processes, 4 unless given; 14 ran 800 tests in three minutes on an H200 and 16 cores

PYTHON ?= python3
PORT ?= 8000
TEST_WORKERS ?= 3
TORCH_INSTALL_ARGS ?= -c constraints.txt
GPU_PYTHON ?= python3
GPU_SECONDS ?= 420
GPU_WORKERS ?= 4

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NIXL := $(VENV)/.installed-nixl
UI := $(VENV)/.installed-ui
MODEL := build/model
DEMO_MODEL := demo/model
TORCH := $(shell grep '^torch==' constraints.txt)
# Clients disagree about the versions of what they need: an environment for each of these lists.
CLIENTS := build/clients
NODE_PROGRAMS := codex claude-code opencode ai-sdk
RUN_CLIENTS = cd tests/clients && $(ONE_THREAD) $(ON_CPU) CAIRN=$(CURDIR)/$(BIN)/cairn CAIRN_MODEL=$(CURDIR)/$(MODEL)
# Ray, in an environment of its own that sees what the other one has.
RAY := build/ray
RAY_INSTALLED := $(RAY)/.installed
RUN_RAY = $(ONE_THREAD) $(OFFLINE) $(ON_CPU) RAY_USAGE_STATS_ENABLED=0 $(CURDIR)/$(RAY)/bin/python
# Beside the environment, not in it: torch and transformers are others where Triton can be imported.
TRITON_FOLDER := build/triton
TRITON := $(TRITON_FOLDER)/.installed
WITH_TRITON := PYTHONPATH=$(CURDIR)/$(TRITON_FOLDER) TRITON_CACHE_DIR=$(CURDIR)/build/triton-cache

# Tests count on one thread: tiny models are slower with more, and float sums then have one order.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
OFFLINE := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
# Some machines forbid it, and then each of a run's hundreds of processes would compile the same modules anew.
KEEP_COMPILED := PYTHONDONTWRITEBYTECODE=
# Where there is a GPU --device auto would take it: these are lanes of the CPU.
ON_CPU := CUDA_VISIBLE_DEVICES=
RUN := $(ONE_THREAD) $(OFFLINE) $(KEEP_COMPILED) $(ON_CPU) $(BIN)/python
# Once a machine: else tests compile them side by side, and wait for each other.
COMPILE := $(RUN) -m cairn.kernels.cpu.compile_worker
# The same of what pytest makes of tests' sources, a third of a minute in each of its processes.
COMPILE_TESTS := $(RUN) -m pytest -n 0 --collect-only

.PHONY: test compiled compiled-tests test-more test-avx2 test-clients clients-openai clients-litellm clients-programs test-ray test-vllm test-kernels test-gpu test-gpu-engine check-docker gpu-wheels test-ui test-long soak soak-server lint demo demo-pd demo-ray serve train-demo-model benchmarks bench-vllm bench-llama clean

# Three that take a core each for most of a minute: two cores are both busy until the end.
test: $(NIXL)
	@$(MAKE) --no-print-directory -j 3 lint compiled compiled-tests
	@$(RUN) -m pytest -n $(TEST_WORKERS) --dist worksteal $(TEST_ARGS)

compiled: $(NIXL)
	@$(COMPILE)

compiled-tests: $(NIXL)
	@$(COMPILE_TESTS) >/dev/null || true

test-ui: $(UI)
	@$(RUN) -m pytest -m ui -n 0 tests/ui $(TEST_ARGS)

test-more: $(NIXL)
	@$(COMPILE)
	@$(RUN) -m pytest -m "more and not long" -n $(TEST_WORKERS) --dist worksteal $(TEST_ARGS)

# Those of models in which what is served computes; others are of files, configs and the reference's numbers.
SERVED_TESTS := $(wildcard tests/models/test_*_logits.py) \
  $(patsubst %,tests/models/test_%.py,fp8 gemma4 gguf gguf_codes gpt_oss packed_checkpoints served_int4 served_int8 state_dtypes)
# What a processor's instructions are of no matter to: rules, memory, Triton's kernels, and the reference.
SAME_ON_ALL := $(wildcard tests/kernels/test_cuda_*.py) \
  $(patsubst %,tests/kernels/test_%.py,attention_rule gpu_progress heap huge_pages reference wgmma_descriptors)
CPU_KERNEL_TESTS := $(filter-out $(SAME_ON_ALL),$(wildcard tests/kernels/test_*.py))
# Of AVX512 without BF16 and VNNI as well, of AVX-VNNI, and of AVX512 without AMX, which have other products than either.
PRODUCT_TESTS := $(patsubst %,tests/kernels/test_%.py,panels int8 int4 codes float32_weights against_reference)

test-avx2: $(NIXL)
	@if grep -qwE 'avx512f|avx_vnni' /proc/cpuinfo; then \
	  CAIRN_MAX_CPU_ISA=avx2 $(RUN) -m pytest -n $(TEST_WORKERS) --dist worksteal $(TEST_ARGS) \
	    $(CPU_KERNEL_TESTS) tests/runner $(SERVED_TESTS) tests/engine/test_exactness.py \
	    tests/engine/test_exactness_families.py tests/engine/test_exactness_drafts.py && \
	  if grep -qw avx512f /proc/cpuinfo; then for isa in avx512 $$(grep -m 1 -ow avx_vnni /proc/cpuinfo) \
	    $$(grep -m 1 -ow amx_bf16 /proc/cpuinfo | sed s/amx/avx512/); do \
	    CAIRN_MAX_CPU_ISA=$$isa $(RUN) -m pytest -n $(TEST_WORKERS) --dist worksteal $(TEST_ARGS) $(PRODUCT_TESTS) || exit 1; \
	  done; fi; \
	else echo "SKIPPED make test-avx2: this processor has neither AVX512 nor AVX-VNNI, so make test has shown what it shows"; fi

# Each client's own requirements hold: the openai package is there in its newest version, and in litellm's.
# Two at a time, each with servers of its own: they wait for programs and sockets more than they compute.
test-clients:
	@$(MAKE) --no-print-directory --output-sync -j 2 clients-programs clients-openai clients-litellm

clients-openai: $(MODEL)/config.json $(CLIENTS)/openai/.installed
	@$(RUN_CLIENTS) $(CURDIR)/$(CLIENTS)/openai/bin/python -m pytest $(TEST_ARGS) \
	  test_openai.py test_openai_responses.py test_anthropic.py test_langchain.py

clients-litellm: $(MODEL)/config.json $(CLIENTS)/litellm/.installed
	@$(RUN_CLIENTS) $(CURDIR)/$(CLIENTS)/litellm/bin/python -m pytest $(TEST_ARGS) \
	  test_openai.py test_openai_responses.py test_litellm.py test_instructor.py

clients-programs: $(MODEL)/config.json $(CLIENTS)/agents/.installed $(NODE_PROGRAMS:%=$(CLIENTS)/node/%/.installed)
	@$(RUN_CLIENTS) $(CURDIR)/$(CLIENTS)/agents/bin/python -m pytest -rs $(TEST_ARGS) \
	  test_openai_agents.py test_ai_sdk.py test_opencode.py test_codex.py test_claude_code.py

test-ray: $(MODEL)/config.json $(NIXL) $(RAY_INSTALLED)
	@cd tests/ray_serve && $(RUN_RAY) -m pytest $(TEST_ARGS)

test-vllm: build/scripted-model/config.json build/scripted-vision-model/config.json $(CLIENTS)/vllm/.installed
	@test -d "$(VLLM)" || { echo "Name the folder of vLLM's unpacked source package: make test-vllm VLLM=..." >&2; exit 1; }
	@$(ON_CPU) $(CLIENTS)/vllm/bin/python tests/clients/vllm_tests/run.py "$(VLLM)" $(TEST_ARGS)

# "cuda" is in the names of the backend's files and of its parameter: what other backends are asked is asked elsewhere.
# torch's products of bfloat16 by AMX read behind an odd last column (kernels/exact/products.py), and here they are the host's.
test-kernels: $(TRITON)
	@$(WITH_TRITON) TRITON_INTERPRET=1 ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 $(RUN) -m pytest -n $(TEST_WORKERS) \
	  --dist worksteal -k cuda tests/kernels $(TEST_ARGS)
	@$(WITH_TRITON) $(RUN) -m pytest -n $(TEST_WORKERS) --dist worksteal tests/kernels/test_cuda_compiles.py \
	  tests/kernels/test_cuda_launches.py tests/kernels/test_cuda_first_use.py $(TEST_ARGS)

# Tests that have passed are not run again before one of these files changes.
GPU_SOURCES = $(sort $(wildcard src/cairn/kernels/*.py src/cairn/kernels/*/*.py tests/kernels/*.py benchmarks/gpu_kernels.py \
	src/cairn/runner/checkpoint.py src/cairn/runner/memory.py src/cairn/layers/memory.py \
	tests/runner/*exactness.py src/cairn/transfer/*.py src/cairn/transfer/*/*.py src/cairn/engine/transfers/*.py))
GPU_TESTS := test_cuda_real_shapes test_cuda_rows test_cuda_attention test_scans test_sequences_in_parts test_exact \
	test_against_reference test_checkpoint_files test_cuda_libraries test_cuda_loading test_cuda_sampler test_cuda_pd \
	test_cuda_exactness test_cuda_fp8 test_cuda_codes test_verify_and_fold test_state_dtypes
GPU_ENGINE_SOURCES = $(sort $(GPU_SOURCES) $(shell find src/cairn -name '*.py'))
GPU_ENGINE_TESTS := test_cuda_engine test_cuda_engine_load
# Sources, and files of tests.
RUN_ON_GPU = PYTHONPATH=src:tests:tests/pd:. TRITON_CACHE_DIR=$(CURDIR)/build/triton-cache-gpu $(ONE_THREAD) $(OFFLINE) \
	  GPU_TESTS_PASSED=build/gpu-tests/$$(cat $(1) | sha256sum | cut -c 1-16) \
	  GPU_TESTS_SECONDS=$(GPU_SECONDS) $(GPU_PYTHON) tests/kernels/gpu_run.py --workers $(GPU_WORKERS) -q --durations=10 \
	  -c /dev/null --rootdir=. --confcutdir=tests/kernels --import-mode=importlib -p no:cacheprovider \
	  -k cuda $(2:%=tests/kernels/%.py) $(TEST_ARGS)

test-gpu:
	@$(call RUN_ON_GPU,$(GPU_SOURCES),$(GPU_TESTS))

test-gpu-engine:
	@$(call RUN_ON_GPU,$(GPU_ENGINE_SOURCES),$(GPU_ENGINE_TESTS))

# Torch comes as it does for .venv. Not part of make test: it installs everything once more.
check-docker: $(MODEL)/config.json
	@$(ON_CPU) PYTHONPATH=. $(BIN)/python -m deploy.docker.build_steps --model $(MODEL) --build-arg "TORCH_INSTALL_ARGS=$(TORCH_INSTALL_ARGS)"

gpu-wheels: $(INSTALLED)
	@$(BIN)/python deploy/gpu_wheels.py build/gpu-wheels

test-long: $(NIXL) $(TRITON)
	@$(RUN) -m pytest -m long $(TEST_ARGS)
	@$(WITH_TRITON) $(RUN) -m pytest -m long tests/kernels/test_cuda_compiles.py $(TEST_ARGS)

# Starts of servers with NIXL, then rounds of every fault between real processes over it: build/soak.json. STARTS, ROUNDS,
# SEED and FROM=fault_name are optional.
soak: $(MODEL)/config.json $(NIXL)
	@PYTHONPATH=tests $(RUN) tests/pd/soak.py --model $(MODEL) --starts $(or $(STARTS),20) --rounds $(or $(ROUNDS),20) --seed $(or $(SEED),0) --from "$(FROM)"

# Everything that clients do, for ten minutes, at one server that is too small for it: build/soak-server.json. SECONDS, SEED.
soak-server: $(MODEL)/config.json
	@PYTHONPATH=tests $(RUN) tests/server/soak.py --model $(MODEL) --seconds $(or $(SECONDS),600) --seed $(or $(SEED),0)

lint: $(INSTALLED)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy src demo

demo: $(INSTALLED)
	@$(RUN) -m demo --model $(DEMO_MODEL) --out build/demo

demo-pd: $(NIXL)
	@$(RUN) -m demo.demo_pd --model $(DEMO_MODEL) --out build/demo-pd

demo-ray: $(RAY_INSTALLED)
	@$(RUN_RAY) -m demo.demo_ray --model $(DEMO_MODEL) --out build/demo-ray

serve: $(INSTALLED)
	@$(OFFLINE) exec $(BIN)/cairn serve $(DEMO_MODEL) --served-model-name tiny --port $(PORT) $(SERVE_ARGS)

# The model of demo/model anew, from this Python's standard library: two hours, more or less. Stopped, it goes on.
train-demo-model: $(INSTALLED)
	@$(OFFLINE) $(BIN)/python tools/train_small_model.py --work build/small-model --out build/small-model/trained

benchmarks: $(NIXL)
	@mkdir -p build/benchmarks
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,nixl,dev]'
	@$(RUN) -m benchmarks.cache_core --json build/benchmarks/cache_core.json --plot build/benchmarks/cache_core.svg
	@$(RUN) -m benchmarks.prefix_hits --json build/benchmarks/prefix_hits.json --plot build/benchmarks/prefix_hits.svg
	@$(RUN) -m benchmarks.pd_reproducer --json build/benchmarks/pd_reproducer.json --plot build/benchmarks/pd_reproducer.svg
	@$(RUN) -m benchmarks.pd_handover --json build/benchmarks/pd_handover.json --plot build/benchmarks/pd_handover.svg
	@$(RUN) -m benchmarks.pd_bandwidth --json build/benchmarks/pd_bandwidth.json --plot build/benchmarks/pd_bandwidth.svg
	@$(RUN) -m benchmarks.incremental_images --json build/benchmarks/incremental_images.json \
		--plot build/benchmarks/incremental_images.svg
	@$(RUN) -m benchmarks.bench_serve_matrix --json build/benchmarks/bench_serve.json \
		--plot build/benchmarks/bench_serve.svg
	@$(RUN) -m benchmarks.step_overhead --json build/benchmarks/step_overhead.json \
		--plot build/benchmarks/step_overhead.svg
	@$(RUN) -m benchmarks.quantization --json build/benchmarks/quantization.json
	@PYTHONPATH=tests $(RUN) -m benchmarks.quantized_start --json build/benchmarks/quantized_start.json
	@$(RUN) -m benchmarks.state_dtypes --json build/benchmarks/state_dtypes.json --plot build/benchmarks/state_dtypes.svg
	@$(RUN) -m benchmarks.sampler --json build/benchmarks/sampler.json
	@$(RUN) -m benchmarks.idle_cpu --json build/benchmarks/idle_cpu.json
	@$(RUN) -m benchmarks.speculation --json build/benchmarks/speculation.json --plot build/benchmarks/speculation.svg

# cairn beside vLLM's CPU build, which gets an environment of its own (4 GB): build/benchmarks/peers.json, an hour or more.
# SIZES="tiny small", ROUNDS, THREADS and PEERS_ARGS (e.g. --quick) are optional.
bench-vllm: $(INSTALLED)
	@$(BIN)/python -m benchmarks.peer_vllm build/peers/vllm
	@$(OFFLINE) $(ON_CPU) $(BIN)/python -m benchmarks.peers --servers cairn vllm --sizes $(or $(SIZES),tiny small) \
		--rounds $(or $(ROUNDS),3) --threads $(or $(THREADS),2) $(PEERS_ARGS)

# cairn beside llama.cpp's server, which is compiled in an environment of its own (1 GB), with what the machine can do at
# most: build/benchmarks/llama.json. QUANT=int8 or int4: weights of as many bits on both sides; ISA=avx2: no more
# instructions than those, on both. SIZES, ROUNDS, THREADS and PEERS_ARGS as above.
bench-llama: $(INSTALLED)
	@$(BIN)/python -m benchmarks.peer_llama build/peers/llama $(ISA:%=--isa %)
	@$(OFFLINE) $(ON_CPU) $(BIN)/python -m benchmarks.peers --servers cairn llama-server --sizes $(or $(SIZES),tiny small) \
		--rounds $(or $(ROUNDS),3) --threads $(or $(THREADS),2) $(QUANT:%=--quantization %) $(ISA:%=--isa %) --bounds \
		--json build/benchmarks/llama$(QUANT:%=-%)$(ISA:%=-%).json $(PEERS_ARGS)

clean:
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# config.json is written last: a folder that has it is a finished checkpoint.
$(MODEL)/config.json: $(wildcard src/cairn/models/*.py src/cairn/models/*/*.py) | $(INSTALLED)
	@rm -rf $(MODEL)
	@mkdir -p $(dir $(MODEL))
	@$(RUN) -m cairn make-model nemotron_h $(MODEL)

build/vision-model/config.json: $(MODEL)/config.json
	@rm -rf $(@D)
	@$(RUN) -m cairn make-model qwen3_5_vl $(@D)

build/scripted-%/config.json: build/%/config.json tests/clients/vllm_tests/scripted_model.py
	@$(RUN) tests/clients/vllm_tests/scripted_model.py $(<D) $(@D)
	@touch $@

# The lists are whole, so that nothing has to be resolved.
$(CLIENTS)/%/.installed: tests/clients/%.txt
	@rm -rf $(@D) && mkdir -p $(CLIENTS)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

# A machine without npm, or whose registry lacks them, does without: their tests are skipped.
$(CLIENTS)/node/%/.installed: tests/clients/node/%/package.json tests/clients/node/%/package-lock.json
	@rm -rf $(@D) && mkdir -p $(@D) && cp $^ $(@D)
	@if ! node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null || ! command -v npm >/dev/null; then \
	  echo "SKIPPED make test-clients, $*: there is no node 20 with npm here"; \
	elif ! timeout 240 npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund --loglevel=error --fetch-retries=1 --fetch-timeout=60000 \
	  >/dev/null; then \
	  echo "SKIPPED make test-clients, $*: npm could not install it"; \
	else touch $@; fi

# The list is whole, and the other environment is seen by a .pth file: torch is not installed twice.
$(RAY_INSTALLED): tests/ray_serve/ray.txt | $(INSTALLED)
	@rm -rf $(RAY)
	@$(BIN)/python -m venv $(RAY)
	@$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' \
	  > $$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cairn.pth
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is needed; '$(PYTHON)' is not. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  $(PYTHON) -m venv --clear $(VENV) || \
	  { echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it needs the package python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV): once, it takes some minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_INSTALL_ARGS) $(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The transfer library is half a gigabyte: `make serve` and `make demo` do without it.
$(NIXL): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[nixl,dev]'
	@touch $@

# It brings no browser: that is the system's.
$(UI): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ui,dev]'
	@touch $@

# 700 MB; the compiler in it needs no GPU.
$(TRITON): constraints.txt | $(INSTALLED)
	@rm -rf $(TRITON_FOLDER)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON_FOLDER) \
	  $$(grep '^triton==' constraints.txt)
	@touch $@
