/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * matrix.h - a weight [rows, columns] as a checkpoint stores it, in any of the encodings that the converter
 * reads, and its rows as values.
 */
#ifndef QUERN_QUANTIZE_MATRIX_H
#define QUERN_QUANTIZE_MATRIX_H

#include <quern/quern.h>

typedef enum encoding {
    ENCODING_FLOATS, /* bf16, f16 or f32 */
    ENCODING_NVFP4,
    ENCODING_MXFP4, /* E2M1 codes, a power of two for each 32 */
    ENCODING_FP8    /* E4M3, a scale for each block or for all */
} encoding;

/* Pointers go into the mapped files and need no alignment. */
typedef struct matrix {
    encoding encoding;
    quern_dtype dtype; /* of FLOATS */
    int64_t rows, columns;
    const uint8_t *data;
    int64_t row_bytes; /* from a row to the next */
    int64_t turned;    /* FLOATS: bytes from a column to the next where those of a row lie apart, else 0 */
    const uint8_t *scales;
    int64_t scales_row_bytes; /* NVFP4, MXFP4 */
    bool e8m0;                /* FP8: the scales are powers of two, else f32 */
    int64_t block;            /* FP8: rows and columns that share a scale; 0: all do */
    float global;             /* NVFP4: G, or R = 1 / G */
    bool reciprocal;          /* it is R */
} matrix;

/* Values of some rows: count rows of `columns`, `stride` elements apart. */
typedef struct matrix_values {
    const void *data;
    quern_dtype dtype;
    int64_t stride;
} matrix_values;

/* 2^(byte - 127); 0xFF is NaN. */
float e8m0_value(uint8_t byte);
/* The value of an E4M3 byte. */
float e4m3_byte_value(uint8_t byte);
/* Bytes of a buffer for matrix_read. */
size_t matrix_buffer_bytes(const matrix *m, int64_t rows);
/* The values of rows `first` ... `first + count - 1`: where they stand, or in the buffer. A value beyond f32
 * comes out as an infinity, a NaN scale as NaN. */
matrix_values matrix_read(const matrix *m, int64_t first, int64_t count, void *buffer);
/* Bytes of the file that the matrix stands for. */
int64_t matrix_bytes(const matrix *m);

#endif
