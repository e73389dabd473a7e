/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compare.c - `quern compare A B`: how far the tensors of A are from those of B.
 *
 * Error of a floating-point tensor: max |a - b| / max |b| (the golden vectors' measure) and ||a - b|| / ||b||.
 * Infinities must stand at the same places and are left out, NaN differs from everything; where b is 0
 * throughout, a must be. Integers must be equal.
 */
#include "command.h"
#include "values.h"

#include <quern/safetensors.h>

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct compare_options {
    float tolerance;
    bool json;
} compare_options;

#define AT(member) offsetof(compare_options, member)
static const option_row rows[] = {
    {"tolerance", OPTION_FLOAT, AT(tolerance), NULL, "largest accepted max |a - b| / max |b|"},
    {"json", OPTION_FLAG, AT(json), NULL, "print the result as JSON"},
};
#undef AT
enum { ROWS = sizeof rows / sizeof *rows };

typedef struct difference {
    double max_relative, l2_relative;
    bool same_shape, exact; /* exact: integers, or infinities and zeros, agree */
} difference;

static void print_help(void)
{
    compare_options defaults = {.tolerance = 2e-6f};
    printf("usage: quern compare A.safetensors B.safetensors [NAME[=NAME_IN_B] ...] [--tolerance X]\n\n"
           "Compares tensors of A with the expected ones of B; without names, every tensor that both hold.\n\noptions:\n");
    print_options(&(option_group){rows, ROWS, &defaults});
    printf("\nexample:\n  quern compare out.safetensors golden.safetensors O=full.causal.O lse_win=full.lse_sld --tolerance 2e-6\n\n"
           "exit codes: 0 all within the tolerance, 1 not, 2 wrong command line, 3 a file or tensor is not there.\n");
}

static difference differ(const quern_tensor *a, const quern_tensor *b)
{
    difference d = {0, 0, a->ndim == b->ndim, true};
    for (int32_t i = 0; d.same_shape && i < a->ndim; i++) d.same_shape = a->shape[i] == b->shape[i];
    if (!d.same_shape) return d;
    double worst = 0, largest = 0, sum = 0, norm = 0;
    const bool real = b->dtype <= QUERN_BF16;
    for (int64_t i = 0, n = value_count(a); i < n; i++) {
        const double x = value_at(a, i), y = value_at(b, i);
        if (!real || isinf(y) || isinf(x)) {
            d.exact = d.exact && x == y;
            continue;
        }
        const double e = fabs(x - y);
        if (isnan(e)) d.exact = false;
        worst = e > worst ? e : worst;
        largest = fabs(y) > largest ? fabs(y) : largest;
        sum += e * e;
        norm += y * y;
    }
    if (norm == 0) d.exact = d.exact && sum == 0;
    else d = (difference){worst / largest, sqrt(sum / norm), true, d.exact};
    return d;
}

/* Compares one pair; adds a line to `lines`. Returns an exit code. */
static int compare_pair(const quern_safetensors *a, const quern_safetensors *b, const char *name, const char *name_b,
                        const compare_options *options, json_t *lines)
{
    quern_tensor x, y;
    quern_status status = quern_safetensors_get(a, name, &x);
    if (status == QUERN_OK) status = quern_safetensors_get(b, name_b, &y);
    if (status != QUERN_OK) return fail(EXIT_INPUT, "%s", quern_last_error(NULL));
    const difference d = differ(&x, &y);
    const bool pass = d.same_shape && d.exact && d.max_relative <= (double)options->tolerance;
    if (!options->json)
        printf("%-16s %-24s max %.3g  l2 %.3g  %s%s\n", name, name_b, d.max_relative, d.l2_relative, pass ? "PASS" : "FAIL",
               !d.same_shape ? " (shapes differ)" : !d.exact ? " (integers, infinities, zeros or NaN differ)" : "");
    json_array_append_new(lines, json_pack("{s:s, s:s, s:f, s:f, s:b, s:b}", "a", name, "b", name_b, "max", d.max_relative, "l2",
                                           d.l2_relative, "exact", d.exact && d.same_shape, "pass", pass));
    return pass ? EXIT_DONE : EXIT_MISMATCH;
}

static int compare_files(const quern_safetensors *a, const quern_safetensors *b, char **names, int count,
                         const compare_options *options)
{
    json_t *lines = json_array();
    int code = EXIT_DONE;
    for (int i = 0; i < count && code <= EXIT_MISMATCH; i++) {
        char name[256];
        const char *equals = strchr(names[i], '=');
        snprintf(name, sizeof name, "%.*s", equals != NULL ? (int)(equals - names[i]) : (int)sizeof name - 1, names[i]);
        const int one = compare_pair(a, b, name, equals != NULL ? equals + 1 : name, options, lines);
        code = one > code ? one : code;
    }
    for (size_t i = 0; count == 0 && i < quern_safetensors_count(a) && code <= EXIT_MISMATCH; i++) {
        const char *name = quern_safetensors_name(a, i);
        if (!quern_safetensors_has(b, name)) continue;
        const int one = compare_pair(a, b, name, name, options, lines);
        code = one > code ? one : code;
    }
    if (code <= EXIT_MISMATCH && json_array_size(lines) == 0) code = fail(EXIT_INPUT, "the files have no tensor in common");
    if (options->json && code <= EXIT_MISMATCH) {
        json_dumpf(lines, stdout, JSON_INDENT(2));
        putchar('\n');
    }
    json_decref(lines);
    return code;
}

int verb_compare(int argc, char **argv)
{
    compare_options options = {.tolerance = 2e-6f};
    int first;
    bool help;
    int code = parse_options(argc, argv, &(option_group){rows, ROWS, &options}, 1, &first, &help);
    if (code != EXIT_DONE) return code;
    if (help) {
        print_help();
        return EXIT_DONE;
    }
    if (argc - first < 2) return fail(EXIT_USAGE, "%d words are given: A B [NAME ...] is accepted", argc - first);
    quern_safetensors *a = NULL, *b = NULL;
    quern_status status = quern_safetensors_open(argv[first], &a);
    if (status != QUERN_OK) return fail(EXIT_INPUT, "%s: %s", argv[first], quern_last_error(NULL));
    status = quern_safetensors_open(argv[first + 1], &b);
    code = status != QUERN_OK ? fail(EXIT_INPUT, "%s: %s", argv[first + 1], quern_last_error(NULL))
                              : compare_files(a, b, argv + first + 2, argc - first - 2, &options);
    quern_safetensors_close(a);
    quern_safetensors_close(b);
    return code;
}
