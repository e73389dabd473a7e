#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What a newcomer meets: packages, each installed and tried where nothing else is, and the times of the first commands
# from a clean clone. As root; `make package` has made the packages.
#   tests/package/run.sh [packages] [demo] [tests]   all of them where none is named
set -eu
cd "$(dirname "$0")/../.."
[[ $# -gt 0 ]] || set -- packages demo tests
packages=$PWD/build/packages
version=$(sed -n 's/^project(quern VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
dir=$(mktemp -d)
root=$dir/root
trap 'rm -rf "$dir"' EXIT
failed=0
unset QUERN_CUDA_LIBRARY LD_LIBRARY_PATH CMAKE_C_COMPILER_LAUNCHER CMAKE_CXX_COMPILER_LAUNCHER CMAKE_CUDA_COMPILER_LAUNCHER

# figure WHAT VALUE [MOST]: a line, and a failure where the value exceeds the most that is allowed.
figure() {
    local verdict=""
    if [[ -n ${3-} ]]; then
        verdict=$(awk -v v="$2" -v most="$3" 'BEGIN { print v <= most ? "PASS" : "FAIL" }')
        [[ $verdict == PASS ]] || failed=1
    fi
    printf '%-60s %8s s%s\n' "$1" "$2" "${3:+  at most $3  $verdict}"
}

# tried WHAT COMMAND...: a check, whose output stands where it fails.
tried() {
    local what=$1 start=$SECONDS
    shift
    if "$@" >"$dir/log" 2>&1; then
        printf '%-60s %8s s  PASS\n' "$what" $((SECONDS - start))
    else
        printf '%-60s %8s s  FAIL\n' "$what" $((SECONDS - start))
        tail -n 30 "$dir/log"
        failed=1
    fi
}

# inside SCRIPT: in the clean root, which has a /proc of its own for the time.
inside() {
    unshare --mount sh -c 'mount -t proc proc "$1/proc" && exec chroot "$1" /usr/bin/env -i HOME=/root \
        PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive OMP_WAIT_POLICY=passive \
        sh -euxc "$2"' sh "$root" "$1"
}

clean_root() {
    cmake/setup.sh mmdebstrap
    mmdebstrap --variant=minbase --include=python3-venv bookworm "$root"
    cp /etc/resolv.conf "$root/etc"
    mkdir -p "$root/try/python" "$root/try/wheels" "$root/try/tests"
    cp "$packages"/* "$root/try"
    cp -r examples "$root/try"
    cp -r python/tests python/pyproject.toml "$root/try/python"
    cp -r tests/vectors "$root/try/tests"
    # The root reaches no index of Python's packages: what pip needs there is brought along.
    python3 -m pip download -q -d "$root/try/wheels" -r python/tests/requirements.txt ninja cmake \
        "$(sed -n 's/^requires = \["\(scikit[^"]*\)".*/\1/p' python/pyproject.toml)"
}

# wheel FILE: installed by pip alone, then what its tests ask of NumPy's arrays.
wheel() {
    inside "cd /try/python
        python3 -m venv /try/venv
        /try/venv/bin/pip install -q --no-index --find-links /try/wheels /try/${1##*/} numpy pytest safetensors
        /try/venv/bin/python -c 'import quern; assert quern.__version__ == \"$version\", quern.__version__'
        /try/venv/bin/pytest -q -p no:cacheprovider -c pyproject.toml tests/test_numpy.py tests/test_golden_numpy.py"
}

# backend: the CUDA library of the wheel is loaded, of the same build, and asks for a driver.
backend() {
    inside "/try/venv/bin/python -c '
import ctypes, glob, quern
library = ctypes.CDLL(glob.glob(quern.__path__[0] + \"/libquern.so.*\")[0])
library.quern_last_error.restype = ctypes.c_char_p
count = ctypes.c_int32()
code = library.quern_cuda_device_count(ctypes.byref(count))
said = library.quern_last_error(None).decode()
assert code == 0 or \"driver\" in said, said
print(code, said)'"
}

debian_package() {
    inside "apt-get update -q
        apt-get install -y -q --no-install-recommends /try/quern_${version}_*.deb
        quern info
        quern run nsa /try/tests/vectors/nsa_small.safetensors /try/out.safetensors
        test -e /usr/share/man/man1/quern.1 -o -e /usr/share/man/man1/quern.1.gz
        test -e /usr/share/doc/quern/LICENSE"
}

# headers: a program is built by pkg-config and by find_package, against what the Debian package installed.
headers() {
    inside "apt-get install -y -q --no-install-recommends gcc libc6-dev pkg-config cmake make
        cd /try/examples/hello
        cc hello.c \$(pkg-config --cflags --libs quern) -lm -o /try/hello
        /try/hello
        cmake -S . -B /try/build
        cmake --build /try/build
        /try/build/hello"
}

source_distribution() {
    inside "python3 -m venv /try/built
        /try/built/bin/pip install -q --no-index --find-links /try/wheels /try/quern-$version.tar.gz numpy
        /try/built/bin/python -c 'import numpy, quern; print(quern.attention(*[numpy.ones((1, 8, 2, 16), \"f4\")] * 3)[0, 0])'"
}

archive() {
    inside "apt-get install -y -q --no-install-recommends $(sed -n 's/^SETUP = //p' Makefile)
        cd /try
        tar xf quern-src-$version.tar.gz
        cd quern-$version
        make install PREFIX=/opt/quern
        /opt/quern/bin/quern info
        test -e /opt/quern/share/doc/quern/docs/guide.md"
}

packages() {
    local file
    for file in "$packages"/*; do
        printf '%-60s %8s MB\n' "${file##*/}" "$(stat -c %s "$file" | awk '{ printf "%.1f", $1 / 1e6 }')"
    done
    tried "a clean root: Debian 12 with python3-venv" clean_root
    for file in "$packages"/*.whl; do
        rm -rf "$root/try/venv"
        tried "pip install ${file##*/}" wheel "$file"
        [[ $file != *cuda* ]] || tried "its CUDA library is loaded" backend
    done
    tried "apt-get install quern_$version" debian_package
    tried "hello.c by pkg-config and by find_package" headers
    tried "pip install quern-$version.tar.gz" source_distribution
    tried "make install from quern-src-$version.tar.gz" archive
}

# until_training: seconds until `make demo` in the clone has trained a step, on a terminal, which is told of each; it is
# then stopped.
until_training() {
    local start=$EPOCHREALTIME pid
    setsid script -qefc "make -C '$dir/clone' demo" "$dir/log" >/dev/null 2>&1 </dev/null &
    pid=$!
    until grep -q 'step .*bits/byte' "$dir/log" 2>/dev/null; do
        if ! kill -0 "$pid" 2>/dev/null; then
            tail -n 30 "$dir/log" >&2
            echo 1e9
            return
        fi
        sleep 0.1
    done
    awk -v from="$start" -v to="$EPOCHREALTIME" 'BEGIN { printf "%.1f", to - from }'
    kill -- -"$pid"
    wait "$pid" 2>/dev/null || true
    rm -f "$dir/log"
}

[[ " $* " == *" packages "* ]] && packages
git clone -q . "$dir/clone"
if [[ " $* " == *" demo "* ]]; then
    figure "make demo in a clean clone, to the first training line" "$(until_training)" 120
    figure "make demo again, to the first training line" "$(until_training)" 5
fi
if [[ " $* " == *" tests "* ]]; then
    start=$SECONDS
    tried "make test in the clone" make -C "$dir/clone" test
    grep -E '^[0-9]+ passed, ' "$dir/log" || true
    figure "make test" $((SECONDS - start))
fi
exit $failed
