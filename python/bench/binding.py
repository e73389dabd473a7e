# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What a call from Python costs beside the C library's, in microseconds, and what `import quern` costs after
torch, in seconds, as JSON. The call is attention, and NSA, of one token, which `quern bench` times in C.
Processor time of the calling thread, medians of batches.
usage: binding.py QUERN"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

_begun = time.perf_counter()
import quern  # noqa: E402

import_s = time.perf_counter() - _begun


def in_c(what, *options):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        shape = ("--n", "1", "--heads", "1/1", "--dim", "8", "--threads", "1", "--no-peer")
        command = (sys.argv[1], "bench", what, *shape, *options, "--json", file.name)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(file.name) as written:
            return 1e3 * json.load(written)["results"][0]["ms_median"]


def median_us(function, calls=500, batches=61):
    taken = []
    for _ in range(batches):
        start = time.thread_time()
        for _ in range(calls):
            function()
        taken.append(1e6 * (time.thread_time() - start) / calls)
    return statistics.median(taken)


q, k, v, o = (torch.randn(1, 1, 1, 8) for _ in range(4))
operator = torch.ops.quern.attention_out.default
attention, nsa = in_c("attention"), in_c("nsa")
found = {
    "import_s": import_s,
    "c_us": attention,
    "direct_us": median_us(lambda: quern.attention(q, k, v, out=o)) - attention,
    "operator_us": median_us(lambda: operator(q, k, v, *[None] * 5, "causal=true\n", o, None)) - attention,
    "functional_us": median_us(lambda: quern.attention(q, k, v)) - attention,
    "nsa_us": median_us(lambda: quern.nsa(q, k, v)) - nsa,
}
print(json.dumps(found))
