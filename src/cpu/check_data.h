/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * check_data.h - checks of the integers by which a stage finds its rows, before it follows them. Families
 * check what the host can read, with sentences of their own; behind a device's pointers these checks are the
 * only ones. Each returns QUERN_OK, or the fault that it has reported. Absent views have none.
 */
#ifndef QUERN_CPU_CHECK_DATA_H
#define QUERN_CPU_CHECK_DATA_H

#include "backend.h"

/* 0 = cu[0] <= ... <= cu[batch] <= rows. */
quern_status check_cu(const stage_exec *exec, const quern_tensor *cu, int64_t batch, int64_t rows);
/* The queries' offsets alone, and with those of keys, which are the queries' where cu_kv is absent. */
quern_status check_queries(const stage_exec *exec, const stage_seqs *seqs);
quern_status check_seqs(const stage_exec *exec, const stage_seqs *seqs);

/* Each of the first `count` elements of an i32 vector lies in least ... most; else `kind`. */
quern_status check_each(const stage_exec *exec, int32_t kind, const quern_tensor *t, int64_t count,
                        int64_t least, int64_t most);
/* Columns first ... end - 1 of row b of a table exist and hold pages 0 ... pages - 1. */
quern_status check_pages(const stage_exec *exec, const quern_tensor *table, int64_t b, int64_t first,
                         int64_t end, int64_t pages);
/* A step's rows lie among `rows` and do not fall. */
quern_status check_step_rows(const stage_exec *exec, const stage_step *step, int64_t rows);
/* A step's sequences: rows lie among `rows` and do not fall, positions are not negative. */
quern_status check_step(const stage_exec *exec, const stage_step *step, int64_t rows);
/* The table of a plane has the pages of what each of the step's sequences then has: of its tokens, or, with a
 * block_size, of the entries of these. */
quern_status check_plane(const stage_exec *exec, const cache_plane *plane, const stage_step *step,
                         int64_t block_size, int64_t stride);
/* Each slot 0 ... count - 1 stands once in a permutation; row_of[slot] is its place. */
quern_status check_permutation(const stage_exec *exec, const quern_tensor *permutation, int64_t count,
                               int32_t *row_of);

#endif
