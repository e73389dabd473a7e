/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared.cuh - attention of a token's heads over keys that are values at once (D 512), on Hopper.
 *
 * A persistent block of four warpgroups walks items of one token and 64 of its heads:
 *
 *   feed     gathers the item's Q, then its keys, 64 rows at a time, raw rows before entries; a stage has
 *            half of their columns
 *   score    holds Q in registers (HELD of 8 panels; the others stay in shared memory), makes S = Q K^T of a
 *            stage and its softmax, and writes P, rounded, and the rows' factors in a stage of their own
 *   values   twice: O += P K, each for 256 of the 512 columns
 *
 * So K is read from global memory once and serves two products from shared memory, where most of Q need not
 * stand: that leaves room for 192 keys. Values of 64 keys start once the next keys' scores are complete: they
 * then run beside its softmax, and the tensor cores are rarely without work.
 *
 * Shared memory: K 6 x 32 KB, P 2 x 8 KB, Q's last panels 16 KB. Registers: Q 96 and S 32, or O 128, of 160.
 * Limit: 4 H D flops a pair over the tensor cores' rate, 2048 clocks for 64 heads and 64 keys. What holds it
 * back is how long keys stay in shared memory: from the gather's start on, through both products.
 */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_SHARED_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_SHARED_CUH

#include "attend_mqa/params.cuh"
#include "hopper/ring.cuh"
#include "hopper/rows.cuh"
#include "hopper/wgmma.cuh"

namespace sm90_mqa
{

enum {
    HEADS = 64,
    KEYS = 64,
    STAGES = 6,
    PANELS = MQA_DIM / 64, /* of 64 columns */
    HALF = PANELS / 2,     /* panels of a stage */
    PANEL_BYTES = 64 * 128,
    HELD = 6, /* panels of Q in registers */
    THREADS = 512,
    FEED_REGISTERS = 32,
    COMPUTE_REGISTERS = 160
};

/* What a stage holds. QUERY: Q of an item's heads, from head0 on; KEYS_HERE: `keys` rows, zeros after them;
 * last: no more of this item; raw_end: the window's last. END: no item is left. */
enum stage_kind { QUERY, KEYS_HERE, END };
struct __align__(16) stage_info
{
    int32_t kind, keys, last, raw_end;
    int32_t sequence, row, position, head0;
};

template <typename T> struct shared {
    typedef T type;
    T k[STAGES][HALF][64][64];
    T q[PANELS - HELD][64][64];
    T p[2][64][64];
    float shrink[2][HEADS], factor[2][HEADS]; /* factor: beside an item's last P */
    stage_info info[STAGES];
    ring<STAGES> keys;
    ring<2> weights;
};
enum { KEY_FILLERS = 2 * 128, KEY_USERS = 2 * 128, WEIGHT_FILLERS = 128, WEIGHT_USERS = 2 * 128 };

typedef quern_status instance(const stage_exec *exec, const mqa_kernel &a);
instance mqa_bf16, mqa_f16;

} // namespace sm90_mqa

#endif
