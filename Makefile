# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# A thin face over CMake's presets: `make` builds build/release/quern, `make demo` runs the main job, `make test`
# runs everything that CI runs.
JOBS ?= $(shell nproc)
SETUP = gcc g++ cmake pkg-config libjansson-dev nettle-dev libdnnl-dev gnuplot-nox linux-libc-dev libc6-dev
SETUP_DEV = $(SETUP) libcmocka-dev clang-14 clang-tidy-14 clang-format-14 libclang-rt-14-dev libomp-14-dev

all: setup
	cmake --preset release >/dev/null
	cmake --build build/release -j$(JOBS)

setup:
	@cmake/setup.sh $(SETUP)

setup-dev:
	@cmake/setup.sh $(SETUP_DEV)

demo: all
	examples/lm/demo.sh

check: setup-dev
	tests/run.sh check

test: setup-dev
	tests/run.sh test

test-gpu:
	tests/gpu/run.sh

test-gpu-sanitize:
	tests/gpu/sanitize.sh

bench: all
	build/release/quern bench ceilings
	build/release/quern bench attention
	build/release/quern bench nsa

accept: $(patsubst bench/accept/%.sh,accept-%,$(wildcard bench/accept/*.sh))

accept-%: all
	bench/accept/$*.sh

install: all
	cmake --install build/release

format: setup-dev
	git-clang-format-14 --extensions c,h,cu,cuh

tidy: setup-dev all
	tests/tidy.sh

clean:
	rm -rf build

.PHONY: all setup setup-dev demo check test test-gpu test-gpu-sanitize bench accept install format tidy clean
