/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "dsv4_weights.h"

#include "oracle/dsv4.h"
#include "oracle/nvfp4.h"

#include <stdlib.h>
#include <string.h>

unsigned char *dsv4_weight_bytes(const test_tensor *t, int64_t row)
{
    return (unsigned char *)t->view.data + row * t->view.strides[0];
}

/* Random bytes; `make` draws one. */
static test_tensor random_bytes(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns,
                                int64_t low, int64_t high, bool sign)
{
    const int64_t shape[] = {rows, columns};
    test_tensor t =
        test_tensor_make(random, dtype, 2, shape, (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < columns; k++)
            dsv4_weight_bytes(&t, i)[k] = (unsigned char)(test_random_int(random, low, high) |
                                                          (sign && test_random_one_in(random, 2) ? 128 : 0));
    memcpy(t.snapshot, t.buffer, t.bytes);
    return t;
}

static void widen_fp8(weight *w, int64_t in, int64_t columns)
{
    const int64_t across = (in + 127) / 128, down = (columns + 127) / 128;
    unsigned char *codes = malloc((size_t)(in * columns)), *powers = malloc((size_t)(across * down));
    float *scales = malloc((size_t)(across * down) * sizeof *scales);
    for (int64_t n = 0; n < columns; n++) memcpy(codes + n * in, dsv4_weight_bytes(&w->codes, n), (size_t)in);
    for (int64_t n = 0; n < down; n++) {
        if (w->kind == FP8_POWERS)
            memcpy(powers + n * across, dsv4_weight_bytes(&w->scales, n), (size_t)across);
        else
            memcpy(scales + n * across, (float *)w->scales.view.data + n * w->scales.view.strides[0],
                   (size_t)across * sizeof *scales);
    }
    oracle_dsv4_widen_weight(codes, powers, w->kind == FP8_POWERS ? NULL : scales, columns, in, w->values);
    free(codes), free(powers), free(scales);
}

static void widen_nvfp4(weight *w, int64_t in, int64_t columns)
{
    const double global = (double)((const float *)w->global.view.data)[0];
    for (int64_t k = 0; k < in; k++)
        for (int64_t n = 0; n < columns; n++) {
            const int code = dsv4_weight_bytes(&w->codes, k / 2)[n] >> (k % 2 * 4) & 15;
            w->values[k * columns + n] = (double)oracle_e2m1(code) *
                                         (double)oracle_e4m3(dsv4_weight_bytes(&w->scales, k / 16)[n]) *
                                         global;
        }
}

weight dsv4_weight_random(test_random *random, weight_kind kind, int64_t in, int64_t columns)
{
    weight w = {.kind = kind, .values = test_doubles(in * columns)};
    const int64_t blocks[] = {(columns + 127) / 128, (in + 127) / 128};
    const quern_dtype codes = test_random_one_in(random, 2) ? QUERN_U8 : QUERN_E4M3;
    if (kind == NVFP4) {
        w.codes = random_bytes(random, QUERN_U8, in / 2, columns, 0, 255, false);
        w.scales = random_bytes(random, codes, in / 16, columns, 0x18, 0x38, false);
        w.global = test_tensor_make(random, QUERN_F32, 0, NULL, TEST_UNALIGNED);
        test_tensor_set(&w.global, (const double[]){0.04});
        widen_nvfp4(&w, in, columns);
        return w;
    }
    w.codes = random_bytes(random, codes, columns, in, 0, 0x50, true); /* up to 16 */
    if (kind == FP8_POWERS) {
        w.scales = random_bytes(random, codes == QUERN_U8 ? QUERN_U8 : QUERN_E8M0, blocks[0], blocks[1], 118,
                                122, false);
    } else {
        w.scales = test_tensor_make(random, QUERN_F32, 2, blocks, TEST_STRIDED);
        test_tensor_normal(&w.scales, random, 0.02);
    }
    widen_fp8(&w, in, columns);
    return w;
}

void dsv4_weight_free(weight *w)
{
    test_tensor *all[] = {&w->codes, &w->scales, &w->global};
    for (int i = 0; i < 3; i++)
        if (all[i]->buffer != NULL) {
            test_tensor_check_unchanged(all[i], "weight");
            test_tensor_free(all[i]);
        }
    free(w->values);
}

void dsv4_weight_give(const weight *w, quern_dsv4_compress_tensors *t)
{
    const bool fp8 = w->kind != NVFP4;
    t->w_fp8 = fp8 ? &w->codes.view : NULL;
    t->w_fp8_scales = fp8 ? &w->scales.view : NULL;
    t->w_codes = fp8 ? NULL : &w->codes.view;
    t->w_scales = fp8 ? NULL : &w->scales.view;
    t->w_global = fp8 ? NULL : &w->global.view;
}

test_tensor dsv4_weight_rows(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    test_tensor t = test_tensor_make(random, dtype, 2, shape, TEST_STRIDED);
    test_tensor_normal(&t, random, 1);
    return t;
}
