/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * mxfp4_rows.c - strips of blocks: first a mask for each, all ones where a code is not zero, then their
 * exponents side by side. Limit: codes read once.
 */
#include "quantize/mxfp4_rows.h"

#include "core/mxfp4.h"

#include <string.h>

enum { STRIP = 256 };

static void masks_of(const uint8_t *codes, int64_t count, uint8_t *mask)
{
    for (int64_t b = 0; b < count; b++) {
        uint64_t half[2];
        memcpy(half, codes + b * MX_BYTES, sizeof half);
        const uint64_t any = (half[0] | half[1]) & 0x7777777777777777u;
        mask[b] = (uint8_t) - (int)(any != 0);
    }
}

void mxfp4_sweep(const uint8_t *codes, const uint8_t *exponents, int64_t blocks, mxfp4_range *range)
{
    uint8_t mask[STRIP], largest = 0, least = 255, most = 0, all = 255, any = 0;
    for (int64_t first = 0; first < blocks; first += STRIP) {
        const int64_t count = blocks - first < STRIP ? blocks - first : STRIP;
        const uint8_t *e = exponents + first;
        masks_of(codes + first * MX_BYTES, count, mask);
        for (int64_t b = 0; b < count; b++) {
            const uint8_t high = e[b] & mask[b], low = e[b] | (uint8_t)~mask[b];
            largest = high > largest ? high : largest;
            least = low < least ? low : least;
            most = e[b] > most ? e[b] : most;
            all &= mask[b];
            any |= mask[b];
        }
    }
    range->zeros = range->zeros || all == 0;
    if (most > range->most) range->most = most;
    if (any == 0) return;
    if (largest > range->largest) range->largest = largest;
    if (least < range->least) range->least = least;
}

void mxfp4_scales(const uint8_t *codes, const uint8_t *exponents, int64_t blocks, const uint8_t table[256],
                  uint8_t *scales)
{
    uint8_t mask[STRIP];
    memset(mask, 255, sizeof mask);
    for (int64_t first = 0; first < blocks; first += STRIP) {
        const int64_t count = blocks - first < STRIP ? blocks - first : STRIP;
        if (codes != NULL) masks_of(codes + first * MX_BYTES, count, mask);
        for (int64_t b = 0; b < count; b++) {
            const uint8_t scale = table[exponents[first + b]] & mask[b];
            scales[2 * (first + b)] = scales[2 * (first + b) + 1] = scale;
        }
    }
}
