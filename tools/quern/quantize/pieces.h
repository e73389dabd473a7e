/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* pieces.h - the second sweep: some rows of a module, or some bytes that are copied, go to their
 * output file. */
#ifndef QUERN_QUANTIZE_PIECES_H
#define QUERN_QUANTIZE_PIECES_H

#include "quantize/convert.h"
#include "quantize/thread_team.h"

/* A part of the work. */
typedef struct write_piece {
    quern_file *out;
    size_t module; /* SIZE_MAX: a copy */
    const output_part *copied;
    output_kind kind;     /* CODES (with the scales), VALUES, VALUES_TURNED, BLOCKS, COPY */
    int64_t first, count; /* rows; of TURNED columns, of a copy elements */
    int64_t at;           /* of a copy: where in the file */
    module_error error;
} write_piece;

/* One thread's buffers, each for the largest piece. */
typedef struct piece_room {
    void *values; /* of the source */
    float *back;  /* of the codes */
    uint8_t *codes, *scales;
    void *workspace;
} piece_room;

typedef struct piece_team {
    conversion *c;
    progress *progress;
    sweep *sweep; /* the first */
    write_piece *pieces;
    size_t count, room, room_count;
    team_lanes lanes; /* one for each file */
    int64_t bytes;    /* of the source, that the pieces stand for */
    int64_t values; /* the most of a piece */
    size_t workspace_bytes;
    piece_room *rooms; /* one for each thread */
} piece_team;

/* Sizes the buffers for all pieces. False without memory. */
bool pieces_make_room(piece_team *team);
void pieces_free_room(piece_team *team);
/* A team_piece of the team. */
int pieces_write(void *team, int64_t index, int thread, char sentence[1024]);
/* Columns of a piece of VALUES_TURNED. */
int64_t columns_a_piece(const matrix *m);

#endif
