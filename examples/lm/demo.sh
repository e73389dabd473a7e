#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# The demonstration: a byte-level language model learns the C headers of this machine with native sparse
# attention and with dense attention, beside an order-2 byte model; then `quern bench` times both over length.
# Results stay in build/demo. The headers are joined in the order of the SHA-256 of their paths, and the last
# 5% of the bytes are held out; figures are over 48 pieces of 4096 bytes spread evenly over that part.
# It takes under five minutes on two cores, beside the build.
set -eu
cd "$(dirname "$0")/../.."
lm=build/release/lm
out=build/demo
mkdir -p $out
start=$SECONDS
echo "== order-2 byte model"
$lm order2 --json $out/order2.json
for attention in nsa dense; do
    echo "== 390 steps of 4096 bytes with $attention attention"
    beside=
    [[ $attention == nsa ]] || beside="--curve $out/losses.svg --beside $out/nsa.losses"
    # shellcheck disable=SC2086 # several words
    $lm train --attention $attention --checkpoint $out/$attention.safetensors --save-every 0 \
        --losses $out/$attention.losses --json $out/$attention.json $beside
done
echo "== a sample from the model with native sparse attention"
$lm generate --checkpoint $out/nsa.safetensors --prompt 'static inline ' --bytes 300 --temperature 0.6
echo "== forward time of both attentions over length"
build/release/quern bench nsa --n 4096,16384,65536 --json $out/bench.json --svg $out/bench.svg
echo "charts: $out/losses.svg (both losses) and $out/bench.svg ($((SECONDS - start)) s in all)"
