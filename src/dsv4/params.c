/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.c - the compressors' parameters. */
#include "dsv4/call.h"

#include "core/error.h"

#define NAME_OF(name, ...) name,
const char *const dsv4_formats[] = {ROW_FORMATS(NAME_OF) NULL};
const char *const dsv4_key_formats[] = {"rows", "fp8", "fp8-power", "fp4", NULL};

quern_status dsv4_resolve(quern_dsv4_compress_params *p)
{
    if (p->ratio == 0) p->ratio = p->kind == QUERN_DSV4_CSA ? DSV4_CSA_RATIO : DSV4_HCA_RATIO;
    if (p->eps == 0.0f) p->eps = 1e-6f;
    if (!p->rope_last && p->start_abs_pos % p->ratio != 0)
        return error_argument(
            "start_abs_pos is %lld: multiples of ratio %lld are accepted unless rope_last is set",
            (long long)p->start_abs_pos, (long long)p->ratio);
    return QUERN_OK;
}

quern_status dsv4_check_width(const quern_dsv4_compress_params *p, int64_t width, int64_t rope_dim)
{
    if (width < 1 || width > DSV4_WIDTH_MOST)
        return error_argument("entries have %lld channels: 1 to %d are accepted", (long long)width,
                              DSV4_WIDTH_MOST);
    if (rope_dim % 2 != 0 || rope_dim > width)
        return error_argument("cos_sin has %lld columns: an even number up to the %lld channels is accepted",
                              (long long)rope_dim, (long long)width);
    if (p->hadamard && (width & (width - 1)) != 0)
        return error_argument("entries have %lld channels: hadamard takes powers of two", (long long)width);
    const row_format *f = row_format_of(dsv4_entry_format(p->format));
    if (f->width > 0 && (width != f->width || (rope_dim != 0 && rope_dim != f->rope)))
        return error_argument("entries have %lld channels, %lld of them rotated: format %s takes %d and %d",
                              (long long)width, (long long)rope_dim, f->name, f->width, f->rope);
    if (f->group > 0 && width % f->group != 0)
        return error_argument("entries have %lld channels: format %s takes multiples of %d", (long long)width,
                              f->name, f->group);
    return QUERN_OK;
}

quern_status dsv4_check_core_format(quern_dsv4_format format)
{
    if (format == QUERN_DSV4_ROWS || format == QUERN_DSV4_ROW584) return QUERN_OK;
    return error_argument("format is %s: rows and row584 are accepted", dsv4_formats[format]);
}

int64_t dsv4_ring_of(bool overlap, int64_t width, int64_t floats)
{
    const int64_t ring = (floats - pool_sums_floats(overlap, width)) / pool_row_columns(overlap, width);
    return ring < 0 ? 0 : ring > DSV4_RING_MOST ? DSV4_RING_MOST : ring;
}

entry_args dsv4_entry(const quern_dsv4_compress_params *p, const quern_tensor *norm_weight,
                      const quern_tensor *cos_sin)
{
    entry_args e = {.round_bf16 = p->round_bf16,
                    .eps = p->eps,
                    .rope_last = p->rope_last,
                    .hadamard = p->hadamard,
                    .format = dsv4_entry_format(p->format)};
    if (norm_weight != NULL) e.norm_weight = *norm_weight;
    if (cos_sin != NULL) e.cos_sin = *cos_sin;
    return e;
}
