/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fp8.c - the grouped product of e4m3 operands, as GPUs with FP8 products compute it: A rounded by row and
 * 128 of K, weights by column with one power of two. Products are f32: a decoded unit of weights is
 * rounded to e4m3 in place, 128 of K are summed from zero, and added to the sums times A's scale.
 */
#include "core/half.h"
#include "core/parallel.h"
#include "cpu/gemm4/product.h"
#include "cpu/kernels/formats/e8m0.h"

enum { GROUP = PRODUCT_UNITS_FP8 * GEMM4_UNIT, ROWS = 12 /* that are multiplied at once */ };

static int64_t groups_of(const product_job *job)
{
    return (job->units + PRODUCT_UNITS_FP8 - 1) / PRODUCT_UNITS_FP8;
}

static float *powers_at(const product_job *job, int64_t expert, int64_t panel)
{
    return job->column_power + (expert * panels_of(job->args->n) + panel) * GEMM4_PANEL;
}

/* The largest scales of repacked columns. A larger scale has a smaller byte, but for 0. */
static void largest_repacked(const product_job *job, int64_t expert, int64_t panel, uint8_t most[GEMM4_PANEL])
{
    const uint8_t *unit = product_units(job, NULL, expert, panel, 0, 0);
    uint8_t least[GEMM4_PANEL] = {0};
    for (int64_t u = 0; u < job->units; u++, unit += GEMM4_UNIT_BYTES)
        for (int64_t c = 0; c < GEMM4_PANEL; c++) {
            const uint8_t *strip = unit + c / GEMM4_STRIP * GEMM4_STRIP_BYTES + c % GEMM4_STRIP;
            for (int64_t b = 0; b < GEMM4_BLOCKS; b++) {
                const uint8_t byte = strip[b * GEMM4_STRIP];
                if (byte != 0 && (least[c] == 0 || byte < least[c])) least[c] = byte;
            }
        }
    for (int64_t c = 0; c < GEMM4_PANEL; c++) most[c] = gemm4_e4m3_byte(least[c]);
}

static float power_of(uint8_t scale)
{
    const float magnitude =
        scale < 8 ? (float)scale * 0x1p-9f : float_from_bits((uint32_t)scale << 20) * 0x1p120f;
    return scale > 0 ? power_above(6.0f * magnitude / 448.0f) : 1.0f;
}

static void powers_task(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const product_job *job = arg;
    const grouped_gemm_args *args = job->args;
    const int64_t panels = panels_of(args->n), expert = index / panels, panel = index % panels;
    uint8_t most[GEMM4_PANEL];
    if (job->ends[expert] == (expert > 0 ? job->ends[expert - 1] : 0)) return;
    if (args->b_repacked.ndim > 0) {
        largest_repacked(job, expert, panel, most);
    } else {
        const weight_view w =
            weight_of(&args->b_codes, &args->b_scales, args->k_major, args->order, args->n, args->k, expert);
        largest_scales(&w, panel, most);
    }
    float *to = powers_at(job, expert, panel);
    for (int64_t c = 0; c < GEMM4_PANEL; c++) to[c] = power_of(most[c]);
}

void fp8_powers(const stage_exec *exec, const product_job *job)
{
    parallel_for(exec, job->experts * panels_of(job->args->n), powers_task, (void *)(uintptr_t)job);
}

void fp8_ready_row(const product_job *job, int64_t row)
{
    const quern_tensor *a = &job->args->a;
    const row_kernels *rows = job->dense->rows;
    float *out = (float *)(void *)(job->a + row * ready_row_bytes(job)),
          *scales = job->a_scale + row * groups_of(job);
    uint8_t codes[GROUP];
    const float power = row_power_of(job, rows->magnitude(view_row(a, row), a->dtype, job->args->k));
    job->row_power[row] = power;
    for (int64_t k = 0; k < job->units * GEMM4_UNIT; k += GROUP) {
        const int64_t left = job->args->k - k, n = left < GROUP ? left : GROUP,
                      padded = job->units * GEMM4_UNIT - k;
        const void *from = view_at(a, row, k);
        const float scale = float_from_bits(rows->magnitude(from, a->dtype, n)) / 448.0f,
                    divisor = scale > 0.0f ? scale : 1.0f;
        rows->convert(from, a->dtype, out + k, QUERN_F32, n);
        job->formats->quantise_e4m3(out + k, divisor, n, codes);
        job->formats->widen_e4m3(codes, n, out + k);
        for (int64_t i = n; i < padded && i < GROUP; i++) out[k + i] = 0.0f;
        scales[k / GROUP] = divisor * power;
    }
}

/* Decoded weights [depth][64] to e4m3 values. */
static void round_weights(const product_job *job, product_scratch *s, int64_t depth, const float *powers)
{
    uint8_t *codes = (uint8_t *)(void *)s->turned;
    float inverse[GEMM4_PANEL];
    for (int64_t c = 0; c < GEMM4_PANEL; c++) inverse[c] = 1.0f / powers[c];
    for (int64_t k = 0; k < depth; k++)
        for (int64_t c = 0; c < GEMM4_PANEL; c++) s->decoded[k * GEMM4_PANEL + c] *= inverse[c];
    job->formats->quantise_e4m3(s->decoded, 1.0f, depth * GEMM4_PANEL, codes);
    job->formats->widen_e4m3(codes, depth * GEMM4_PANEL, s->decoded);
}

void fp8_multiply(const product_job *job, product_scratch *s, const uint8_t *units, int64_t first,
                  int64_t count, int64_t expert, int64_t panel, int64_t row, int64_t rows, float *sums)
{
    const int64_t depth = count * GEMM4_UNIT, lda = ready_row_bytes(job) / (int64_t)sizeof(float),
                  group = first / PRODUCT_UNITS_FP8, columns = job->dense->panel;
    const float *a = (const float *)(const void *)job->a + row * lda + first * GEMM4_UNIT;
    float part[ROWS * GEMM4_PANEL];
    job->kernels->decode_f32(units, count, s->decoded);
    round_weights(job, s, depth, powers_at(job, expert, panel));
    for (int64_t r = 0; r < rows; r += ROWS) {
        const int64_t some = rows - r < ROWS ? rows - r : ROWS;
        for (int64_t c = 0; c < GEMM4_PANEL; c += columns) {
            const int64_t n = GEMM4_PANEL - c < columns ? GEMM4_PANEL - c : columns;
            job->dense->mm_f32(some, n, depth, a + r * lda, lda, 1, s->decoded + c, GEMM4_PANEL, part + c,
                               GEMM4_PANEL, false);
        }
        for (int64_t i = 0; i < some; i++) {
            const float scale = job->a_scale[(row + r + i) * groups_of(job) + group];
            float *to = sums + (r + i) * GEMM4_PANEL;
            for (int64_t c = 0; c < GEMM4_PANEL; c++) {
                const float term = scale * part[i * GEMM4_PANEL + c];
                to[c] = first > 0 ? to[c] + term : term;
            }
        }
    }
}

void fp8_scale_columns(const product_job *job, int64_t expert, int64_t panel, int64_t rows, float *sums)
{
    const float *powers = powers_at(job, expert, panel);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < GEMM4_PANEL; c++) sums[r * GEMM4_PANEL + c] *= powers[c];
}
