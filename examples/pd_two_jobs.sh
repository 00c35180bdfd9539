#!/usr/bin/env bash
# Prefill and decode as two jobs on one machine: starts a router, a prompt engine and a completion engine, generates through
# them, stops them. On CPU with the demo model this takes a minute or two the first time (programs are compiled and kept).
#
#   examples/pd_two_jobs.sh ["a prompt" ...]
#
# MODEL=/path/to/model chooses another model, PYTHON another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
MODEL=${MODEL:-demo}
LOGS=$(mktemp -d)
free_port() { "$PYTHON" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
ROUTER=127.0.0.1:$(free_port)
HTTP=$(free_port)
# Small sizes, so that few programs are compiled.
SIZES=(--max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 512 --num-blocks 256 --decode-buckets 8)

PIDS=()
stop() {  # SIGTERM drains: requests finish, then the process leaves
  trap - EXIT
  for pid in "${PIDS[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${PIDS[@]}"; do wait "$pid" || true; done
}
trap 'echo "failed; logs are in $LOGS" >&2; tail -n 5 "$LOGS"/*.log >&2; stop' EXIT
trap 'exit 130' INT TERM

launch() {  # launch ROLE FLAGS...
  "$PYTHON" -m "deepinfer_jax.launch.$1" "${@:2}" > "$LOGS/$1.log" 2>&1 &
  PIDS+=($!)
}

launch router --listen "$ROUTER" --http-port "$HTTP"
launch prompt --model "$MODEL" --router "$ROUTER" "${SIZES[@]}" --prefill-buckets 64,512
launch completion --model "$MODEL" --router "$ROUTER" "${SIZES[@]}"

echo "waiting for the engines (first time: compiling) ..."
until "$PYTHON" -c "import sys, urllib.request as r; r.urlopen('http://127.0.0.1:$HTTP/healthz')" 2>/dev/null; do
  for pid in "${PIDS[@]}"; do kill -0 "$pid" 2>/dev/null || exit 1; done
  sleep 1
done
cat "$LOGS"/{prompt,completion}.log | grep -E ': (role|mesh|model|cache) ' || true

"$PYTHON" - "$ROUTER" "$@" <<'PY'
import sys

from deepinfer_jax import LLM, SamplingParams

router, *prompts = sys.argv[1:]
prompts = prompts or ["What is the capital of France?", "Name three colours.", "Why is the sky blue?"]
with LLM(router=router) as llm:
    messages = [[{"role": "user", "content": p}] for p in prompts]
    for prompt, output in zip(prompts, llm.chat(messages, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)):
        print(f"\n>>> {prompt}\n{output.outputs[0].text}")
PY
echo
"$PYTHON" -m deepinfer_jax status --router "$ROUTER"
stop
echo "stopped"
