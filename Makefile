# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Short names for CMake's presets. `make` builds build/release/quern and installs nothing on the machine.
# `make demo` trains and times two attentions, `make demo-all` every kind; they build what they run and nothing of the
# GPU. `make test` runs CI's tests in build/test; `make test-tsan` looks for data races, `make test-tidy` runs clang-tidy,
# `make test-cuda` compiles and inspects the GPU's kernels, `make test-numpy` and `make test-python` test the Python package
# with NumPy alone and in PyTorch.
# `make demo`, `make test` and setup* install packages that are missing.
JOBS ?= $(shell nproc)
SETUP = gcc g++ cmake pkg-config libjansson-dev nettle-dev libdnnl-dev gnuplot-nox linux-libc-dev libc6-dev
SETUP_DEV = $(SETUP) python3-venv libcmocka-dev clang-14 clang-tidy-14 clang-format-14 libclang-rt-14-dev libomp-14-dev

all: packages
	cmake --preset release >/dev/null
	cmake --build build/release -j$(JOBS)

packages:
	@cmake/setup.sh --print $(SETUP)

packages-dev:
	@cmake/setup.sh --print $(SETUP_DEV)

setup:
	@cmake/setup.sh $(SETUP)

setup-dev:
	@cmake/setup.sh $(SETUP_DEV)

demo demo-all: setup
	cmake --preset release >/dev/null
	cmake --build build/release -j$(JOBS) --target lm quern_command
	examples/lm/demo.sh $(if $(filter demo-all,$@),--all)

check: packages-dev
	tests/run.sh check

test: setup-dev
	tests/run.sh test

test-tsan: setup-dev
	tests/run.sh tsan

test-tidy: setup-dev
	tests/run.sh tidy

test-numpy: setup-dev
	tests/run.sh numpy

test-cuda: setup
	tests/run.sh cuda

test-adding: setup-dev
	tests/adding/run.sh

# The package is built from its own sources; the command makes and reads files beside it.
test-python: packages
	cmake --preset release >/dev/null
	cmake --build build/release -j$(JOBS) --target quern_command
	python/tests/run.sh

test-gpu:
	tests/gpu/run.sh

test-gpu-sanitize:
	tests/gpu/sanitize.sh
	QUERN_SANITIZE_TOOLS=racecheck tests/gpu/sanitize.sh

bench: all
	build/release/quern bench ceilings
	build/release/quern bench attention
	build/release/quern bench nsa

accept: $(patsubst bench/accept/%.json,accept-%,$(wildcard bench/accept/*.json))

accept-%: all
	cmake --build build/release --target accept accept_error accept_convert accept_v4 >/dev/null
	build/release/accept bench/accept/$*.json build/release

# make install PREFIX=/usr/local
install: all
	cmake --install build/release $(if $(PREFIX),--prefix $(PREFIX))

# A Debian package, an archive of the last commit's sources, Python's source distribution and wheels, in build/packages.
package: all
	@cmake/setup.sh --print dpkg-dev python3-venv
	tools/package.sh

# Installs each in a clean root, and times the first commands of a clean clone and its tests: over half an hour, as root.
accept-package: package
	tests/package/run.sh

# The guide and the reference as web pages, in build/docs/html.
SETUP_DOCS = doxygen python3-sphinx python3-breathe python3-myst-parser
docs:
	@cmake/setup.sh $(SETUP_DOCS)
	@mkdir -p build/docs
	doxygen docs/sphinx/Doxyfile
	sphinx-build -q -E -W --keep-going -b html -c docs/sphinx docs build/docs/html
	tests/docs.sh

format: packages-dev
	git-clang-format-14 --binary clang-format-14 --extensions c,h,cu,cuh

tidy: packages-dev all
	tests/tidy.sh 225000

clean:
	rm -rf build

.PHONY: all packages packages-dev setup setup-dev demo demo-all check test test-tsan test-tidy test-numpy test-cuda
.PHONY: test-adding test-python test-gpu test-gpu-sanitize bench accept accept-package install package docs format tidy clean
