/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* lm_case.h - what the tests of examples/lm share: a small model, a small corpus, the program. */
#ifndef LM_CASE_H
#define LM_CASE_H

#include "layer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* A model of an attention, small enough for finite differences. */
lm_config small(const char *attention);
/* Every value of every array moves, for a zero matrix hides what is behind it. */
void stir(lm_model *model);
/* Random letters of eight. */
void fill(uint8_t *text, int n);

enum { CORPUS = 9000, PIECE = 96 }; /* its held-out 5% holds some pieces */

/* A folder of the test's own, with a corpus and one that differs from it by a byte; for a group of tests. */
typedef struct places {
    char folder[32], corpus[64], other[64];
} places;
int make_places(void **state);
int remove_places(void **state);

/* The program's exit code; `arguments` may name files of the folder. What it prints is in out and err. */
int program(const places *p, const char *environment, const char *arguments);
/* The program ends with a code; the test shows what it said where the code is another. */
void assert_ends(const places *p, const char *environment, const char *arguments, int code);
/* The program's error message holds these words. */
bool says(const places *p, const char *words);

#define SMALL                                                                                                \
    "--width 32 --layers 2 --heads 2 --inner 48 --context 96 --block 16 --selected 4 --window 32 --pieces "  \
    "2 "

#endif
