/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* validate_lists.cu - the validate_lists stage: sets bits of the caller's status word where a handed-in list
 * has entries outside its sequence, or where offsets of sequences fall or leave the batch. Runs only where
 * the caller asks; the kernels that use the lists bound every entry themselves. A warp takes a row of a list,
 * its lanes the entries; limit: the lists' bytes over the copy rate. */
#include "variants.cuh"

enum { THREADS = 256 };
static const int64_t most_blocks = 4096;

struct list_kernel {
    seqs s;
    const int32_t *list;
    int64_t stride[3], views, heads, rows, k;
    int64_t tile, unit;       /* tokens, or compressed entries, of a list's entry */
    int64_t block_size, step; /* step > 0: entries of compressed blocks, else tokens */
    int32_t bit, *status;
};

__global__ void __launch_bounds__(THREADS) validate_list(const __grid_constant__ list_kernel a)
{
    const int lane = threadIdx.x % 32;
    bool bad = false;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32; i < a.views * a.heads * a.rows;
         i += (int64_t)gridDim.x * (THREADS / 32)) {
        const int64_t row = i % a.rows, h = i / a.rows % a.heads, b = i / a.rows / a.heads;
        sequence seq;
        int64_t first;
        if (a.s.cu_q == NULL) seq = sequence_at(a.s, b);
        else if (!piece_at(a.s, row, a.tile, 1, &seq, &first)) continue;
        const int64_t limit =
            mask_blocks(a.step == 0 ? seq.nq : mask_entries(seq.nq, a.block_size, a.step), a.unit);
        const int32_t *list = a.list + b * a.stride[0] + h * a.stride[1] + row * a.stride[2];
        for (int64_t e = lane; e < a.k; e += 32) bad |= list[e] < -1 || list[e] >= limit;
    }
    if (__any_sync(~0u, bad) && lane == 0) atomicOr(a.status, a.bit);
}

__global__ void __launch_bounds__(THREADS)
    validate_offsets(const int32_t *cu, int64_t batch, int64_t rows, int32_t *status)
{
    bool bad = threadIdx.x == 0 && (cu[0] != 0 || cu[batch] > rows);
    for (int64_t i = threadIdx.x; i < batch; i += THREADS) bad |= cu[i + 1] < cu[i];
    if (__any_sync(~0u, bad) && threadIdx.x % 32 == 0) atomicOr(status, QUERN_STATUS_BAD_OFFSETS);
}

static quern_status launch_list(const stage_exec *exec, const validate_lists_args *args,
                                const quern_tensor &list, bool groups)
{
    if (!present(list)) return QUERN_OK;
    list_kernel a = {seqs_of(args->seqs),
                     (const int32_t *)list.data,
                     {list.strides[0], list.strides[1], list.strides[2]},
                     list.shape[0],
                     list.shape[1],
                     list.shape[2],
                     list.shape[3],
                     args->tile,
                     groups ? (int64_t)STAGE_GROUP_ENTRIES : args->select_block,
                     args->block_size,
                     groups ? args->stride : 0,
                     groups ? QUERN_STATUS_BAD_GROUP : QUERN_STATUS_BAD_INDEX,
                     exec->status};
    a.s.cu_kv = NULL;
    const int64_t blocks = (a.views * a.heads * a.rows + THREADS / 32 - 1) / (THREADS / 32);
    if (blocks == 0) return QUERN_OK;
    validate_list<<<(unsigned)(blocks < most_blocks ? blocks : most_blocks), THREADS, 0,
                    (cudaStream_t)exec->stream>>>(a);
    return LAUNCHED("validation of a list");
}

static quern_status validate_lists_run(const stage_exec *exec, const validate_lists_args *args, void *)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const quern_tensor *const cu_seqlens[] = {&args->seqs.cu_q, &args->seqs.cu_kv};
    for (int i = 0; i < 2; i++) {
        if (!present(*cu_seqlens[i])) continue;
        validate_offsets<<<1, THREADS, 0, stream>>>((const int32_t *)cu_seqlens[i]->data, args->seqs.batch,
                                                    i == 0 ? args->seqs.n_q : args->seqs.n_kv, exec->status);
        const quern_status status = LAUNCHED("validation of cu_seqlens");
        if (status != QUERN_OK) return status;
    }
    const quern_status status = launch_list(exec, args, args->blocks, false);
    return status != QUERN_OK ? status : launch_list(exec, args, args->groups, true);
}

extern const variant<validate_lists_args> validate_lists_any = {"validate_lists_any", NULL, NULL,
                                                                validate_lists_run};
