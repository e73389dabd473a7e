# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Models of the transformers package under torch.compile with its default backend, which writes C++: the same
tokens."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.20")

from tiny_models import MODELS, tokens  # noqa: E402
from torch._inductor import cpp_builder, exc  # noqa: E402

from quern.integrations.transformers import accelerate  # noqa: E402

try:
    cpp_builder.get_cpp_compiler()
except exc.InvalidCxxCompiler:
    pytest.skip("no C++ compiler", allow_module_level=True)


# Layers that stay, since kernels are compiled for a second or two each.
KEPT = {"llama": slice(1), "gpt_oss": slice(1), "minimax_m3": slice(1, None), "deepseek_v4": slice(2)}


@pytest.mark.parametrize("kind", MODELS)
def test_generation(kind):
    """In one graph, without a cache, what has no graph breaks; else with a cache that grows."""
    torch.manual_seed(3)
    model = MODELS[kind]().eval()
    model.model.layers = model.model.layers[KEPT[kind]]
    quern, whole = accelerate(model), kind in ("llama", "minimax_m3")
    given = {"use_cache": not whole, "max_new_tokens": 3, "do_sample": False}
    want = quern.generate(tokens(), **given)
    torch.compiler.reset()
    quern.forward = torch.compile(quern.forward, fullgraph=whole, dynamic=True)
    assert torch.equal(quern.generate(tokens(), **given), want)
