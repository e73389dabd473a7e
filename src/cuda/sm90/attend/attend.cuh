/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend.cuh - the attention kernels for Hopper (sm_90a) as the stages see them: which calls they take, and one function
 * for each dtype and pair of padded head dims. */
#ifndef QUERN_CUDA_SM90_ATTEND_CUH
#define QUERN_CUDA_SM90_ATTEND_CUH

#include "any/attend/attend.cuh"

struct sm90_device {
    int multiprocessors;
};

/* Whether the device is a Hopper GPU that this library holds code for; if so, describes it. */
bool sm90_device_of(const stage_exec *exec, sm90_device *device);

enum { SM90_COUNT_BYTES = 7 }; /* of workspace, at any address, for a counter of pieces */

/* Whether the Hopper kernels take these arguments on this device; the forward; the backward's dQ; its dK and dV, or their
 * shares, of `pieces` pieces of 128 keys. */
#ifdef QUERN_SM90
bool sm90_attend_forward_takes(const stage_exec *exec, const attend_args *args, sm90_device *device);
quern_status sm90_attend_forward(const stage_exec *exec, const attend_args *args, const sm90_device &device, void *workspace);
bool sm90_attend_backward_takes(const stage_exec *exec, const attend_args *args, sm90_device *device);
quern_status sm90_attend_backward_rows(const attend_args *args, const attend_launch &l, const sm90_device &device, void *workspace,
                                       cudaStream_t stream);
quern_status sm90_attend_backward_keys(const attend_args *args, const attend_launch &l, int64_t pieces, cudaStream_t stream);
#else
static inline bool sm90_attend_forward_takes(const stage_exec *, const attend_args *, sm90_device *) { return false; }
static inline quern_status sm90_attend_forward(const stage_exec *, const attend_args *, const sm90_device &, void *) { return QUERN_ERR_UNSUPPORTED; }
static inline bool sm90_attend_backward_takes(const stage_exec *, const attend_args *, sm90_device *) { return false; }
static inline quern_status sm90_attend_backward_rows(const attend_args *, const attend_launch &, const sm90_device &, void *, cudaStream_t)
{
    return QUERN_ERR_UNSUPPORTED;
}
static inline quern_status sm90_attend_backward_keys(const attend_args *, const attend_launch &, int64_t, cudaStream_t) { return QUERN_ERR_UNSUPPORTED; }
#endif

/* A counter in `workspace` that starts at 0 when the kernels after it do; none where every block has one piece. */
quern_status sm90_count_from_zero(int64_t pieces, const sm90_device &device, void *workspace, cudaStream_t stream, int32_t **counter);

typedef quern_status sm90_attend(const attend_args *args, const attend_launch &l, const sm90_device &device, void *workspace, cudaStream_t stream);
sm90_attend sm90_forward_bf16_64, sm90_forward_bf16_128, sm90_forward_bf16_192, sm90_forward_bf16_256;
sm90_attend sm90_forward_f16_64, sm90_forward_f16_128, sm90_forward_f16_192, sm90_forward_f16_256;

sm90_attend sm90_rows_bf16_64, sm90_rows_bf16_128, sm90_rows_f16_64, sm90_rows_f16_128;

typedef quern_status sm90_attend_keys(const attend_args *args, const attend_launch &l, int64_t pieces, cudaStream_t stream);
sm90_attend_keys sm90_keys_bf16_64, sm90_keys_bf16_128, sm90_keys_f16_64, sm90_keys_f16_128;

#endif
