/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* moe.h - the router in float64: scores, weights of given experts, and the gradient. */
#ifndef QUERN_ORACLE_MOE_H
#define QUERN_ORACLE_MOE_H

#include <stdbool.h>
#include <stdint.h>

typedef enum oracle_score { ORACLE_SOFTMAX, ORACLE_SQRT_SOFTPLUS, ORACLE_SIGMOID } oracle_score;

void oracle_route_scores(oracle_score score, const double *logits, int64_t experts, double *scores);
/* The weights of a token's experts [k]. */
void oracle_route_weights(const double *scores, const int32_t *chosen, int64_t k, bool renormalize,
                          double scale, double *weights);
/* sum_j d_weights[j] weights[j] as a function of the logits, whose gradient tests take by central
 * differences. */
double oracle_route_loss(oracle_score score, const double *logits, int64_t experts, const int32_t *chosen,
                         int64_t k, bool renormalize, double scale, const double *d_weights);

#endif
