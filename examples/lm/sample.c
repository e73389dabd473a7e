/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* sample.c - draws a byte from logits. */
#include "lm.h"

#include <math.h>
#include <stdlib.h>

typedef struct choice {
    double p;
    int byte;
} choice;

/* The likelier first, of equals the lower byte. */
static int by_chance(const void *a, const void *b)
{
    const choice *x = a, *y = b;
    return x->p != y->p ? (x->p < y->p) - (x->p > y->p) : x->byte - y->byte;
}

int sample(const float *logits, double temperature, double top_p, uint64_t *state)
{
    choice list[BYTES];
    double top = logits[0], sum = 0.0, kept = 0.0;
    int count = 0;
    for (int c = 1; c < BYTES; c++) top = (double)logits[c] > top ? (double)logits[c] : top;
    for (int c = 0; c < BYTES; c++) {
        const double below = (double)logits[c] - top;
        list[c] = (choice){temperature > 0.0 ? exp(below / temperature) : below == 0.0, c};
        sum += list[c].p;
    }
    qsort(list, BYTES, sizeof *list, by_chance);
    if (temperature == 0.0) return list[0].byte;
    while (count < BYTES && (count == 0 || kept < top_p * sum)) kept += list[count++].p;
    double at = (double)(random_next(state) >> 11) * 0x1p-53 * kept;
    int chosen = 0;
    while (chosen < count - 1 && (at -= list[chosen].p) >= 0.0) chosen++;
    return list[chosen].byte;
}
