/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command_decode_test.c - `quern run nsa-decode` and `attention-decode`: rows and lists of whole sequences,
 * however they go into the cache. */
#include "command.h"
#include "compare.h"
#include "tensor.h"

#include <quern/safetensors.h>

#include <unistd.h>

enum { BATCH = 2, TOKENS = 150, HEADS = 4, KV_HEADS = 2, DIM = 16, DIM_V = 24 };

/* Files DIR/fixed and DIR/varlen of random tensors; the same values but for cu_seqlens. */
static void write_inputs(void)
{
    enum { INPUTS = 9 };
    static float data[INPUTS][BATCH * TOKENS * HEADS * DIM_V];
    static const char *const names[INPUTS] = {"Q", "K", "V", "K_win", "V_win", "gate", "W_k", "W_v", "pe_k"};
    const int64_t fixed[INPUTS][4] = {
        {BATCH, TOKENS, HEADS, DIM},    {BATCH, TOKENS, KV_HEADS, DIM},   {BATCH, TOKENS, KV_HEADS, DIM_V},
        {BATCH, TOKENS, KV_HEADS, DIM}, {BATCH, TOKENS, KV_HEADS, DIM_V}, {HEADS, 3, DIM},
        {KV_HEADS, 8 * DIM, DIM},       {KV_HEADS, 8 * DIM_V, DIM_V},     {KV_HEADS, 8, DIM}};
    static int32_t cu[] = {0, 149, 283};
    const int64_t offsets[] = {3};
    test_random random = {9};
    quern_tensor t[2][INPUTS + 1];
    quern_safetensors_item items[2][INPUTS + 1];
    for (int i = 0; i < INPUTS; i++) {
        for (int k = 0; k < BATCH * TOKENS * HEADS * DIM_V; k++)
            data[i][k] = (float)(test_random_normal(&random) * (i > 4 ? 0.2 : 1));
        const int64_t varlen[] = {BATCH * TOKENS, fixed[i][2], fixed[i][3]};
        t[0][i] = quern_tensor_contiguous(data[i], QUERN_F32, i < 5 ? 4 : 3, fixed[i]);
        t[1][i] = i < 5 ? quern_tensor_contiguous(data[i], QUERN_F32, 3, varlen) : t[0][i];
        for (int f = 0; f < 2; f++) items[f][i] = (quern_safetensors_item){names[i], &t[f][i]};
    }
    t[1][INPUTS] = quern_tensor_contiguous(cu, QUERN_I32, 1, offsets);
    items[1][INPUTS] = (quern_safetensors_item){"cu_seqlens", &t[1][INPUTS]};
    assert_int_equal(quern_safetensors_save(path_of("fixed"), items[0], INPUTS, NULL, 0), QUERN_OK);
    assert_int_equal(quern_safetensors_save(path_of("varlen"), items[1], INPUTS + 1, NULL, 0), QUERN_OK);
    items[1][INPUTS].name = "cu_seqlens_q";
    assert_int_equal(quern_safetensors_save(path_of("varlen_dense"), items[1], INPUTS + 1, NULL, 0),
                     QUERN_OK);
}

/* Files DIR/indexed and DIR/indexed_varlen: those inputs without weights, with the block indexer's. */
static void write_indexed(void)
{
    enum { INPUTS = 5 };
    static float data[INPUTS][BATCH * TOKENS * HEADS * DIM_V];
    static const char *const names[INPUTS] = {"Q", "K", "V", "q_I", "k_I"};
    static const int64_t tails[INPUTS][2] = {
        {HEADS, DIM}, {KV_HEADS, DIM}, {KV_HEADS, DIM_V}, {KV_HEADS, DIM}, {DIM, 0}};
    static int32_t cu[] = {0, 149, 283};
    const int64_t offsets[] = {3};
    test_random random = {10};
    quern_tensor t[2][INPUTS + 1];
    quern_safetensors_item items[2][INPUTS + 1];
    for (int i = 0; i < INPUTS; i++) {
        const int64_t fixed[] = {BATCH, TOKENS, tails[i][0], tails[i][1]},
                      varlen[] = {BATCH * TOKENS, tails[i][0], tails[i][1]};
        const int32_t ndim = i == INPUTS - 1 ? 3 : 4;
        for (int k = 0; k < BATCH * TOKENS * HEADS * DIM_V; k++)
            data[i][k] = (float)test_random_normal(&random);
        t[0][i] = quern_tensor_contiguous(data[i], QUERN_F32, ndim, fixed);
        t[1][i] = quern_tensor_contiguous(data[i], QUERN_F32, ndim - 1, varlen);
        for (int f = 0; f < 2; f++) items[f][i] = (quern_safetensors_item){names[i], &t[f][i]};
    }
    t[1][INPUTS] = quern_tensor_contiguous(cu, QUERN_I32, 1, offsets);
    items[1][INPUTS] = (quern_safetensors_item){"cu_seqlens", &t[1][INPUTS]};
    assert_int_equal(quern_safetensors_save(path_of("indexed"), items[0], INPUTS, NULL, 0), QUERN_OK);
    assert_int_equal(quern_safetensors_save(path_of("indexed_varlen"), items[1], INPUTS + 1, NULL, 0),
                     QUERN_OK);
}

static quern_safetensors *open_result(const char *name, const char *tensor, quern_tensor *t)
{
    quern_safetensors *file;
    assert_int_equal(quern_safetensors_open(path_of(name), &file), QUERN_OK);
    if (quern_safetensors_get(file, tensor, t) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    return file;
}

static void same_rows(void)
{
    quern_tensor a, b;
    quern_safetensors *whole = open_result("whole", "O", &a), *pieces = open_result("pieces", "O", &b);
    assert_int_equal(a.ndim, b.ndim);
    int64_t count = 1;
    for (int i = 0; i < a.ndim; i++) {
        assert_int_equal(a.shape[i], b.shape[i]);
        count *= a.shape[i];
    }
    double *x = test_doubles(count), *y = test_doubles(count);
    for (int64_t i = 0; i < count; i++) {
        x[i] = (double)((const float *)a.data)[i];
        y[i] = (double)((const float *)b.data)[i];
    }
    test_check("O", y, x, count, test_forward_bound(QUERN_F32));
    free(x), free(y);
    quern_safetensors_close(whole), quern_safetensors_close(pieces);
}

static void same_lists(void)
{
    quern_tensor a, b;
    quern_safetensors *whole = open_result("whole", "block_idx", &a),
                      *pieces = open_result("pieces", "block_idx", &b);
    size_t bytes = 4;
    assert_int_equal(a.ndim, b.ndim);
    for (int i = 0; i < a.ndim; i++) {
        assert_int_equal(a.shape[i], b.shape[i]);
        bytes *= (size_t)a.shape[i];
    }
    assert_memory_equal(a.data, b.data, bytes);
    quern_safetensors_close(whole), quern_safetensors_close(pieces);
}

static int64_t cache_bytes(void)
{
    quern_tensor t;
    quern_safetensors *file = open_result("pieces", "cache_bytes", &t);
    assert_int_equal(t.ndim, 0);
    assert_int_equal(t.dtype, QUERN_I64);
    const int64_t bytes = *(const int64_t *)t.data;
    quern_safetensors_close(file);
    return bytes;
}

static void run_both(const char *op, const char *in, const char *options, const char *pieces)
{
    char line[512];
    snprintf(line, sizeof line, "run %s $DIR/%s $DIR/whole %s", op, in, options);
    expect(0, line, "");
    snprintf(line, sizeof line, "run %s-decode $DIR/%s $DIR/pieces %s %s", op, in, options, pieces);
    expect(0, line, "");
    same_rows();
}

static const char *const pieces[] = {"", "--prefill 149 --step 1 --rollback 8",
                                     "--prefill 70 --step 3 --page 64 --rollback 2", "--prefill 1000",
                                     "--step 64 --page 64"};
enum { PIECES = sizeof pieces / sizeof *pieces };

static void sparse_pieces_give_the_whole(void **state)
{
    static const char *const options[] = {
        "--without W_k,W_v,pe_k,K_win,V_win --block-size 8 --num-selected 5 --window 20",
        "--without W_k,W_v,pe_k --block-size 8 --stride 4 --select-block 16 --num-selected 4 --window 33 "
        "--scope head",
        "--without gate --compress linear --block-size 8 --num-selected 4 --window 1000 --scope head",
        "--without W_k,W_v,pe_k,gate --block-size 16 --metric mean_logit --num-selected 4 --branches cmp,slc",
    };
    (void)state;
    write_inputs();
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        for (int k = 0; k < PIECES; k++) {
            run_both("nsa", "fixed", options[i], pieces[k]);
            same_lists();
            run_both("nsa", "varlen", options[i], pieces[k]);
            same_lists();
        }
}

static void pieces_by_the_indexer_give_the_whole(void **state)
{
    static const char *const options[] = {
        "--profile msa --select-block 16 --num-selected 3",
        "--block-size 8 --select-block 16 --num-selected 4 --window 20",
        "--block-size 8 --num-selected 5 --window 20 --branches slc,win",
    };
    (void)state;
    write_indexed();
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        for (int k = 0; k < PIECES; k++) {
            run_both("nsa", "indexed", options[i], pieces[k]);
            same_lists();
            if (i != 1) /* no entries */
                assert_int_equal(cache_bytes(), BATCH * (k == 2 || k == 4 ? 192 : TOKENS) *
                                                    (KV_HEADS * (DIM + DIM_V) + DIM) * 4);
            run_both("nsa", "indexed_varlen", options[i], pieces[k]);
            same_lists();
        }
}

static void dense_pieces_give_the_whole(void **state)
{
    static const char *const options[] = {"", "--window 40 --scale 0.3"};
    (void)state;
    write_inputs();
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < PIECES; k++) {
            run_both("attention", "fixed", options[i], pieces[k]);
            assert_int_equal(cache_bytes(),
                             BATCH * (k == 2 || k == 4 ? 192 : TOKENS) * KV_HEADS * (DIM + DIM_V) * 4);
            run_both("attention", "varlen_dense", options[i], pieces[k]);
        }
}

static void bytes_count_rows_of_every_kind(void **state)
{
    const int64_t row = BATCH * KV_HEADS * (DIM + DIM_V) * 4;
    (void)state;
    write_inputs();
    expect(0, "run nsa-decode $DIR/fixed $DIR/pieces --without W_k,W_v,pe_k,K_win,V_win --block-size 8", "");
    assert_int_equal(cache_bytes(), (TOKENS + TOKENS / 8) * row);
    expect(
        0,
        "run nsa-decode $DIR/fixed $DIR/pieces --without W_k,W_v,pe_k,K_win,V_win --block-size 8 --page 64",
        "");
    assert_int_equal(cache_bytes(), (192 + 64) * row);
    expect(0, "run nsa-decode $DIR/fixed $DIR/pieces --without W_k,W_v,pe_k --block-size 8 --window 20", "");
    assert_int_equal(cache_bytes(), (TOKENS + TOKENS / 8 + 64) * row); /* a ring for 20 + 8 + 1 tokens */
}

static void mistakes_are_reported(void **state)
{
    (void)state;
    write_inputs();
    expect(3, "run nsa-decode $DIR/fixed $DIR/none --without W_k,W_v,pe_k --block-size 8 --causal false",
           "causal is false");
    expect(3,
           "run nsa-decode $DIR/fixed $DIR/none --without W_k,W_v,pe_k --block-size 8 --metric mean_logit "
           "--max-compressed-groups 2",
           "max_compressed_groups is 2");
    expect(3, "run nsa-decode $DIR/fixed $DIR/none --compress given", "");
    expect(2, "run nsa-decode $DIR/fixed $DIR/none --tile 2", "tile");
    expect(2, "run nsa-decode $DIR/fixed $DIR/none --rollback 9", "--rollback 9");
    expect(2, "run nsa-decode $DIR/fixed $DIR/none --step 0", "--step 0");
    expect(3, "run attention-decode $DIR/fixed $DIR/none --page 32", "page is 32");
    expect(3, "run attention-decode $DIR/fixed $DIR/none --causal false", "causal is false");
    assert_false(exists("none"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sparse_pieces_give_the_whole),
        cmocka_unit_test(pieces_by_the_indexer_give_the_whole), cmocka_unit_test(dense_pieces_give_the_whole),
        cmocka_unit_test(bytes_count_rows_of_every_kind), cmocka_unit_test(mistakes_are_reported)};
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
