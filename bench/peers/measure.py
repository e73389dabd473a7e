# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What the programs beside this share: random data, medians of CUDA events with other data read into the L2
cache before each repetition, cuDNN's attention, and the lines of a report."""

import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16 = torch.bfloat16
torch.manual_seed(1)
flush = torch.zeros(64 << 20, device="cuda")
_failed = 0


def act(*shape):
    return torch.randn(*shape, dtype=BF16, device="cuda")


def empty(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def smooth(n, heads, dim, step=512):
    """Tokens that move from one random vector to the next over `step` tokens."""
    knots = torch.randn(1, n // step + 2, heads, dim, device="cuda")
    at = torch.arange(n, device="cuda")
    part = ((at % step).float() / step).view(1, n, 1, 1)
    made = empty(1, n, heads, dim)
    for h in range(heads):  # a head at a time: the sums are f32
        low = knots[:, at // step, h : h + 1]
        made[:, :, h : h + 1] = low + part * (knots[:, at // step + 1, h : h + 1] - low)
    return made


def once(function):
    flush.sum()  # not written: what is measured would write the lines back
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    function()
    b.record()
    b.synchronize()
    return a.elapsed_time(b)


def ms(function, reps=15, warm=3):
    for _ in range(warm):
        function()
    return statistics.median(once(function) for _ in range(reps))


def in_turns(*functions, reps=7, warm=2):
    """Milliseconds of functions that take turns: the clocks that the power limit leaves to one depend on what
    ran before it."""
    for _ in range(warm):
        for function in functions:
            function()
    times = [[once(function) for function in functions] for _ in range(reps)]
    return tuple(statistics.median(t) for t in zip(*times))


def graph_of(function, calls=20):
    """A function that launches a graph of so many calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still make the data
    with torch.cuda.stream(stream):
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                function()

    def launch():
        graph.replay()
        return function  # whose memory the graph uses

    return launch


def graph_us(function, calls=20):
    return ms(graph_of(function, calls)) * 1e3 / calls


def kernel_us(function, calls=5):
    """Microseconds of each kernel of a call, by name, as its calls follow one another."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    return {
        event.key.split("(")[0].removeprefix("void "): event.device_time_total / calls
        for event in seen.key_averages()
        if event.device_time_total > 0
    }


def line(what, target, measured, unit, most=False):
    global _failed
    good = measured <= target if most else measured >= target
    _failed += not good
    print(
        f"{what:78} target {'<=' if most else '>='} {target:<8.3g} measured {measured:<8.3g} "
        f"{unit:8} {'PASS' if good else 'FAIL'}",
        flush=True,
    )


def fail(why):
    """A line of what could not be measured, or is wrong."""
    global _failed
    _failed += 1
    print(f"FAIL    {why}", flush=True)


def attempt(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        fail(f"{arguments[0] if arguments else ''}: {str(error)[:200]}")


def failures():
    return _failed


def causal(q, k, v):
    """PyTorch's causal attention of tensors in its layout."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def causal_calls(q, k, v, do=None):
    """PyTorch's causal attention of these tensors as functions: forward, and forward and backward."""
    q, k, v = (x.transpose(1, 2).detach().requires_grad_(do is not None) for x in (q, k, v))

    def forward():
        with torch.no_grad():
            causal(q, k, v)

    def both():
        q.grad = k.grad = v.grad = None
        causal(q, k, v).backward(do.transpose(1, 2))

    return forward, both


def beside_cudnn(forward, backward, q, k, v, do):
    """Milliseconds of a forward and a backward, and of cuDNN's, in turns."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        peer, both = causal_calls(q, k, v, do)
        ours, theirs = in_turns(forward, peer)
        back, again, whole = in_turns(backward, peer, both)
    return ours, back, theirs, whole - again


def cudnn(q, k, v, do=None):
    """Milliseconds of cuDNN's causal attention: forward, and forward and backward."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        forward, both = causal_calls(q, k, v, do)
        # Of 1M tokens once: half a minute, and two with the backward.
        reps = (1, 0) if q.shape[1] > 1 << 18 else (5, 1)
        return ms(forward, *reps), ms(both, *reps) if do is not None else 0
