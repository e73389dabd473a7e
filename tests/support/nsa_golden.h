/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_golden.h - the golden vectors as nsa_cases, for the oracle and the library alike. */
#ifndef QUERN_TEST_NSA_GOLDEN_H
#define QUERN_TEST_NSA_GOLDEN_H

#include "golden.h"
#include "nsa_case.h"

/* One case of a file: its configuration and the prefix of its expected tensors. */
typedef struct nsa_golden {
    const char *file, *prefix, *lists; /* prefix of block_idx_sorted; NULL: the file calls it sel_idx */
    nsa_config config;
} nsa_golden;

/* The cases of nsa_small (both visibilities of full, nogate, noproj, noncausal) and nsa_paper_b. Returns
 * how many. */
int nsa_golden_cases(nsa_golden cases[16]);
/* A case with the file's inputs. */
nsa_case *nsa_golden_case(const nsa_golden *golden, const quern_safetensors *file);
/* Sets one tensor from the file. */
void nsa_golden_set(nsa_case *c, nsa_slot slot, const quern_safetensors *file, const char *prefix,
                    const char *name);
/* Compares whatever the file has for this case: values[slot] are row-major (NULL: not compared). */
void nsa_golden_compare(const nsa_golden *golden, const nsa_case *c, const quern_safetensors *file,
                        double *const values[NSA_SLOTS]);
void nsa_golden_compare_lists(const nsa_golden *golden, const nsa_case *c, const quern_safetensors *file,
                              const int32_t *block_idx, const int32_t *block_count);

#endif
