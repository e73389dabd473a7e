/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mxfp4_rows.h - sweeps over rows of MXFP4 blocks: the range of their exponents, and their scales in
 * NVFP4. */
#ifndef QUERN_QUANTIZE_MXFP4_ROWS_H
#define QUERN_QUANTIZE_MXFP4_ROWS_H

#include <stdbool.h>
#include <stdint.h>

/* What some blocks hold. */
typedef struct mxfp4_range {
    int largest, least; /* exponent bytes of blocks that are not zero; -1, 256: all are zero */
    int most;           /* of any block */
    bool zeros;         /* a block is zero */
} mxfp4_range;

void mxfp4_sweep(const uint8_t *codes, const uint8_t *exponents, int64_t blocks, mxfp4_range *range);
/* Two scale bytes a block: table[exponent], 0 for a block of zeros. codes NULL: no block is zero. */
void mxfp4_scales(const uint8_t *codes, const uint8_t *exponents, int64_t blocks, const uint8_t table[256],
                  uint8_t *scales);

#endif
