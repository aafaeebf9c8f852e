#!/usr/bin/env bash
# The ablation of KVarN on both real models and one GPU: several processes side by side, parts in order of importance.
#
#   WEIGHTS_DIR=DIR DATA=wikitext2_test.txt OUT=DIR launch/ablation.sh
#
# WEIGHTS_DIR holds gemma3-270m-q4_k_m.gguf and smollm2-135m-q4_1.gguf. The same command again goes on where it ended.
# JOBS (7): processes at once. LIMIT (0, none): no process runs longer than that many seconds after the start.
# PARTS: some of those below. MODELS: gemma3-270m smollm2-135m. FLAGS: more flags for each run.
set -u
cd "$(dirname "$0")/.."
: "${WEIGHTS_DIR:?}" "${DATA:?}" "${OUT:?}"
JOBS=${JOBS:-7} LIMIT=${LIMIT:-0} MODELS=${MODELS:-gemma3-270m smollm2-135m}
PARTS=${PARTS:-kvarn-32 kivi kvarn-128 k-32 v-32 layers turboquant k-128 v-128 kivi-rotated three-bits mixed quarot published}
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0" XLA_PYTHON_CLIENT_PREALLOCATE=false
export XLA_PYTHON_CLIENT_MEM_FRACTION=${MEM_FRACTION:-0.135}
mkdir -p "$OUT"

run_part() { # MODEL PART
  local model=$1 part=$2 out="$OUT/$1-$2" flags=(--gate=off) left=0
  [[ -e "$out.done" ]] && return 0
  if ((LIMIT > 0)); then
    left=$((LIMIT - SECONDS))
    ((left < 20)) && return 0
  fi
  [[ $part == kivi ]] && flags=(--gate=on)
  [[ $model == gemma3-270m ]] && flags+=(--residual=fp32 --checkpoint="$WEIGHTS_DIR/gemma3-270m-q4_k_m.gguf")
  [[ $model == smollm2-135m ]] && flags+=(--checkpoint="$WEIGHTS_DIR/smollm2-135m-q4_1.gguf")
  timeout "$left" python -m jaxkv.launch --flagfile="launch/ablation-$part.flags" --model="$model" --data="$DATA" \
    "${flags[@]}" --compilation_cache="$OUT/xla" --out="$out" ${FLAGS:-} >"$out.log" 2>&1
  local code=$?
  ((code == 0)) && touch "$out.done"
  echo "$model $part: exit $code after $SECONDS s"
}

for part in $PARTS; do
  for model in $MODELS; do
    [[ $part == layers && $model == smollm2-135m ]] && continue # it has no windowed layer
    while (($(jobs -rp | wc -l) >= JOBS)); do wait -n; done
    run_part "$model" "$part" &
  done
done
wait
