#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Makes what is handed out, in build/packages, from the last commit and from what `make` has built: a Debian package, an
# archive of the sources, Python's source distribution and, from that, wheels: for the CPU and, where `make` has built
# libquern_cuda, with that. Prints the size of each.
set -eu
cd "$(dirname "$0")/.."
to=$PWD/build/packages
venv=$PWD/build/package-venv
platform=manylinux_2_36_$(uname -m)
version=$(sed -n 's/^project(quern VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
cuda=$PWD/build/release/libquern_cuda.so.$(sed -n 's/^set(QUERN_ABI \([0-9]*\).*/\1/p' CMakeLists.txt)
export PIP_DISABLE_PIP_VERSION_CHECK=1 CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$to"
mkdir -p "$to"

# quietly COMMAND...: its output only where it fails.
quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log"; return 1; }; }

# repaired WHEEL: named for the oldest glibc that it runs on, with libgomp inside. TVM-FFI's library is that of the
# package of its name.
repaired() {
    PATH=$venv/bin:$PATH quietly "$venv/bin/auditwheel" repair --plat "$platform" --only-plat \
        --exclude libtvm_ffi.so -w "$to" "$1"
}

if command -v dpkg-shlibdeps >/dev/null; then
    (cd build/release && quietly cpack -B "$to")
    rm -rf "$to/_CPack_Packages"
else
    echo "no dpkg-shlibdeps (Debian: dpkg-dev): no Debian package"
fi
git archive --prefix "quern-$version/" -o "$to/quern-src-$version.tar.gz" HEAD

if ! cmp -s python/requirements-wheels.txt "$venv/requirements.txt"; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    quietly "$venv/bin/pip" install -r python/requirements-wheels.txt
    cp python/requirements-wheels.txt "$venv/requirements.txt"
fi
quietly "$venv/bin/python" -m build --sdist --outdir "$to" python
quietly "$venv/bin/pip" wheel --no-deps -C cmake.define.QUERN_CUDA=OFF -w "$work" \
    "$to/quern-$version.tar.gz"
repaired "$work"/quern-*.whl
if [[ -e $cuda ]]; then
    # The same wheel and one library more. It is of another version, so that pip tells the two apart.
    local=$version+cuda
    "$venv/bin/wheel" unpack -d "$work" "$work"/quern-*.whl >/dev/null
    cd "$work/quern-$version"
    strip -o "quern/${cuda##*/}" "$cuda"
    sed -i "s/^Version: .*/Version: $local/" "quern-$version.dist-info/METADATA"
    mv "quern-$version.dist-info" "quern-$local.dist-info"
    rm "$work"/quern-*.whl
    "$venv/bin/wheel" pack -d "$work" . >/dev/null
    repaired "$work/quern-$local"*.whl
else
    echo "no ${cuda##*/} in build/release: no wheel with CUDA"
fi
cd "$to"
for file in *; do
    echo "$file: $(stat -c %s "$file" | awk '{ printf "%.1f MB", $1 / 1e6 }')"
done
