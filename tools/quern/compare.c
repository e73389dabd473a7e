/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compare.c - `quern compare A B`: how far the tensors of A are from those of B.
 *
 * Shapes and dtypes must be the same. Error of a floating-point tensor: max |a - b| / max |b| (the golden
 * vectors' measure) and ||a - b|| / ||b||, over the elements that are finite in both. Infinities must stand
 * at the same places, NaN differs from everything and from itself; where b is 0 throughout, a must be.
 * Elements of every other dtype, 8-bit and 4-bit floats among them, must be the same bits. Two tensors are
 * exact where no element is unequal: of another value, or of other bits where bits are compared.
 */
#include "command.h"
#include "output.h"
#include "values.h"

#include <quern/safetensors.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct compare_options {
    float tolerance;
    bool widen, json;
} compare_options;

#define AT(member) offsetof(compare_options, member)
static const option_row rows[] = {
    {"tolerance", OPTION_FLOAT, AT(tolerance), NULL, "largest accepted max |a - b| / max |b|"},
    {"widen", OPTION_FLAG, AT(widen), NULL,
     "floating-point tensors may differ in dtype: f16, bf16, f32 and f64 are widened"},
    {"json", OPTION_FLAG, AT(json), NULL, "print the result as JSON"},
};
#undef AT
enum { ROWS = sizeof rows / sizeof *rows };

typedef struct difference {
    bool shape, dtype; /* equal */
    double max, l2;    /* relative, of the finite elements */
    int64_t nan;       /* elements that are NaN in A or in B */
    int64_t infinite;  /* elements of which one is infinite and the other another */
    int64_t unequal;   /* elements of another value, NaN among them; where `bits`, of other bits */
    bool bits;         /* no distance is accepted: elements must be the same bits */
    bool zero;         /* B is 0 throughout and A is not */
} difference;

static void print_help(void)
{
    compare_options defaults = {.tolerance = 2e-6f};
    printf("usage: quern compare A.safetensors B.safetensors [NAME[=NAME_IN_B] ...] [--tolerance X] "
           "[--widen]\n\n"
           "Compares tensors of A with the expected ones of B; without names, every tensor that both hold. "
           "Shapes and dtypes\n"
           "must be the same, f16, bf16, f32, f64 and c64 values within the tolerance, all others the same "
           "bits. NaN differs\n"
           "from everything. The table and the JSON count the elements that are NaN, infinite in one file "
           "alone, or unequal\nwhere the same bits are needed. \"exact\" in the JSON: no element is of "
           "another value; \"unequal\" says how many are.\n\noptions:\n");
    print_options(&(option_group){rows, ROWS, &defaults});
    printf("\nexamples:\n  quern compare out.safetensors golden.safetensors O=full.causal.O "
           "lse_win=full.lse_sld --tolerance 2e-6\n"
           "  quern compare bf16.safetensors f32.safetensors O --widen --tolerance 4e-3 --json\n\n"
           "exit codes: 0 all within the tolerance, 1 not, 2 wrong command line, 3 a file or tensor is not "
           "there or not accepted.\n");
}

static bool is_real(quern_dtype dtype)
{
    return dtype == QUERN_F32 || dtype == QUERN_F16 || dtype == QUERN_BF16 || dtype == QUERN_F64;
}

/* A c64 tensor as the f32 values that it consists of. */
static quern_tensor parts_of(const quern_tensor *t)
{
    quern_tensor parts = *t;
    if (t->dtype != QUERN_C64 || t->ndim == QUERN_MAX_DIMS) return parts;
    parts.dtype = QUERN_F32;
    parts.shape[parts.ndim++] = 2;
    return parts;
}

static void differ_real(const quern_tensor *a, const quern_tensor *b, difference *d)
{
    const int64_t n = value_count(a);
    double largest = 0, expected = 0; /* of both, of B */
    for (int64_t i = 0; i < n; i++) {
        const double x = value_at(a, i), y = value_at(b, i);
        d->unequal += !(x == y);
        d->nan += isnan(x) || isnan(y);
        d->infinite += !isnan(x) && !isnan(y) && (isinf(x) || isinf(y)) && x != y;
        if (!isfinite(x) || !isfinite(y)) continue;
        largest = fmax(largest, fmax(fabs(x), fabs(y)));
        expected = fmax(expected, fabs(y));
    }
    d->zero = expected == 0 && largest > 0;
    if (expected == 0) return;
    double worst = 0, sum = 0, norm = 0; /* in units of `largest`, so that no square overflows */
    for (int64_t i = 0; i < n; i++) {
        const double x = value_at(a, i), y = value_at(b, i);
        if (!isfinite(x) || !isfinite(y)) continue;
        const double e = fabs(x / largest - y / largest);
        worst = fmax(worst, e);
        sum += e * e;
        norm += y / largest * (y / largest);
    }
    d->max = worst / (expected / largest);
    d->l2 = sqrt(sum / norm);
}

static difference differ(const quern_tensor *a, const quern_tensor *b, bool widen)
{
    difference d = {.shape = a->ndim == b->ndim};
    for (int32_t i = 0; d.shape && i < a->ndim; i++) d.shape = a->shape[i] == b->shape[i];
    d.dtype = a->dtype == b->dtype || (widen && is_real(a->dtype) && is_real(b->dtype));
    if (!d.shape || !d.dtype) return d;
    const quern_tensor x = parts_of(a), y = parts_of(b);
    if (is_real(x.dtype)) {
        differ_real(&x, &y, &d);
        return d;
    }
    d.bits = true;
    const size_t size = quern_dtype_size(a->dtype);
    const char *p = a->data, *q = b->data;
    for (int64_t i = 0, n = value_count(a); i < n; i++)
        d.unequal += memcmp(p + (size_t)i * size, q + (size_t)i * size, size) != 0;
    return d;
}

/* Differences besides the distance, for the table. */
static void print_reasons(const difference *d, const quern_tensor *x, const quern_tensor *y)
{
    if (!d->shape) printf(" (shapes differ)");
    if (!d->dtype) printf(" (dtypes differ: %s, %s)", quern_dtype_name(x->dtype), quern_dtype_name(y->dtype));
    if (d->nan > 0) printf(" (NaN: %" PRId64 ")", d->nan);
    if (d->infinite > 0) printf(" (infinities differ: %" PRId64 ")", d->infinite);
    if (d->bits && d->unequal > 0) printf(" (unequal: %" PRId64 ")", d->unequal);
    if (d->zero) printf(" (only zeros are expected)");
    putchar('\n');
}

static json_t *line_json(const char *name, const char *name_b, const difference *d, bool pass)
{
    const bool exact = d->shape && d->dtype && d->unequal == 0;
    return json_pack("{s:s, s:s, s:o, s:o, s:b, s:b, s:b, s:I, s:I, s:I, s:b}", "a", name, "b", name_b, "max",
                     output_number(d->max), "l2", output_number(d->l2), "same_shape", d->shape, "same_dtype",
                     d->dtype, "exact", exact, "nan", (json_int_t)d->nan, "infinite", (json_int_t)d->infinite,
                     "unequal", (json_int_t)d->unequal, "pass", pass);
}

/* Compares one pair; adds a line to `lines`. Returns an exit code. */
static int compare_pair(const quern_safetensors *a, const quern_safetensors *b, const char *name,
                        const char *name_b, const compare_options *options, json_t *lines)
{
    quern_tensor x, y;
    quern_status status = quern_safetensors_get(a, name, &x);
    if (status == QUERN_OK) status = quern_safetensors_get(b, name_b, &y);
    if (status != QUERN_OK) return fail_file(NULL, status);
    const difference d = differ(&x, &y, options->widen);
    const bool near = d.bits ? d.unequal == 0 : d.max <= (double)options->tolerance;
    const bool pass = d.shape && d.dtype && d.nan == 0 && d.infinite == 0 && !d.zero && near;
    if (!options->json) {
        char left[256], right[256];
        text_escape(name, left, sizeof left);
        text_escape(name_b, right, sizeof right);
        printf("%-16s %-24s max %.3g  l2 %.3g  %s", left, right, d.max, d.l2, pass ? "PASS" : "FAIL");
        print_reasons(&d, &x, &y);
    }
    if (json_array_append_new(lines, line_json(name, name_b, &d, pass)) != 0)
        return fail(EXIT_MACHINE, "no memory for the result");
    return pass ? EXIT_DONE : EXIT_MISMATCH;
}

/* A word of the command line: a tensor's name in both files, or NAME=NAME_IN_B. */
static int compare_word(const quern_safetensors *a, const quern_safetensors *b, const char *word,
                        const compare_options *options, json_t *lines)
{
    const char *equals = strchr(word, '=');
    if (equals == NULL || quern_safetensors_has(a, word))
        return compare_pair(a, b, word, word, options, lines);
    char *name = strndup(word, (size_t)(equals - word));
    if (name == NULL) return fail(EXIT_MACHINE, "no memory for a name");
    const int code = compare_pair(a, b, name, equals + 1, options, lines);
    free(name);
    return code;
}

static int compare_files(const quern_safetensors *a, const quern_safetensors *b, char **names, int count,
                         const compare_options *options)
{
    json_t *lines = json_array();
    int code = lines != NULL ? EXIT_DONE : fail(EXIT_MACHINE, "no memory for the result");
    for (int i = 0; i < count && code <= EXIT_MISMATCH; i++) {
        const int one = compare_word(a, b, names[i], options, lines);
        code = one > code ? one : code;
    }
    for (size_t i = 0; count == 0 && i < quern_safetensors_count(a) && code <= EXIT_MISMATCH; i++) {
        const char *name = quern_safetensors_name(a, i);
        if (!quern_safetensors_has(b, name)) continue;
        const int one = compare_pair(a, b, name, name, options, lines);
        code = one > code ? one : code;
    }
    if (code <= EXIT_MISMATCH && json_array_size(lines) == 0)
        code = fail(EXIT_INPUT, "the files have no tensor in common");
    if (options->json && code <= EXIT_MISMATCH) output_print(lines, JSON_INDENT(2));
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
    if (argc - first < 2)
        return fail(EXIT_USAGE, "%d words are given: A B [NAME ...] is accepted", argc - first);
    quern_safetensors *a = NULL, *b = NULL;
    quern_status status = quern_safetensors_open(argv[first], &a);
    if (status != QUERN_OK) return fail_file(argv[first], status);
    status = quern_safetensors_open(argv[first + 1], &b);
    code = status != QUERN_OK ? fail_file(argv[first + 1], status)
                              : compare_files(a, b, argv + first + 2, argc - first - 2, &options);
    quern_safetensors_close(a);
    quern_safetensors_close(b);
    return code;
}
