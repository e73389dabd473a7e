/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4.h - checks and conversions of the compressors' parameters, for the family's files. */
#ifndef QUERN_DSV4_DSV4_H
#define QUERN_DSV4_DSV4_H

#include <quern/dsv4.h>

#include "stages/pool.h"

#include <assert.h>

/* What the host knows of one sequence that is pooled token by token; the floats of pool_append_args.state
 * follow it. */
typedef struct pool_state {
    uint32_t magic, version;
    uint64_t checksum; /* of a saved copy; else 0 */
    int32_t ratio;
    int16_t overlap, begun; /* begun: it has taken in a token or a block before it */
    int64_t width;
    int64_t ring;             /* rows that it can take back */
    int64_t origin, position; /* of the first token, of the next one */
    int64_t held;             /* rows in the ring that are not in the sums yet */
} pool_state;
static_assert(sizeof(pool_state) == 64, "a header is a line");

static inline float *pool_state_data(const pool_state *s)
{
    return (float *)(uintptr_t)(s + 1);
}

static inline int64_t pool_floats_of(const pool_state *s)
{
    return pool_state_floats(s->overlap != 0, s->width, s->ring);
}

/* Entries that are whole before `position`. */
static inline int64_t pool_state_entries(const pool_state *s, int64_t position)
{
    return (position - s->origin) / s->ratio;
}

enum { DSV4_WIDTH_MOST = 65536, DSV4_RATIO_MOST = 65536, DSV4_HEADS_MOST = 65536 };
enum { DSV4_INDEX_WIDTH_MOST = 256, DSV4_TOP_K_MOST = 2048, DSV4_RING_MOST = 8 };
/* The released models', and defaults. */
enum { DSV4_CSA_RATIO = 4, DSV4_HCA_RATIO = 128, DSV4_WINDOW = 128, DSV4_TOP_K = 512 };

/* The names of quern_dsv4_format, and those of keys; end with NULL. */
extern const char *const dsv4_formats[], *const dsv4_key_formats[];
/* Checks each parameter's range, resolves defaults and writes *known. */
quern_status dsv4_params(const quern_dsv4_compress_params *given, quern_dsv4_compress_params *known);
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

/* Notes that an append has put tokens, and maybe a block before them, into a state's floats. */
void dsv4_state_advance(pool_state *state, int64_t tokens, bool after_block);
quern_status dsv4_state_check(const quern_dsv4_state *state, const char *name);
/* Whether saved bytes are a state that began at position 0, stands at `position` and can take back `held`
 * tokens or more. */
quern_status dsv4_state_check_saved(const quern_dsv4_compress_params *params, int64_t width, int64_t ring,
                                    const void *from, size_t from_bytes, int64_t position, int64_t held);
/* FNV-1a over saved bytes, with zeros in place of the checksum, which stands at byte `at`. */
uint64_t dsv4_checksum(const unsigned char *bytes, size_t count, size_t at);

#endif
