# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.compat.csa against the golden vectors."""

import pytest

torch = pytest.importorskip("torch")

from quern.compat import csa  # noqa: E402

BOUND = 1e-6
CSA = {"fresh": ("f", 6, 0, 0, False), "cont": ("c", 5, 2, 100, True), "offset_noprev": ("c", 4, 3, 8, False)}
HCA = {"fresh": (2, 0, 0), "cont": (2, 5, 384)}


def csa_arguments(file, case):
    which, n, start, position, prev = CSA[case]
    names = (
        f"main.proj_{which}",
        f"idx.proj_{which}",
        "main.prev",
        "idx.prev",
        "main.Ba",
        "main.Bb",
        "idx.Ba",
        "idx.Bb",
        "cos_sin",
    )
    return file.torch(*names), (n, start, position, prev)


@pytest.mark.parametrize("case", CSA)
@pytest.mark.parametrize("stream", [None, 0])
def test_csa(golden, close, case, stream):
    file = golden("raw_csa")
    tensors, (n, *rest) = csa_arguments(file, case)
    out, indexer = torch.full((n + 1, 512), 7.0), torch.full((n + 1, 128), 7.0)
    csa.launch_csa_compress_projected(*tensors, out, indexer, n, *rest, stream)
    close(out[:n], file.torch(f"{case}.main.out"), BOUND)
    close(indexer[:n], file.torch(f"{case}.idx.out"), BOUND)
    assert (out[n] == 7).all() and (indexer[n] == 7).all()


@pytest.mark.parametrize("case", HCA)
def test_hca(golden, close, case):
    file = golden("raw_hca")
    proj, bias, table = file.torch("proj", "B", "cos_sin")
    n, *rest = HCA[case]
    for dtypes in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ):
        out = torch.empty(n, 512)
        csa.launch_hca_compress_projected(proj.to(dtypes[0]), bias.to(dtypes[1]), table, out, n, *rest)
        close(out, file.torch(f"{case}.out"), BOUND)


def test_results_of_any_dtype_and_layout(golden, close):
    file = golden("raw_csa")
    tensors, (n, *rest) = csa_arguments(file, "cont")
    tensors[4:8] = [t.half() for t in tensors[4:8]]
    out, indexer = torch.empty(512, n).t(), torch.empty(n, 128, dtype=torch.bfloat16)
    csa.launch_csa_compress_projected(*tensors, out, indexer, n, *rest)
    close(out, file.torch("cont.main.out"), 1e-3)
    close(indexer, file.torch("cont.idx.out"), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64])
def test_projections_of_any_dtype(golden, close, dtype, out_dtype):
    tensors, (n, *rest) = csa_arguments(golden("raw_csa"), "cont")
    tensors = [t.to(dtype) for t in tensors]
    want, got = (
        [torch.empty(n, width, dtype=kind) for width in (512, 128)] for kind in (torch.float32, out_dtype)
    )
    csa.launch_csa_compress_projected(*(t.float() for t in tensors), *want, n, *rest)
    csa.launch_csa_compress_projected(*tensors, *got, n, *rest)
    for a, b in zip(got, want):
        close(a, b, BOUND)


def test_a_refused_call_writes_nothing(golden):
    """Whichever compressor's tensors are wrong."""
    tensors, (n, *rest) = csa_arguments(golden("raw_csa"), "cont")
    for i, wrong in ((0, tensors[0][:20]), (4, tensors[4][1:]), (6, tensors[6][1:]), (7, tensors[7][:, 1:])):
        given = [wrong if i == j else t for j, t in enumerate(tensors)]
        out, indexer = torch.full((n, 512), 7.0), torch.full((n, 128), 7.0)
        with pytest.raises(ValueError):
            csa.launch_csa_compress_projected(*given, out, indexer, n, *rest)
        assert (out == 7).all() and (indexer == 7).all()
    for short in (torch.full((n - 1, 128), 7.0), torch.full((128, n - 1), 7.0).t(), torch.full((n, 128), 7)):
        with pytest.raises(ValueError):
            csa.launch_csa_compress_projected(*tensors, out, short, n, *rest)
        assert (out == 7).all() and (short == 7).all()
    with pytest.raises(ValueError, match="has_external_prev"):
        csa.launch_csa_compress_projected(*tensors[:2], None, *tensors[3:], out, indexer, n, *rest)
    with pytest.raises(TypeError, match="indexer_out is a ndarray"):
        csa.launch_csa_compress_projected(*tensors, torch.empty(n, 512), indexer.numpy(), n, *rest)


def test_no_blocks_write_nothing(golden):
    tensors, (_, *rest) = csa_arguments(golden("raw_csa"), "fresh")
    out, indexer = torch.full((1, 512), 7.0), torch.full((1, 128), 7.0)
    csa.launch_csa_compress_projected(*tensors, out, indexer, 0, *rest)
    assert (out == 7).all() and (indexer == 7).all()


def test_dummy_and_packing():
    dummy = csa.make_dummy_prev_b(4, 8, device="cpu", dtype=torch.bfloat16)
    assert dummy.shape == (4, 16) and dummy.dtype == torch.bfloat16
    parts = [torch.full((3, 2), float(i)) for i in range(4)]
    for pack in (csa.pack_csa_main_weights, csa.pack_csa_indexer_weights):
        assert pack(*parts)[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert csa.pack_hca_weights(*parts[:2])[0].tolist() == [0, 0, 1, 1]


def test_sentences(golden):
    tensors, (n, *rest) = csa_arguments(golden("raw_csa"), "fresh")
    out, indexer = torch.empty(n, 512), torch.empty(n, 128)
    with pytest.raises(ValueError, match=r"proj_main has shape \[27, 512\]: 2048 columns"):
        csa.launch_csa_compress_projected(tensors[1], *tensors[1:], out, indexer, n, *rest)
    with pytest.raises(ValueError, match="n_blocks"):
        csa.launch_csa_compress_projected(*tensors, torch.empty(9, 512), torch.empty(9, 128), 9, *rest)
    with pytest.raises(ValueError, match="NOPE 448 and ROPE 64: 256"):
        csa.launch_hca_compress_projected(
            torch.empty(256, 512), torch.empty(128, 256), tensors[8], out, 2, 0, 0, C=256
        )
