/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * name_map.h - names of tensors in GGUF: a file of two columns, a name and what it becomes, in which {n}
 * stands for the number of a layer and {e} for that of an expert.
 *
 *     model.layers.{n}.self_attn.q_proj.weight            blk.{n}.attn_q.weight
 *     model.layers.{n}.mlp.experts.{e}.up_proj.weight     blk.{n}.ffn_up_exps.weight
 *
 * A target without the {e} of its source stacks the experts. A line that begins with # is a comment.
 */
#ifndef QUERN_QUANTIZE_NAME_MAP_H
#define QUERN_QUANTIZE_NAME_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct name_rule {
    const char *from, *to;
} name_rule;

typedef struct name_map {
    char *text; /* of the file; rules point into it */
    name_rule *rules;
    size_t count;
} name_map;

/* Returns an exit code. Free with name_map_free; an empty map is {0}. */
int name_map_read(const char *path, name_map *map);
void name_map_free(name_map *map);
/* The name that the first fitting rule gives, else a copy; NULL without memory. *expert: of a tensor that
 * is to be stacked, else -1. */
char *name_map_apply(const name_map *map, const char *name, int64_t *expert);

#endif
