/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * tensor.h - tensors for tests: a view into a buffer of its own whose every byte outside the view's
 * elements is a guard. Values go in and come out as contiguous doubles; f16 and bf16 are rounded here by
 * code of the tests' own.
 */
#ifndef QUERN_TEST_TENSOR_H
#define QUERN_TEST_TENSOR_H

#include "levels.h"
#include "random.h"

#include <quern/quern.h>

#include <stdbool.h>

typedef enum test_layout {
    TEST_CONTIGUOUS, /* row-major, 64-byte aligned */
    TEST_UNALIGNED,  /* row-major, aligned to the element only */
    TEST_STRIDED,    /* gaps between rows, dimensions but the last permuted, aligned to the element only */
    TEST_SPACED,     /* the same, but every row stands on a multiple of 16 bytes */
    TEST_LAYOUTS
} test_layout;

typedef struct test_tensor {
    quern_tensor view;
    unsigned char *buffer;   /* NULL: this tensor was never made */
    unsigned char *snapshot; /* the buffer as made, or as last written by test_tensor_set */
    size_t bytes;
} test_tensor;

/* A new tensor full of sentinel bytes (as f32, f16, bf16: large odd numbers, no NaN). */
test_tensor test_tensor_make(test_random *random, quern_dtype dtype, int32_t ndim, const int64_t *shape,
                             test_layout layout);
/* A new [rows, columns] tensor of N(0, 1) in any layout. */
test_tensor test_tensor_matrix(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns);
/* The same bits in a buffer of its own; to be freed like any. Its guards are not checked: it has no snapshot.
 */
test_tensor test_tensor_copy(const test_tensor *tensor);
void test_tensor_free(test_tensor *tensor);
int64_t test_tensor_count(const test_tensor *tensor);

/* Writes values (rounded to the dtype) and takes a new snapshot. */
void test_tensor_set(test_tensor *tensor, const double *values);
void test_tensor_set_i32(test_tensor *tensor, const int32_t *values);
/* Fills with sigma * N(0, 1). */
void test_tensor_normal(test_tensor *tensor, test_random *random, double sigma);
/* Sets every byte, guards too, back to the sentinel: what an output holds before a call. */
void test_tensor_reset(test_tensor *tensor);
/* The values as new contiguous doubles, row-major (at least one element is allocated). */
double *test_tensor_get(const test_tensor *tensor);
int32_t *test_tensor_get_i32(const test_tensor *tensor);

/* Fails the test if a byte outside the elements changed (outputs), or any byte at all (inputs, and
 * outputs of a call that must not touch them). `name` goes into the message. */
void test_tensor_check_guards(const test_tensor *tensor, const char *name);
void test_tensor_check_unchanged(const test_tensor *tensor, const char *name);
/* True if the elements of two tensors of one shape and dtype are the same bits. */
bool test_tensor_same_bits(const test_tensor *a, const test_tensor *b);

/* `count` zeros; the caller frees. */
double *test_doubles(int64_t count);
/* x rounded to f32, f16 or bf16 (nearest even). */
double test_round(quern_dtype dtype, double x);
const char *test_layout_name(test_layout layout);

/* A workspace of exactly `bytes` bytes at an odd address between guards, filled with garbage that reads
 * as NaN. */
typedef struct test_workspace {
    void *data;
    size_t bytes;
    unsigned char *buffer;
} test_workspace;
test_workspace test_workspace_make(size_t bytes);
/* Whether none of its bytes was written. */
bool test_workspace_is_new(const test_workspace *workspace);
/* Fails the test if a guard changed, then frees. */
void test_workspace_close(test_workspace *workspace);

/* A context of this level and number of threads, or of the number in QUERN_TEST_THREADS; fails the test if it
 * cannot be had. */
quern_context *test_context(quern_cpu_level level, int32_t threads);

/* Bytes of a weight [K, N] that the CPU has repacked. */
int64_t test_repacked_bytes(int64_t n, int64_t k);

#endif
