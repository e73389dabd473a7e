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

/* Whether the Hopper kernels take these arguments on this device; the forward; the backward: dQ, and dK and dV or their
 * shares, of `pieces` pieces of 128 keys. */
struct sm90_backward_call {
    sm90_device device;
    void *workspace;
};
#ifdef QUERN_SM90
bool sm90_attend_forward_takes(const stage_exec *exec, const attend_args *args, sm90_device *device);
quern_status sm90_attend_forward(const stage_exec *exec, const attend_args *args, const sm90_device &device, void *workspace);
bool sm90_attend_backward_takes(const stage_exec *exec, const attend_args *args, sm90_device *device);
size_t sm90_attend_backward_bytes(const attend_args *args);
quern_status sm90_attend_backward(const attend_args *args, const attend_launch &l, int64_t pieces, const sm90_backward_call &call, cudaStream_t stream);
#else
static inline bool sm90_attend_forward_takes(const stage_exec *, const attend_args *, sm90_device *) { return false; }
static inline quern_status sm90_attend_forward(const stage_exec *, const attend_args *, const sm90_device &, void *) { return QUERN_ERR_UNSUPPORTED; }
static inline bool sm90_attend_backward_takes(const stage_exec *, const attend_args *, sm90_device *) { return false; }
static inline size_t sm90_attend_backward_bytes(const attend_args *) { return 0; }
static inline quern_status sm90_attend_backward(const attend_args *, const attend_launch &, int64_t, const sm90_backward_call &, cudaStream_t)
{
    return QUERN_ERR_UNSUPPORTED;
}
#endif

/* A counter in `workspace` that starts at 0 when the kernels after it do; none where every block has one piece. */
quern_status sm90_count_from_zero(int64_t pieces, const sm90_device &device, void *workspace, cudaStream_t stream, int32_t **counter);

typedef quern_status sm90_attend(const attend_args *args, const attend_launch &l, const sm90_device &device, void *workspace, cudaStream_t stream);
sm90_attend sm90_forward_bf16_64, sm90_forward_bf16_128, sm90_forward_bf16_192, sm90_forward_bf16_256;
sm90_attend sm90_forward_f16_64, sm90_forward_f16_128, sm90_forward_f16_192, sm90_forward_f16_256;

enum { SM90_BACKWARD_ROWS = 64 }; /* queries of a tile of dQ */

/* What the blocks of a backward's launch share. */
struct sm90_backward_plan {
    int32_t pieces;        /* of keys, of each key/value head */
    int32_t kv0, kv_heads; /* the key/value heads of this launch */
    int32_t tiles;         /* counters of a query head */
    int32_t wave;          /* blocks that start at once; every second wave walks its tiles from the first */
    bool head_first;       /* a head's tiles one after another, not a tile's heads */
    int32_t *taken;        /* tickets given out */
    int32_t *turns;        /* [heads][tiles]: how many key blocks have added to a tile of dQ */
};

/* `d_q`: f32, its heads those of this launch; added to. */
typedef quern_status sm90_attend_back(const attend_args *args, const attend_launch &l, const sm90_backward_plan &plan, const quern_tensor &d_q,
                                      cudaStream_t stream);
sm90_attend_back sm90_backward_bf16_64, sm90_backward_bf16_128, sm90_backward_f16_64, sm90_backward_f16_128;

#endif
