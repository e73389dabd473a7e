/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * op.h - what every operation shares: the size rule of the structs that callers fill, the description of a
 * family's tensors and parameters, the checks that follow from it, and calls and plans over these.
 *
 * A family describes its operations once (op_family): which tensors and parameters there are, a function that
 * derives the extents, one that says what role each tensor has. From these op_prepare() checks a caller's
 * structs and lets the family build its program of stages. op_run() then needs no more than the pointers: an
 * ordinary call does both, a plan keeps what op_prepare() made.
 *
 * Symbolic pointers. While stages' arguments are filled, a view's `data` is no address: its high bits say of
 * which tensor of the call it is (or that it is of the workspace), its low bits how far into it.
 * view_narrow() and the like work on it as on an address, and it has the alignment of the address to come.
 * op_frame turns it into that address.
 */
#ifndef QUERN_CORE_OP_H
#define QUERN_CORE_OP_H

#include "backend.h"
#include "core/op_program.h"
#include "core/view.h"

#include <quern/op.h>

#include <stddef.h>

/* ---- the size rule ---- */

/* `known` is this library's struct at its defaults, size set; the bytes of `given`, whose size may differ,
 * are copied over it. A smaller struct leaves the rest at the defaults. A larger one is accepted where its
 * tail is zero. Refused are NULL, a size that no struct has, and a tail with a nonzero byte; *known is
 * then unspecified. */
quern_status op_struct(void *known, const void *given, const char *name, const char *init);
/* The reverse, for a struct that the library fills: copies *known over the fields that `given` has.
 * `given` has passed op_struct(). */
void op_struct_give(void *given, const void *known);

/* *exec from what the caller gave; NULL: the defaults. */
quern_status op_exec(const quern_exec *given, quern_exec *exec);

/* ---- the description of a family ---- */

enum { OP_TENSORS_MAX = QUERN_OP_TENSORS_MAX, OP_SYMBOLS_MAX = 32, OP_ASKED = 4 };

/* A tensor's number: the place of its field after `size` in the family's struct, of which all others are
 * pointers; how many there are. */
#define OP_TENSOR(type, field) ((int)(offsetof(type, field) / sizeof(void *)) - 1)
#define OP_TENSOR_COUNT(type) ((int)(sizeof(type) / sizeof(void *)) - 1)

/* Which dtypes a tensor may have. */
typedef enum op_dtype {
    OP_ACTIVATION, /* that of call->like */
    OP_WEIGHT,     /* the same, or f32 */
    OP_FLOAT,      /* f32, f16 or bf16, whatever the others have */
    OP_F32,
    OP_GLOBAL, /* f32, scales: one number may be [] or [1], others may have a last extent of 1 more */
    OP_I32,
    OP_INDEX, /* i32 or i64 */
    OP_I64,
    OP_U8,
    OP_CODES,         /* bytes of two E2M1: u8 or e2m1x2 */
    OP_SCALE,         /* bytes of E4M3: u8 or e4m3 */
    OP_EXPONENT,      /* bytes of E8M0: u8 or e8m0 */
    OP_STORED,        /* f32, f16, bf16, or u8: the family says which */
    OP_STORED_2,      /* the same, of a second result with a format of its own */
    OP_ANY,           /* those and the bytes above: the family says which */
    OP_SOURCE,        /* that of the tensor which it is the gradient of; f32 where that is not given */
    OP_SOURCE_OR_F32, /* the same, or f32, which is usual */
    OP_LIKE           /* that of the tensor before it in the list, an input of the same name in files */
} op_dtype;

/* A tensor. They stand in the order of the fields of the family's tensors struct, which are pointers after
 * `size`. A shape is a list of places in op_call.symbol, from 1 on; 0 ends it. OP_LEAD + i stands for all
 * the extents of call->lead[i], however many there are: leading ones, or the whole of a global's shape, which
 * may be [], [E] or [E, 2]. OP_HALF + i and the like stand for a part of the extent at i, as codes, NVFP4's
 * blocks and FP8's blocks have it. An empty varlen shape: as fixed. */
typedef struct op_tensor {
    const char *field, *name; /* in the struct, and in files */
    op_dtype dtype;
    int8_t gradient_of; /* the tensor that this is the gradient of, or OP_NONE */
    uint8_t fixed[QUERN_MAX_DIMS], varlen[QUERN_MAX_DIMS];
} op_tensor;
enum { OP_NONE = -1, OP_LEADS = 6, OP_LEAD = 256 - OP_LEADS };
enum {
    OP_HALF = OP_SYMBOLS_MAX,
    OP_SIXTEENTH = 2 * OP_SYMBOLS_MAX,
    OP_128TH = 3 * OP_SYMBOLS_MAX, /* rounded up */
};

typedef enum op_kind {
    OP_INTEGER,  /* int64_t */
    OP_FLAG,     /* bool */
    OP_ROOT,     /* float: 0, for 1/sqrt(D), or finite and positive */
    OP_POSITIVE, /* float: 0, for a default, or finite and positive */
    OP_LIMIT,    /* float: 0, for no clamp, or finite and positive */
    OP_NUMBER,   /* float: any finite one */
    OP_CHOICE,   /* an enum */
    OP_SET       /* uint32_t of or-ed bits */
} op_kind;

/* A parameter. */
typedef struct op_param {
    const char *field;
    size_t offset;
    op_kind kind;
    int64_t least, most; /* INTEGER, CHOICE, SET */
    const char *const
        *choices;     /* CHOICE: names from 0 on. SET: of the bits. FLAG: of false and true, or NULL */
    const char *help; /* NULL: follows from the tensors that a file holds */
} op_param;

/* The first members of a parameter's row. */
#define OP_FIELD(type, member) #member, offsetof(type, member)

/* What quern/op.h says of them; why one is refused, the family says. */
typedef quern_op_role op_role;
#define OP_UNUSED QUERN_OP_UNUSED
#define OP_NEEDED QUERN_OP_NEEDED
#define OP_OPTIONAL QUERN_OP_OPTIONAL
#define OP_RESULT QUERN_OP_RESULT
#define OP_OPTIONAL_RESULT QUERN_OP_OPTIONAL_RESULT
#define OP_REFUSED QUERN_OP_REFUSED
#define OP_SOURCE_MISSING QUERN_OP_SOURCE_MISSING
#define OP_UPDATED QUERN_OP_UPDATED

/* A parameter that is not chosen but follows from the tensors that are there: choice i where tensor by[i] is,
 * the choice of OP_NONE where none is. */
typedef struct op_mode {
    int8_t param, by[4];
} op_mode;

/* Another name, in an operation's files and options, of the tensor or parameter of a field. `when`: the field
 * of a flag that must be set; NULL: always. */
typedef struct op_rename {
    const char *field, *name, *when;
} op_rename;

/* An operation as files, commands and bindings know it. */
typedef struct quern_op {
    const char *name, *help;
    int8_t forward, backward; /* places among the family's operations; backward 0: there is none */
    const op_rename *renames; /* ends with a field of NULL; NULL: there are none */
    const char *fixed; /* the field of a parameter that is no option, at `fixed_to`; NULL: there is none */
    int64_t fixed_to;
    /* Results that are written to files only where the option asks for it, or the backward reads them; the
     * list ends with OP_NONE. */
    const char *aside;
    bool aside_valued; /* the option takes true or false */
    const int8_t *aside_tensors;
    const char *asked[OP_ASKED]; /* extents of results that follow from no input: options, op_call.asked */
} op_entry;

typedef struct op_extents {
    int32_t count;
    int64_t extent[QUERN_MAX_DIMS];
} op_extents;

/* A call or a plan: the head of a family's own struct, whose other members its functions fill. */
typedef struct op_call {
    const struct op_family *family;
    int32_t operation; /* its place in the family */
    bool varlen;
    const quern_backend *backend;
    stage_exec exec;                  /* without a stream */
    quern_tensor like;                /* a tensor of the call: device and dtype of activations */
    const quern_tensor *const *given; /* while it is prepared: the caller's views, or NULL */
    uint8_t role[OP_TENSORS_MAX];
    int32_t asks; /* while roles are asked why tensor asks - 1 has its role; 0: they are not */
    const char *why;
    uint8_t alignment[OP_TENSORS_MAX]; /* bytes, of a tensor with elements that the call uses; 0: of others */
    int64_t symbol[OP_SYMBOLS_MAX];
    op_extents lead[OP_LEADS];
    quern_dtype stored, stored_2; /* set by derive: the usual dtype of an OP_STORED, OP_STORED_2 result */
    int64_t
        asked[OP_ASKED]; /* where a result is absent: the extents that it is to have (quern_op_expect()) */
    bool contents; /* quern_op_expect(): derive may read index tensors that the host has, at their data */
    bool writes;   /* some result has elements */
    bool has_empty_result;
    int32_t given_count; /* entries of a plan's data: the pointers that the caller's struct has */
    size_t bytes;        /* of workspace */
    op_program program;
    void *replay; /* the backend's, by which the stages start as one; NULL: they start one by one */
} op_call;
/* What malloc() gives on every 64-bit machine. What wants more looks at the address when it runs. */
enum { OP_ALIGN_MOST = 16 };

/* The addresses of a call: its tensors', the workspace's, the status word's (which is exec.status, and stands
 * here because replays compare addresses). */
typedef struct op_frame {
    stage_exec exec;
    uintptr_t base[OP_TENSORS_MAX + 2];
} op_frame;
enum { OP_ADDRESSES_BYTES = (OP_TENSORS_MAX + 2) * sizeof(uintptr_t) };

enum { OP_REASON = 160 };

typedef struct op_family {
    const char *const *operations; /* their names, as in the public functions */
    int32_t operation_count;
    quern_operation first; /* the public number of the first */
    const op_tensor *tensors;
    int32_t tensor_count, varlen_by; /* the tensor whose presence makes a batch varlen; 0: none does */
    const op_param *params;
    int32_t param_count;
    const void *defaults; /* the parameters' struct, as its _INIT macro sets it */
    const char *params_init, *tensors_init;
    quern_status (*preset)(void *params, const char *name); /* NULL: there are none */
    const char *symbols;      /* the extents' names in shapes, from 1 on: a word each */
    const char *const *leads; /* those of the lists; NULL: "..." */
    const char *group;        /* the operations below, which share options; NULL: the name of the first */
    const op_entry *entries;
    const op_mode *modes;
    int32_t entry_count, mode_count;
    /* Of the family's struct, and where the parameters and the steps stand in it, the latter last and at a
     * multiple of 8. */
    size_t call_size, params_at, program_at;
    /* Tensors that others have the device and the dtype of: of the first one that a call uses. The list ends
     * with OP_NONE; NULL: tensor 0. */
    const int8_t *like;
    /* What they allow together, each in its range; resolves defaults. NULL: nothing. */
    quern_status (*check_params)(op_call *call);
    /* May replace the caller's views by views of the family; NULL: it does not. */
    void (*adapt)(op_call *call, const quern_tensor **given);
    /* Of every tensor, by parameters and `given`. Reasons that op_allow() and op_reason() do not give: */
    void (*roles)(op_call *call);
    /* Why a tensor is OP_REFUSED, as the sentence goes on behind "... is given": a constant, or in `text`. */
    const char *(*refuse)(const op_call *call, int32_t tensor, char text[OP_REASON]);
    /* Checks extents, and sets those that no tensor has: `like` is set, needed tensors are there, dtypes and
     * devices are right, and symbols have the extents of tensors that come in, but for those in shapes with
     * lists. NULL: nothing follows. */
    quern_status (*derive)(op_call *call);
    /* Writes an index tensor that follows from the others; NULL: none does. */
    quern_status (*complete)(const op_call *call, int32_t tensor, int32_t *data);
    /* What the host can read: offsets, globals. `data` as of quern_plan_run(). NULL: nothing. */
    quern_status (*check_data)(const op_call *call, void *const *data);
    void (*build)(op_build *b); /* the call's steps */
} op_family;

/* The tables of a family: arrays whose extents are known; of parameters maybe the first of a longer list. */
#define OP_TABLES(its_operations, its_params, its_symbols, its_entries)                                      \
    OP_TABLES_WITH(its_operations, its_params, sizeof(its_params) / sizeof *(its_params), its_symbols,       \
                   its_entries)
#define OP_TABLES_WITH(its_operations, its_params, count, its_symbols, its_entries)                          \
    .operations = (its_operations), .operation_count = sizeof(its_operations) / sizeof *(its_operations),    \
    .params = (its_params), .param_count = (count), .symbols = (its_symbols), .entries = (its_entries),      \
    .entry_count = sizeof(its_entries) / sizeof *(its_entries)
/* The table of its tensors: a row for each field of their struct, which `init` begins. */
#define OP_ROWS(rows, type, init)                                                                            \
    .tensors = (rows), .tensors_init = #init,                                                                \
    .tensor_count = sizeof(struct {                                                                          \
        _Static_assert(sizeof(rows) / sizeof *(rows) == OP_TENSOR_COUNT(type), "a row a tensor");            \
        char each[OP_TENSOR_COUNT(type)];                                                                    \
    })

/* Its struct: an op_call, parameters with their _INIT macro, and steps. */
#define OP_CALL(its_params, init, program_bytes)                                                             \
    .defaults = &(const its_params)init /* NOLINT(bugprone-macro-parentheses) */, .params_init = #init,      \
    .call_size = OP_PROGRAM_AT(its_params) + (program_bytes), .params_at = sizeof(op_call),                  \
    .program_at = OP_PROGRAM_AT(its_params)
#define OP_PROGRAM_AT(its_params)                                                                            \
    ((sizeof(op_call) + sizeof(its_params) + _Alignof(op_step) - 1) / _Alignof(op_step) * _Alignof(op_step))
/* The same where it has more members: `params` and `program` are two of its own. */
#define OP_OWN_CALL(call, init)                                                                              \
    .defaults = &(const __typeof__(((call *)NULL)->params))init /* NOLINT(bugprone-macro-parentheses) */,    \
    .params_init = #init, .call_size = sizeof(call), .params_at = offsetof(call, params),                    \
    .program_at = offsetof(call, program)

/* All families (quern.c); ends with NULL. */
extern const op_family *const quern_families[];

/* ---- for a family's functions ---- */

static inline bool op_uses(const op_call *call, int32_t tensor)
{
    const uint8_t role = call->role[tensor];
    return role != OP_UNUSED && role != OP_REFUSED && role != OP_SOURCE_MISSING &&
           call->given[tensor] != NULL;
}

/* Its parameters. */
static inline void *op_params(const op_call *call)
{
    return (char *)(uintptr_t)call + call->family->params_at;
}

/* For a family's roles(): why a tensor has its role, as a sentence goes on behind "... is given" if it is
 * OP_REFUSED, behind "... is NULL" if it is needed. */
static inline void op_reason(op_call *call, int32_t tensor, const char *why)
{
    if (call->asks == tensor + 1) call->why = why;
}
/* A role that a tensor has where the call may have it. Else it is OP_REFUSED. */
static inline void op_allow(op_call *call, int32_t tensor, bool allowed, op_role role, const char *why)
{
    call->role[tensor] = (uint8_t)(allowed ? role : OP_REFUSED);
    if (!allowed) op_reason(call, tensor, why);
}
/* The same of tensors `first` to `last`. */
static inline void op_allow_all(op_call *call, int32_t first, int32_t last, bool allowed, op_role role,
                                const char *why)
{
    for (int32_t i = first; i <= last; i++) op_allow(call, i, allowed, role, why);
}
/* Results of a backward that are gradients: each is optional, and refused where its tensor is. */
void op_gradient_roles(op_call *call, int32_t first, int32_t last, bool backward);

/* What is there of a call, with the family's part and the steps. */
static inline size_t op_call_bytes(const op_call *call)
{
    return call->family->program_at + call->program.bytes;
}

/* The greatest power of two, at most OP_ALIGN_MOST, that divides a tensor's address. NULL: its element's
 * size. */
static inline uint8_t op_alignment_of(const quern_tensor *t)
{
    const uintptr_t address = (uintptr_t)t->data, greatest = address & (0 - address);
    if (address == 0) return (uint8_t)quern_dtype_size(t->dtype);
    return (uint8_t)(greatest < OP_ALIGN_MOST ? greatest : OP_ALIGN_MOST);
}

/* The tensors that a call uses, and what they reach. */
typedef struct op_used {
    int32_t count;
    uint8_t index[OP_TENSORS_MAX];
    view_span span[OP_TENSORS_MAX]; /* by place in index */
} op_used;

/* Whether a tensor, or NULL, is one number: [] or [1]. */
static inline bool op_is_one(const quern_tensor *t)
{
    return t != NULL && (t->ndim == 0 || (t->ndim == 1 && t->shape[0] == 1));
}

/* That each parameter is in the range of its description. */
quern_status op_check_ranges(const op_family *family, const void *params);
/* The first tensor of the list that the call uses, or OP_NONE. */
int32_t op_first_used(const op_call *call, const int32_t *list, int32_t count);
/* Bytes of a matrix [K, N] in the layout of the device's prepack stage. */
quern_status op_repacked_bytes(const op_call *call, int64_t n, int64_t k, int64_t *bytes);
/* That a tensor is there, and has so many dimensions. */
quern_status op_check_ndim(const op_call *call, int32_t tensor, int32_t ndim);
/* The batch: of `lead` where lengths are fixed, else by the extent of the offsets in tensor `cu`, which is
 * checked. */
quern_status op_find_batch(const op_call *call, int32_t cu, const quern_tensor *lead, int64_t *batch);
/* The view of a tensor for stages, symbolic; absent where the call does not use it. `batch`: varlen
 * activations get a leading extent of 1. A scalar [] comes as [1], for no dimensions are an absent view. */
quern_tensor op_view(const op_call *call, int32_t tensor, bool batch);
/* The address that a symbolic pointer stands for. */
void *op_placed(const void *p, const op_frame *frame);
/* The tensor of the call that a symbolic pointer points into, and how many bytes into it; OP_NONE: none. */
int32_t op_pointed(const op_call *call, const void *p, int64_t *bytes);
/* An arena over the symbolic workspace. */
arena op_workspace(void);
/* Adds what was taken to the call. */
void op_workspace_end(op_call *call, const arena *a);

/* ---- calls ---- */

void op_frame_of(const op_call *call, const quern_exec *exec, void *const *data, void *workspace,
                 op_frame *frame);

/* A tensors struct of any family. */
typedef struct op_tensors {
    size_t size;
    const quern_tensor *t[OP_TENSORS_MAX];
} op_tensors;

/* The first checks of a call: the structs' sizes, the parameters' ranges, roles. *own becomes the caller's
 * struct at this library's size. */
quern_status op_begin(op_call *call, const op_family *family, int32_t operation, const void *params,
                      const void *tensors, op_tensors *own);
/* Refuses tensors of OP_REFUSED and misses those that are needed; then like, symbols and lists. */
quern_status op_derive(op_call *call);
/* The extents that a tensor has by its description; returns how many. */
int32_t op_shape(const op_call *call, int32_t tensor, int64_t shape[QUERN_MAX_DIMS]);

/* The public functions of an operation. The family's struct stands on the stack: 2 to 52 KiB. */
quern_status op_workspace_of(const op_family *family, int32_t operation, quern_context *ctx,
                             const void *params, const void *tensors, size_t *bytes);
quern_status op_run(const op_family *family, int32_t operation, quern_context *ctx, const quern_exec *exec,
                    const void *params, const void *tensors, void *workspace, size_t bytes);

/* What plans add: preparing alone, and running with pointers (NULL: absent) in the order of the family's
 * tensors. */
typedef enum op_looks { OP_AT_SHAPES, OP_AT_ALIGNMENT, OP_AT_DATA } op_looks;
quern_status op_prepare(op_call *call, const op_family *family, int32_t operation, quern_context *ctx,
                        const void *params, const void *tensors, op_looks looks);
quern_status op_run_at(const op_call *call, const quern_exec *exec, void *const *data, void *workspace,
                       size_t bytes);

/* Refuses a scale of scores for which a backward of attention could not recompute P. */
quern_status op_check_backward_scale(float scale);
/* Refuses runs of gate and up with which the products' SwiGLU could not deal: they divide 32 columns. */
quern_status op_check_granularity(int64_t granularity);

#endif
