/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.c - the compressors' parameters. */
#include "dsv4/call.h"

#include "core/error.h"

enum { FP4_BLOCK = 32, ROW584_WIDTH = 512, ROW584_ROPE = 64 };

const char *const dsv4_formats[] = {"rows", "fp8", "fp8-power", "fp4", "row584", NULL},
                  *const dsv4_key_formats[] = {"rows", "fp8", "fp8-power", "fp4", NULL};

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
    if (p->format == QUERN_DSV4_FP4 && width % FP4_BLOCK != 0)
        return error_argument("entries have %lld channels: format fp4 takes multiples of %d",
                              (long long)width, FP4_BLOCK);
    if (p->format == QUERN_DSV4_ROW584 &&
        (width != ROW584_WIDTH || (rope_dim != 0 && rope_dim != ROW584_ROPE)))
        return error_argument(
            "entries have %lld channels, %lld of them rotated: format row584 takes %d and %d",
            (long long)width, (long long)rope_dim, ROW584_WIDTH, ROW584_ROPE);
    return QUERN_OK;
}

int64_t dsv4_row_bytes(quern_dsv4_format format, int64_t width)
{
    switch (format) {
    case QUERN_DSV4_FP8:
    case QUERN_DSV4_FP8_POWER: return width + 4;
    case QUERN_DSV4_FP4: return width / 2 + width / FP4_BLOCK;
    case QUERN_DSV4_ROW584: return 584;
    case QUERN_DSV4_ROWS: break;
    }
    return 0;
}

int64_t dsv4_row_data_bytes(quern_dsv4_format format, int64_t width)
{
    switch (format) {
    case QUERN_DSV4_FP8:
    case QUERN_DSV4_FP8_POWER: return width;
    case QUERN_DSV4_FP4: return width / 2;
    case QUERN_DSV4_ROW584: return 576;
    case QUERN_DSV4_ROWS: break;
    }
    return 0;
}

entry_format dsv4_entry_format(quern_dsv4_format format)
{
    static const entry_format formats[] = {ENTRY_ROWS, ENTRY_FP8, ENTRY_FP8_POWER, ENTRY_FP4, ENTRY_ROW584};
    return formats[format];
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
