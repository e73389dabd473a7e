# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""How many times faster a layer of the transformers package is after accelerate(): one layer of DeepSeek-V4
(CSA) or MiniMax-M3 with its released widths, 16 experts, bf16, on the CPU with 2 threads, against eager
attention and experts, as JSON: `forward` of a prompt, and `decode`, a step after it; `attention_forward` and
`attention_decode` of the layer's attention alone, with its projections. The two take turns; the medians of
the rounds' ratios count. Projections and experts in floats are the same products on both sides."""

import argparse
import contextlib
import copy
import inspect
import io
import json
import os
import statistics
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", choices=("deepseek_v4", "minimax_m3"), default="deepseek_v4")
parser.add_argument("--n", type=int, default=2048, help="tokens of the prompt (default 2048)")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--steps", type=int, default=10, help="steps of a round (default 10)")
parser.add_argument("--experts", choices=("nvfp4",), help="round experts to NVFP4 (eager's stay bf16)")
options = parser.parse_args()

os.environ["OMP_NUM_THREADS"] = "2"
os.environ["OMP_WAIT_POLICY"] = "passive"  # neither's idle threads take the other's cores

import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4  # noqa: E402
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3  # noqa: E402

from quern.integrations.transformers import accelerate  # noqa: E402

torch.set_num_threads(2)
torch.manual_seed(0)
ONE = {"vocab_size": 1024, "num_hidden_layers": 1, "attn_implementation": "eager"}


def deepseek_v4():
    kinds = {"layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["moe"]}
    return v4.DeepseekV4Model(v4.DeepseekV4Config(**ONE, **kinds, n_routed_experts=16))


def minimax_m3():
    kinds = {"layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["sparse"], "pad_token_id": 0}
    config = m3.MiniMaxM3VLTextConfig(**ONE, **kinds, num_local_experts=16, bos_token_id=1, eos_token_id=2)
    return m3.MiniMaxM3VLTextModel(config)


def timed(function):
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


class Clock:
    """Seconds that a module's last call took."""

    def __init__(self, module):
        self.seconds = 0.0
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.end)

    def begin(self, *_):
        self.began = time.perf_counter()

    def end(self, *_):
        self.seconds = time.perf_counter() - self.began


def prompt(model):
    """Seconds of a forward of the prompt, its output, and the cache."""
    seconds, made = timed(lambda: model(ids, use_cache=True))
    kept = made["cache"] if "cache" in made else made["past_key_values"]
    return seconds, made.last_hidden_state, kept


def step(model, cache):
    return model(ids[:, :1], **{NAMED: cache}, use_cache=True).last_hidden_state


def turn(model, clock):
    """Seconds of a forward and of a step after it, of their attention, and what both return."""
    forward, whole, cache = prompt(model)
    attention = clock.seconds
    steps = []
    for _ in range(options.steps):
        seconds, last = timed(lambda: step(model, cache))
        steps.append((seconds, clock.seconds))
    return (forward, attention, *(statistics.median(s) for s in zip(*steps))), (whole, last)


torch.set_default_dtype(torch.bfloat16)
eager = {"deepseek_v4": deepseek_v4, "minimax_m3": minimax_m3}[options.model]().eval()
torch.set_default_dtype(torch.float32)
eager.set_experts_implementation("eager")
quern = copy.deepcopy(eager, {id(t): t for t in eager.parameters()})
with contextlib.redirect_stdout(io.StringIO()):
    accelerate(quern, experts=options.experts)
ids = torch.randint(2, 1024, (1, options.n))
clocks = [Clock(model.layers[0].self_attn) for model in (quern, eager)]
NAMED = "cache" if "cache" in inspect.signature(eager.forward).parameters else "past_key_values"

rounds, seconds = [], []
with torch.no_grad():
    for i in range(options.rounds + 1):  # the first warms up
        ours, results = turn(quern, clocks[0])
        theirs, expected = turn(eager, clocks[1])
        if i == 0:
            a, b = (made[0].float() for made in (results, expected))
            error = float((a - b).norm() / b.norm())
            # Of the prompt; rounding moves some tokens to other experts.
            if error > (0.5 if options.experts else 0.1):
                raise SystemExit(f"the two differ by {error:.3g}")
        else:
            rounds.append([b / a for a, b in zip(ours, theirs)])
            seconds.append(ours)
names = ("forward", "attention_forward", "decode", "attention_decode")
found = {name: statistics.median(ratios) for name, ratios in zip(names, zip(*rounds))}
found |= {f"{name}_ms": 1e3 * statistics.median(s) for name, s in zip(names, zip(*seconds))}
print(json.dumps({"model": options.model, "n": options.n, **found}))
