/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_launch.cu - which attention calls Hopper's kernels take, and which instance. */
#include "common/tma.cuh"
#include "sm90/attend/attend.cuh"

enum { SHARED_BYTES = 227 * 1024, MOST_LIST = 256, LEAST_ROWS = 64 };

bool sm90_device_of(const stage_exec *exec, sm90_device *device)
{
    int major = 0, minor = 0;
    if (exec->shared_bytes != 0 && exec->shared_bytes < SHARED_BYTES) return false;
    cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, exec->device_id);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, exec->device_id);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, exec->device_id);
    if (code != cudaSuccess) (void)cudaGetLastError();
    return code == cudaSuccess && major == 9 && minor == 0;
}

/* Lists must come in blocks that copies can serve, short enough for a warp to sort, for rows that fill a warpgroup. */
static bool list_taken(const attend_args *args, int64_t heads_of_list)
{
    if (!present(args->list)) return true;
    const int64_t block = args->mask == ATTEND_COMPRESSED ? 128 : args->block_size;
    return block % 16 == 0 && args->list.shape[3] <= MOST_LIST && args->tile * heads_of_list >= LEAST_ROWS;
}

/* What forward and backward ask of a call. */
static bool call_taken(const attend_args *args)
{
    const stage_seqs &s = args->seqs;
    if (args->q.dtype == QUERN_F32 || s.batch < 1 || s.n_kv > INT32_MAX - 1024 || s.n_q > INT32_MAX - 1024 || s.batch > INT32_MAX / 2) return false;
    if (!tma_can(args->q) || !tma_can(args->k) || !tma_can(args->v)) return false;
    return (s.batch + s.n_q) * (args->q.shape[2] + 8) <= INT32_MAX; /* pieces are counted in 32 bits */
}

bool sm90_attend_forward_takes(const stage_exec *exec, const attend_args *args, sm90_device *device)
{
    if (!call_taken(args) || !rows_aligned16(args->o)) return false;
    const bool by_head = present(args->list) && args->scope == LIST_BY_HEAD;
    const int64_t heads = by_head ? 1 : args->q.shape[2] / args->k.shape[2];
    return heads <= 128 && list_taken(args, heads) && sm90_device_of(exec, device);
}

bool sm90_attend_backward_takes(const stage_exec *exec, const attend_args *args, sm90_device *device)
{
    if (!call_taken(args) || !tma_can(args->d_o) || present(args->list)) return false;
    if (args->q.shape[3] > 128 || args->v.shape[3] > 128 || (args->d_q.dtype == QUERN_F32 && !tma_can(args->d_q))) return false;
    return sm90_device_of(exec, device);
}

quern_status sm90_count_from_zero(int64_t pieces, const sm90_device &device, void *workspace, cudaStream_t stream, int32_t **counter)
{
    *counter = NULL;
    if (pieces <= device.multiprocessors) return QUERN_OK;
    *counter = (int32_t *)(((uintptr_t)workspace + 3) & ~(uintptr_t)3);
    return cuda_report(cudaMemsetAsync(*counter, 0, sizeof **counter, stream), "attention: the counter of pieces");
}

quern_status sm90_attend_forward(const stage_exec *exec, const attend_args *args, const sm90_device &device, void *workspace)
{
    static sm90_attend *const table[2][4] = {{sm90_forward_bf16_64, sm90_forward_bf16_128, sm90_forward_bf16_192, sm90_forward_bf16_256},
                                             {sm90_forward_f16_64, sm90_forward_f16_128, sm90_forward_f16_192, sm90_forward_f16_256}};
    const attend_launch l = attend_launch_of(args);
    const int k = l.kernel.dim_k, v = l.kernel.dim_v;
    const int dims = k <= 64 && v <= 64 ? 0 : k <= 128 && v <= 128 ? 1 : k <= 192 && v <= 128 ? 2 : 3;
    return table[l.dtype == QUERN_F16][dims](args, l, device, workspace, (cudaStream_t)exec->stream);
}
