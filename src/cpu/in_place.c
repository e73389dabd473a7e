/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * in_place.c - products of few rows with a weight [out, in] in place.
 *
 * The micro-kernel broadcasts one operand and loads vectors along the columns of the other. Here the weight
 * is broadcast: its rows are read in their order, a word at a time, so nothing of it is packed. The rows of
 * a, which meet all of the weight, are packed once, as columns. The sums of a task come out as [outputs][rows
 * of a] and are transposed at its end. Each sum takes the same products in the same order and pieces of k as
 * in the gemm stage's other ways, so the bits are the same.
 *
 * A task takes up to 64 outputs through k, a piece at a time: 64 rows of 512 bytes of the weight, and 32 KiB
 * of a's columns for 64 rows, which come from L2. Before 12 outputs are multiplied (16 by AMX), the next
 * piece of their weights is requested: all of it at once would be more lines than can be in flight. Limit:
 * the dot product; on a Zen 4, 64 rows run at 0.93 of it with K 4096 and at 0.87 with K 1024, where
 * transposing and storing count more.
 */
#include "cpu/in_place.h"

/* Outputs between requests: a multiple of the micro-kernel's six rows; a tile's sixteen. */
enum { PIECE_WORDS = 128, OUTPUTS_BETWEEN = 12, TILE_OUTPUTS = 16 };

bool in_place_takes(const attention_kernels *kernels, const row_source *a, const row_source *w)
{
    if (a->rows > IN_PLACE_ROWS) return false;
    if (w->dtype == QUERN_F32) return true;
    return kernels->mm_bf16 != NULL && a->dtype == QUERN_BF16 && w->dtype == QUERN_BF16 && w->dim % 2 == 0 &&
           w->stride % 2 == 0;
}

bool in_place_aligned(const row_source *w)
{
    return (uintptr_t)w->data % sizeof(float) == 0;
}

in_place_product in_place_of(const attention_kernels *kernels, const row_source *a, const row_source *w)
{
    return (in_place_product){.kernels = kernels, .pairs = w->dtype == QUERN_BF16, .a = *a, .w = *w};
}

static int64_t words_of(const in_place_product *p, int64_t elements)
{
    return p->pairs ? elements / 2 : elements;
}

static int64_t elements_of(const in_place_product *p, int64_t words)
{
    return p->pairs ? 2 * words : words;
}

static int64_t panels_of(const in_place_product *p)
{
    return (p->a.rows + p->kernels->panel - 1) / p->kernels->panel;
}

/* Words of the piece that begins at `word`. */
static int64_t depth_at(const in_place_product *p, int64_t word)
{
    const int64_t left = words_of(p, p->a.dim) - word;
    return left < PIECE_WORDS ? left : PIECE_WORDS;
}

static const char *at(const row_source *s, int64_t row, int64_t column)
{
    return (const char *)s->data + (row * s->stride + column) * (int64_t)quern_dtype_size(s->dtype);
}

/* Where the columns of a's panel t from `word` on stand among all. */
static int64_t columns_at(const in_place_product *p, int64_t t, int64_t word)
{
    return (t * words_of(p, p->a.dim) + word) * p->kernels->panel;
}

size_t in_place_floats(const in_place_product *p)
{
    return (size_t)(panels_of(p) * words_of(p, p->a.dim) * p->kernels->panel);
}

void in_place_pack(const in_place_product *p, float *columns)
{
    const int32_t panel = p->kernels->panel;
    for (int64_t t = 0; t < panels_of(p); t++)
        for (int64_t word = 0; word < words_of(p, p->a.dim); word += PIECE_WORDS) {
            const int64_t left = p->a.rows - t * panel;
            const row_source src = {at(&p->a, t * panel, elements_of(p, word)), p->a.dtype, p->a.stride,
                                    left < panel ? left : panel, elements_of(p, depth_at(p, word))};
            float *to = columns + columns_at(p, t, word);
            if (p->pairs) p->kernels->pack_keys_bf16(&src, panel, (uint32_t *)(void *)to);
            else p->kernels->pack_keys_f32(&src, panel, to);
        }
}

/* Requests a piece of the weight's rows first ... first + n - 1, as far as there are any. */
static void request(const in_place_product *p, int64_t first, int64_t n, int64_t word)
{
    const int64_t bytes = depth_at(p, word) * (int64_t)sizeof(float),
                  step = words_of(p, p->w.stride) * (int64_t)sizeof(float),
                  end = first + n < p->w.rows ? first + n : p->w.rows;
    const char *row = at(&p->w, first, elements_of(p, word));
    for (int64_t i = first; i < end; i++, row += step)
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
}

/* Outputs first ... first + n - 1 of a's panel t, of a piece, in blocks between which the weights that follow
 * are requested. */
static void multiply_piece(const in_place_product *p, const float *columns, int64_t t, int64_t word,
                           int64_t first, int64_t n, float *sums)
{
    const int32_t panel = p->kernels->panel;
    const int64_t left = p->a.rows - t * panel, depth = depth_at(p, word), words = words_of(p, p->a.dim),
                  stride = words_of(p, p->w.stride);
    const bool last = word + depth == words;
    mm_kernel *mm = p->pairs ? p->kernels->mm_weights_bf16 : p->kernels->mm_f32;
    const int64_t between = p->pairs && mm != p->kernels->mm_bf16 ? TILE_OUTPUTS : OUTPUTS_BETWEEN;
    for (int64_t i = 0; i < n; i += between) {
        const int64_t outputs = n - i < between ? n - i : between;
        if (t == 0) request(p, first + i + (last ? n : 0), outputs, last ? 0 : word + depth);
        mm(outputs, left < panel ? left : panel, depth, at(&p->w, first + i, elements_of(p, word)), stride, 1,
           columns + columns_at(p, t, word), panel, sums + i * IN_PLACE_PITCH + t * panel, IN_PLACE_PITCH,
           word > 0);
    }
}

void in_place_multiply(const in_place_product *p, const float *columns, int64_t first, int64_t n, float *sums)
{
    const int32_t panel = p->kernels->panel;
    const int64_t words = words_of(p, p->a.dim);
    float *turned = sums + IN_PLACE_OUTPUTS * IN_PLACE_ROWS;
    for (int64_t word = 0; word == 0 || word < words; word += PIECE_WORDS)
        for (int64_t t = 0; t < panels_of(p); t++) multiply_piece(p, columns, t, word, first, n, turned);
    for (int64_t i = 0; i < n; i += panel) {
        const row_source rows = {turned + i * IN_PLACE_PITCH, QUERN_F32, IN_PLACE_PITCH,
                                 n - i < panel ? n - i : panel, p->a.rows};
        p->kernels->pack_keys_f32(&rows, panel, sums + i * p->a.rows);
    }
}
