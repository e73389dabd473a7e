/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "cpu/check_data.h"

#include "cpu/rows_at.h"

quern_status check_cu(const stage_exec *exec, const quern_tensor *cu, int64_t batch, int64_t rows)
{
    const int32_t *at = cu->data;
    int64_t before = 0;
    for (int64_t b = 0; is_present(cu) && b <= batch; before = at[b++])
        if (at[b] < before || at[b] > (b > 0 ? rows : 0))
            return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_BAD_OFFSETS,
                                                    .tensor = cu,
                                                    .index = b,
                                                    .least = before,
                                                    .most = b > 0 ? rows : 0});
    return QUERN_OK;
}

quern_status check_queries(const stage_exec *exec, const stage_seqs *seqs)
{
    return check_cu(exec, &seqs->cu_q, seqs->batch, seqs->n_q);
}

quern_status check_seqs(const stage_exec *exec, const stage_seqs *seqs)
{
    const quern_tensor *keys = is_present(&seqs->cu_kv) ? &seqs->cu_kv : &seqs->cu_q;
    const quern_status status = check_queries(exec, seqs);
    return status == QUERN_OK ? check_cu(exec, keys, seqs->batch, seqs->n_kv) : status;
}

quern_status check_each(const stage_exec *exec, int32_t kind, const quern_tensor *t, int64_t count,
                        int64_t least, int64_t most)
{
    for (int64_t i = 0; is_present(t) && i < count; i++) {
        const int64_t x = index_at(t, i);
        if (x < least || x > most)
            return stage_report(
                exec, (stage_fault){.kind = kind, .tensor = t, .index = i, .least = least, .most = most});
    }
    return QUERN_OK;
}

quern_status check_pages(const stage_exec *exec, const quern_tensor *table, int64_t b, int64_t first,
                         int64_t end, int64_t pages)
{
    const int32_t *row = (const int32_t *)table->data + b * table->strides[0];
    for (int64_t c = first; is_present(table) && c < end; c++)
        if (c >= table->shape[1] || row[c] < 0 || row[c] >= pages)
            return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_BAD_PAGE,
                                                    .tensor = table,
                                                    .index = b * table->shape[1] +
                                                             (c < table->shape[1] ? c : table->shape[1] - 1),
                                                    .most = pages - 1});
    return QUERN_OK;
}

quern_status check_permutation(const stage_exec *exec, const quern_tensor *permutation, int64_t count,
                               int32_t *row_of)
{
    const int32_t *slots = permutation->data;
    for (int64_t i = 0; i < count; i++) row_of[i] = -1;
    for (int64_t row = 0; row < count; row++) {
        if (slots[row] < 0 || slots[row] >= count || row_of[slots[row]] >= 0)
            return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_BAD_ID,
                                                    .tensor = permutation,
                                                    .index = row,
                                                    .most = count - 1});
        row_of[slots[row]] = (int32_t)row;
    }
    return QUERN_OK;
}

quern_status check_step_rows(const stage_exec *exec, const stage_step *step, int64_t rows)
{
    const int64_t batch = step->slots.shape[0], next = step->rows.strides[1];
    const bool offsets = step->rows.strides[0] == next; /* the rows are cu_seqlens: they start at 0 */
    for (int64_t b = 0; b < batch; b++) {
        const int32_t *row = (const int32_t *)step->rows.data + b * step->rows.strides[0];
        const bool bad_first = row[0] < 0 || (offsets && b == 0 && row[0] != 0);
        if (bad_first || row[next] < row[0] || row[next] > rows)
            return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_BAD_OFFSETS,
                                                    .tensor = &step->rows,
                                                    .index = bad_first ? 2 * b : 2 * b + 1,
                                                    .least = bad_first ? 0 : row[0],
                                                    .most = rows});
    }
    return QUERN_OK;
}

quern_status check_step(const stage_exec *exec, const stage_step *step, int64_t rows)
{
    const quern_status status = check_step_rows(exec, step, rows);
    return status != QUERN_OK ? status
                              : check_each(exec, QUERN_STATUS_BAD_POSITION, &step->positions,
                                           step->slots.shape[0], 0, INT32_MAX);
}

quern_status check_plane(const stage_exec *exec, const cache_plane *plane, const stage_step *step,
                         int64_t block_size, int64_t stride)
{
    const int64_t columns = plane->table.shape[1];
    quern_status status = QUERN_OK;
    for (int64_t b = 0; b < step->slots.shape[0] && status == QUERN_OK; b++) {
        const step_run run = step_run_at(step, b);
        const int64_t tokens = run.slot >= 0 ? run.first + run.count : 0,
                      rows = block_size > 0 ? mask_entries(tokens, block_size, stride) : tokens,
                      needed = mask_blocks(rows, CACHE_BLOCK), kept = needed < columns ? needed : columns;
        if (plane->ring > 0 ? run.count > columns * CACHE_BLOCK : needed > columns)
            return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_BAD_POSITION,
                                                    .tensor = &step->positions,
                                                    .index = b,
                                                    .most = columns * CACHE_BLOCK - run.count});
        status = check_pages(exec, &plane->table, b, 0, kept, plane->blocks.shape[0]);
    }
    return status;
}
