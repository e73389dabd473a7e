/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * bench_mover.c - the lines of nsa-gate with gate weights: forward Q and the branches' outputs are read, O
 * streamed, the gates written; backward dO, the branches' outputs, Q and the gates are read, the branches'
 * gradients and dQ streamed. Those of nvfp4-quantize of 16-bit values: X is read for the global, and again
 * while codes, a quarter of its bytes, are streamed and scales written. Of nvfp4-fused-quantize: X is read,
 * codes are written. Of nvfp4-gemm: the repacked weights are read, a stream a thread.
 */
#include "bench.h"

#include "mover.h"
#include "team.h"
#include "values.h"

#include <string.h>

static const quern_tensor *tensor_of(const job *j, const char *name)
{
    const int i = tensor_named(j->op, name);
    return i >= 0 ? j->tensors.t[i] : NULL;
}

/* Stores the data pointers of a list of tensors. False unless each has `bytes` bytes and starts at a line. */
static bool collect(const job *j, const char *const *names, int count, char **to, size_t bytes)
{
    for (int i = 0; i < count; i++) {
        const quern_tensor *t = tensor_of(j, names[i]);
        if (t == NULL || (size_t)value_count(t) * quern_dtype_size(t->dtype) != bytes ||
            (uintptr_t)t->data % 64 != 0)
            return false;
        to[i] = t->data;
    }
    return true;
}

/* Milliseconds of bench/mover.h over the tensors that the pass reads and writes; 0 where they are others. The
 * outputs hold garbage afterwards. */
double bench_mover_ms(const job *j, bool backward, int threads)
{
    static const char *const read[2][MOVER_STREAMS] = {{"Q", "O_cmp", "O_slc", "O_win"},
                                                       {"dO", "Q", "O_cmp", "O_slc", "O_win"}};
    static const char *const write[2][MOVER_STREAMS] = {{"O"}, {"dO_cmp", "dO_slc", "dO_win", "dQ"}};
    const quern_tensor *q = tensor_of(j, "Q"), *gates = tensor_of(j, "gates");
    if (j->device != QUERN_CPU || q == NULL || gates == NULL || tensor_of(j, "gate") == NULL) return 0;
    mover m = {.reads = backward ? 5 : 4,
               .writes = backward ? 4 : 1,
               .bytes = (size_t)value_count(q) * quern_dtype_size(q->dtype)};
    char *from[MOVER_STREAMS];
    m.few_bytes = (size_t)value_count(gates) * quern_dtype_size(gates->dtype);
    if (m.bytes == 0 || m.bytes % 512 != 0 || (uintptr_t)gates->data % 64 != 0 ||
        !collect(j, read[backward], m.reads, from, m.bytes) ||
        !collect(j, write[backward], m.writes, m.write, m.bytes))
        return 0;
    for (int i = 0; i < m.reads; i++) m.read[i] = from[i];
    if (backward) m.read_few = gates->data;
    else m.write_few = gates->data;
    return openmp_team(threads) == threads ? mover_run(&m, threads) : 0;
}

/* The same of nvfp4-quantize. The quarters of X are four streams. */
double bench_quantise_mover_ms(const job *j, bool backward, int threads)
{
    const quern_tensor *x = tensor_of(j, "X"), *codes = tensor_of(j, "codes"),
                       *scales = tensor_of(j, "scales");
    if (backward || j->device != QUERN_CPU || x == NULL || codes == NULL || scales == NULL) return 0;
    const size_t bytes = (size_t)value_count(x) * quern_dtype_size(x->dtype) / 4;
    mover pass = {.reads = 4, .bytes = bytes};
    for (int i = 0; i < 4; i++) pass.read[i] = (const char *)x->data + (size_t)i * bytes;
    if (bytes == 0 || bytes % 512 != 0 || (size_t)value_count(codes) != bytes ||
        (uintptr_t)x->data % 64 != 0 || (uintptr_t)codes->data % 64 != 0 ||
        (uintptr_t)scales->data % 64 != 0 || openmp_team(threads) != threads)
        return 0;
    const double first = mover_run(&pass, threads);
    pass.writes = 1;
    pass.write[0] = codes->data;
    pass.write_few = scales->data;
    pass.few_bytes = (size_t)value_count(scales);
    return first + mover_run(&pass, threads);
}

/* The same of nvfp4-fused-quantize. */
double bench_fused_mover_ms(const job *j, bool backward, int threads)
{
    const quern_tensor *x = tensor_of(j, "X"), *codes = tensor_of(j, "gate_codes");
    if (backward || j->device != QUERN_CPU || x == NULL || codes == NULL) return 0;
    const size_t bytes = (size_t)value_count(x) * quern_dtype_size(x->dtype) / 4;
    mover pass = {.reads = 4, .bytes = bytes, .write_few = codes->data};
    for (int i = 0; i < 4; i++) pass.read[i] = (const char *)x->data + (size_t)i * bytes;
    pass.few_bytes = (size_t)value_count(codes);
    if (bytes == 0 || bytes % 512 != 0 || pass.few_bytes > bytes || (uintptr_t)x->data % 64 != 0 ||
        (uintptr_t)codes->data % 64 != 0 || openmp_team(threads) != threads)
        return 0;
    return mover_run(&pass, threads);
}

/* The same of nvfp4-gemm by repacked weights. */
double bench_weights_mover_ms(const job *j, bool backward, int threads)
{
    const quern_tensor *b = tensor_of(j, "B_repacked");
    if (backward || j->device != QUERN_CPU || b == NULL) return 0;
    mover pass = {.reads = 1, .read = {b->data}, .bytes = (size_t)value_count(b)};
    if (pass.bytes == 0 || pass.bytes % 512 != 0 || (uintptr_t)b->data % 64 != 0 ||
        openmp_team(threads) != threads)
        return 0;
    return mover_run(&pass, threads);
}
