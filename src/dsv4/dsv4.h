/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4.h - checks and conversions of the compressors' parameters, for the family's files. */
#ifndef QUERN_DSV4_DSV4_H
#define QUERN_DSV4_DSV4_H

#include <quern/dsv4.h>

#include "stages/row_formats.h"

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
/* That the attention core reads a format. */
quern_status dsv4_check_core_format(quern_dsv4_format format);
/* The stages' format for a public one: they have the same numbers. */
static inline entry_format dsv4_entry_format(quern_dsv4_format format)
{
    return (entry_format)format;
}
_Static_assert((int)QUERN_DSV4_FP8 == (int)ENTRY_FP8 && (int)QUERN_DSV4_FP8_POWER == (int)ENTRY_FP8_POWER &&
                   (int)QUERN_DSV4_FP4 == (int)ENTRY_FP4 && (int)QUERN_DSV4_ROW584 == (int)ENTRY_ROW584,
               "a public format has its number in the stages");
/* Elements of a row in a format: channels, or bytes. */
static inline int64_t dsv4_row_elements(quern_dsv4_format format, int64_t width)
{
    return row_bytes(dsv4_entry_format(format), width, QUERN_U8);
}
/* Of a view's last extent: a row, or in bytes a page of them (page 0: contiguous rows). */
static inline int64_t dsv4_page_elements(quern_dsv4_format format, int64_t width, int64_t page)
{
    return dsv4_row_elements(format, width) * (format != QUERN_DSV4_ROWS && page > 0 ? page : 1);
}
/* Rows of the ring of a state of so many floats. */
int64_t dsv4_ring_of(bool overlap, int64_t width, int64_t floats);
/* The stages' description of norm, rotation and format; norm_weight and cos_sin may be NULL. */
entry_args dsv4_entry(const quern_dsv4_compress_params *p, const quern_tensor *norm_weight,
                      const quern_tensor *cos_sin);

#endif
