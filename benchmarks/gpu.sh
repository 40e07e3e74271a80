#!/usr/bin/env bash
# Checks and measures an accelerator from source: needs a python that has torch, and nothing else.
#
#   benchmarks/gpu.sh OUT [SECONDS]      all of it, within SECONDS (570)
#
# Writes OUT/machine.txt, checks.txt, checks.json, interleaved.txt, interleaved.json, blocks.txt, budgets.txt,
# budgets.json, bench.txt and bench.json; the JSON files grow as it goes, so a run that is cut off leaves what it
# measured. Status 1 when a check failed.
#
#   PYTHON    the interpreter (python3)
#   DEVICE    what to measure (cuda); cpu plays one, tiny, to try the script
#   DISK      where the disk tier is (/var/tmp); not a file system in memory
#   HOST      host memory for stashes (three quarters of what is to spare)
#   PARTS     "checks interleaved budgets bench": which; the first takes a quarter of the time at most, the next
#             two half of what is left, the last all the rest
#   MODELS    those of budgets ("gpt,resnet,unet,lstm,llama,experts")

set -uo pipefail
out=${1:?usage: benchmarks/gpu.sh OUT [SECONDS]}
seconds=${2:-570}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
mkdir -p "$out" || exit 2
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
SECONDS=0

{
    date -u
    uname -a
    timeout 20 nvidia-smi
    timeout 60 "$python" -c 'import sys, torch; print(sys.version, torch.__version__, torch.version.cuda, torch.accelerator.is_available())'
    free -g
    df -h "${DISK:-/var/tmp}"
    ulimit -l
} >"$out/machine.txt" 2>&1

parts=${PARTS:-checks interleaved budgets bench}
models=${MODELS:-gpt,resnet,unet,lstm,llama,experts}
status=0 interleaved=0 budgets=0 bench=0
checks_seconds=$((seconds / 4))
[[ $parts == checks ]] && checks_seconds=$((seconds - 30))
[[ $parts == *checks* ]] && {
    timeout -k 5 $((checks_seconds + 20)) "$python" "$root/tests/test_gpu.py" \
        --out "$out/checks.json" --seconds "$checks_seconds" 2>&1 | tee "$out/checks.txt"
    status=${PIPESTATUS[0]}
}

left=$((seconds - SECONDS - 15))
[[ $parts == *budgets* || $parts == *bench* ]] && left=$((left / 2))
options=(--device "$device" --seconds $((left - 30)) --disk "${DISK:-/var/tmp}")
[[ $device == cpu ]] && options+=(--tiny --rounds 1)
[[ $parts == *interleaved* ]] && {
    timeout -k 5 $((left + 10)) "$python" "$root/benchmarks/interleaved.py" "${options[@]}" \
        --out "$out/interleaved.json" 2>&1 | tee "$out/interleaved.txt"
    interleaved=${PIPESTATUS[0]}
}

[[ $parts == *bench* && $device != cpu ]] && {
    timeout -k 5 60 "$python" "$root/benchmarks/blocks_under_way.py" 2>&1 | tee "$out/blocks.txt"
}

left=$((seconds - SECONDS - 15))
[[ $parts == *bench* ]] && left=$((left / 2))
options=(--device "$device" --seconds $((left - 30)) --models "$models" --disk "${DISK:-/var/tmp}")
[[ $device == cpu ]] && options+=(--tiny)
[[ $parts == *budgets* ]] && {
    timeout -k 5 $((left + 10)) "$python" "$root/benchmarks/budget_cells.py" "${options[@]}" --regions \
        --out "$out/budgets.json" 2>&1 | tee "$out/budgets.txt"
    budgets=${PIPESTATUS[0]}
}

left=$((seconds - SECONDS - 15))
options=(--device "$device" --seconds "$left" --disk "${DISK:-/var/tmp}" --out "$out/bench.json" --repeats 3 --steps 2)
[[ -n ${HOST:-} ]] && options+=(--host "$HOST")
[[ $device == cpu ]] && options+=(--tiny --repeats 1 --steps 1)
[[ $parts == *bench* ]] && {
    timeout -k 5 $((left + 10)) "$python" -m backstash bench "${options[@]}" 2>&1 | tee "$out/bench.txt"
    bench=${PIPESTATUS[0]}
}

echo "checks: status $status; interleaved: status $interleaved; budgets: status $budgets;" \
    "benchmark: status $bench; $SECONDS s; see $out"
exit $((status != 0 || interleaved != 0 || budgets != 0 || bench != 0))
