# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What the wheel brings: libquern with every CPU level, one runtime dependency, no other's library."""

import importlib.metadata as metadata
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

import quern

ATTEND = """
import sys
import numpy as np
import quern

q, k, v = (np.random.default_rng(0).standard_normal((1, 70, h, 24)).astype(np.float32) for h in (4, 2, 2))
sys.stdout.buffer.write(quern.attention(q, k, v).tobytes())
"""


ROOT = pathlib.Path(__file__).parents[2]


def imported(python, folder, **environment):
    """Whose files Python imports in a folder."""
    command = [python, "-c", "import quern; print(quern.__version__, quern.__file__)"]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def loaded_library():
    """The libquern of this process."""
    mapped = (line.split()[-1] for line in open("/proc/self/maps"))
    return next(path for path in mapped if pathlib.Path(path).name.startswith("libquern.so"))


@pytest.fixture
def wheel():
    try:
        return metadata.distribution("quern")
    except metadata.PackageNotFoundError:
        pytest.skip("quern runs from its sources")


def test_contents(wheel):
    names = {file.name for file in wheel.files}
    libraries = {name for name in names if ".so" in name}
    assert "quern_ffi.so" in libraries and any(name.startswith("libquern.so") for name in libraries)
    assert libraries <= {"quern_ffi.so", "libquern.so.0", "libquern_cuda.so.0"}
    assert "LICENSE" in names and "py.typed" in names
    needed = [r for r in wheel.requires if "extra" not in r]
    assert len(needed) == 1 and needed[0].startswith("apache-tvm-ffi")
    assert wheel.version == quern.__version__


def test_nothing_else_is_loaded(wheel):
    """No oneDNN, no library of CUDA."""
    code = "import quern; print(*{line.split()[-1] for line in open('/proc/self/maps')}, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    mapped = {pathlib.Path(path).name for path in done.stdout.splitlines()}
    assert any(name.startswith("libquern.so") for name in mapped)
    assert not any("dnnl" in name or "cublas" in name for name in mapped)


def test_cpu_levels(run_alone):
    """Every level that this CPU has, by the name that chooses it."""
    results = {}
    for level in ("portable", "avx2", "avx512", "avx512bf16", "amx"):
        done = run_alone(ATTEND, QUERN_CPU=level)
        if level != "portable" and b"this machine has" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr[-2000:]
        results[level] = np.frombuffer(done.stdout, np.float32)
    want = results["portable"]
    assert want.size == 70 * 4 * 24
    for got in results.values():
        assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want)


def test_import_beside_the_sources():
    """Python takes the sources in its folder first."""
    version, file = imported(sys.executable, ROOT / "python")
    assert version == quern.__version__ and file == str(ROOT / "python" / "quern" / "__init__.py")


@pytest.mark.parametrize("mode", ["redirect", "inplace"])
def test_editable_install(mode, tmp_path):
    """pip install -e, with the libquern that is here; then from the sources' folder and from another."""
    for folder in ("python/quern", "python/src", "include"):
        without = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=without)
    for file in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / "python" / file, tmp_path / "python")
    for name in ("libquern.so", "libquern.so.0"):
        (tmp_path / name).symlink_to(loaded_library())
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    settings = ("-C", f"editable.mode={mode}", "-C", f"cmake.define.QUERN_BUILT={tmp_path}")
    command = [python, "-m", "pip", "install", "-q", "-e", tmp_path / "python", *settings]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No matching distribution" in done.stderr:
        pytest.skip("no package index has what an install builds with")
    assert done.returncode == 0, done.stderr[-2000:]
    for folder in (tmp_path, tmp_path / "python"):
        version, file = imported(python, folder, PYTHONPATH="")
        assert version == quern.__version__ and file == str(tmp_path / "python" / "quern" / "__init__.py")
