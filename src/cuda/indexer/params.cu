/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cu - the arguments of the indexer's kernels. */
#include "indexer/params.cuh"

bool index_takes(const indexer_args *args, char why[STAGE_WHY_BYTES])
{
    const bool bytes = args->format != ENTRY_ROWS;
    if (args->q.dtype == QUERN_F32 ||
        (bytes ? args->q.dtype != QUERN_BF16 : args->keys.dtype != args->q.dtype))
        snprintf(why, STAGE_WHY_BYTES,
                 "q is %s and k %s: the cuda backend takes bf16 or f16 for both, or bf16 with keys of bytes",
                 dtype_text(args->q.dtype), dtype_text(args->keys.dtype));
    else if (args->q.shape[0] * args->q.shape[1] > INT32_MAX / 4 || args->ratio > INT32_MAX)
        snprintf(why, STAGE_WHY_BYTES,
                 "%lld queries, a ratio of %lld: the cuda backend takes up to %d and %d",
                 (long long)(args->q.shape[0] * args->q.shape[1]), (long long)args->ratio, INT32_MAX / 4,
                 INT32_MAX);
    else if ((present(args->cu) && !(present(args->positions) && present(args->table))) ||
             (bytes && args->page > 0 && args->keys.ndim == 3))
        snprintf(why, STAGE_WHY_BYTES,
                 "sequences of any lengths without positions and pages, or bytes in rows of a page: the cuda "
                 "backend takes neither");
    else return true;
    return false;
}

index_kernel index_kernel_of(const indexer_args *args, void *spread)
{
    const int64_t width = args->q.shape[3], codes = args->format == ENTRY_ROWS  ? 0
                                                    : args->format == ENTRY_FP4 ? width / 2
                                                                                : width;
    index_kernel a = {};
    a.q = view4_of(args->q);
    a.keys = row_source_of(args->keys, args->table, args->page, codes);
    a.format = args->format;
    a.w = args->w.data;
    a.w_dtype = args->w.dtype;
    for (int i = 0; i < 3; i++) a.w_row[i] = args->w.strides[i];
    a.idx = (int32_t *)args->idx.data;
    a.count = (int32_t *)args->count.data;
    a.scores = (float *)args->scores.data;
    a.scores_n = present(args->scores) ? args->scores.shape[2] : 0;
    for (int i = 0; i < 2; i++) {
        a.idx_row[i] = args->idx.strides[i];
        a.count_row[i] = args->count.strides[i];
        a.scores_row[i] = present(args->scores) ? args->scores.strides[i] : 0;
    }
    a.positions = (const int32_t *)args->positions.data;
    a.position = args->position;
    a.entries = present(args->table) ? args->table.shape[1] * args->page : args->keys.shape[1];
    if (a.entries > INT32_MAX - 256) a.entries = INT32_MAX - 256;
    a.ratio = (uint32_t)args->ratio;
    a.batch = (int32_t)args->q.shape[0];
    a.queries = (int32_t)args->q.shape[1];
    a.heads = (int32_t)args->q.shape[2];
    a.width = (int32_t)width;
    a.k = (int32_t)args->idx.shape[2];
    a.scale = args->scale;
    a.rounded = args->rounded;
    a.q_wide = rows_aligned16(args->q);
    if (!present(args->cu)) return a;
    a.batch = a.queries;
    a.queries = 1;
    a.q.s[0] = a.q.s[1];
    a.w_row[0] = a.w_row[1];
    a.idx_row[0] = a.idx_row[1];
    a.count_row[0] = a.count_row[1];
    a.scores_row[0] = a.scores_row[1];
    if (spread == NULL) {
        a.starts = a.positions;
        a.starts_s = args->positions.strides[0];
        a.positions = NULL;
        a.cu = (const int32_t *)args->cu.data;
        a.cu_s = args->cu.strides[0];
        a.sequences = (int32_t)args->cu.shape[0] - 1;
        a.rows = a.batch;
        return a;
    }
    a.positions = (const int32_t *)spread;
    a.sequence = a.positions + a.batch;
    a.limit = a.sequence + a.batch;
    return a;
}
