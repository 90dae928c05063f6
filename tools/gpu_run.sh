#!/usr/bin/env bash
# Part of a kit (tools/gpu_kit.sh): runs `penstock selftest --gpu` on this machine, from the kit alone, and ends within BUDGET
# seconds (545). What it finds lies in OUT: results.md, results.json, journal.jsonl, log.txt, trace.json.gz.
#   OUT=results bash gpu_run.sh [--parts facts,bytes,...] [--quick]
# Status 0: all passed; 1: something failed; 2: the kit does not work here; 77: there is no GPU here.
# PYTHON: the interpreter that has torch and numpy (python3).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${OUT:?OUT=folder: where the results go}"
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit 2
python=${PYTHON:-python3} budget=${BUDGET:-545}
exec > >(tee "$OUT/log.txt") 2>&1

# Not the temporary folder of tests: that is removed piece by piece while they run.
site=$(mktemp -d "${TMPDIR:-/var/tmp}/penstock-site.XXXXXX") || exit 2
awake=
trap 'rm -rf "$site"; [ -z "$awake" ] || kill "$awake" 2>/dev/null' EXIT
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

broken() {
  echo "$1"
  printf '# Penstock on a GPU\n\n**Nothing ran: %s**\n' "$1" >"$OUT/results.md"
  exit 2
}
install() {
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
    --upgrade --target "$site" "$@"
}
# Without a process that has the device open, the driver ends after each one and starts anew for the next (seconds each time).
# This one opens it and sleeps; it changes no setting.
"$python" - >/dev/null 2>&1 <<'P' &
import ctypes
import signal
import time

ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not longer than the shell
nvml = ctypes.CDLL("libnvidia-ml.so.1")
device = ctypes.c_void_p()
nvml.nvmlInit_v2()
nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
time.sleep(620)
P
awake=$!
timeout 120 "$python" -c 'import torch, numpy' || broken "$python has no torch or no numpy, or takes 120 s to import them."
echo "torch imported after $SECONDS s"
# In one call of pip, which takes longer to start than to unpack
install "$here"/wheels/*.whl || {
  install "$here"/wheels/penstock-*.whl || broken "Penstock's wheel cannot be installed."
  for wheel in "$here"/wheels/*.whl; do
    case $wheel in */penstock-*) continue ;; esac
    install "$wheel" || echo "$(basename "$wheel") cannot be installed: the suite goes without it"
  done
}
echo "installed after $SECONDS s"
"$python" -c 'import pytest, pytest_timeout' 2>/dev/null || install "$here"/testing/*.whl ||
  broken "pytest cannot be installed."
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}

# fastsafetensors asks for libcudart.so without a version: the one that torch brings, and no other.
runtime=$("$python" - <<'P'
import glob
import os
import sys

found = (f for p in sys.path for f in sorted(glob.glob(os.path.join(p, "nvidia", "*", "lib", "libcudart.so.1*"))))
print(next(found, ""))
P
)
if [ -n "$runtime" ]; then
  mkdir -p "$site/.lib" && ln -sf "$runtime" "$site/.lib/libcudart.so"
  LD_LIBRARY_PATH=$site/.lib:$(dirname "$runtime")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LD_LIBRARY_PATH
fi

PENSTOCK_SELFTEST_REVISION=$(cat "$here/HEAD" 2>/dev/null)
export PENSTOCK_SELFTEST_REVISION
left=$((budget - SECONDS - 5))
PENSTOCK_SELFTEST_CHILD=1 "$python" -m penstock.selftest.run --out "$OUT" --budget "$left" "$@"
