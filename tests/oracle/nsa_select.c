/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_select.c - which blocks and groups a tile chooses, and the rule by which a library's lists are
 * judged where scores nearly tie. */
#include "dot.h"
#include "nsa.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { GROUP_ENTRIES = 128 };

static double *doubles(int64_t n)
{
    double *p = calloc((size_t)(n > 0 ? n : 1), sizeof *p);
    if (p == NULL) abort();
    return p;
}

static double scale_of(const oracle_nsa *a)
{
    return a->params.scale != 0 ? (double)a->params.scale : 1 / sqrt((double)a->d);
}

static bool entry_visible(const oracle_nsa *a, int64_t entry, int64_t query)
{
    const int64_t start = entry * oracle_nsa_stride(a);
    if (!a->params.causal) return true;
    if (a->params.compressed_visibility == QUERN_NSA_VISIBLE_STARTED) return start <= query;
    return start + a->params.block_size - 1 <= query;
}

/* Index of the newest entry that a query sees, -1 if none: it sees all before it. */
static int64_t newest_entry(const oracle_nsa *a, int64_t query)
{
    int64_t newest = oracle_nsa_entries(a) - 1;
    while (newest >= 0 && !entry_visible(a, newest, query)) newest--;
    return newest;
}

/* The queries of a tile and the heads that share a list. */
typedef struct members {
    int64_t first, last, head, heads;
} members;

static members members_of(const oracle_nsa *a, int64_t list, int64_t tile)
{
    const int64_t heads = a->h / oracle_nsa_lists(a), end = (tile + 1) * a->params.tile;
    const members m = {tile * a->params.tile, (end < a->n ? end : a->n) - 1, list * heads, heads};
    return m;
}

static double product(const oracle_nsa *a, const double *q, const double *k_cmp, int64_t head, int64_t query,
                      int64_t entry)
{
    const double *x = q + (query * a->h + head) * a->d;
    const double *y = k_cmp + (entry * a->hkv + head / (a->h / a->hkv)) * a->d;
    return oracle_dot(x, y, a->d);
}

/* p[i] += softmax over the entries that the query sees. */
static void add_softmax(const oracle_nsa *a, const double *q, const double *k_cmp, int64_t head,
                        int64_t query, double *p)
{
    const int64_t nc = newest_entry(a, query) + 1;
    double *s = doubles(nc), max = -INFINITY, sum = 0;
    const double scale = scale_of(a);
    for (int64_t i = 0; i < nc; i++) {
        s[i] = scale * product(a, q, k_cmp, head, query, i);
        if (s[i] > max || isnan(s[i])) max = s[i];
    }
    for (int64_t i = 0; i < nc; i++) {
        s[i] = exp(s[i] - max);
        sum += s[i];
    }
    for (int64_t i = 0; i < nc; i++) p[i] += s[i] / sum;
    free(s);
}

/* Mean over the tile's queries and the group's heads: d numbers. */
static double *mean_query(const oracle_nsa *a, const double *q, members m)
{
    double *mean = doubles(a->d);
    for (int64_t query = m.first; query <= m.last; query++)
        for (int64_t head = m.head; head < m.head + m.heads; head++)
            for (int64_t c = 0; c < a->d; c++) mean[c] += q[(query * a->h + head) * a->d + c];
    for (int64_t c = 0; c < a->d; c++) mean[c] /= (double)((m.last - m.first + 1) * m.heads);
    return mean;
}

/* Mean of the logits with one entry. */
static double mean_logit(const oracle_nsa *a, const double *mean, const double *k_cmp, members m,
                         int64_t entry)
{
    const double *y = k_cmp + (entry * a->hkv + m.head / (a->h / a->hkv)) * a->d;
    return scale_of(a) * oracle_dot(mean, y, a->d);
}

static void mark_forced(const oracle_nsa *a, members m, int64_t blocks, oracle_choice *choices)
{
    const int64_t block = oracle_nsa_select_block(a), touched = m.first / block;
    for (int64_t j = 0; j < blocks; j++) {
        bool forced = j < a->params.forced_first;
        if (a->params.causal && a->params.forced_local > 0)
            forced |= j >= touched - (a->params.forced_local - 1) && j <= m.last / block;
        choices[j].forced = forced && choices[j].candidate;
    }
}

void oracle_nsa_block_choices(const oracle_nsa *a, const double *q, const double *k_cmp, int64_t list,
                              int64_t tile, oracle_choice *choices)
{
    const members m = members_of(a, list, tile);
    const int64_t nc = oracle_nsa_entries(a), blocks = oracle_nsa_blocks(a), d = oracle_nsa_stride(a);
    const int64_t block = oracle_nsa_select_block(a), per_block = block / d,
                  per_entry = a->params.block_size / d;
    const bool softmax = a->params.metric == QUERN_NSA_METRIC_SOFTMAX;
    double *p = softmax ? doubles(nc) : NULL, *mean = softmax ? NULL : mean_query(a, q, m);
    for (int64_t query = m.first; softmax && query <= m.last; query++)
        for (int64_t head = m.head; head < m.head + m.heads; head++) add_softmax(a, q, k_cmp, head, query, p);
    for (int64_t j = 0; j < blocks; j++) {
        oracle_choice c = {0, !a->params.causal || j * block <= m.last, false, false};
        if (softmax) {
            for (int64_t x = 0; x < per_block; x++) {
                for (int64_t y = 0; y < per_entry; y++) {
                    const int64_t i = per_block * j + x - y;
                    if (i < 0 || i >= nc) continue;
                    c.score += p[i];
                    c.counts |= entry_visible(a, i, m.last);
                }
            }
        } else {
            c.counts = j < nc && entry_visible(a, j, m.last);
            c.score = c.counts ? mean_logit(a, mean, k_cmp, m, j) : -INFINITY;
        }
        choices[j] = c;
    }
    mark_forced(a, m, blocks, choices);
    free(p);
    free(mean);
}

void oracle_nsa_group_choices(const oracle_nsa *a, const double *q, const double *k_cmp, int64_t list,
                              int64_t tile, oracle_choice *choices)
{
    const members m = members_of(a, list, tile);
    const int64_t nc = oracle_nsa_entries(a), groups = (nc + GROUP_ENTRIES - 1) / GROUP_ENTRIES;
    const int64_t newest_first = newest_entry(a, m.first), newest_last = newest_entry(a, m.last);
    double *mean = mean_query(a, q, m);
    for (int64_t g = 0; g < groups; g++) {
        oracle_choice c = {0, false, false, false};
        int64_t visible = 0;
        for (int64_t i = g * GROUP_ENTRIES; i < nc && i < (g + 1) * GROUP_ENTRIES; i++) {
            if (!entry_visible(a, i, m.last)) continue;
            c.score += mean_logit(a, mean, k_cmp, m, i);
            visible++;
        }
        c.candidate = c.counts = visible > 0;
        c.score = visible > 0 ? c.score / (double)visible : -INFINITY;
        if (a->params.causal && c.candidate)
            c.forced =
                g == newest_last / GROUP_ENTRIES || (newest_first >= 0 && g == newest_first / GROUP_ENTRIES);
        choices[g] = c;
    }
    free(mean);
}

/* 2: a number or +inf; 1: -inf; 0: NaN. */
static int rank_class(double score)
{
    return isnan(score) ? 0 : score == -INFINITY ? 1 : 2;
}

/* True if candidate i goes before candidate j: forced, higher score, lower index. */
static bool before(const oracle_choice *c, int64_t i, int64_t j)
{
    if (c[i].forced != c[j].forced) return c[i].forced;
    if (rank_class(c[i].score) != rank_class(c[j].score))
        return rank_class(c[i].score) > rank_class(c[j].score);
    if (rank_class(c[i].score) == 2 && c[i].score != c[j].score) return c[i].score > c[j].score;
    return i < j;
}

/* Fills ranked with the first `most` candidates in order; returns how many candidates there are. */
static int64_t rank_candidates(const oracle_choice *choices, int64_t count, int64_t *ranked, int64_t most)
{
    int64_t n = 0, candidates = 0;
    for (int64_t j = 0; j < count; j++) {
        if (!choices[j].candidate) continue;
        candidates++;
        if (n == most && !before(choices, j, ranked[n - 1])) continue;
        int64_t at = n < most ? n++ : n - 1;
        for (; at > 0 && before(choices, j, ranked[at - 1]); at--) ranked[at] = ranked[at - 1];
        ranked[at] = j;
    }
    return candidates;
}

static int64_t *indices(int64_t n)
{
    int64_t *p = malloc(sizeof *p * (size_t)(n > 0 ? n : 1));
    if (p == NULL) abort();
    return p;
}

int32_t oracle_nsa_pick(const oracle_choice *choices, int64_t count, int64_t k, int32_t *list)
{
    int64_t *ranked = indices(k);
    const int64_t candidates = rank_candidates(choices, count, ranked, k),
                  taken = candidates < k ? candidates : k;
    for (int64_t r = 0; r < taken; r++) { /* in order of the index */
        int64_t at = r;
        for (; at > 0 && list[at - 1] > ranked[r]; at--) list[at] = list[at - 1];
        list[at] = (int32_t)ranked[r];
    }
    for (int64_t r = taken; r < k; r++) list[r] = -1;
    free(ranked);
    return (int32_t)taken;
}

/* The tolerant half of the rule: `edge` is rank k's score, all scores at the edge are finite. */
static bool within_tolerance(const oracle_choice *choices, int64_t count, const bool *chosen, double edge,
                             double tolerance, char why[200])
{
    bool skipped_uncounted = false;
    for (int64_t j = 0; j < count; j++) {
        const oracle_choice c = choices[j];
        if (!c.candidate || c.forced) continue;
        if (chosen[j] && !(c.score >= edge - tolerance)) {
            snprintf(why, 200, "index %" PRId64 " of score %.9g chosen, rank k has %.9g", j, c.score, edge);
            return false;
        }
        if (!chosen[j] && c.score > edge + tolerance) {
            snprintf(why, 200, "index %" PRId64 " of score %.9g left out, rank k has %.9g", j, c.score, edge);
            return false;
        }
        if (!c.counts && chosen[j] && skipped_uncounted) {
            snprintf(why, 200, "index %" PRId64 " counts no entry and came before a lower such index", j);
            return false;
        }
        skipped_uncounted |= !c.counts && !chosen[j];
    }
    return true;
}

bool oracle_nsa_accepts(const oracle_choice *choices, int64_t count, int64_t k, const int32_t *list,
                        char why[200])
{
    int64_t *ranked = indices(k + 1);
    int32_t *expected = malloc(sizeof *expected * (size_t)k);
    bool *chosen = calloc((size_t)(count > 0 ? count : 1), 1), good = true;
    if (expected == NULL || chosen == NULL) abort();
    const int64_t candidates = rank_candidates(choices, count, ranked, k + 1);
    const int32_t taken = oracle_nsa_pick(choices, count, k, expected);
    for (int64_t r = 0; r < k && good; r++) {
        const int32_t j = list[r];
        good =
            r >= taken ? j == -1 : j >= 0 && j < count && choices[j].candidate && (r == 0 || j > list[r - 1]);
        if (!good)
            snprintf(why, 200, "entry %" PRId64 " is %d, with %d candidates of %" PRId64 " to take", r, j,
                     taken, candidates);
        else if (r < taken) chosen[j] = true;
    }
    for (int64_t j = 0; j < count && good; j++) {
        good = !choices[j].forced || chosen[j];
        if (!good) snprintf(why, 200, "forced index %" PRId64 " is missing", j);
    }
    if (good && candidates > k && !choices[ranked[k]].forced) {
        const double below = choices[ranked[k]].score;
        const double edge = choices[ranked[k - 1]].forced ? INFINITY : choices[ranked[k - 1]].score;
        double largest = 0;
        for (int64_t j = 0; j < count; j++)
            if (choices[j].candidate && !choices[j].forced && isfinite(choices[j].score))
                largest = fmax(largest, fabs(choices[j].score));
        if (isfinite(edge) && isfinite(below) && edge - below <= 1e-5 * largest) {
            good = within_tolerance(choices, count, chosen, edge, 1e-5 * largest, why);
        } else {
            for (int64_t r = 0; r < k && good; r++) {
                good = list[r] == expected[r];
                if (!good)
                    snprintf(why, 200, "entry %" PRId64 " is %d, expected %d; scores at the edge %.9g %.9g",
                             r, list[r], expected[r], edge, below);
            }
        }
    }
    free(ranked);
    free(expected);
    free(chosen);
    return good;
}

/* One walk over all lists, for choosing and for judging. */
typedef struct walk {
    int32_t *block_idx, *block_count, *group_idx;             /* written */
    const int32_t *given_idx, *given_count, *given_group_idx; /* judged */
    char *why;
} walk;

static bool one_list(const oracle_choice *choices, int64_t count, int64_t k, int32_t *out,
                     const int32_t *given, int32_t *taken, char *why)
{
    int32_t *list = malloc(sizeof *list * (size_t)k);
    if (list == NULL) abort();
    *taken = oracle_nsa_pick(choices, count, k, list);
    for (int64_t r = 0; out != NULL && r < k; r++) out[r] = list[r];
    free(list);
    return given == NULL || oracle_nsa_accepts(choices, count, k, given, why);
}

static bool visit(const oracle_nsa *a, const double *q, const double *k_cmp, int64_t list_rows, walk w)
{
    const int64_t blocks = oracle_nsa_blocks(a), tiles = oracle_nsa_tiles(a), k = a->params.num_selected;
    const int64_t groups = (oracle_nsa_entries(a) + GROUP_ENTRIES - 1) / GROUP_ENTRIES;
    const int64_t c = a->params.max_compressed_groups, most = blocks > groups ? blocks : groups;
    oracle_choice *choices = malloc(sizeof *choices * (size_t)(most > 0 ? most : 1));
    if (choices == NULL) abort();
    bool good = true;
    for (int64_t list = 0; list < oracle_nsa_lists(a) && good; list++) {
        for (int64_t tile = 0; tile < tiles && good; tile++) {
            const int64_t row = list * (list_rows > 0 ? list_rows : tiles) + tile;
            char what[200] = "";
            int32_t taken;
            oracle_nsa_block_choices(a, q, k_cmp, list, tile, choices);
            good = one_list(choices, blocks, k, w.block_idx != NULL ? w.block_idx + row * k : NULL,
                            w.given_idx != NULL ? w.given_idx + row * k : NULL, &taken, what);
            if (w.block_count != NULL) w.block_count[row] = taken;
            if (good && w.given_count != NULL && w.given_count[row] != taken) {
                good = false;
                snprintf(what, sizeof what, "count %d, expected %d", w.given_count[row], taken);
            }
            if (good && c > 0 && (w.group_idx != NULL || w.given_group_idx != NULL)) {
                oracle_nsa_group_choices(a, q, k_cmp, list, tile, choices);
                good = one_list(choices, groups, c, w.group_idx != NULL ? w.group_idx + row * c : NULL,
                                w.given_group_idx != NULL ? w.given_group_idx + row * c : NULL, &taken, what);
            }
            if (!good) snprintf(w.why, 200, "list %" PRId64 " tile %" PRId64 ": %.120s", list, tile, what);
        }
    }
    free(choices);
    return good;
}

void oracle_nsa_select(const oracle_nsa *a, const double *q, const double *k_cmp, int64_t list_rows,
                       int32_t *block_idx, int32_t *block_count, int32_t *group_idx)
{
    const walk w = {block_idx, block_count, group_idx, NULL, NULL, NULL, NULL};
    visit(a, q, k_cmp, list_rows, w);
}

bool oracle_nsa_judge(const oracle_nsa *a, const double *q, const double *k_cmp, int64_t list_rows,
                      const int32_t *block_idx, const int32_t *block_count, const int32_t *group_idx,
                      char why[200])
{
    const walk w = {NULL, NULL, NULL, block_idx, block_count, group_idx, why};
    return visit(a, q, k_cmp, list_rows, w);
}

static int ascending(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

int32_t oracle_nsa_list_convert(const int32_t *in, int64_t k_in, int64_t from, int32_t *out, int64_t k_out,
                                int64_t to, int64_t n)
{
    const int64_t parts = from > to ? from / to : 1;
    int32_t *all = malloc(sizeof *all * (size_t)(k_in * parts + 1)), count = 0;
    int64_t found = 0;
    if (all == NULL) abort();
    for (int64_t i = 0; i < k_in; i++) {
        if (in[i] < 0 || in[i] * from >= n) continue;
        for (int64_t part = 0; part < parts; part++) {
            const int64_t block = in[i] * from / to + part;
            if (block * to < n) all[found++] = (int32_t)block;
        }
    }
    qsort(all, (size_t)found, sizeof *all, ascending);
    for (int64_t i = 0; i < found; i++)
        if ((i == 0 || all[i] != all[i - 1]) && count < k_out) out[count++] = all[i];
    for (int64_t i = count; i < k_out; i++) out[i] = -1;
    free(all);
    return count;
}
