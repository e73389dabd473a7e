/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command_compressor_test.c - `quern run csa-compress` and `hca-compress`: pieces give the bytes of one shot,
 * bytes those of a quantiser over f32, and mistakes are told. */
#include "command.h"
#include "tensor.h"

#include <quern/safetensors.h>

#include <string.h>
#include <unistd.h>

enum { TOKENS = 45, IN = 20, WIDTH = 64, RATIO = 4 };

/* DIR/both and DIR/both_x: csa and csa_x with the indexer's compressor beside. */
static void write_pairs(float data[8][TOKENS * 4 * WIDTH], const quern_safetensors_item *csa, int csa_count,
                        const quern_safetensors_item *from_x, int x_count)
{
    enum { OWN = 32 };
    const int64_t proj[] = {TOKENS, 4 * OWN}, bias[] = {RATIO, OWN}, prev[] = {RATIO, 2 * OWN},
                  w[] = {IN, 4 * OWN}, out[] = {TOKENS / RATIO, OWN};
    const quern_tensor t[] = {quern_tensor_contiguous(data[1] + 100, QUERN_F32, 2, proj),
                              quern_tensor_contiguous(data[3] + 100, QUERN_F32, 2, w),
                              quern_tensor_contiguous(data[0] + 100, QUERN_F32, 2, bias),
                              quern_tensor_contiguous(data[4] + 100, QUERN_F32, 2, bias),
                              quern_tensor_contiguous(data[2] + 100, QUERN_F32, 2, prev),
                              quern_tensor_contiguous(data[5] + 100, QUERN_F32, 2, out)};
    quern_safetensors_item both[16], both_x[16];
    memcpy(both, csa, (size_t)csa_count * sizeof *both);
    memcpy(both_x, from_x, (size_t)x_count * sizeof *both_x);
    const quern_safetensors_item own[] = {{"index_proj", &t[0]},
                                          {"index_B_a", &t[2]},
                                          {"index_B_b", &t[3]},
                                          {"index_prev_b", &t[4]},
                                          {"index_d_out", &t[5]}};
    const quern_safetensors_item own_x[] = {{"index_W", &t[1]}, {"index_B_a", &t[2]}, {"index_B_b", &t[3]}};
    memcpy(both + csa_count, own, sizeof own);
    memcpy(both_x + x_count, own_x, sizeof own_x);
    assert_int_equal(quern_safetensors_save(path_of("both"), both, csa_count + 5, NULL, 0), QUERN_OK);
    assert_int_equal(quern_safetensors_save(path_of("both_x"), both_x, x_count + 3, NULL, 0), QUERN_OK);
}

/* DIR/fp8 and DIR/nvfp4: csa_x of 32 channels with the weight in bytes. */
static void write_bytes(float data[8][TOKENS * 4 * WIDTH], const quern_tensor *b_a, const quern_tensor *b_b)
{
    enum { IN_BYTES = 32 };
    static unsigned char codes[4 * WIDTH * IN_BYTES], scales[2 * 4 * WIDTH];
    static float global = 0.01f;
    test_random random = {18};
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = (unsigned char)test_random_int(&random, 0, 0x50);
    for (size_t i = 0; i < sizeof scales; i++)
        scales[i] = (unsigned char)test_random_int(&random, 0x18, 0x38);
    static unsigned char powers[2] = {119, 121};
    const int64_t x[] = {TOKENS, IN_BYTES}, fp8[] = {4 * WIDTH, IN_BYTES}, blocks[] = {2, 1},
                  fp4[] = {IN_BYTES / 2, 4 * WIDTH}, fp4_scales[] = {2, 4 * WIDTH};
    const quern_tensor t[] = {quern_tensor_contiguous(data[6], QUERN_F32, 2, x),
                              quern_tensor_contiguous(codes, QUERN_E4M3, 2, fp8),
                              quern_tensor_contiguous(powers, QUERN_E8M0, 2, blocks),
                              quern_tensor_contiguous(codes, QUERN_U8, 2, fp4),
                              quern_tensor_contiguous(scales, QUERN_U8, 2, fp4_scales),
                              quern_tensor_contiguous(&global, QUERN_F32, 0, NULL)};
    const quern_safetensors_item eight[] = {
        {"X", &t[0]}, {"W_fp8", &t[1]}, {"W_fp8_scales", &t[2]}, {"B_a", b_a}, {"B_b", b_b}};
    const quern_safetensors_item four[] = {{"X", &t[0]},        {"W_codes", &t[3]}, {"W_scales", &t[4]},
                                           {"W_global", &t[5]}, {"B_a", b_a},       {"B_b", b_b}};
    assert_int_equal(quern_safetensors_save(path_of("fp8"), eight, 5, NULL, 0), QUERN_OK);
    assert_int_equal(quern_safetensors_save(path_of("nvfp4"), four, 6, NULL, 0), QUERN_OK);
    const quern_tensor vector = quern_tensor_contiguous(&global, QUERN_F32, 1, (const int64_t[]){1});
    quern_safetensors_item with_vector[6];
    memcpy(with_vector, four, sizeof four);
    with_vector[3].tensor = &vector;
    assert_int_equal(quern_safetensors_save(path_of("nvfp4_vector"), with_vector, 6, NULL, 0), QUERN_OK);
}

/* Files DIR/csa (from projections), DIR/csa_x (from hidden states) and DIR/hca of random tensors. */
static void write_inputs(void)
{
    static float data[8][TOKENS * 4 * WIDTH];
    test_random random = {8};
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < TOKENS * 4 * WIDTH; k++) data[i][k] = (float)test_random_normal(&random);
    const int64_t proj[] = {TOKENS, 4 * WIDTH}, half[] = {TOKENS, 2 * WIDTH}, bias[] = {RATIO, WIDTH},
                  prev[] = {RATIO, 2 * WIDTH}, norm[] = {WIDTH};
    const int64_t table[] = {64, 16}, x[] = {TOKENS, IN}, w[] = {IN, 4 * WIDTH},
                  out[] = {TOKENS / RATIO, WIDTH};
    const quern_tensor t[] = {
        quern_tensor_contiguous(data[0], QUERN_F32, 2, proj),
        quern_tensor_contiguous(data[1], QUERN_F32, 2, bias),
        quern_tensor_contiguous(data[2], QUERN_F32, 2, bias),
        quern_tensor_contiguous(data[3], QUERN_F32, 2, prev),
        quern_tensor_contiguous(data[4], QUERN_F32, 1, norm),
        quern_tensor_contiguous(data[5], QUERN_F32, 2, table),
        quern_tensor_contiguous(data[6], QUERN_F32, 2, x),
        quern_tensor_contiguous(data[7], QUERN_F32, 2, w),
        quern_tensor_contiguous(data[6], QUERN_F32, 2, out),
        quern_tensor_contiguous(data[0], QUERN_F32, 2, half),
    };
    const quern_safetensors_item csa[] = {{"proj", &t[0]},   {"B_a", &t[1]},         {"B_b", &t[2]},
                                          {"prev_b", &t[3]}, {"norm_weight", &t[4]}, {"cos_sin", &t[5]},
                                          {"d_out", &t[8]}};
    const quern_safetensors_item from_x[] = {
        {"X", &t[6]}, {"W", &t[7]}, {"B_a", &t[1]}, {"B_b", &t[2]}, {"cos_sin", &t[5]}};
    const quern_safetensors_item hca[] = {{"proj", &t[9]}, {"B", &t[1]}, {"norm_weight", &t[4]}};
    assert_int_equal(quern_safetensors_save(path_of("csa"), csa, 7, NULL, 0), QUERN_OK);
    assert_int_equal(quern_safetensors_save(path_of("csa_x"), from_x, 5, NULL, 0), QUERN_OK);
    assert_int_equal(quern_safetensors_save(path_of("hca"), hca, 3, NULL, 0), QUERN_OK);
    write_pairs(data, csa, 7, from_x, 5);
    write_bytes(data, &t[1], &t[2]);
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
    assert_int_equal(quern_safetensors_open(path_of(name), &file), QUERN_OK);
    return file;
}

static void same_tensor(const char *a, const char *b, const char *name)
{
    quern_safetensors *first = open_result(a), *second = open_result(b);
    const quern_tensor x = get(first, name), y = get(second, name);
    size_t bytes = quern_dtype_size(x.dtype);
    assert_int_equal(x.ndim, y.ndim);
    assert_int_equal(x.dtype, y.dtype);
    for (int i = 0; i < x.ndim; i++) {
        assert_int_equal(x.shape[i], y.shape[i]);
        bytes *= (size_t)x.shape[i];
    }
    assert_memory_equal(x.data, y.data, bytes);
    quern_safetensors_close(first), quern_safetensors_close(second);
}

/* One shot and pieces under the same options. */
static void in_pieces(const char *op, const char *in, const char *options)
{
    static const char *const pieces[] = {"--chunks 45", "--chunks 3,1,7,0,4,30 --ring 5 --rollback 3",
                                         "--chunks 1,1,1,1,1,40 --ring 8 --rollback 8"};
    char line[512];
    snprintf(line, sizeof line, "run %s $DIR/%s $DIR/whole %s", op, in, options);
    expect(0, line, "");
    for (int i = 0; i < 3; i++) {
        snprintf(line, sizeof line, "run %s $DIR/%s $DIR/pieces %s %s", op, in, options, pieces[i]);
        expect(0, line, "");
        same_tensor("whole", "pieces", "out");
        same_tensor("whole", "pieces", "pooled");
        if (strncmp(in, "both", 4) != 0) continue;
        same_tensor("whole", "pieces", "index_out");
        same_tensor("whole", "pieces", "index_pooled");
    }
}

static void pieces_give_the_bytes_of_one_shot(void **state)
{
    (void)state;
    write_inputs();
    in_pieces("csa-compress", "csa", "--ratio 4");
    in_pieces("csa-compress", "csa", "--start-token 1 --start-abs-pos 8 --rope-at last --format fp8");
    in_pieces("csa-compress", "csa_x", "--hadamard true --format fp4 --round-bf16 true");
    in_pieces("csa-compress", "csa_x", "--format bf16");
    in_pieces("hca-compress", "hca", "--eps 1e-5");
    in_pieces("csa-compress", "fp8", "--format fp8");
    in_pieces("csa-compress", "nvfp4", "--ratio 4");
    in_pieces("csa-compress", "nvfp4_vector", "--ratio 4"); /* a global [1] */
    in_pieces("csa-compress", "both", "--ratio 4 --index-format fp4 --index-hadamard true");
    in_pieces("csa-compress", "both_x", "--format bf16 --index-format fp8");
}

static void results_are_complete(void **state)
{
    static const char *const gradients[] = {"d_proj", "dB_a", "dB_b", "dprev_b", "dnorm_weight"};
    (void)state;
    write_inputs();
    expect(0, "run csa-compress $DIR/csa $DIR/out", "");
    expect(0, "run csa-compress $DIR/both $DIR/both_out", "");
    quern_safetensors *pair = open_result("both_out");
    assert_int_equal(get(pair, "index_out").shape[1], 32);
    assert_int_equal(get(pair, "dindex_proj").shape[1], 4 * 32);
    same_tensor("out", "both_out", "out"), same_tensor("out", "both_out", "d_proj");
    quern_safetensors_close(pair);
    quern_safetensors *file = open_result("out");
    assert_int_equal(get(file, "out").shape[0], TOKENS / RATIO);
    assert_int_equal(get(file, "pooled").dtype, QUERN_F32);
    for (int i = 0; i < 5; i++) get(file, gradients[i]);
    quern_safetensors_close(file);
    expect(0, "run hca-compress $DIR/hca $DIR/out", "");
    file = open_result("out");
    assert_false(quern_safetensors_has(file, "dB"));
    quern_safetensors_close(file);
}

/* A start must be a multiple of the ratio that is in force: an option's, else the rows of the biases. */
static void starts_are_multiples_of_the_ratio(void **state)
{
    (void)state;
    write_inputs();
    expect(0, "run hca-compress $DIR/hca $DIR/start --start-abs-pos 8", "");
    expect(0, "run hca-compress $DIR/hca $DIR/start4 --start-abs-pos 8 --ratio 4", "");
    same_tensor("start", "start4", "out");
    expect(3, "run hca-compress $DIR/hca $DIR/none --start-abs-pos 10", "ratio 4");
    static float zeros[6 * 64];
    const int64_t proj[] = {6, 64}, bias[] = {2, 16};
    const quern_tensor t[] = {quern_tensor_contiguous(zeros, QUERN_F32, 2, proj),
                              quern_tensor_contiguous(zeros, QUERN_F32, 2, bias)};
    const quern_safetensors_item items[] = {{"proj", &t[0]}, {"B_a", &t[1]}, {"B_b", &t[1]}};
    assert_int_equal(quern_safetensors_save(path_of("two"), items, 3, NULL, 0), QUERN_OK);
    expect(0, "run csa-compress $DIR/two $DIR/start --ratio 2 --start-abs-pos 10", "");
    expect(3, "run csa-compress $DIR/two $DIR/none --ratio 2 --start-abs-pos 3", "ratio 2");
    assert_false(exists("none"));
}

static void mistakes_are_reported(void **state)
{
    (void)state;
    write_inputs();
    expect(2, "run csa-compress one-word", "OP IN OUT");
    expect(2, "run csa-compress $DIR/csa $DIR/none --chunks 3,x", "--chunks '3,x'");
    expect(2, "run csa-compress $DIR/csa $DIR/none --chunks 3,4", "sum to the 45 tokens");
    expect(2, "run csa-compress $DIR/csa $DIR/none --chunks 45 --ring 9", "--ring 9: 0 to 8 rows");
    expect(3, "run csa-compress $DIR/hca $DIR/none", "B_a");
    expect(3, "run csa-compress $DIR/csa $DIR/none --start-abs-pos 3", "start_abs_pos is 3");
    expect(3, "run csa-compress $DIR/csa $DIR/none --start-abs-pos 40", "position 80");
    expect(3, "run csa-compress $DIR/csa $DIR/none --format row584", "row584");
    expect(3, "run csa-compress $DIR/missing $DIR/none", "missing");
    assert_int_not_equal(access(path_of("none"), F_OK), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_give_the_bytes_of_one_shot),
        cmocka_unit_test(results_are_complete),
        cmocka_unit_test(starts_are_multiples_of_the_ratio),
        cmocka_unit_test(mistakes_are_reported),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
