# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.

MODEL       ?= deepseek-v2-lite
DTYPE       ?= fp16
CACHE       ?= append
TARGET      ?= trt-rtx
BACKEND     ?= $(TARGET)
PREFILL     ?= expanded
MAX_CONTEXT ?= 32768
MAX_BATCH   ?= 8
CHUNK       ?= 512
SCOPE       ?=
LAYER       ?=
LAYERS      ?=
WEIGHTS     ?= copy
SUITE       ?= layer
SEED        ?= 0
OUT         ?= build/$(notdir $(MODEL:/=))$(if $(LAYER),-layer$(LAYER))-$(DTYPE)-$(CACHE)-$(TARGET)

VENV   ?= .venv
PYTHON ?= python3
TORCH  ?= torch==2.13.0
PY     ?= $(VENV)/bin/python

# What the hardware suits: ONNX Runtime for CUDA where there is a GPU, TensorRT for data-centre GPUs (compute capability
# 9.0 and 10.x, which TensorRT-RTX does not list), TensorRT-RTX everywhere.
CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
comma      := ,
EXTRAS     := rtx,polygraphy,serve,test,dev$(if $(CAPABILITY),$(if $(filter 9.0 10.%,$(CAPABILITY)),$(comma)tensorrt))

STAMPS  := build/.stamps
KEY     := $(STAMPS)/$(subst /,_,$(OUT))
EXPORT  := $(MODEL) --out $(OUT) --dtype $(DTYPE) --cache $(CACHE) --target $(TARGET) --prefill $(PREFILL) \
           --max-context $(MAX_CONTEXT) --max-batch $(MAX_BATCH) --seed $(SEED) --weights $(WEIGHTS) \
           $(if $(SCOPE),--scope $(SCOPE)) $(if $(LAYER),--layer $(LAYER)) $(if $(LAYERS),--layers $(LAYERS))
ENGINE  := $(OUT) --backend $(BACKEND) --max-batch $(MAX_BATCH) --max-context $(MAX_CONTEXT) --chunk $(CHUNK)

.DEFAULT_GOAL := help
.PHONY: help setup stubs demo export engine validate doctor report serve polygraphy activation predictor operator bench lint typecheck test test-all test-cpp test-gpu clean FORCE

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14
	@echo; echo "Variables: MODEL=$(MODEL) OUT=$(OUT) DTYPE=$(DTYPE) CACHE=$(CACHE) TARGET=$(TARGET) BACKEND=$(BACKEND)"
	@echo "           PREFILL=$(PREFILL) MAX_CONTEXT=$(MAX_CONTEXT) MAX_BATCH=$(MAX_BATCH) CHUNK=$(CHUNK) SEED=$(SEED)"
	@echo "           SCOPE=$(SCOPE) LAYER=$(LAYER) LAYERS=$(LAYERS) WEIGHTS=$(WEIGHTS) SUITE=$(SUITE)"

setup: $(VENV)/.installed ## make .venv with what the hardware suits

$(VENV)/.installed: pyproject.toml
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@# CPU build of torch where the index has one; a CUDA build works as well
	$(PY) -m pip install --quiet '$(TORCH)'
	$(PY) -m pip install --quiet -e '.[$(EXTRAS)]'
	@# Triton's protobuf definition; what else the package asks for is not needed and would hold ml_dtypes back
	$(PY) -m pip install --quiet --no-deps 'tritonclient>=2.60'
	@# onnxruntime and onnxruntime-gpu share one module name: never both
	$(if $(CAPABILITY),$(PY) -m pip uninstall --quiet -y onnxruntime && $(PY) -m pip install --quiet --force-reinstall --no-deps onnxruntime-gpu)
	@touch $@

demo: setup ## everything once: export, engines, parity, memory, with tables
	@echo "== export ($(OUT))"; $(MAKE) --no-print-directory export > /dev/null
	@$(PY) -m exporter inspect $(OUT)
	@echo "== engines ($(BACKEND))"; $(MAKE) --no-print-directory engine > /dev/null
	@$(PY) -m engines inspect $(OUT)
	@echo "== parity of the exported folder"; $(PY) -m validate parity $(OUT)
	@echo "== parity of the same layer in fp32, where ONNX Runtime counts"
	@$(PY) -m validate parity $(MODEL) --dtype fp32 --cache append --max-context 6000 $(if $(LAYER),--layer $(LAYER)) --seed $(SEED)
	@echo "== memory"; $(PY) -m validate memory $(OUT) --max-batch $(MAX_BATCH) --max-context $(MAX_CONTEXT) --chunk $(CHUNK)

export: $(OUT)/manifest.json ## export MODEL to OUT

engine: $(OUT)/engines/$(BACKEND)/manifest.json ## build BACKEND's engines in OUT

# The stamps hold the arguments an output was made with, and change only when those do. A folder that make did not
# make is never overwritten.
$(KEY).export-args: FORCE
	@mkdir -p $(STAMPS); echo '$(EXPORT)' | cmp -s - $@ || echo '$(EXPORT)' > $@
$(KEY).engine-args-$(BACKEND): FORCE
	@mkdir -p $(STAMPS); echo '$(ENGINE)' | cmp -s - $@ || echo '$(ENGINE)' > $@

$(OUT)/manifest.json: $(KEY).export-args $(wildcard exporter/*.py exporter/*/*.py) | setup
	@$(PY) -m exporter export $(EXPORT) $$(test -f $(KEY).made && echo --overwrite)
	@touch $(KEY).made

$(OUT)/engines/$(BACKEND)/manifest.json: $(OUT)/manifest.json $(KEY).engine-args-$(BACKEND) $(wildcard engines/*.py) | setup
	@$(PY) -m engines build $(ENGINE) $$(test -f $(KEY).made && test -d $(OUT)/engines/$(BACKEND) && echo --overwrite)

validate: export ## parity and memory of OUT
	@$(PY) -m validate parity $(OUT)
	@$(PY) -m validate memory $(OUT) --max-batch $(MAX_BATCH) --max-context $(MAX_CONTEXT) --chunk $(CHUNK)

doctor: export ## what is wrong with OUT, by measurement
	@$(PY) -m validate doctor $(OUT)

report: export ## OUT.html, one page about OUT: verdict, figures, parity, doctor, memory curves (minutes)
	@$(PY) -m validate report $(OUT) --out $(OUT).html --overwrite

serve: setup ## OUT, an exported model, behind OpenAI's API on port 8000
	@$(PY) -m engines serve $(OUT)

polygraphy: export ## Polygraphy comparison runs of every graph in OUT
	@$(PY) -m validate polygraphy $(OUT)

activation: setup ## the README's table of TensorRT-RTX activation memory, every figure built now (4 minutes)
	@$(PY) -m validate activation --update README.md

predictor: setup ## refit the activation predictor to the installed TensorRT-RTX, on builds made now (about 20 minutes)
	@$(PY) -m engines.calibrate

operator: setup ## the library of mla::LatentAttention for this processor, which --fused-decode needs
	@$(PY) -m engines operator --build

bench: setup ## side by side with peers and the floor: SUITE=layer, model, prefill, export, profile, engine or all
	@$(PY) -m validate bench $(if $(filter layer,$(SUITE)),$(MODEL)) --suite $(SUITE)

lint: setup ## ruff
	@$(VENV)/bin/ruff check .

typecheck: setup ## mypy, strict; the TensorRT door against TensorRT's own types
	@$(MAKE) --no-print-directory stubs || echo "TensorRT's types could not be had: its door is checked without them"
	@$(VENV)/bin/mypy

stubs: build/stubs/tensorrt/__init__.pyi
build/stubs/tensorrt/__init__.pyi: | setup
	@$(PY) -m tests.tensorrt_stubs build/stubs

test: setup ## the fast tests (about 18 minutes on 2 cores)
	@$(PY) -m pytest -n 2 --dist worksteal

test-all: setup ## every test, the slow ones too
	@$(PY) -m pytest -n 2 --dist worksteal -m ''

test-cpp: setup ## the C++ library: compiled, run beside Python, under sanitizers (fetches headers; minutes)
	@$(PY) -m pytest -m cpp tests/test_cpp*.py

test-gpu: $(if $(filter $(VENV)/%,$(PY)),setup) ## parity, memory, time and engines on a GPU (under 8 minutes; PY=python3: no .venv)
	@$(PY) -m validate gpu --out build/gpu.json

clean: ## remove build outputs (not .venv)
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
