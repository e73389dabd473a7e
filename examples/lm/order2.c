/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* order2.c - an interpolated order-2 byte model, the yardstick of the demonstration: Witten-Bell,
 * p(c | ab) = (count(abc) + kinds(ab) p(c | b)) / (count(ab) + kinds(ab)), and so on down to uniform. */
#include "lm.h"

#include <math.h>
#include <stdlib.h>

struct order2 {
    uint32_t count[3][65536][BYTES]; /* orders 0, 1, 2; the first has one row, the second 256 */
    uint32_t total[3][65536], kinds[3][65536];
};

order2 *order2_create(void)
{
    return calloc(1, sizeof(order2));
}

void order2_free(order2 *m)
{
    free(m);
}

void order2_add(order2 *m, const uint8_t *text, int64_t n)
{
    for (int64_t t = 1; t < n; t++) {
        const uint32_t rows[3] = {0, text[t - 1], t > 1 ? text[t - 1] | (uint32_t)text[t - 2] << 8 : 0};
        for (int o = 0; o < (t > 1 ? 3 : 2); o++) {
            m->kinds[o][rows[o]] += m->count[o][rows[o]][text[t]]++ == 0;
            m->total[o][rows[o]]++;
        }
    }
}

double order2_bits(const order2 *m, const uint8_t *text, int64_t n)
{
    double bits = 0.0;
    for (int64_t t = 1; t < n; t++) {
        const uint32_t rows[3] = {0, text[t - 1], t > 1 ? text[t - 1] | (uint32_t)text[t - 2] << 8 : 0};
        double p = 1.0 / BYTES;
        for (int o = 0; o < (t > 1 ? 3 : 2); o++) {
            const double kinds = m->kinds[o][rows[o]], total = m->total[o][rows[o]];
            if (total > 0.0) p = (m->count[o][rows[o]][text[t]] + kinds * p) / (total + kinds);
        }
        bits -= log2(p);
    }
    return bits;
}
