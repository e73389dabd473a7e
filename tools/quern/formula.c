/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "formula.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double symbol_value(const formula_symbol *symbols, const char *name, size_t length)
{
    for (; symbols->name != NULL; symbols++)
        if (strlen(symbols->name) == length && memcmp(symbols->name, name, length) == 0)
            return symbols->value;
    return NAN;
}

/* A number or a symbol, and what divides it. */
static double factor(const char **at, const formula_symbol *symbols)
{
    static const char digits[] = "0123456789.", ends[] = "*/+ ";
    char *end;
    double value;
    if (**at != '\0' && strchr(digits, **at) != NULL) {
        value = strtod(*at, &end);
        *at = end;
    } else {
        const size_t length = strcspn(*at, ends);
        value = symbol_value(symbols, *at, length);
        *at += length;
    }
    while (**at == '/') {
        const double by = strtod(*at + 1, &end);
        value = end == *at + 1 ? (double)NAN : value / by;
        *at = end;
    }
    return value;
}

double formula_value(const char *text, const formula_symbol *symbols)
{
    double sum = 0;
    if (*text == '\0') return 0;
    for (const char *at = text;; at += 3) {
        double product = factor(&at, symbols);
        while (*at == '*') {
            at++;
            product *= factor(&at, symbols);
        }
        sum += product;
        if (*at == '\0') return sum;
        if (strncmp(at, " + ", 3) != 0) return (double)NAN;
    }
}
