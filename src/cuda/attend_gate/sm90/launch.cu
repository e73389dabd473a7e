/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls of NSA's branches and gate Hopper's one kernel takes, and which instance. */
#include "attend/any.cuh"
#include "common/tail.cuh"
#include "attend_gate/sm90/params.cuh"
#include "variants.cuh"

/* The selection, where the stage has to make it: before any branch, so without the compressed one's lse. */
static select_args select_of(const attend_gate_args *args)
{
    select_args select = args->select;
    select.lse = {};
    return select;
}

/* Whether it takes the kernels for head dims above 64. */
static bool is_wide(const attend_args *branch)
{
    return branch->q.shape[3] > 64 || branch->v.shape[3] > 64;
}

/* Rows of a list. */
static int64_t rows_of_list(const attend_args *listed)
{
    const int64_t group = listed->q.shape[2] / listed->k.shape[2];
    return listed->tile * (listed->scope == LIST_BY_HEAD ? 1 : group);
}

/* Whether a piece of 128 rows holds whole lists, whose masks hold all blocks (sm90_few/kernel.cuh). */
static bool lists_are_few(const attend_args *listed)
{
    const int64_t rows = rows_of_list(listed), block = listed->block_size;
    return rows >= 128 / SM90_MASKS && rows <= 32 && block % 64 == 0 &&
           mask_blocks(listed->k.shape[1], block) <= 32 * SM90_MASK_WORDS;
}

/* Whether the kernel chooses the blocks itself: entries are blocks, and few. */
static bool chooses(const attend_gate_args *args)
{
    enum { LONGEST_TILE = 256 };
    const attend_args *const entries = &args->branch[0], *const listed = &args->branch[1];
    const select_args *const s = &args->select;
    const int64_t rows = rows_of_list(listed), most = 32 * SM90_MASK_WORDS;
    if (args->select_given || present(s->groups) || s->rule.block_size != s->rule.stride ||
        s->rule.select_block != s->rule.stride || entries->k.shape[1] > most ||
        mask_blocks(listed->k.shape[1], s->rule.select_block) > most)
        return false;
    if (lists_are_few(listed))
        return s->rule.scorer == SELECT_PROBABILITY && (rows == 4 || rows == 8 || rows == 16);
    return s->rule.scorer == SELECT_MEAN_LOGIT && listed->scope == LIST_BY_HEAD &&
           listed->tile <= LONGEST_TILE && s->rule.k <= SM90_GATED_LIST;
}

/* Measured (docs/notes/attend-gate-sm90.md): sequences gain the launches and the gate's pass, the longest
 * ones nothing; of D 64 only short ones were measured. Lists of few rows pay as long as all keys of a piece
 * are not many more than its lists name: the more rows a list has, the fewer lists share them. Else several
 * heads a piece cost more for their gates than they save. Where a list has room for every block, other
 * kernels need not select, and two branches are one. A softmax over entries takes the compressed branch's
 * lse, which only separate stages have at that time. */
static bool pays(const stage_exec *exec, const attend_gate_args *args)
{
    enum { LONGEST = 8192, WIDE_LONGEST = 1 << 18, FEW_LONGEST = 3 << 14 };
    if (exec->variant != NULL && strcmp(exec->variant, "attend_gate_sm90") == 0) return true;
    const attend_args *const listed = &args->branch[1];
    const int64_t n = listed->seqs.n_q;
    if (n <= listed->block_size * listed->list.shape[3] || n > (is_wide(listed) ? WIDE_LONGEST : LONGEST))
        return false;
    if (lists_are_few(listed)) return n * rows_of_list(listed) <= FEW_LONGEST;
    if (!args->select_given && args->select.rule.scorer != SELECT_MEAN_LOGIT) return false;
    return listed->scope == LIST_BY_HEAD;
}

/* Whether Hopper's forward would take a branch; `few`: a list's blocks as all keys. */
static bool takes_branch(const stage_exec *exec, const attend_args &branch, bool few)
{
    char limits[STAGE_WHY_BYTES];
    attend_args b = branch;
    if (few) {
        b.mask = ATTEND_RANGE;
        b.list = {};
        b.query_offset = -1;
        b.window = 0;
    }
    return !present(branch.o) && branch.q.shape[3] <= 128 && branch.v.shape[3] <= 128 &&
           branch.k.shape[1] > 0 && attend_forward_sm90_supports(exec, &b, limits);
}

static bool attend_gate_sm90_supports(const stage_exec *exec, const attend_gate_args *args, char *)
{
    const uint32_t all = (1u << SM90_BRANCHES) - 1;
    char limits[STAGE_WHY_BYTES];
    if (args->branches != all || !present(args->gate.o) || !rows_aligned16(args->gate.o)) return false;
    const attend_args &listed = args->branch[1];
    if (!present(listed.list) || present(args->branch[0].list) || present(args->branch[2].list) ||
        listed.k.shape[2] == 0)
        return false;
    const bool few = lists_are_few(&listed);
    for (int i = 0; i < SM90_BRANCHES; i++)
        if (!takes_branch(exec, args->branch[i], few && i == 1)) return false;
    const select_args select = select_of(args);
    return (few || listed.list.shape[3] <= SM90_GATED_LIST) && pays(exec, args) &&
           (args->select_given || chooses(args) || select_variants.choose(exec, &select, limits) != NULL);
}

static size_t attend_gate_sm90_bytes(const stage_exec *exec, const attend_gate_args *args)
{
    const select_args select = select_of(args);
    const bool selects = !args->select_given && !chooses(args);
    const size_t bytes = selects ? select_variants.workspace(exec, &select) : 0;
    return bytes > (size_t)SM90_COUNT_BYTES ? bytes : (size_t)SM90_COUNT_BYTES;
}

/* The lists that the kernel makes, and where they are written. */
static sm90_choice choice_of(const attend_gate_args *args)
{
    const select_args *const s = &args->select;
    sm90_choice c = {};
    c.here = chooses(args);
    if (!c.here) return c;
    c.scale = s->rule.scale;
    c.rule = contest_rule_of(s->rule);
    c.blocks = args->lists_wanted ? (int32_t *)s->blocks.data : NULL;
    c.count = (int32_t *)s->count.data;
    c.rows = s->blocks.shape[2];
    for (int i = 0; i < 3; i++) {
        c.stride[i] = s->blocks.strides[i];
        c.count_stride[i] = present(s->count) ? s->count.strides[i] : 0;
    }
    return c;
}

static sm90_seen seen_of(const attend_kernel &a)
{
    constexpr int64_t MOST = 1 << 29; /* no sequence has as many keys */
    const bool range = a.mask == ATTEND_RANGE;
    const int64_t position = range && a.query_offset > 0 ? a.query_offset : 0;
    int64_t before = -MOST, after = a.causal ? position + 1 : MOST;
    sm90_seen seen = {0, 0, fast_div_by(1), range && a.query_offset < 0};
    if (range && a.window > 0) {
        before = position - (a.causal ? a.window - 1 : a.window / 2);
        if (!a.causal) after = position + a.window / 2 + 1;
    }
    if (a.mask == ATTEND_COMPRESSED && a.causal) {
        if (a.visibility == ENTRY_COMPLETE) after = 2 - a.block_size;
        seen.stride = fast_div_by((uint32_t)(a.stride < INT32_MAX ? a.stride : INT32_MAX));
    }
    seen.before = (int32_t)(before > -MOST ? before : -MOST);
    seen.after = (int32_t)(after < MOST ? after > -MOST ? after : -MOST : MOST);
    return seen;
}

/* The branches without lists have the rows of the one with lists. */
static sm90_gated gated_of(const attend_gate_args *args)
{
    sm90_gated a = {};
    const attend_kernel listed = attend_launch_of(&args->branch[1]).kernel;
    for (int i = 0; i < SM90_BRANCHES; i++) {
        a.branch[i] = attend_launch_of(&args->branch[i]).kernel;
        a.branch[i].hs = listed.hs;
        a.branch[i].units = listed.units;
        a.branch[i].by_hs = listed.by_hs;
        a.branch[i].tile = listed.tile;
        a.seen[i] = seen_of(a.branch[i]);
    }
    a.choice = choice_of(args);
    a.behind = args->behind_compress || (!args->select_given && !a.choice.here);
    a.by_mask = a.choice.here ? fast_div_by(128 / SM90_MASKS) : listed.by_tile_rows;
    a.o = view4_of(args->gate.o);
    a.gates = view4_of(args->gate.gates);
    a.gate = args->gate.kind;
    a.w = args->gate.w_gate.data;
    a.w_stride[0] = args->gate.w_gate.strides[0];
    a.w_stride[1] = args->gate.w_gate.strides[1];
    a.w_f32 = args->gate.w_gate.dtype == QUERN_F32;
    a.w_vec = rows_aligned16(args->gate.w_gate);
    return a;
}

static quern_status attend_gate_sm90_run(const stage_exec *exec, const attend_gate_args *args,
                                         void *workspace)
{
    static sm90_attend_gated *const table[2][2] = {{sm90_gated_bf16_64, sm90_gated_bf16_128},
                                                   {sm90_gated_f16_64, sm90_gated_f16_128}};
    static sm90_attend_gated *const few[2][2] = {{sm90_gated_few_bf16_64, sm90_gated_few_bf16_128},
                                                 {sm90_gated_few_f16_64, sm90_gated_few_f16_128}};
    const select_args select = select_of(args);
    const attend_args &listed = args->branch[1];
    const sm90_gated a = gated_of(args);
    const bool f16 = listed.q.dtype == QUERN_F16, wide = is_wide(&listed);
    quern_status status = QUERN_OK;
    sm90_attend_gated *const kernel = lists_are_few(&listed) ? few[f16][wide] : table[f16][wide];
    if (!args->select_given && !chooses(args)) status = select_variants.run(exec, &select, workspace);
    if (status == QUERN_OK)
        status = kernel(args, a, {exec->multiprocessors}, workspace, (cudaStream_t)exec->stream);
    for (int i = 0; i < SM90_BRANCHES && status == QUERN_OK; i++) status = attend_end(exec, &args->branch[i]);
    if (status == QUERN_OK) status = fill_tail(exec, &listed.seqs, true, &args->gate.o, 0.0f);
    if (status == QUERN_OK && args->gate.kind != GATE_GIVEN)
        status = fill_tail(exec, &listed.seqs, true, &args->gate.gates, 0.0f);
    return status;
}

extern const variant<attend_gate_args> attend_gate_sm90 = {"attend_gate_sm90", attend_gate_sm90_supports,
                                                           attend_gate_sm90_bytes, attend_gate_sm90_run};
