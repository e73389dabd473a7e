/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * op_program.h - a call as a program: a list of steps, each a stage with its arguments, filled once.
 *
 * A family's build() appends the steps in the order in which they run and takes their tensors from the
 * workspace. The size of the workspace, a backend's refusals, runs, plans, replays and
 * quern_plan_describe() all read the list.
 *
 * The steps stand in the family's own struct, one after the other, so that a call allocates nothing:
 *
 *     attend_args *args = OP_ADD(b, attend_forward);
 *     args->q = op_view(b->call, ATTENTION_Q, true);
 *
 * A loop repeats the steps that are added before its end. Views of these steps may move on with its indices.
 */
#ifndef QUERN_CORE_OP_PROGRAM_H
#define QUERN_CORE_OP_PROGRAM_H

#include "core/arena.h"
#include "core/op_stage.h"

struct op_call;
struct op_frame;

/* A step. Its arguments follow it, then, in a loop, how far each of their views moves: int64_t [views, dims],
 * in bytes. */
typedef struct op_step {
    uint32_t bytes; /* from here to the next step */
    uint8_t stage;
    bool asked;          /* runs only where the caller has a status word */
    uint8_t made_for;    /* op_made_for(): the tensor's number and 1; 0: none */
    bool after_all;      /* op_after_all() */
    uint8_t behind;      /* op_behind(): a step's number and 1; 0: none */
    uint8_t percent;     /* op_percent(); 0: all */
    const void *scratch; /* symbolic, or NULL */
} op_step;
static inline void *op_step_args(const op_step *step)
{
    return (void *)(uintptr_t)(step + 1);
}
static inline op_step *op_step_next(const op_step *step)
{
    return (op_step *)((uintptr_t)step + step->bytes);
}
/* Bytes of a step whose arguments are NAME_args, outside of loops. */
#define OP_STEP_BYTES(name) (sizeof(op_step) + sizeof(name##_args))

/* The steps [first, end), for all indices of `dims` extents, the last one fastest. */
enum { OP_LOOPS_MAX = 4, OP_BESIDE_MOST = 64 /* steps of a program that may run beside each other */ };
typedef struct op_loop {
    int32_t first, end, dims;
    int64_t extent[QUERN_MAX_DIMS];
} op_loop;

/* What a call keeps, besides the steps. */
typedef struct op_program {
    int32_t steps, loops;
    size_t bytes;        /* of the steps */
    const void *scratch; /* that steps use in turn, symbolic */
    /* The steps are up to OP_BESIDE_MOST, in no loop, and have memory of their own. Where launches are
     * recorded, each waits for those alone whose memory it needs, and the last one for all. */
    bool beside;
    op_loop loop[OP_LOOPS_MAX];
} op_program;

/* A program that is being built. */
typedef struct op_build {
    struct op_call *call;
    arena a; /* of the workspace, symbolic */
    op_program *program;
    char *room; /* for the steps */
    size_t room_bytes;
    op_step *last;
    op_loop *loop;        /* that is open, or NULL */
    size_t scratch_bytes; /* most of any step */
    quern_status status;  /* the first failure; the program is of no use then */
    op_args dropped;      /* the arguments of steps for which there is no room */
} op_build;

/* ---- for a family's build() ---- */

/* Appends a step and returns its arguments, all 0 and absent. */
#define OP_ADD(build, stage) ((__typeof__(((op_args *)NULL)->stage) *)op_add(build, OP_##stage))
void *op_add(op_build *b, op_stage stage);
/* The last step runs only where the caller has a status word. */
void op_when_asked(op_build *b);
/* What the last step reads in the workspace was made for a tensor of the call, which may be absent: sentences
 * of faults in it have that tensor's name. */
void op_made_for(op_build *b, int32_t tensor);
/* Steps may run beside each other, each with its own scratch; false where the backend cannot do that. */
bool op_beside(op_build *b);
/* The last step, where steps run beside each other, waits for all before it, whether it needs them or not. */
void op_after_all(op_build *b);
/* The step that was added last; op_behind(): the last step, where steps run beside each other, waits for that
 * one, whether it needs it or not. */
int32_t op_number(const op_build *b);
void op_behind(op_build *b, int32_t number);
/* The last step, where steps run beside each other, takes so much of the device: others run meanwhile. For a
 * stage whose workspace does not follow from the device. */
void op_percent(op_build *b, int32_t percent);
/* Takes the last step back. */
void op_drop(op_build *b);
/* Whether the backend has a stage, which may be an optional one. */
bool op_has(const op_build *b, op_stage stage);
/* The refusal of a stage that a backend lacks. */
quern_status op_lacks(const quern_backend *backend, op_stage stage);
/* Whether the backend, which has the stage, takes the arguments. */
bool op_takes(const op_build *b, op_stage stage, const void *args);

/* A contiguous tensor in the workspace. */
quern_tensor op_room(op_build *b, quern_dtype dtype, int32_t ndim, const int64_t *shape);
quern_tensor op_matrix(op_build *b, quern_dtype dtype, int64_t rows, int64_t columns);
/* A result of the call, if it has it, that steps in its middle write and read: the caller's tensor where it
 * is contiguous and no later step can make the call fail, which would leave results as they were: on a GPU
 * faults of data are bits of the status word. Else one in the workspace. op_give() follows. */
quern_tensor op_result(op_build *b, int32_t tensor, quern_dtype dtype, int32_t ndim, const int64_t *shape);
/* A tensor of the call, [.., columns], as a matrix: a view, or a copy where its strides forbid one. Absent
 * where the call does not use it. */
quern_tensor op_rows(op_build *b, int32_t tensor);
/* Copies rows that are as many and as long, whatever the shapes. */
void op_copy(op_build *b, const quern_tensor *from, const quern_tensor *to);
/* The same to a tensor of the call, if the call has it and it is not `from` itself. */
void op_give(op_build *b, int32_t tensor, const quern_tensor *from);
/* The dtype of what stands between two products, a gradient too: bf16 for the bf16 dot product; f16 would
 * leave its range. */
quern_dtype op_between_dtype(quern_dtype activations);

/* The steps that follow are repeated, up to op_loop_end(). Loops have no loops inside. */
void op_loop_begin(op_build *b, int32_t dims, const int64_t *extents);
void op_loop_end(op_build *b);
/* `view`, of the last step's arguments, moves on by so many elements with each index of the loop's dimension
 * `dim`. */
void op_moves(op_build *b, const quern_tensor *view, int32_t dim, int64_t elements);
/* In a loop over one extent n: `view` is the n-th part of what it was along `along`, and moves on by that
 * part. Without a loop, or where the view is absent, it stays as it is. */
void op_cut(op_build *b, quern_tensor *view, int32_t along);

/* ---- for a family's check_data() ---- */

/* The arguments of a call's first step of a stage. */
#define OP_FIND(call, stage) ((const __typeof__(((op_args *)NULL)->stage) *)op_find(call, OP_##stage))
const void *op_find(const struct op_call *call, op_stage stage);

/* ---- for op.c and plan.c ---- */

/* The sentence of a fault of data that a stage has reported, whose arguments were `now`. */
quern_status op_fault(const struct op_call *call, const op_step *step, const op_args *now,
                      const stage_fault *fault);

const op_step *op_program_steps(const struct op_call *call);
/* Builds a call's program with its family's build(), and sets the call's workspace. */
quern_status op_program_build(struct op_call *call);
quern_status op_program_run(const struct op_call *call, const struct op_frame *frame);

/* What a program runs: its stages in the order of their first runs, with the kernels that each would
 * choose. */
enum { OP_LISTED_MAX = 16 };
typedef struct op_listed {
    const char *stage;
    char kernel[STAGE_NAME_BYTES]; /* "" where the stage does not name them */
    int64_t times;
} op_listed;
int32_t op_program_list(const struct op_call *call, op_listed listed[OP_LISTED_MAX]);

#endif
