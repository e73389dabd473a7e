/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * quantise.h - values to NVFP4: codes, a scale for each 16 of them, and a global scale.
 *
 * In this stage and those beside it, activations have any number of leading dimensions; matrices with blocks
 * along their rows are 3-D [E, K, N], their codes [E, K/2, N] and scales [E, K/16, N]. A global stands in a
 * view whose last extent is 1: [1], [E, 1], or a value per row.
 */
#ifndef QUERN_STAGES_QUANTISE_H
#define QUERN_STAGES_QUANTISE_H

#include "stages/stage.h"

enum { QUANTISE_BLOCK = 16 };

/* How values become codes, and which scale a block gets: <quern/nvfp4.h> has the rules under the same names.
 */
typedef enum quantise_profile {
    QUANTISE_PROFILE_RNE = 0,
    QUANTISE_PROFILE_HALFSTEP = 1,
    QUANTISE_PROFILE_MODELOPT = 2,
    QUANTISE_PROFILE_COMPRESSED_TENSORS = 3
} quantise_profile;

typedef enum quantise_scales {
    QUANTISE_SCALES_RNE = 0,
    QUANTISE_SCALES_FOUR_OVER_SIX = 1,
    QUANTISE_SCALES_SEARCH = 2
} quantise_scales;

/* What shares a global. */
typedef enum quantise_global {
    QUANTISE_GLOBAL_TENSOR = 0,
    QUANTISE_GLOBAL_EXPERT = 1,
    QUANTISE_GLOBAL_ROW = 2
} quantise_global;

/* A value that is not finite is a fault (stage.h). */
typedef struct quantise_args {
    quantise_profile profile;
    quantise_scales choice;
    quantise_global per;
    bool columns; /* blocks along the rows of x [E, K, N], else along its last dimension */
    /* offsets: i32 [E], where each expert's rows end; for one global per expert. Without them x is then
     * [E, n, D]. */
    quern_tensor x, offsets;
    /* If present, row r of codes, scales, offsets and globals is row slots[r] / slots_a_row of x. The
     * globals of experts are then given. */
    quern_tensor slots;
    int64_t slots_a_row;
    quern_tensor given; /* globals; absent: computed */
    quern_tensor codes, scales;
    quern_tensor global; /* written: as given, or computed. May be absent with `given` */
} quantise_args;
STAGE_DECLARE(quantise);
#define QUANTISE_TENSORS(IN, OUT, GRAD)                                                                      \
    IN(x) IN(offsets) IN(slots) IN(given) OUT(codes) OUT(scales) OUT(global)
#define QUANTISE_VALUES(F) F(profile) F(choice) F(per) F(columns) F(slots_a_row)

#endif
