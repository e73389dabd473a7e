/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "formula.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What is read. */
typedef struct reader {
    const char *at;
    const formula_symbols *symbols;
} reader;

static double sum(reader *r);

/* A number, a symbol, or a sum in parentheses. */
static double factor(reader *r)
{
    static const char digits[] = "0123456789.", ends[] = "*/() ";
    char *end;
    if (*r->at == '(') {
        r->at++;
        const double value = sum(r);
        if (*r->at != ')') return (double)NAN;
        r->at++;
        return value;
    }
    if (*r->at != '\0' && strchr(digits, *r->at) != NULL) {
        const double value = strtod(r->at, &end);
        r->at = end;
        return value;
    }
    const char *name = r->at;
    r->at += strcspn(name, ends);
    return formula_symbol(r->symbols, name, (size_t)(r->at - name));
}

static double product(reader *r)
{
    double value = factor(r);
    for (;;) {
        const bool times = *r->at == '*' || (*r->at == ' ' && r->at[1] != '+');
        if (!times && *r->at != '/') return value;
        r->at++;
        const double next = factor(r);
        value = times ? value * next : value / next;
    }
}

static double sum(reader *r)
{
    double value = product(r);
    while (strncmp(r->at, " + ", 3) == 0) {
        r->at += 3;
        value += product(r);
    }
    return value;
}

double formula_symbol(const formula_symbols *symbols, const char *name, size_t length)
{
    for (int i = 0; i < symbols->count; i++)
        if (strlen(symbols->name[i]) == length && memcmp(symbols->name[i], name, length) == 0)
            return symbols->value[i];
    return (double)NAN;
}

void formula_set(formula_symbols *symbols, const char *name, double value)
{
    int i = 0;
    while (i < symbols->count && strcmp(symbols->name[i], name) != 0) i++;
    if (i == FORMULA_SYMBOLS_MAX) return;
    symbols->name[i] = name;
    symbols->value[i] = value;
    if (i == symbols->count) symbols->count++;
}

double formula_value(const char *text, const formula_symbols *symbols)
{
    reader r = {text, symbols};
    const double value = sum(&r);
    return *r.at == '\0' ? value : (double)NAN;
}
