// SPDX-FileCopyrightText: The Quern authors
// SPDX-License-Identifier: BSD-2-Clause
// Dense attention through quern.hpp, as a call and as a plan, and what its errors say.
#include <quern/attention.h>
#include <quern/quern.hpp>

#include <cmath>
#include <cstdio>
#include <utility>

static int wrong;

static void expect(bool right, const char *what)
{
    if (!right) std::printf("quern.hpp: %s\n", what);
    wrong += right ? 0 : 1;
}

template <typename Failure, typename Call> static void expect_throw(const char *part, Call &&call)
{
    std::string said = "no exception";
    try {
        call();
    } catch (const Failure &failure) {
        said = failure.what();
    }
    expect(said.find(part) != std::string::npos, said.c_str());
}

int main()
{
    quern::context first;
    quern::context ctx = std::move(first);
    std::vector<float> q(2 * 8), k(4 * 8), v(4 * 8, 3.0F), o(2 * 8);
    quern_tensor tq = quern::view(q, {1, 2, 1, 8}), tk = quern::view(k, {1, 4, 1, 8});
    quern_tensor tv = quern::view(v, {1, 4, 1, 8}), to = quern::view(o, {1, 2, 1, 8});
    quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    t.q = &tq, t.k = &tk, t.v = &tv, t.o = &to;

    size_t bytes = 0;
    quern::check(quern_attention_forward_workspace(ctx, &params, &t, &bytes));
    std::vector<uint8_t> workspace(bytes);
    quern::check(quern_attention_forward(ctx, nullptr, &params, &t, workspace.data(), bytes));
    const quern::plan plan(ctx, QUERN_OP_ATTENTION_FORWARD, &params, &t);
    size_t planned = 0;
    quern::check(quern_plan_workspace(plan, &planned));
    void *data[sizeof t / sizeof(void *)] = {q.data(), k.data(), v.data(), nullptr, nullptr, o.data()};
    o.assign(o.size(), 0.0F);
    quern::check(quern_plan_run(plan, nullptr, data, workspace.data(), bytes));
    expect(planned == bytes, "a plan and a call need different workspaces");
    for (const float x : o) expect(std::fabs(x - 3.0F) < 1e-6F, "the mean of equal values is another");

    to.shape[3] = 7;
    expect_throw<quern::error>("o.shape", [&] {
        quern::check(quern_attention_forward(ctx, nullptr, &params, &t, workspace.data(), bytes));
    });
    expect_throw<quern::error>("no-such-file", [] { quern::safetensors file("no-such-file"); });
    expect_throw<quern::error>("no-such-file", [] { quern::checkpoint file("no-such-file"); });
    expect_throw<std::invalid_argument>("16 elements", [&] { (void)quern::view(q, {3, 5}); });
    expect_throw<std::invalid_argument>("7 dimensions", [&] {
        (void)quern::view(q.data(), QUERN_F32, {1, 1, 1, 1, 1, 2, 8});
    });
    return wrong;
}
