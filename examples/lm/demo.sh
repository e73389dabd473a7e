#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# The demonstration: a byte-level language model learns the C headers of this machine with native sparse
# attention and with dense attention, beside an order-2 byte model; `quern bench` times both over length; at
# the end the model continues a prompt from its caches. Under five minutes on two cores, beside the build.
# With --all also DeepSeek-V4's compressed attentions and a mixture of experts, and what each kind costs as a
# table, a chart and JSON (costs.sh): under twenty minutes.
# Results stay in build/demo. The headers are joined in the order of the SHA-256 of their paths, and the last
# 5% of the bytes are held out; figures are over 48 pieces of 4096 bytes spread evenly over that part.
set -eu
cd "$(dirname "$0")/../.."
lm=build/release/lm
out=build/demo
mkdir -p $out
start=$SECONDS

train() { # NAME OPTIONS...
    echo "== 280 steps of 4096 bytes: $1"
    $lm train --checkpoint "$out/$1.safetensors" --save-every 0 --losses "$out/$1.losses" \
        --json "$out/$1.json" "${@:2}"
}

echo "== order-2 byte model"
$lm order2 --json $out/order2.json
train nsa
train dense --attention dense --curve $out/losses.svg --beside $out/nsa.losses
kinds="nsa dense"
charts="$out/losses.svg (the losses), $out/bench.svg (forward time)"
if [[ ${1-} == --all ]]; then
    kinds="nsa dense csa hca hybrid experts"
    train csa --attention csa
    train hca --attention hca
    train experts --experts 8
    train hybrid --attention hybrid --curve $out/all.svg --beside $out/nsa.losses --beside $out/dense.losses \
        --beside $out/csa.losses --beside $out/hca.losses --beside $out/experts.losses
    for weights in bf16 nvfp4; do
        echo "== nsa with 8 experts in $weights"
        $lm eval --checkpoint $out/experts.safetensors --expert-weights $weights
    done
fi
echo "== forward time of both attentions over length"
build/release/quern bench nsa --n 4096,16384,32768 --json $out/bench.json --svg $out/bench.svg
if [[ ${1-} == --all ]]; then
    echo "== each kind: caches in chunks of 100 bytes give what one shot gives; speed from caches"
    for kind in $kinds; do
        $lm eval --checkpoint $out/$kind.safetensors --pieces 2 --chunk 100
        $lm speed --checkpoint $out/$kind.safetensors --json $out/$kind.speed
    done
    echo "== what each kind costs; experts: nsa with a mixture of 8"
    examples/lm/costs.sh $out $kinds
    charts+=", $out/all.svg (the losses of every kind), $out/costs.svg (decoding)"
fi
echo "charts: $charts ($((SECONDS - start)) s in all)"
echo "== a sample from the model with native sparse attention, from its caches"
$lm generate --checkpoint $out/nsa.safetensors --prompt 'static inline ' --bytes 300 --temperature 0.6 \
    --top-p 0.95
