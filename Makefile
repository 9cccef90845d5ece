# make tune    from nothing to the fastest batch size of a ResNet-18 on this machine
# make test    from nothing to the whole test suite
# make help    the other targets

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$python && break; done)
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
PYTEST := $(PY) -m pytest

# A stamp is the list it stands for: what is installed once is not looked at again until the list changes.
PRODUCT := $(VENV)/.product
TESTING := $(VENV)/.testing
DEBIAN := $(VENV)/.debian

EMULATION := qemu-system-arm qemu-system-misc qemu-utils qemu-user-static mmdebstrap e2fsprogs kmod device-tree-compiler iproute2 buildah
DEBIAN_PACKAGES := qemu-user $(EMULATION) clang libclang-rt-dev openssh-server openssh-client busybox dataset-fashion-mnist

.DELETE_ON_ERROR:
.PHONY: help tune check test test-faults test-boards acceptance bench peers docs lock clean

help:
	@echo 'make tune         virtual environment, dependencies, build, and the tuning study of resnet18 on this machine'
	@echo 'make check        format, lint and types'
	@echo 'make test         all tests but the groups below; installs what they need'
	@echo 'make test-faults  fault loops'
	@echo 'make test-boards  emulated boards, real SSH servers, the Dockerfiles'
	@echo 'make acceptance   long runs; recorded in build/acceptance.xml, not gating'
	@echo 'make bench        our throughput against PyTorch, as it comes and tuned, on this machine'
	@echo 'make peers        ONNX Runtime training and JAX for make bench, each in an environment of its own under build/peers'
	@echo 'make docs         checks links, verbs, exit codes and board names in the documentation'
	@echo 'make lock         resolves requirements.lock anew'
	@echo 'make clean        removes build/ and the caches of the tools; .venv and runs/ stay'
	@echo "variables         PYTHON=python3.12 (for a new .venv), ARGS='options for tune, pytest or bench'"

tune: $(PRODUCT)
	$(PY) -m host_control tune --model resnet18 --max-batch-size 64 --board local $(ARGS)

check: $(TESTING)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

test: $(TESTING) $(DEBIAN)
	$(PYTEST) $(ARGS)

test-faults: $(TESTING) $(DEBIAN)
	$(PYTEST) -m 'faults and not acceptance' $(ARGS)

test-boards: $(TESTING) $(DEBIAN)
	$(PYTEST) -n 2 --dist loadgroup -m 'boards and not acceptance' $(ARGS)

acceptance: $(TESTING) $(DEBIAN)
	$(PYTEST) -m acceptance --junitxml=build/acceptance.xml $(ARGS)

bench: $(TESTING)
	$(PY) benchmarks/compare_peers.py --model resnet18 --batch-sizes 1,8,32 --peers torch,torch-tuned $(ARGS)

# One that cannot be had for this Python is said, and does not keep the others away.
peers: $(TESTING)
	@for peer in ort jax; do \
		rm -rf build/peers/$$peer && $(PY) -m venv build/peers/$$peer && \
		build/peers/$$peer/bin/python -m pip --disable-pip-version-check --quiet install -r benchmarks/peers/requirements-$$peer.txt || \
		{ echo "error: peer $$peer cannot be installed here: see above. make bench goes on without it." >&2; rm -rf build/peers/$$peer; }; \
	done

docs: $(TESTING)
	$(PYTEST) tests/test_docs.py $(ARGS)

$(PY):
	@test -n '$(PYTHON)' || { echo 'error: no Python 3.11, 3.12 or 3.13 on PATH. Install one, or name it: make PYTHON=/path/to/python3.12 ...' >&2; exit 22; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || tests/install-debian-packages python3-venv || true
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo 'error: $(PYTHON) cannot make a virtual environment. Install its venv and ensurepip modules (Debian: python3-venv).' >&2; exit 22; }
	$(PYTHON) -m venv $(VENV)

$(PRODUCT): requirements.lock | $(PY)
	$(PIP) install --require-hashes -r requirements.lock
	@# The checkout itself is importable from anywhere in this environment: examples are run as plain scripts.
	@echo '$(CURDIR)' > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/taste-edge-checkout.pth"
	@cp requirements.lock $@

$(TESTING): requirements-test.txt requirements-test-data.txt | $(PRODUCT)
	$(PIP) install -r requirements-test.txt
	$(PIP) install --no-deps -r requirements-test-data.txt
	@cat $^ > $@

# Without root, or elsewhere than on Debian, this says what is missing and the tests that need it are skipped.
$(DEBIAN): Makefile | $(PY)
	@if tests/install-debian-packages $(DEBIAN_PACKAGES); then echo '$(DEBIAN_PACKAGES)' > $@; fi

lock: | $(PY)
	$(PY) -m venv build/uv
	build/uv/bin/python -m pip --disable-pip-version-check --quiet install uv==0.13.9
	build/uv/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
		--no-header --output-file build/resolved.lock pyproject.toml
	{ echo '# The product on CPython 3.11-3.13, Linux. Made by `make lock`; installed with pip --require-hashes.'; \
		cat build/resolved.lock; } > requirements.lock

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
