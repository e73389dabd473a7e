/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* select_choose.c - a tile's lists from its entry scores. Entry scores become block scores by overlap in
 * space. The forced blocks and the best of the rest form the list, in ascending order. Also chooses the
 * groups of entries that the compressed branch keeps. */
#include "cpu/rows_at.h"
#include "cpu/kernels/select/select.h"

#include <math.h>
#include <string.h>

/* s[J] = sum over m < l'/d, n < l/d of p[(l'/d) J + m - n]: an entry counts as often as it overlaps the
 * block. */
static void map_to_blocks(const select_plan *p, const float *entries, int64_t seen, int64_t first,
                          int64_t end, float *scores)
{
    const select_args *n = p->args;
    const int64_t per_block = n->rule.select_block / n->rule.stride,
                  per_entry = n->rule.block_size / n->rule.stride;
    for (int64_t j = first; j < end; j++) {
        const int64_t low = per_block * j - per_entry + 1,
                      high = per_block * (j + 1); /* entries that touch block j */
        float sum = 0.0f;
        for (int64_t i = low > 0 ? low : 0; i < high && i < seen; i++) {
            int64_t times = i - low + 1 < high - i ? i - low + 1 : high - i;
            if (times > per_block) times = per_block;
            if (times > per_entry) times = per_entry;
            sum += (float)times * entries[i];
        }
        scores[j] = sum;
    }
}

/* Chooses groups of 128 entries: first those with the newest entries that the tile's first and last query
 * see, then the best by the mean score of their visible entries. */
static void choose_groups(const select_plan *p, const float *entries, int64_t seen_first, int64_t seen,
                          select_scratch *s, int32_t *out)
{
    const int64_t want = p->args->group_k, groups = mask_blocks(seen, STAGE_GROUP_ENTRIES);
    int64_t count = 0, skip = -1;
    int64_t rest = groups; /* candidates: all groups but the last and `skip` */
    if (p->args->causal && groups > 0) {
        rest--;
        s->chosen[count++] = (int32_t)rest;
        if (seen_first > 0 && (seen_first - 1) / STAGE_GROUP_ENTRIES != rest) {
            skip = (seen_first - 1) / STAGE_GROUP_ENTRIES;
            s->chosen[count++] = (int32_t)skip;
            rest--;
        }
    }
    for (int64_t i = 0; i < rest; i++) {
        const int64_t g = i + (skip >= 0 && i >= skip), first = g * STAGE_GROUP_ENTRIES;
        const int64_t n = seen - first < STAGE_GROUP_ENTRIES ? seen - first : STAGE_GROUP_ENTRIES;
        float lanes[16] = {0}, sum = 0.0f;
        for (int64_t x = 0; x < n; x++) lanes[x % 16] += entries[first + x];
        for (int x = 0; x < 16; x++) sum += lanes[x];
        s->scores[i] = sum / (float)n;
    }
    const int64_t found =
        p->kernels->best_of(s->scores, 0, rest, want - count < rest ? want - count : rest, s->best);
    for (int64_t i = 0; i < found; i++) {
        const int32_t x = rank_index(s->best[i]);
        s->chosen[count++] = x + (skip >= 0 && x >= skip);
    }
    attend_list_sort(s->chosen, count);
    for (int64_t i = 0; i < want; i++) out[i] = i < count ? s->chosen[i] : -1;
}

void select_choose(const select_plan *p, const attend_sequence *seq, int64_t list_head, int64_t tile,
                   int64_t row, float *entries, select_scratch *s)
{
    const select_args *n = p->args;
    const int64_t first = tile * p->tile, end = first + p->tile < seq->nq ? first + p->tile : seq->nq,
                  view_b = seq->view_b;
    const int64_t seen = select_seen(p, seq, end - 1);
    if (is_present(&n->groups))
        choose_groups(p, entries, select_seen(p, seq, first), seen, s,
                      row_at(&n->groups, view_b, list_head, row));
    if (!is_present(&n->blocks)) return;

    const int64_t candidates = mask_blocks_seen(n->causal, seq->nq, end - 1, n->rule.select_block);
    const int64_t forced_first = n->rule.forced_first < candidates ? n->rule.forced_first : candidates;
    int64_t local = candidates; /* blocks local ... candidates - 1 are forced */
    if (n->causal && n->rule.forced_local > 0)
        local = first / n->rule.select_block - (n->rule.forced_local - 1);
    if (local < forced_first) local = forced_first;
    int64_t want = n->rule.k - forced_first - (candidates - local);
    if (want > local - forced_first) want = local - forced_first;

    const float *scores = entries;
    if (n->rule.scorer == SELECT_MEAN_LOGIT) {
        for (int64_t j = seen; j < candidates; j++) entries[j] = -INFINITY;
    } else if (n->rule.select_block != n->rule.stride || n->rule.block_size != n->rule.stride) {
        map_to_blocks(p, entries, seen, forced_first, local, s->scores);
        scores = s->scores;
    }
    const int64_t found = p->kernels->best_of(scores, forced_first, local, want, s->best);
    for (int64_t i = 0; i < found; i++) s->chosen[i] = rank_index(s->best[i]);
    const int32_t count = select_write_list(forced_first, s->chosen, found, local, candidates, n->rule.k,
                                            row_at(&n->blocks, view_b, list_head, row));
    if (is_present(&n->count)) *(int32_t *)row_at(&n->count, view_b, list_head, row) = count;
}

int32_t select_index_list(const nsa_kernels *kernels, const index_rule *rule, const float *scores,
                          int64_t position, int64_t candidates, uint64_t *best, int32_t *chosen, int32_t *out)
{
    const int64_t first = rule->forced_first < candidates ? rule->forced_first : candidates;
    int64_t local = candidates; /* blocks local ... candidates - 1 are forced */
    if (candidates > 0 && rule->forced_local > 0)
        local = position / rule->block_size - (rule->forced_local - 1);
    if (local > candidates) local = candidates;
    if (local < first) local = first;
    if (candidates <= rule->k) local = first; /* all of them */
    const int64_t want = rule->k - first - (candidates - local),
                  found = local > first ? kernels->best_of(scores, first, local, want, best) : 0;
    for (int64_t i = 0; i < found; i++) chosen[i] = rank_index(best[i]);
    return select_write_list(first, chosen, found, local, candidates, rule->k, out);
}
