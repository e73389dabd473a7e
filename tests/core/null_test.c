/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * null_test.c - public calls with NULL for each of their pointers, one after the other: they say so, or it is
 * allowed. An operation's own functions are what quern/op.h calls, so they are not called here.
 */
#include "cmocka_c11.h"
#include "context.h"

#include <quern/cache.h>
#include <quern/cuda.h>
#include <quern/dlpack.h>
#include <quern/dsv4_layer.h>
#include <quern/file.h>
#include <quern/op.h>
#include <quern/safetensors.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int absent, pointers; /* which pointer of a call is NULL; how many it has */

/* The i-th pointer of a call. */
static void *at(int i, const void *p)
{
    if (i + 1 > pointers) pointers = i + 1;
    return i == absent ? NULL : (void *)(uintptr_t)p;
}

/* `call` with no pointer NULL, then with each. A refusal has a sentence. */
static void each(quern_status (*call)(void))
{
    pointers = 0;
    for (absent = -1; absent < pointers; absent++) {
        const quern_status status = call();
        if (status != QUERN_OK && strlen(quern_last_error(ctx)) < 10)
            fail_msg("pointer %d of %d: no sentence", absent, pointers);
    }
}

#define EACH(list)                                                                                           \
    for (size_t i = 0; i < sizeof(list) / sizeof *(list); i++) each((list)[i])

/* ---- quern/op.h and quern/plan.h ---- */

static const quern_op *op;
static char params[QUERN_OP_PARAMS_BYTES], text[400];
static struct {
    size_t size;
    const quern_tensor *t[QUERN_OP_TENSORS_MAX];
} tensors;
static float numbers[256];
static quern_tensor view;
static size_t bytes;

static quern_status op_named(void)
{
    assert_true((quern_op_named(at(0, "nsa")) == NULL) == (absent == 0));
    return QUERN_OK;
}
static quern_status op_get(void)
{
    quern_op_info info;
    return quern_op_get(at(0, op), at(1, &info));
}
static quern_status op_get_tensors(void)
{
    quern_op_tensor all[QUERN_OP_TENSORS_MAX];
    return quern_op_get_tensors(at(0, op), at(1, all));
}
static quern_status op_get_params(void)
{
    quern_op_param all[QUERN_OP_PARAMS_MAX];
    return quern_op_get_params(at(0, op), at(1, all));
}
static quern_status op_tensor_name(void)
{
    quern_op_info info;
    assert_int_equal(quern_op_get(op, &info), QUERN_OK);
    for (int32_t i = 0; i < info.tensor_count; i++) (void)quern_op_tensor_name(at(0, op), at(1, params), i);
    return QUERN_OK;
}
static quern_status op_defaults(void)
{
    return quern_op_defaults(at(0, op), at(1, params));
}
static quern_status op_preset(void)
{
    return quern_op_preset(at(0, op), at(1, params), at(2, "tile256"));
}
static quern_status op_set_word(void)
{
    return quern_op_set(at(0, op), at(1, params), at(2, "causal"), at(3, "true"));
}
static quern_status op_set_number(void)
{
    return quern_op_set(at(0, op), at(1, params), at(2, "scale"), at(3, "1"));
}
static quern_status op_text(void)
{
    for (int32_t i = 0; i < QUERN_OP_PARAMS_MAX; i++)
        (void)quern_op_text(at(0, op), at(1, params), i, at(2, text), sizeof text);
    return QUERN_OK;
}
static quern_status op_follow(void)
{
    return quern_op_follow(at(0, op), at(1, params), at(2, &tensors));
}
static quern_status op_roles(void)
{
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    return quern_op_roles(at(0, op), QUERN_OP_FORWARD, at(1, params), at(2, &tensors), at(3, roles));
}
static quern_status op_expect(void)
{
    quern_tensor expected[QUERN_OP_TENSORS_MAX];
    const int64_t asked[4] = {0};
    return quern_op_expect(at(0, op), QUERN_OP_FORWARD, at(1, params), at(2, &tensors), at(3, asked),
                           at(4, expected));
}
static quern_status op_extent(void)
{
    int64_t extent;
    return quern_op_extent(at(0, op), at(1, params), at(2, &tensors), at(3, "N"), at(4, &extent));
}
static quern_status op_complete(void)
{
    quern_op_info info;
    int32_t data[256];
    assert_int_equal(quern_op_get(op, &info), QUERN_OK);
    for (int32_t i = 0; i < info.tensor_count; i++)
        (void)quern_op_complete(at(0, op), at(1, params), at(2, &tensors), i, at(3, data));
    return QUERN_OK;
}
static quern_status op_workspace(void)
{
    return quern_op_workspace(at(0, ctx), at(1, op), QUERN_OP_FORWARD, at(2, params), at(3, &tensors),
                              at(4, &bytes));
}
static quern_status op_run(void)
{
    const quern_exec exec = QUERN_EXEC_INIT;
    return quern_op_run(at(0, ctx), at(1, &exec), at(2, op), QUERN_OP_FORWARD, at(3, params), at(4, &tensors),
                        at(5, numbers), sizeof numbers);
}

static quern_status plans(void)
{
    quern_plan *plan = NULL;
    void *data[QUERN_OP_TENSORS_MAX] = {NULL};
    quern_op_info info;
    assert_int_equal(quern_op_get(op, &info), QUERN_OK);
    const quern_status status = quern_plan_create(at(0, ctx), info.forward, at(1, params), at(2, &tensors),
                                                  absent == 3 ? NULL : &plan);
    (void)quern_plan_workspace(at(4, plan), at(5, &bytes));
    (void)quern_plan_describe(at(6, plan), at(7, text), sizeof text);
    (void)quern_plan_run(at(8, plan), NULL, at(9, data), at(10, numbers), 0);
    quern_plan_destroy(plan);
    return status;
}

static void operations(void **state)
{
    static quern_status (*const calls[])(void) = {
        op_named,  op_get,      op_get_tensors, op_get_params, op_tensor_name, op_defaults,
        op_preset, op_set_word, op_text,        op_set_number, op_follow,      op_roles,
        op_expect, op_extent,   op_complete,    op_workspace,  op_run,         plans};
    (void)state;
    const int64_t shape[] = {1, 2, 1, 8};
    view = quern_tensor_contiguous(numbers, QUERN_F32, 4, shape);
    for (size_t n = 0; (op = quern_op_at(n)) != NULL; n++) {
        quern_op_info info;
        assert_int_equal(quern_op_get(op, &info), QUERN_OK);
        tensors.size = info.tensors_size;
        for (int some = 0; some < 2; some++) {
            for (int32_t i = 0; i < info.tensor_count; i++)
                tensors.t[i] = some != 0 && (uint32_t)i * 2654435761u % 3 > 0 ? &view : NULL;
            assert_int_equal(quern_op_defaults(op, params), QUERN_OK);
            EACH(calls);
        }
    }
}

/* Every sentence names its argument. */
static void texts_are_named(void **state)
{
    (void)state;
    op = quern_op_named("nvfp4-quantize");
    assert_int_equal(quern_op_defaults(op, params), QUERN_OK);
    assert_int_equal(quern_op_set(op, params, NULL, "1"), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "name is NULL"));
    assert_int_equal(quern_op_set(op, params, "format", NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "text is NULL"));
    assert_int_equal(quern_op_preset(op, params, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "preset is NULL"));
    assert_int_equal(quern_op_preset(quern_op_named("nsa"), params, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(quern_op_tensor_name(quern_op_named("csa-compress"), NULL, 0));
}

/* ---- contexts, DLPack, files ---- */

static quern_status contexts(void)
{
    const quern_context_params p = QUERN_CONTEXT_PARAMS_INIT;
    quern_context *made = NULL;
    const quern_status status = quern_context_create(at(0, &p), absent == 1 ? NULL : &made);
    (void)at(1, &made);
    (void)quern_context_threads(at(2, ctx));
    (void)quern_context_cpu_level(at(3, ctx));
    (void)quern_last_error(at(4, ctx));
    quern_context_destroy(made);
    return status;
}
static quern_status dlpack(void)
{
    char dl_tensor[64];
    quern_tensor back;
    if (quern_tensor_to_dlpack(at(0, &view), absent == 1 ? NULL : dl_tensor) != QUERN_OK) return QUERN_OK;
    return quern_tensor_from_dlpack(at(1, dl_tensor), at(2, &back));
}

static char path[] = "null_test.XXXXXX";

static quern_status files(void)
{
    quern_file *file = NULL;
    (void)quern_file_check(at(0, path));
    quern_status status = quern_file_create(at(1, path), absent == 2 ? NULL : &file);
    (void)at(2, &file);
    (void)quern_file_write(at(3, file), at(4, "text"), 4);
    if (status == QUERN_OK) (void)quern_file_commit(at(5, file));
    if (absent == 5) quern_file_discard(file);
    quern_file_discard(NULL);
    return status;
}
static quern_status safetensors(void)
{
    const quern_safetensors_pair pair = {at(0, "key"), at(1, "value")};
    const quern_safetensors_item item = {at(2, "name"), at(3, &view)};
    quern_safetensors *file = NULL;
    quern_tensor got;
    (void)quern_safetensors_save(at(4, path), at(5, &item), 1, at(6, &pair), 1);
    (void)quern_safetensors_open_bytes(at(7, text), 0, absent == 8 ? NULL : &file);
    quern_safetensors_close(file), file = NULL;
    const quern_status status = quern_safetensors_open(at(8, path), absent == 9 ? NULL : &file);
    quern_safetensors *const f = at(9, file);
    (void)quern_safetensors_count(f);
    (void)quern_safetensors_name(f, 0);
    (void)quern_safetensors_has(f, at(10, "name"));
    (void)quern_safetensors_get(f, at(11, "name"), at(12, &got));
    quern_safetensors_data data = QUERN_SAFETENSORS_DATA_INIT;
    (void)quern_safetensors_bytes(f, at(14, "name"), at(15, &data));
    (void)quern_safetensors_metadata_count(f);
    (void)quern_safetensors_metadata_key(f, 0);
    (void)quern_safetensors_metadata(f, at(13, "key"));
    quern_safetensors_close(absent == 9 ? NULL : file);
    if (absent == 9) quern_safetensors_close(file);
    return status;
}

static void files_and_contexts(void **state)
{
    static quern_status (*const calls[])(void) = {contexts, dlpack, files, safetensors};
    (void)state;
    const int64_t shape[] = {2, 8};
    view = quern_tensor_contiguous(numbers, QUERN_F32, 2, shape);
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    EACH(calls);
    unlink(path);
}

/* ---- caches ---- */

static quern_cache *cache;
static const int32_t ids[] = {0};
static const int64_t counts[] = {1};
static char memory[1 << 16], rows[1 << 16], saved[1 << 16];
static size_t memory_bytes, rows_bytes;

static quern_cache_params cache_params(void)
{
    quern_cache_params p = QUERN_CACHE_PARAMS_INIT;
    p.sequences = 2, p.kv_heads = 1, p.dim = p.dim_v = 8, p.capacity = 8;
    return p;
}
static quern_status cache_make(void)
{
    const quern_cache_params p = cache_params();
    quern_ledger_params l = QUERN_LEDGER_PARAMS_INIT;
    quern_cache *made = NULL;
    (void)quern_cache_ledger_params(at(0, &p), at(1, &l));
    (void)quern_cache_size(at(2, &p), at(3, &memory_bytes), at(4, &rows_bytes));
    (void)quern_cache_create(at(5, &p), at(6, saved), sizeof saved, at(7, rows), sizeof rows, at(8, &made));
    return quern_cache_create(&p, memory, sizeof memory, rows, sizeof rows, &cache);
}
static quern_status cache_use(void)
{
    int64_t a, b;
    bytes = sizeof saved;
    (void)quern_cache_length(at(0, cache), 0, at(1, &a), at(2, &b));
    (void)quern_cache_held(at(3, cache), at(4, &a));
    (void)quern_cache_rollback(at(5, cache), 0, 0);
    (void)quern_cache_reset(at(6, cache), 0);
    (void)quern_cache_fork(at(7, cache), 0, 1);
    (void)quern_cache_save(at(8, ctx), at(9, cache), 0, at(10, saved), at(11, &bytes));
    return quern_cache_restore(at(12, ctx), at(13, cache), 0, at(14, saved), bytes);
}
static quern_status cache_calls(void)
{
    const quern_cache_batch b = {sizeof b, 1, at(0, ids), at(1, counts)};
    const quern_cache_tensors t = {.size = sizeof t, .k = at(2, &view), .v = at(3, &view)};
    const quern_decode_tensors d = {.size = sizeof d, .q = at(4, &view), .o = at(5, &view)};
    const quern_attention_params a = QUERN_ATTENTION_PARAMS_INIT;
    const quern_nsa_params n = QUERN_NSA_PARAMS_INIT;
    (void)quern_cache_append_workspace(at(6, ctx), at(7, cache), at(8, &b), at(9, &t), at(10, &bytes));
    (void)quern_cache_append(at(11, ctx), NULL, at(12, cache), at(13, &b), at(14, &t), at(15, saved),
                             sizeof saved);
    (void)quern_attention_decode_workspace(at(16, ctx), at(17, &a), at(18, cache), at(19, &b), at(20, &d),
                                           at(21, &bytes));
    (void)quern_attention_decode(at(22, ctx), NULL, at(23, &a), at(24, cache), at(25, &b), at(26, &d),
                                 at(27, saved), sizeof saved);
    (void)quern_nsa_decode_workspace(at(28, ctx), at(29, &n), at(30, cache), at(31, &b), at(32, &d),
                                     at(33, &bytes));
    return quern_nsa_decode(at(34, ctx), NULL, at(35, &n), at(36, cache), at(37, &b), at(38, &d),
                            at(39, saved), sizeof saved);
}

/* ---- ledgers, and operations of a step ---- */

static quern_ledger *ledger;
static char block[1 << 12] __attribute__((aligned(4)));

static quern_status ledger_make(void)
{
    const quern_ledger_params p = {.size = sizeof p, .sequences = 2, .capacity = 8, .pools = {{.page = 4}}};
    quern_ledger *made = NULL;
    int64_t a, b;
    (void)quern_ledger_size(at(0, &p), at(1, &bytes));
    (void)quern_ledger_pages(at(2, &p), 0, 3, at(3, &a), at(4, &b));
    (void)quern_ledger_create(at(5, &p), at(6, saved), sizeof saved, at(7, &made));
    return quern_ledger_create(&p, memory, sizeof memory, &ledger);
}
static quern_status ledger_use(void)
{
    int64_t a, b;
    quern_step step = QUERN_STEP_INIT;
    (void)quern_ledger_begin(at(0, ledger), at(1, ids), at(2, counts), 1, at(3, block), sizeof block);
    (void)quern_ledger_step(at(4, ledger), 1, at(5, block), QUERN_CPU, 0, at(6, &step));
    (void)quern_ledger_abort(at(7, ledger));
    (void)quern_ledger_block_bytes(at(8, ledger), 1, at(9, &bytes));
    (void)quern_ledger_free_pages(at(10, ledger), 0, at(11, &a));
    (void)quern_ledger_length(at(12, ledger), 0, at(13, &a), at(14, &b));
    (void)quern_ledger_newest(at(15, ledger), at(16, ids), at(17, counts), 0, at(18, block), sizeof block);
    (void)quern_ledger_rollback(at(19, ledger), 0, 0);
    (void)quern_ledger_fork(at(20, ledger), 0, 1);
    (void)quern_ledger_reset(at(21, ledger), 0);
    (void)quern_ledger_abort(ledger); /* where the one above was not called */
    assert_int_equal(quern_ledger_begin(ledger, ids, counts, 1, block, sizeof block), QUERN_OK);
    const quern_status status = quern_ledger_commit(at(22, ledger));
    if (status != QUERN_OK) (void)quern_ledger_abort(ledger);
    else assert_int_equal(quern_ledger_reset(ledger, ids[0]), QUERN_OK);
    return status;
}
static quern_status step_calls(void)
{
    const quern_cache_step_params s = QUERN_CACHE_STEP_PARAMS_INIT;
    const quern_cache_pack_params p = QUERN_CACHE_PACK_PARAMS_INIT;
    const quern_attention_params a = QUERN_ATTENTION_PARAMS_INIT;
    const quern_nsa_params n = QUERN_NSA_PARAMS_INIT;
    const quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    const quern_decode_tensors d = QUERN_DECODE_TENSORS_INIT;
    const quern_cache_pack_tensors k = QUERN_CACHE_PACK_TENSORS_INIT;
    (void)quern_cache_append_step_workspace(at(0, ctx), at(1, &s), at(2, &t), at(3, &bytes));
    (void)quern_cache_append_step(at(4, ctx), NULL, at(5, &s), at(6, &t), at(7, saved), sizeof saved);
    (void)quern_attention_decode_step_workspace(at(8, ctx), at(9, &a), at(10, &d), at(11, &bytes));
    (void)quern_attention_decode_step(at(12, ctx), NULL, at(13, &a), at(14, &d), at(15, saved), sizeof saved);
    (void)quern_nsa_decode_step_workspace(at(16, ctx), at(17, &n), at(18, &d), at(19, &bytes));
    (void)quern_nsa_decode_step(at(20, ctx), NULL, at(21, &n), at(22, &d), at(23, saved), sizeof saved);
    (void)quern_cache_pack_workspace(at(24, ctx), at(25, &p), at(26, &k), at(27, &bytes));
    (void)quern_cache_pack(at(28, ctx), NULL, at(29, &p), at(30, &k), at(31, saved), sizeof saved);
    (void)quern_cache_unpack_workspace(at(32, ctx), at(33, &p), at(34, &k), at(35, &bytes));
    (void)quern_cache_unpack(at(36, ctx), NULL, at(37, &p), at(38, &k), at(39, saved), sizeof saved);
    return QUERN_OK;
}

/* ---- DeepSeek V4 ---- */

static quern_dsv4_layer_cache *layer;

static quern_status appends(void)
{
    const quern_dsv4_compress_params p = {.size = sizeof p, .kind = QUERN_DSV4_HCA};
    const quern_dsv4_append_tensors t = {.size = sizeof t,
                                         .proj = at(0, &view),
                                         .b_a = at(1, &view),
                                         .out = at(2, &view),
                                         .slots = at(3, &view),
                                         .states = at(4, &view)};
    (void)quern_dsv4_append_step_workspace(at(5, ctx), at(6, &p), at(7, &t), at(8, &bytes));
    return quern_dsv4_append_step(at(9, ctx), NULL, at(10, &p), at(11, &t), at(12, saved), sizeof saved);
}
static quern_status tables(void)
{
    const quern_dsv4_rope_params p = {.size = sizeof p, .base = 100};
    (void)quern_dsv4_rope_table(at(0, &p), at(1, &view));
    (void)quern_dsv4_pack_weights(QUERN_DSV4_CSA, at(2, &view), at(3, &view), at(4, &view), at(5, &view),
                                  at(6, &view));
    return quern_dsv4_pack_checkpoint(QUERN_DSV4_CSA, at(7, &view), at(8, &view), at(9, &view), at(10, &view),
                                      at(11, &view), at(12, &view));
}
static quern_status layer_caches(void)
{
    quern_dsv4_layer_cache_params p = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    quern_dsv4_layer_cache *made = NULL;
    quern_ledger_params l = QUERN_LEDGER_PARAMS_INIT;
    int64_t a, b;
    p.kind = QUERN_DSV4_LAYER_SWA, p.sequences = 2, p.capacity = 8, p.dim = 8, p.window = 4;
    (void)quern_dsv4_layer_cache_size(at(0, &p), at(1, &memory_bytes), at(2, &rows_bytes));
    (void)quern_dsv4_layer_cache_create(at(3, &p), at(4, saved), sizeof saved, at(5, rows), sizeof rows,
                                        at(6, &made));
    assert_int_equal(quern_dsv4_layer_cache_create(&p, memory, sizeof memory, rows, sizeof rows, &layer),
                     QUERN_OK);
    (void)quern_dsv4_layer_cache_length(at(7, layer), 0, at(8, &a), at(9, &b));
    (void)quern_dsv4_layer_cache_rollback(at(10, layer), 0, 0);
    (void)quern_dsv4_layer_cache_reset(at(11, layer), 0);
    (void)quern_dsv4_layer_ledger_params(at(12, &p), at(13, &l));
    (void)quern_dsv4_layer_cache_pages(at(14, layer), 3, at(15, &a), at(16, &b));
    (void)quern_dsv4_layer_cache_fork(at(17, layer), 0, 1);
    bytes = sizeof saved;
    (void)quern_dsv4_layer_cache_save(at(18, ctx), at(19, layer), 0, at(20, saved), at(21, &bytes));
    return quern_dsv4_layer_cache_restore(at(22, ctx), at(23, layer), 0, at(24, saved), bytes);
}
static quern_status layer_steps(void)
{
    const quern_dsv4_layer_step_params p = QUERN_DSV4_LAYER_STEP_PARAMS_INIT;
    const quern_dsv4_layer_step_tensors t = {.size = sizeof t, .x = at(0, &view), .out = at(1, &view)};
    const quern_dsv4_layer_pack_params q = QUERN_DSV4_LAYER_PACK_PARAMS_INIT;
    const quern_dsv4_layer_pack_tensors s = {.size = sizeof s, .raw = at(2, &view), .packed = at(3, &view)};
    (void)quern_dsv4_layer_step_workspace(at(4, ctx), at(5, &p), at(6, &t), at(7, &bytes));
    (void)quern_dsv4_layer_step(at(8, ctx), NULL, at(9, &p), at(10, &t), at(11, saved), sizeof saved);
    (void)quern_dsv4_layer_pack_workspace(at(12, ctx), at(13, &q), at(14, &s), at(15, &bytes));
    (void)quern_dsv4_layer_pack(at(16, ctx), NULL, at(17, &q), at(18, &s), at(19, saved), sizeof saved);
    (void)quern_dsv4_layer_unpack_workspace(at(20, ctx), at(21, &q), at(22, &s), at(23, &bytes));
    return quern_dsv4_layer_unpack(at(24, ctx), NULL, at(25, &q), at(26, &s), at(27, saved), sizeof saved);
}
static quern_status layer_decodes(void)
{
    const quern_dsv4_layer_params p = QUERN_DSV4_LAYER_PARAMS_INIT;
    const quern_dsv4_layer_tensors t = {.size = sizeof t, .x = at(0, &view), .out = at(1, &view)};
    (void)quern_dsv4_layer_decode_workspace(at(2, ctx), at(3, &p), at(4, layer), at(5, ids), at(6, counts), 1,
                                            at(7, &t), at(8, &bytes));
    return quern_dsv4_layer_decode(at(9, ctx), NULL, at(10, &p), at(11, layer), at(12, ids), at(13, counts),
                                   1, at(14, &t), at(15, saved), sizeof saved);
}

static void caches(void **state)
{
    static quern_status (*const calls[])(void) = {cache_make,  cache_use,    cache_calls,   appends,
                                                  tables,      layer_caches, layer_decodes, layer_steps,
                                                  ledger_make, ledger_use,   step_calls};
    static quern_tensor absent_view;
    (void)state;
    const int64_t shape[] = {1, 1, 8};
    view = quern_tensor_contiguous(numbers, QUERN_F32, 3, shape);
    EACH(calls);
    const int64_t square[] = {4, 4};
    view = quern_tensor_contiguous(numbers, QUERN_F32, 2, square);
    EACH(calls);
    view = absent_view;
    EACH(calls);
}

/* ---- the GPU ---- */

static quern_status devices(void)
{
    quern_cuda_device info = QUERN_CUDA_DEVICE_INIT;
    int32_t count;
    void *p = NULL;
    bool done;
    double ms;
    (void)quern_cuda_device_count(at(0, &count));
    (void)quern_cuda_device_get(1000, at(1, &info));
    (void)quern_cuda_allocate(1000, 8, at(2, &p));
    (void)quern_cuda_free(1000, at(3, memory));
    (void)quern_cuda_copy(1000, at(4, memory), at(5, rows), 8, NULL);
    (void)quern_cuda_fill(1000, at(6, memory), 0, 8, NULL);
    (void)quern_cuda_stream_create(1000, at(7, &p));
    (void)quern_cuda_stream_destroy(1000, at(8, memory));
    (void)quern_cuda_query(1000, NULL, at(9, &done));
    (void)quern_cuda_event_create(1000, at(10, &p));
    (void)quern_cuda_event_destroy(1000, at(11, memory));
    (void)quern_cuda_event_record(1000, at(12, memory), NULL);
    (void)quern_cuda_event_elapsed(1000, at(13, memory), at(14, rows), at(15, &ms));
    return quern_cuda_check(1000);
}

static void gpus(void **state)
{
    (void)state;
    each(devices);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operations),
        cmocka_unit_test(texts_are_named),
        cmocka_unit_test(files_and_contexts),
        cmocka_unit_test(caches),
        cmocka_unit_test(gpus),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
