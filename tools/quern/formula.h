/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* formula.h - sums of products over named numbers, such as "2*T*N*K + K/16": the bench computes what it
 * prints. */
#ifndef QUERN_TOOLS_FORMULA_H
#define QUERN_TOOLS_FORMULA_H

#include <stddef.h>

typedef struct formula_symbol {
    const char *name; /* NULL past the last */
    double value;
} formula_symbol;

/* The value of a sum of products of numbers and symbols, each of which a number may divide; NaN where a
 * symbol is unknown or the text is no such sum. "" is 0. */
double formula_value(const char *text, const formula_symbol *symbols);

#endif
