/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper.h - the families of hyper-connections and of the indexer's loss. */
#ifndef QUERN_DSV4_HYPER_FAMILY_H
#define QUERN_DSV4_HYPER_FAMILY_H

#include "core/op.h"

extern const op_family dsv4_hyper_family, dsv4_index_loss_family;

#endif
