/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4.h - checks and conversions of the compressors' parameters, for the family's files. */
#ifndef QUERN_DSV4_DSV4_H
#define QUERN_DSV4_DSV4_H

#include <quern/dsv4.h>

#include "stages/pool.h"

enum { DSV4_WIDTH_MOST = 65536, DSV4_RATIO_MOST = 65536, DSV4_HEADS_MOST = 65536 };
enum { DSV4_INDEX_WIDTH_MOST = 256, DSV4_TOP_K_MOST = 2048, DSV4_RING_MOST = 8 };
/* The released models', and defaults. */
enum { DSV4_CSA_RATIO = 4, DSV4_HCA_RATIO = 128, DSV4_WINDOW = 128, DSV4_TOP_K = 512 };

/* The names of quern_dsv4_format, and those of keys; end with NULL. */
extern const char *const dsv4_formats[], *const dsv4_key_formats[];
/* Resolves the defaults of parameters in their ranges, and checks what these allow together. */
quern_status dsv4_resolve(quern_dsv4_compress_params *p);
/* Whether a format and the transform take entries of `width` channels, `rope_dim` of them rotated (0:
 * none). */
quern_status dsv4_check_width(const quern_dsv4_compress_params *p, int64_t width, int64_t rope_dim);
/* Bytes of a stored entry; 0 for QUERN_DSV4_ROWS. */
int64_t dsv4_row_bytes(quern_dsv4_format format, int64_t width);
/* Elements of a row in a format: channels, or bytes. */
static inline int64_t dsv4_row_elements(quern_dsv4_format format, int64_t width)
{
    return format == QUERN_DSV4_ROWS ? width : dsv4_row_bytes(format, width);
}
/* Bytes of these before the scales. */
int64_t dsv4_row_data_bytes(quern_dsv4_format format, int64_t width);
/* The stages' format for a public one. */
entry_format dsv4_entry_format(quern_dsv4_format format);
/* The stages' description of norm, rotation and format; norm_weight and cos_sin may be NULL. */
entry_args dsv4_entry(const quern_dsv4_compress_params *p, const quern_tensor *norm_weight,
                      const quern_tensor *cos_sin);

#endif
