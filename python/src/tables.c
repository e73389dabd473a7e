/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * tables.c - what DeepSeek-V4's compressed attention takes beside activations (quern/dsv4.h).
 *
 *   rope_table(numbers, table)     bytes of five f32: base, factor, original_length, beta_fast, beta_slow
 *   pack_weights(hca, w_a_kv, w_a_z, w_b_kv, w_b_z, w)
 *   pack_checkpoint(hca, wkv, wgate, ape, w, b_a, b_b)
 */
#include "ffi.h"

#include <quern/dsv4.h>

#include <string.h>

static int refuse(void)
{
    return fail("TypeError", "what this function takes is accepted");
}

FUNCTION(rope_table)
{
    (void)self;
    TVMFFIByteArray numbers;
    tensor_list list;
    float f[5];
    if (count != 2 || !text_of(&args[0], &numbers) || numbers.size != sizeof f) return refuse();
    if (take_tensors(&args[1], 1, &list) != 0) return -1;
    memcpy(f, numbers.data, sizeof f);
    const quern_dsv4_rope_params params = {.size = sizeof params,
                                           .base = f[0],
                                           .factor = f[1],
                                           .original_length = f[2],
                                           .beta_fast = f[3],
                                           .beta_slow = f[4]};
    const quern_status status = quern_dsv4_rope_table(&params, list.first);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

FUNCTION(pack_weights)
{
    (void)self;
    tensor_list list;
    if (count != 6 || !is_int(&args[0])) return refuse();
    if (take_tensors(&args[1], 5, &list) != 0) return -1;
    const quern_tensor *const *t = list.tensors.t;
    const quern_status status = quern_dsv4_pack_weights(
        args[0].v_int64 != 0 ? QUERN_DSV4_HCA : QUERN_DSV4_CSA, t[0], t[1], t[2], t[3], t[4]);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

FUNCTION(pack_checkpoint)
{
    (void)self;
    tensor_list list;
    if (count != 7 || !is_int(&args[0])) return refuse();
    if (take_tensors(&args[1], 6, &list) != 0) return -1;
    const quern_tensor *const *t = list.tensors.t;
    const quern_status status = quern_dsv4_pack_checkpoint(
        args[0].v_int64 != 0 ? QUERN_DSV4_HCA : QUERN_DSV4_CSA, t[0], t[1], t[2], t[3], t[4], t[5]);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}
