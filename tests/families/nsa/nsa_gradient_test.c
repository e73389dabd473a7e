/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_gradient_test.c - the library's gradients against central differences of the library's own forward,
 * without the oracle: for every compression and every gate, along a random direction of every
 * differentiable input, with the lists held fixed.
 *
 * loss = sum o . d_o is summed in double, so a difference over 2 h carries the forward's rounding, about
 * 1e-7 |o| |d_o| / sqrt(count) / h, and the third derivative's h^2: h = 1e-2 leaves some 1e-3 relative to
 * |grad| |direction|, far below any error of formula. d_pe_k of the whole vanishes, so there is no
 * difference to see: nsa_parts_test.c compares it in the compression's own backward.
 */
#include "cmocka_c11.h"
#include "nsa_case.h"

#include <math.h>
#include <stdlib.h>

static double loss(nsa_case *c, quern_context *ctx)
{
    double sum = 0;
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), NSA_BIT(NSA_O));
    double *o = test_tensor_get(&c->tensor[NSA_O]), *d_o = test_tensor_get(&c->tensor[NSA_D_O]);
    for (int64_t i = 0; i < test_tensor_count(&c->tensor[NSA_O]); i++) sum += o[i] * d_o[i];
    free(o);
    free(d_o);
    return sum;
}

static double loss_at(nsa_case *c, quern_context *ctx, nsa_slot slot, const double *x, const double *u,
                      double h)
{
    const int64_t count = test_tensor_count(&c->tensor[slot]);
    double *moved = test_doubles(count);
    for (int64_t i = 0; i < count; i++) moved[i] = x[i] + h * u[i];
    test_tensor_set(&c->tensor[slot], moved);
    free(moved);
    return loss(c, ctx);
}

static void check_direction(nsa_case *c, quern_context *ctx, nsa_slot slot, nsa_slot gradient,
                            test_random *random)
{
    const int64_t count = test_tensor_count(&c->tensor[slot]);
    double *x = test_tensor_get(&c->tensor[slot]), *grad = test_tensor_get(&c->tensor[gradient]);
    double *u = test_doubles(count), along = 0, grad_norm = 0, u_norm = 0, x_norm = 0;
    for (int64_t i = 0; i < count; i++) {
        /* Half along the gradient, so that the derivative is large; half random. */
        u[i] = test_random_normal(random);
        x_norm += x[i] * x[i];
        grad_norm += grad[i] * grad[i];
    }
    for (int64_t i = 0; i < count; i++) {
        u[i] += grad_norm > 0 ? grad[i] * sqrt((double)count / grad_norm) : 0;
        u[i] *= sqrt(x_norm / (double)count);
        along += u[i] * grad[i];
        u_norm += u[i] * u[i];
    }
    const double h = 1e-2 / sqrt((double)count / 64 + 1);
    const double difference = (loss_at(c, ctx, slot, x, u, h) - loss_at(c, ctx, slot, x, u, -h)) / (2 * h);
    test_tensor_set(&c->tensor[slot], x);
    if (!(fabs(difference - along) <= 3e-3 * sqrt(grad_norm * u_norm) + 1e-4))
        fail_msg("%s: %.6g by differences, %.6g by the gradient", nsa_slot_name(gradient), difference, along);
    free(x);
    free(grad);
    free(u);
}

static void every_input_every_compression_every_gate(void **state)
{
    static const nsa_slot inputs[][2] = {
        {NSA_Q, NSA_D_Q},           {NSA_K, NSA_D_K},         {NSA_V, NSA_D_V},
        {NSA_K_SLC, NSA_D_K_SLC},   {NSA_V_SLC, NSA_D_V_SLC}, {NSA_K_WIN, NSA_D_K_WIN},
        {NSA_V_WIN, NSA_D_V_WIN},   {NSA_K_CMP, NSA_D_K_CMP}, {NSA_V_CMP, NSA_D_V_CMP},
        {NSA_W_K, NSA_D_W_K},       {NSA_W_V, NSA_D_W_V},     {NSA_PE_V, NSA_D_PE_V},
        {NSA_W_GATE, NSA_D_W_GATE}, {NSA_GATES, NSA_D_GATES}};
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    (void)state;
    for (int mode = 0; mode < 4 * 3 * 2; mode++) {
        nsa_config config = nsa_config_small();
        test_random random = {81 + (uint64_t)mode};
        const int phi = mode / 6; /* mean, mean and projection, linear with encodings, given */
        config.params.gate = (quern_nsa_gate_kind)(mode % 3);
        config.separate_slc = config.separate_win = mode / 3 % 2;
        config.params.compress = phi < 2    ? QUERN_NSA_COMPRESS_MEAN
                                 : phi == 2 ? QUERN_NSA_COMPRESS_LINEAR
                                            : QUERN_NSA_COMPRESS_GIVEN;
        config.project_k = config.project_v = phi == 1;
        config.pe_k = config.pe_v = phi == 2;
        config.params.stride = 4;
        config.n = 40;
        nsa_case *c = nsa_case_new(&config, &random);
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
        nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), nsa_backward_outputs(c));
        const nsa_set gradients = nsa_backward_outputs(c);
        c->config.params.selection = QUERN_NSA_LIST_GIVEN;
        for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
            if (gradients & NSA_BIT(inputs[i][1]))
                check_direction(c, ctx, inputs[i][0], inputs[i][1], &random);
        nsa_case_free(c);
    }
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_input_every_compression_every_gate)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
