/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_tensor_input_test.c - each way to spoil each tensor of every NSA operation, and NULL arguments. */
#include "cmocka_c11.h"
#include "nsa_mistake.h"

#include <string.h>

#define BAD QUERN_ERR_INVALID_ARGUMENT

/* Every tensor of every operation, spoilt in every way that a view can be. */
static void every_tensor_is_checked(void **state)
{
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    int tried = 0;
    nsa_failures = 0;
    (void)state;
    for (nsa_base b = 0; b < NSA_BASES; b++) {
        nsa_case *c = nsa_bases[b];
        for (int op = 0; op < NSA_OPS; op++) {
            nsa_set in, out;
            if (!nsa_base_serves(b, op)) continue;
            nsa_sets_of(c, op, &in, &out);
            int lead = 0;
            while (!(in & ~(NSA_BIT(NSA_GATES) | NSA_BIT(NSA_CU_SEQLENS)) & NSA_BIT(lead))) lead++;
            for (int slot = 0; slot < NSA_SLOTS; slot++) {
                if (!((in | out) & NSA_BIT(slot))) continue;
                const quern_tensor *v = &c->tensor[slot].view;
                const char *name = nsa_slot_name(slot);
                const int last = v->ndim - 1;
                const nsa_mistake all[] = {
                    {name, b, 0, DTYPE, slot, 0, QUERN_I64, BAD, {name, "i64", "accepted"}},
                    {name, b, 0, DTYPE, slot, 0, 77, BAD, {name, "dtype", "accepted"}},
                    {name, b, 0, NDIM, slot, 0, v->ndim + 1, BAD, {name, "dimension", "accepted"}},
                    {name, b, 0, SHAPE, slot, 0, -1, BAD, {name, "", "accepted"}},
                    {name, b, 0, STRIDE, slot, last, 2, BAD, {name, "strides", "1 is accepted"}},
                    {name, b, 0, DEVICE, slot, 0, 9, BAD, {name, "device 9", "accepted"}},
                    {name, b, 0, NULL_DATA, slot, 0, 0, BAD, {name, "data is NULL", "needed"}},
                    {name, b, 0, ODD_DATA, slot, 0, 0, BAD, {name, "data", "multiple"}},
                    {name, b, 0, STRIDE, slot, 0, INT64_MAX / 2, BAD, {name, "overflow", "accepted"}},
                    {name, b, 0, MORE, slot, 0, 1, BAD, {name, "shape[0]", "accepted"}},
                    {name, b, 0, STRIDE, slot, 0, 0, BAD, {name, "share memory", "may not"}},
                    {name, b, 0, ALIAS, slot, lead, 0, BAD, {"shares memory with", "own"}},
                };
                int count = sizeof all / sizeof *all;
                if (!(out & NSA_BIT(slot))) count -= 2;
                for (int i = 0; i < count; i++) {
                    const bool single = all[i].fault == STRIDE &&
                                        (last == 0 || v->shape[all[i].where] < 2); /* no stride to spoil */
                    if (single && !(last == 0 && all[i].value != 0)) continue;
                    if (last == 0 && all[i].fault == STRIDE && all[i].value != 2) continue;
                    if (all[i].fault == MORE && (slot == lead || slot == NSA_CU_SEQLENS))
                        continue; /* another tensor's is wrong then */
                    if (slot == NSA_CU_SEQLENS && all[i].fault == SHAPE) continue; /* a row of the table */
                    nsa_try_mistake(ctx, &all[i], op);
                    tried++;
                }
            }
        }
    }
    assert_int_equal(nsa_failures, 0);
    assert_true(tried > 2000);
    quern_context_destroy(ctx);
}

static void null_arguments(void **state)
{
    nsa_case *c = nsa_bases[PLAIN];
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    (void)state;
    for (int op = 0; op < NSA_OPS; op++) {
        const nsa_call *call = nsa_calls[op];
        nsa_set in, out;
        size_t bytes;
        nsa_sets_of(c, op, &in, &out);
        const quern_nsa_tensors t = nsa_bind(c, in | out);
        assert_int_equal(call->run(NULL, NULL, &c->config.params, &t, NULL, 0), QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(NULL), "ctx is NULL"));
        assert_int_equal(call->workspace(ctx, &c->config.params, &t, NULL), QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(NULL), "bytes is NULL"));
        assert_int_equal(call->workspace(NULL, &c->config.params, &t, &bytes), QUERN_ERR_INVALID_ARGUMENT);
    }
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tensor_is_checked),
        cmocka_unit_test(null_arguments),
    };
    return cmocka_run_group_tests(tests, nsa_make_bases, nsa_free_bases);
}
