/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* peer_product.h - oneDNN's dense product, to compare with: c = a b in f32, on weights that stand in the
 * layout that it likes best. */
#ifndef QUERN_TOOLS_PEER_PRODUCT_H
#define QUERN_TOOLS_PEER_PRODUCT_H

#include <quern/quern.h>

typedef struct peer_product peer_product;

/* Prepares the product of a [m, k] and b [k, n], both f32 or bf16. NULL without such a peer: a build without
 * oneDNN 2, f16, no memory, or a failed call of oneDNN. */
peer_product *peer_product_open(const quern_tensor *a, const quern_tensor *b);
/* Computes it once on `threads` threads. */
bool peer_product_run(peer_product *p, int threads);
void peer_product_close(peer_product *p);

#endif
