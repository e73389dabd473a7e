/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * states.c - the streaming states of DeepSeek-V4's compressors (quern/dsv4.h), by their address, its caches,
 * tables and packed weights. Python keeps the memory.
 *
 *   state_size(params, width, ring) -> int
 *   state_create(params, width, ring, memory) -> int
 *   state_position(state) -> bytes of two int64: the next position, rows that can be taken back
 *   state_rollback(state, n)
 *   state_fork(state, memory) -> int
 *   state_save(state) -> bytes
 *   state_restore(params, width, ring, saved, memory) -> int
 *   state_entries(states, counts) -> int
 *   state_append(params, states, counts, proj, x, w, b_a, b_b, prev_b, norm_weight, cos_sin, out, pooled,
 *                w_fp8, w_fp8_scales, w_codes, w_scales, w_global)
 *   store(format, page, x, slots, cache)           rows into a cache that the indexer or the attention reads
 *   rope_table(numbers, table)     bytes of five f32: base, factor, original_length, beta_fast, beta_slow
 *   pack_weights(hca, w_a_kv, w_a_z, w_b_kv, w_b_z, w)
 *   pack_checkpoint(hca, wkv, wgate, ape, w, b_a, b_b)
 *
 * params: of the operations csa-compress and hca-compress. states, counts: bytes of as many int64.
 */
#include "ffi.h"

#include <quern/dsv4.h>

#include <stdlib.h>
#include <string.h>

static int refuse(void)
{
    return fail("TypeError", "a state and what this function takes are accepted");
}

static quern_dsv4_state *state_of(const TVMFFIAny *args, int32_t count, int32_t accepted)
{
    if (count == accepted && is_int(&args[0]) && args[0].v_int64 != 0)
        return (quern_dsv4_state *)(intptr_t)args[0].v_int64;
    (void)refuse();
    return NULL;
}

/* What a state is made from. */
typedef struct maker {
    params_room params;
    int64_t width, ring;
} maker;

static bool read_maker(const TVMFFIAny *args, maker *m)
{
    if (!read_params(&args[0], &m->params) || !is_int(&args[1]) || !is_int(&args[2])) return false;
    m->width = args[1].v_int64;
    m->ring = args[2].v_int64;
    return true;
}

static const quern_dsv4_compress_params *params_of(const params_room *room)
{
    return (const void *)room;
}

static int give_state(quern_status status, quern_dsv4_state *const *state, TVMFFIAny *result)
{
    return status == QUERN_OK ? give_int((intptr_t)*state, result) : fail_as(status);
}

FUNCTION(state_size)
{
    (void)self;
    maker m;
    size_t bytes = 0;
    if (count != 3 || !read_maker(args, &m)) return refuse();
    const quern_status status = quern_dsv4_state_size(params_of(&m.params), m.width, m.ring, &bytes);
    return status == QUERN_OK ? give_int((int64_t)bytes, result) : fail_as(status);
}

FUNCTION(state_create)
{
    (void)self;
    maker m;
    void *memory;
    size_t bytes;
    quern_dsv4_state *state = NULL;
    if (count != 4 || !read_maker(args, &m)) return refuse();
    if (read_memory(&args[3], &memory, &bytes) != 0) return -1;
    return give_state(quern_dsv4_state_create(params_of(&m.params), m.width, m.ring, memory, bytes, &state),
                      &state, result);
}

FUNCTION(state_position)
{
    (void)self;
    int64_t found[2];
    const quern_dsv4_state *state = state_of(args, count, 1);
    if (state == NULL) return -1;
    const quern_status status = quern_dsv4_state_position(state, &found[0], &found[1]);
    return status == QUERN_OK ? give_bytes(found, sizeof found, result) : fail_as(status);
}

FUNCTION(state_rollback)
{
    (void)self;
    quern_dsv4_state *state = state_of(args, count, 2);
    if (state == NULL || !is_int(&args[1])) return state == NULL ? -1 : refuse();
    const quern_status status = quern_dsv4_state_rollback(state, args[1].v_int64);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

FUNCTION(state_fork)
{
    (void)self;
    void *memory;
    size_t bytes;
    quern_dsv4_state *copy = NULL;
    const quern_dsv4_state *state = state_of(args, count, 2);
    if (state == NULL || read_memory(&args[1], &memory, &bytes) != 0) return -1;
    return give_state(quern_dsv4_state_fork(state, memory, bytes, &copy), &copy, result);
}

FUNCTION(state_save)
{
    (void)self;
    size_t bytes = 0;
    const quern_dsv4_state *state = state_of(args, count, 1);
    if (state == NULL) return -1;
    quern_status status = quern_dsv4_state_save(state, NULL, &bytes);
    if (status != QUERN_OK) return fail_as(status);
    void *to = malloc(bytes);
    if (to == NULL) return fail("MemoryError", "no memory for the saved state");
    status = quern_dsv4_state_save(state, to, &bytes);
    const int code = status == QUERN_OK ? give_bytes(to, bytes, result) : fail_as(status);
    free(to);
    return code;
}

FUNCTION(state_restore)
{
    (void)self;
    maker m;
    TVMFFIByteArray saved;
    void *memory;
    size_t bytes;
    quern_dsv4_state *state = NULL;
    if (count != 5 || !read_maker(args, &m) || !text_of(&args[3], &saved)) return refuse();
    if (read_memory(&args[4], &memory, &bytes) != 0) return -1;
    return give_state(quern_dsv4_state_restore(params_of(&m.params), m.width, m.ring, saved.data, saved.size,
                                               memory, bytes, &state),
                      &state, result);
}

/* ---- appending ---- */

typedef struct append_call {
    params_room params;
    quern_dsv4_state *const *states;
    const int64_t *counts;
    int64_t batch;
    tensor_list list;
} append_call;

static int read_batch(const TVMFFIAny *args, append_call *c)
{
    TVMFFIByteArray states, counts;
    _Static_assert(sizeof(void *) == sizeof(int64_t), "an address is an int64");
    if (!text_of(&args[0], &states) || !text_of(&args[1], &counts) || states.size != counts.size)
        return refuse();
    c->states = (quern_dsv4_state *const *)(const void *)states.data;
    c->counts = (const int64_t *)(const void *)counts.data;
    c->batch = (int64_t)(states.size / sizeof(int64_t));
    return 0;
}

FUNCTION(state_entries)
{
    (void)self;
    append_call c = {.batch = 0};
    int64_t n = 0;
    if (count != 2) return refuse();
    if (read_batch(args, &c) != 0) return -1;
    const quern_status status = quern_dsv4_append_entries(c.states, c.counts, c.batch, &n);
    return status == QUERN_OK ? give_int(n, result) : fail_as(status);
}

static quern_status append(const void *what, const quern_exec *exec, void *workspace, size_t bytes)
{
    const append_call *c = what;
    return quern_dsv4_append(need_context(), exec, params_of(&c->params), c->states, c->counts, c->batch,
                             (const void *)&c->list.tensors, workspace, bytes);
}

FUNCTION(state_append)
{
    (void)self;
    append_call c;
    size_t bytes = 0;
    quern_context *context = need_context();
    if (context == NULL) return -1;
    if (count != 18 || !read_params(&args[0], &c.params)) return refuse();
    if (read_batch(&args[1], &c) != 0 || take_tensors(&args[3], 15, &c.list) != 0) return -1;
    const quern_status status = quern_dsv4_append_workspace(context, params_of(&c.params), c.states, c.counts,
                                                            c.batch, (const void *)&c.list.tensors, &bytes);
    if (status != QUERN_OK) return fail_as(status);
    (void)give_nothing(result);
    return with_memory(NULL, bytes, append, &c);
}

/* ---- caches, tables and weights ---- */

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
