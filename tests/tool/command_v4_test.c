/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command_v4_test.c - `quern run v4-index` and `v4-attention` on the golden layers; which results a file
 * holds; mistakes. */
#include "command.h"
#include "compare.h"
#include "dsv4_golden.h"
#include "dsv4_layer.h"
#include "tensor.h"

#include <quern/safetensors.h>

#include <math.h>
#include <unistd.h>

enum { B = DSV4_LAYER_BATCH, ITEMS = 9 };

/* A file of f32 and i32 tensors under construction. */
typedef struct tensor_file {
    quern_tensor tensor[ITEMS];
    quern_safetensors_item item[ITEMS];
    void *memory[ITEMS];
    size_t count;
} tensor_file;

static void add(tensor_file *f, const char *name, const double *values, const int32_t *whole, int32_t ndim,
                const int64_t *shape)
{
    int64_t count = 1;
    for (int32_t i = 0; i < ndim; i++) count *= shape[i];
    if (values == NULL && whole == NULL) return;
    float *data = malloc((size_t)(count + 1) * sizeof *data);
    for (int64_t i = 0; i < count && values != NULL; i++) data[i] = (float)values[i];
    if (whole != NULL) memcpy(data, whole, (size_t)count * sizeof *whole);
    f->memory[f->count] = data;
    f->tensor[f->count] = quern_tensor_contiguous(data, whole != NULL ? QUERN_I32 : QUERN_F32, ndim, shape);
    f->item[f->count] = (quern_safetensors_item){name, &f->tensor[f->count]};
    f->count++;
}

static void save(tensor_file *f, const char *name)
{
    assert_int_equal(quern_safetensors_save(path_of(name), f->item, f->count, NULL, 0), QUERN_OK);
    for (size_t i = 0; i < f->count; i++) free(f->memory[i]);
}

static void write_index(const dsv4_layer *l)
{
    const oracle_indexer *x = &l->indexer;
    tensor_file f = {.count = 0};
    add(&f, "q_I", l->idx_q, NULL, 4, (const int64_t[]){B, x->queries, x->heads, x->width});
    add(&f, "k_I", l->idx_k, NULL, 3, (const int64_t[]){B, x->entries, x->width});
    add(&f, "w", l->idx_w, NULL, 3, (const int64_t[]){B, x->queries, x->heads});
    save(&f, "index");
}

static void write_attention(const dsv4_layer *l, const char *name)
{
    const oracle_core *c = &l->core;
    const int64_t q[] = {B, c->queries, c->heads, c->dim};
    tensor_file f = {.count = 0};
    add(&f, "Q", l->q, NULL, 4, q);
    add(&f, "KV", l->kv, NULL, 3, (const int64_t[]){B, c->raw, c->dim});
    add(&f, "KV_cmp", l->kv_cmp, NULL, 3, (const int64_t[]){B, c->entries, c->dim});
    add(&f, "idx", NULL, l->idx, 3, (const int64_t[]){B, c->queries, c->chosen});
    add(&f, "sink", l->sink, NULL, 1, &c->heads);
    add(&f, "cos_sin", l->cos_sin, NULL, 2, (const int64_t[]){c->queries, c->rope_dim});
    add(&f, "dO", l->o, NULL, 4, q);
    save(&f, name);
}

static quern_tensor get(const quern_safetensors *file, const char *name)
{
    quern_tensor t;
    if (quern_safetensors_get(file, name, &t) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    return t;
}

static quern_safetensors *open_result(const char *name)
{
    quern_safetensors *file;
    if (quern_safetensors_open(path_of(name), &file) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    return file;
}

static double *doubles_of(const quern_tensor *t, int64_t count)
{
    double *values = test_doubles(count);
    assert_int_equal(t->dtype, QUERN_F32);
    for (int64_t i = 0; i < count; i++) values[i] = (double)((const float *)t->data)[i];
    return values;
}

static void golden_index(void **state)
{
    (void)state;
    dsv4_layer l = dsv4_layer_read(QUERN_TEST_VECTORS, 0);
    const int64_t k = l.core.chosen, rows = B * l.indexer.queries, n = rows * l.indexer.entries;
    write_index(&l);
    expect(0, "run v4-index $DIR/index $DIR/out --ratio 4 --top-k 4", "");
    quern_safetensors *file = open_result("out");
    assert_false(quern_safetensors_has(file, "scores"));
    assert_int_equal(get(file, "count").shape[1], l.indexer.queries);
    quern_safetensors_close(file);
    expect(0, "run v4-index $DIR/index $DIR/out --ratio 4 --top-k 4 --start-abs-pos 0 --save-scores true",
           "");
    file = open_result("out");
    const quern_tensor idx = get(file, "idx"), scores = get(file, "scores");
    assert_int_equal(idx.shape[2], k);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < k; i++) {
            bool found = false;
            for (int64_t j = 0; j < k; j++)
                found = found || ((const int32_t *)idx.data)[row * k + j] == l.idx[row * k + i];
            assert_true(found);
        }
    double *out = doubles_of(&scores, n);
    for (int64_t i = 0; i < n; i++)
        if (out[i] == -INFINITY) l.idx_score[i] = -INFINITY;
    test_check_golden("idx.score", out, l.idx_score, n, DSV4_TINY_BOUND);
    free(out);
    quern_safetensors_close(file);
    dsv4_layer_free(&l);
}

static void golden_attention(void **state)
{
    static const char *const options[] = {"--ratio 4 --window 8", "--ratio 8 --window 8 --lse-win true",
                                          "--window 8 --start-abs-pos 0"};
    static const char *const gradients[] = {"dQ", "dKV", "dsink"};
    (void)state;
    for (int i = 0; i < DSV4_LAYERS; i++) {
        char line[300];
        dsv4_layer l = dsv4_layer_read(QUERN_TEST_VECTORS, i);
        const int64_t n = B * l.core.queries * l.core.heads * l.core.dim;
        write_attention(&l, l.name);
        snprintf(line, sizeof line, "run v4-attention $DIR/%s $DIR/out %s", l.name, options[i]);
        expect(0, line, "");
        quern_safetensors *file = open_result("out");
        const quern_tensor o = get(file, "O");
        double *out = doubles_of(&o, n);
        test_check_golden(l.name, out, l.o, n, DSV4_TINY_BOUND);
        assert_int_equal(get(file, "lse").shape[1], l.core.heads);
        assert_int_equal(quern_safetensors_has(file, "lse_win"), i == 1);
        assert_int_equal(quern_safetensors_has(file, "dKV_cmp"), l.kv_cmp != NULL);
        for (int k = 0; k < 3; k++) assert_true(quern_safetensors_has(file, gradients[k]));
        free(out);
        quern_safetensors_close(file);
        dsv4_layer_free(&l);
    }
}

/* O of two runs. */
static void same_output(const char *a, const char *b, double bound)
{
    quern_safetensors *first = open_result(a), *second = open_result(b);
    const quern_tensor x = get(first, "O"), y = get(second, "O");
    const int64_t n = x.shape[0] * x.shape[1] * x.shape[2] * x.shape[3];
    double *out = doubles_of(&x, n), *expected = doubles_of(&y, n);
    if (bound == 0) assert_memory_equal(x.data, y.data, (size_t)n * sizeof(float));
    test_check("O", out, expected, n, bound);
    free(out), free(expected);
    quern_safetensors_close(first), quern_safetensors_close(second);
}

/* The file's rows in a cache: the same bits where the cache holds them exactly. */
static void caches(void **state)
{
    static const char *const same[] = {"--format f32", "--page 16", "--page 64 --format f32", "--page 3"};
    (void)state;
    for (int i = 0; i < DSV4_LAYERS; i++) {
        char line[300];
        dsv4_layer l = dsv4_layer_read(QUERN_TEST_VECTORS, i);
        write_attention(&l, "core");
        snprintf(line, sizeof line,
                 "run v4-attention $DIR/core $DIR/whole --window 8 --ratio %d --without dO",
                 (int)l.core.ratio);
        expect(0, line, "");
        for (int k = 0; k < 4; k++) {
            snprintf(line, sizeof line,
                     "run v4-attention $DIR/core $DIR/cached --window 8 --ratio %d --without dO %s",
                     (int)l.core.ratio, same[k]);
            expect(0, line, "");
            same_output("cached", "whole", 0);
        }
        snprintf(line, sizeof line,
                 "run v4-attention $DIR/core $DIR/cached --window 8 --ratio %d --without dO --format bf16 "
                 "--page 16",
                 (int)l.core.ratio);
        expect(0, line, "");
        same_output("cached", "whole", 4e-3);
        dsv4_layer_free(&l);
    }
    expect(3, "run v4-attention $DIR/core $DIR/none --format row584 --without dO", "32 channels");
    expect(3, "run v4-attention $DIR/core $DIR/none --page 16", "the backward takes rows and 0");
    expect(3, "run v4-attention $DIR/core $DIR/none --page -1 --without dO", "0 or more");
    expect(3, "run v4-attention $DIR/core $DIR/none --page 4611686018427387904 --without dO",
           "--page 4611686018427387904: 0 to 65536 slots are accepted");
    expect(3,
           "run v4-attention $DIR/core $DIR/none --page 16 --start-abs-pos 9223372036854775807 --without dO",
           "start_abs_pos is 9223372036854775807");
}

static void mistakes_are_reported(void **state)
{
    (void)state;
    dsv4_layer l = dsv4_layer_read(QUERN_TEST_VECTORS, 0);
    write_index(&l);
    write_attention(&l, "core");
    expect(3, "run v4-index $DIR/index $DIR/none --top-k 4000", "top_k is 4000");
    expect(3, "run v4-index $DIR/index $DIR/none --key-format fp8", "k_I has dtype f32: u8");
    expect(2, "run v4-index $DIR/index $DIR/none --key-format fp7", "fp7");
    expect(3, "run v4-index $DIR/core $DIR/none", "q_I");
    expect(3, "run v4-attention $DIR/core $DIR/none --window -3", "window is -3");
    expect(3, "run v4-attention $DIR/core $DIR/none --start-abs-pos 7", "position 51");
    expect(3, "run v4-attention $DIR/core $DIR/none --without KV_cmp", "idx");
    assert_int_not_equal(access(path_of("none"), F_OK), 0);
    dsv4_layer_free(&l);
}

/* Rows or keys in a cache's format, in pages or not; the library sees the cache: row584 asks for 512
 * channels, fp4 for multiples of 32. */
static void benches_of_caches(void **state)
{
#define SMALL " --n 300 --queries 3 --heads 2 --top-k 8 --rounds 1 "
#define BENCH "bench v4-attention" SMALL
    static const char *const cases[][2] = {
        {"v4-attention", "f32"}, {"v4-attention", "bf16"}, {"v4-attention", "row584"}, {"v4-index", "f32"},
        {"v4-index", "bf16"},    {"v4-index", "fp8"},      {"v4-index", "fp8-power"},  {"v4-index", "fp4"}};
    (void)state;
    for (int page = 0; page <= 16; page += 16)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            char command[300], field[40], pages[40];
            snprintf(command, sizeof command, "bench %s" SMALL "--format %s --page %d --json /dev/stdout",
                     cases[i][0], cases[i][1], page);
            snprintf(field, sizeof field, "\"format\": \"%s\"", cases[i][1]);
            snprintf(pages, sizeof pages, "\"page\": %d", page);
            expect(0, command, field);
            expect(0, command, pages);
        }
    expect(3, BENCH "--width 64 --format row584", "format row584 takes 512");
    expect(2, BENCH "--format bf16 --backward", "without --backward");
    expect(2, BENCH "--page -1", "0 to 65536 is accepted");
    expect(2, BENCH "--format f32 --page 4611686018427387904", "0 to 65536 is accepted");
    expect(2, BENCH "--format fp4", "input|f32|bf16|row584 is accepted");
    expect(2, "bench v4-index" SMALL "--format row584", "input|f32|bf16|fp8|fp8-power|fp4 is accepted");
    expect(3, "bench v4-index" SMALL "--width 48 --format fp4", "multiples of 32");
#undef BENCH
#undef SMALL
}

/* v4-store reads the cache from its file and writes the updated one; the file it read stays as it was. */
static void a_cache_is_updated(void **state)
{
    enum { N = 3, ROWS = 5, D = 8 };
    const int32_t slots[N] = {4, -1, 0};
    double x[N * D], cache[ROWS * D];
    tensor_file f = {.count = 0};
    (void)state;
    for (int i = 0; i < N * D; i++) x[i] = i + 1;
    for (int i = 0; i < ROWS * D; i++) cache[i] = -i - 1;
    add(&f, "x", x, NULL, 2, (const int64_t[]){N, D});
    add(&f, "slots", NULL, slots, 1, (const int64_t[]){N});
    save(&f, "rows");
    expect(3, "run v4-store $DIR/rows $DIR/out", "v4-store needs x slots cache");
    f.count = 0;
    add(&f, "x", x, NULL, 2, (const int64_t[]){N, D});
    add(&f, "slots", NULL, slots, 1, (const int64_t[]){N});
    add(&f, "cache", cache, NULL, 2, (const int64_t[]){ROWS, D});
    save(&f, "rows");
    expect(0, "run v4-store $DIR/rows $DIR/out --json", "\"cache\"");
    quern_safetensors *in = open_result("rows"), *out = open_result("out");
    assert_false(quern_safetensors_has(out, "x"));
    const quern_tensor before = get(in, "cache"), after = get(out, "cache");
    for (int i = 0; i < ROWS * D; i++) {
        const int row = i / D == 4 ? 0 : i / D == 0 ? 2 : -1; /* of x */
        assert_true((double)((const float *)before.data)[i] == cache[i]);
        assert_true((double)((const float *)after.data)[i] == (row < 0 ? cache[i] : x[row * D + i % D]));
    }
    quern_safetensors_close(in);
    quern_safetensors_close(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_index),          cmocka_unit_test(golden_attention),
        cmocka_unit_test(a_cache_is_updated),    cmocka_unit_test(caches),
        cmocka_unit_test(mistakes_are_reported), cmocka_unit_test(benches_of_caches)};
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
