#!/usr/bin/env bash
# A producer in shell: `produce.sh "def fibonacci(n):"`. It needs redis-cli and python3 with msgpack for the
# two conversions; and the submit script: `edgellm-producer script submit > submit.lua`, named by SUBMIT_LUA.
# EDGELLM_REDIS_URL (redis://...) or EDGELLM_REDIS_SOCKET says where the queue is.
set -euo pipefail

prompt=${1:?the prompt}
lua=${SUBMIT_LUA:?file with the text of the submit script}
prefix="edgellm:{${EDGELLM_QUEUE:-default}}:"
id=$(cat /proc/sys/kernel/random/uuid)
reply_ttl_ms=3600000

redis() {
  if [ -n "${EDGELLM_REDIS_SOCKET:-}" ]; then redis-cli -s "$EDGELLM_REDIS_SOCKET" "$@"
  else redis-cli -u "${EDGELLM_REDIS_URL:-redis://localhost}" "$@"; fi
}

# -x makes standard input the last argument: the envelope is binary and passes through no shell variable.
outcome=$(
  python3 -c 'import msgpack, sys; sys.stdout.buffer.write(msgpack.packb(
    {"v": 1, "id": sys.argv[1], "prompt": sys.argv[2], "max_tokens": 32, "temperature": 0.0}))' "$id" "$prompt" |
    redis -x EVAL "$(cat "$lua")" 1 "${prefix}config" "$id" normal "" "" "$reply_ttl_ms" "" "" |
    head -n 1
)
case "$outcome" in
  queued | known) ;;
  *) echo "not queued: $outcome" >&2; exit 1 ;;
esac

# One entry, as the job does not stream. --raw writes it as lines: key, entry id, "done", then the message and a newline.
redis --raw XREAD BLOCK 60000 STREAMS "${prefix}reply:$id" 0 |
  python3 -c 'import msgpack, sys
reply = msgpack.unpackb(sys.stdin.buffer.read().split(b"\n", 3)[3][:-1])
print(reply["status"], reply["text"])'
