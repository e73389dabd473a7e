/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* formula.h - arithmetic over named numbers, such as "2 (3 D + 2 Dv) B H pairs": the bench computes what it
 * prints. */
#ifndef QUERN_TOOLS_FORMULA_H
#define QUERN_TOOLS_FORMULA_H

#include <stdbool.h>
#include <stddef.h>

enum { FORMULA_SYMBOLS_MAX = 40 };
typedef struct formula_symbols {
    const char *name[FORMULA_SYMBOLS_MAX];
    double value[FORMULA_SYMBOLS_MAX];
    int count;
} formula_symbols;

/* Adds a symbol, or changes its value. */
void formula_set(formula_symbols *symbols, const char *name, double value);
/* NaN where there is none of the name. */
double formula_symbol(const formula_symbols *symbols, const char *name, size_t length);
/* Products of numbers, symbols and sums in parentheses, joined by a space or *, divided by /, and added by
 * " + ". NaN where a symbol is unknown or the text is none of this. */
double formula_value(const char *text, const formula_symbols *symbols);

#endif
