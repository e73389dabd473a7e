/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_weights.h - random projection weights of the compressors in FP8 and NVFP4, and what they mean. */
#ifndef QUERN_TEST_DSV4_WEIGHTS_H
#define QUERN_TEST_DSV4_WEIGHTS_H

#include "tensor.h"

#include <quern/dsv4.h>

typedef enum weight_kind { FP8_POWERS, FP8_SCALES, NVFP4, WEIGHT_KINDS } weight_kind;

/* A weight, and what its codes mean: [Dm, columns]. */
typedef struct weight {
    weight_kind kind;
    test_tensor codes, scales, global;
    double *values;
} weight;

weight dsv4_weight_random(test_random *random, weight_kind kind, int64_t in, int64_t columns);
/* Fails the test where the weight has changed. */
void dsv4_weight_free(weight *w);
/* Row `row` of codes or scales. */
unsigned char *dsv4_weight_bytes(const test_tensor *t, int64_t row);
/* Sets the weight's fields of a call, and clears those of the other formats. */
void dsv4_weight_give(const weight *w, quern_dsv4_compress_tensors *t);
/* Random rows, strided. */
test_tensor dsv4_weight_rows(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns);

#endif
