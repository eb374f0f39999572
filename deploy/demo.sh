#!/usr/bin/env bash
# The demonstration: five steps, each command printed before it runs. `make demo` calls it; so can you, with splitserve
# on the PATH. PORT=8001 deploy/demo.sh takes another port for the router.
set -euo pipefail
cd "$(dirname "$0")/.."

port=${PORT:-8000}
url=http://127.0.0.1:$port
home=$(mktemp -d /tmp/splitserve-demo.XXXXXX) # run directories of this demonstration only
export XDG_RUNTIME_DIR=$home

bold='' cyan='' red='' plain=''
if [ -t 1 ]; then bold=$'\033[1m' cyan=$'\033[36m' red=$'\033[31m' plain=$'\033[0m'; fi
heading() { printf '\n%s== %s%s\n' "$bold" "$*" "$plain"; }
show() { printf '%s$ %s%s\n' "$cyan" "$*" "$plain" && "$@"; }

# Everything that the demonstration started carries its run directory in the environment.
processes() { grep -lzs "^XDG_RUNTIME_DIR=$home\$" /proc/[0-9]*/environ | cut -d/ -f3 | grep -vx -e $$ -e $BASHPID || true; }
ours() { for pid in $(processes); do { tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null | grep splitserve || true; done; }

# Shared memory that a process of the demonstration has mapped: /dev/shm is everybody's, and others come and go in it.
note_shared() {
	for pid in $(processes); do
		{ grep -o '/dev/shm/[^ ]*' "/proc/$pid/maps"; } 2>/dev/null || true
	done >>"$home/shared"
}

# What the bench says in its figures: how many requests of how many failed.
failed_requests() {
	python -c 'import json, sys
shapes = json.load(open(sys.argv[1]))["results"]
print(sum(s["num_failed"] for s in shapes), sum(s["num"] for s in shapes))' "$1"
}

finish() {
	local code=$?
	trap - EXIT
	splitserve down demo --kill >/dev/null 2>&1 || true
	rm -rf "$home"
	[ $code -eq 0 ] || printf '\n%sthe demonstration ended early (exit code %s)%s\n' "$red" $code "$plain"
	exit $code
}
trap finish EXIT

heading "1. One command: a prefill engine, a decode engine and a router; each engine on cores of its own"
show splitserve up deploy/demo.toml --detach --set "router.port=$port"
note_shared

heading "2. The official OpenAI client, streaming through the router"
show python deploy/ask.py "$url/v1"

heading "3. The proof: split and unified answer alike, the state crossed, and planted faults are caught"
show splitserve verify --quick --plant all

heading "4. What it does under load (256 tokens in, 32 out; PD pays off on devices that do not share a memory bus)"
figures=$home/bench.json
code=0
show splitserve bench "$url" --concurrency 1,8,16 --num 3,8,16 --output-len 32 --json "$figures" || code=$?
[ $code -eq 0 ] || { [ $code -eq 1 ] && [ -s "$figures" ]; } || exit $code
read -r failed asked < <(failed_requests "$figures")
[ "$failed" -lt "$asked" ] || { echo "all $asked requests failed" && exit 1; }
if [ "$failed" -gt 0 ]; then
	echo "$failed of $asked requests failed, each with an error and none by hanging. This machine is busy:" \
		"load $(cut -d' ' -f1 /proc/loadavg) on $(nproc) cores. The demonstration goes on."
fi
note_shared

heading "5. An engine is killed in the middle of an answer; it comes back, and the stop is clean"
victim=$(splitserve status demo --json | python -c 'import json, sys
print(next(p["pid"] for p in json.load(sys.stdin)["deployments"][0]["processes"] if p["name"] == "decode-0"))')
story=$home/story
python deploy/ask.py "$url/v1" "Tell me a long story about Paris." >"$story" 2>&1 &
asking=$!
for _ in {1..200}; do [ "$(wc -c <"$story")" -gt 100 ] && break || sleep 0.05; done # it has begun to answer
show kill -9 "$victim"
if wait $asking; then
	echo "(that answer came to its end all the same: the other engine went on with it)"
else
	echo "(that answer ended with an error instead of hanging:)"
fi
cat "$story"
show splitserve status demo --wait 90
show python deploy/ask.py "$url/v1"
note_shared
show splitserve down demo

left=$(ours)
[ -z "$left" ] || { echo "processes left: $left" && exit 1; }
! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "port $port is still open" && exit 1; }
[ -z "$(find "$home" -type s)" ] || { echo "sockets left: $(find "$home" -type s)" && exit 1; }
shared=$(sort -u "$home/shared" | while read -r path; do [ ! -e "$path" ] || echo "$path"; done)
[ -z "$shared" ] || { echo "shared memory left: $shared" && exit 1; }
echo "left behind: no process, no port, no socket, no shared memory"
