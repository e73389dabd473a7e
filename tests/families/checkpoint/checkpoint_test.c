/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* checkpoint_test.c - a checkpoint is one list of tensors with views into its file. */
#include "cmocka_c11.h"
#include "context.h"
#include "experts_case.h"

#include <stdlib.h>
#include <string.h>

static void tensors_are_listed_and_viewed(void **state)
{
    (void)state;
    made_free(&m);
    made_modelopt(&m, "a", 16, 32, 0.5f);
    made_add(&m, QUERN_BF16, "b.weight", 2, (const int64_t[]){3, 5});
    quern_checkpoint *c = open_made();
    quern_checkpoint_tensor t = QUERN_CHECKPOINT_TENSOR_INIT;
    quern_tensor view = {.ndim = -77};
    assert_int_equal(quern_checkpoint_count(c), 4);
    const int64_t weight = quern_checkpoint_find(c, "a.weight"), b = quern_checkpoint_find(c, "b.weight");
    assert_true(weight >= 0 && b >= 0);
    assert_int_equal(quern_checkpoint_find(c, "a"), -1);
    assert_int_equal(quern_checkpoint_find(c, NULL), -1);
    assert_int_equal(quern_checkpoint_info(c, (size_t)weight, &t), QUERN_OK);
    assert_string_equal(t.name, "a.weight");
    assert_string_equal(t.dtype, "U8");
    assert_string_equal(t.shard, made_path);
    assert_true(t.format == QUERN_FORMAT_NVFP4_MODELOPT && t.ndim == 2 && t.shape[1] == 16 && t.bytes == 256);
    assert_memory_equal(t.data, made_data(&m, "a.weight"), 256);
    assert_int_equal(quern_checkpoint_view(c, (size_t)b, &view), QUERN_OK);
    assert_true(view.dtype == QUERN_BF16 && view.ndim == 2 && view.shape[0] == 3 && view.shape[1] == 5);
    assert_memory_equal(view.data, made_data(&m, "b.weight"), 30);
    assert_int_equal(quern_checkpoint_info(c, 4, &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_checkpoint_view(c, 4, &view), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_checkpoint_view(c, 0, NULL), QUERN_ERR_INVALID_ARGUMENT);
    t.size = 0;
    assert_int_equal(quern_checkpoint_info(c, 0, &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_true(t.bytes == 256 && view.shape[1] == 5);
    assert_int_equal(quern_checkpoint_metadata_count(c), 0);
    assert_null(quern_checkpoint_metadata_key(c, 0));
    quern_checkpoint_close(c);
    quern_checkpoint_close(NULL);
    assert_int_equal(quern_checkpoint_open("no/such/model", &c), QUERN_ERR_IO);
    assert_non_null(strstr(quern_last_error(NULL), "no/such/model"));
    assert_int_equal(quern_checkpoint_open(NULL, &c), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_checkpoint_open(made_path, NULL), QUERN_ERR_INVALID_ARGUMENT);
}

/* Codes of the format's 4-bit dtype go into a product as the reader hands them out. */
static void four_bit_views_are_multiplied_as_they_are(void **state)
{
    enum { K = 32, N = 16 };
    (void)state;
    made_free(&m);
    made_add(&m, QUERN_E2M1X2, "w.weight", 3, (const int64_t[]){1, N, K / 2});
    uint8_t *scales = made_add(&m, QUERN_E4M3, "w.weight_scale", 3, (const int64_t[]){1, N, K / 16});
    for (int i = 0; i < N * K / 16; i++) scales[i] = (uint8_t)(0x30 + scales[i] % 16);
    quern_checkpoint *c = open_made();
    quern_tensor codes, scale, bytes;
    assert_int_equal(quern_checkpoint_view(c, (size_t)quern_checkpoint_find(c, "w.weight"), &codes),
                     QUERN_OK);
    assert_int_equal(quern_checkpoint_view(c, (size_t)quern_checkpoint_find(c, "w.weight_scale"), &scale),
                     QUERN_OK);
    assert_int_equal(codes.dtype, QUERN_E2M1X2);
    bytes = codes;
    bytes.dtype = QUERN_U8;
    float a[2 * K], out[2][2 * N];
    int32_t end = 2;
    for (int i = 0; i < 2 * K; i++) a[i] = (float)(i % 7 - 3);
    const quern_tensor x = quern_tensor_contiguous(a, QUERN_F32, 2, (const int64_t[]){2, K}),
                       offsets = quern_tensor_contiguous(&end, QUERN_I32, 1, (const int64_t[]){1});
    for (int i = 0; i < 2; i++) {
        const quern_tensor y = quern_tensor_contiguous(out[i], QUERN_F32, 2, (const int64_t[]){2, N});
        quern_nvfp4_gemm_params p = QUERN_NVFP4_GEMM_PARAMS_INIT;
        quern_nvfp4_gemm_tensors t = QUERN_NVFP4_GEMM_TENSORS_INIT;
        p.b_codes = QUERN_NVFP4_CODES_K_MAJOR;
        p.b_scales = QUERN_NVFP4_LAYOUT_K_MAJOR;
        t.a = &x, t.b_codes = i == 0 ? &codes : &bytes, t.b_scales = &scale, t.offsets = &offsets, t.c = &y;
        size_t room;
        assert_int_equal(quern_nvfp4_gemm_workspace(ctx, &p, &t, &room), QUERN_OK);
        void *workspace = malloc(room + 1);
        if (quern_nvfp4_gemm(ctx, NULL, &p, &t, workspace, room) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        free(workspace);
    }
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    assert_true(out[0][0] != 0 || out[0][1] != 0);
    quern_checkpoint_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_are_listed_and_viewed),
        cmocka_unit_test(four_bit_views_are_multiplied_as_they_are),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}
