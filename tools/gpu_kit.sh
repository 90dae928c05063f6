#!/usr/bin/env bash
# Gathers into .gpu/ (ignored by git) what a machine with a GPU needs that can fetch nothing: Penstock's wheel, which holds
# the suite (python/penstock/selftest), the wheels of its peers, and those of pytest. `make gpu-kit` calls it after
# `make wheel`.
#   there: OUT=results bash .gpu/gpu_run.sh
# torch and numpy are taken from that machine: torch's wheel alone is larger than all that a kit may hold (MOST, MiB),
# and has to match the driver there.
# PYTHON: the interpreter whose pip fetches. FOR: Python's version on that machine.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} version=${FOR:-3.12} most=${MOST:-64}
peers=(safetensors==0.9.0rc1 fastsafetensors instanttensor runai-model-streamer humanize)
testing=(pytest pytest-timeout pluggy iniconfig packaging pygments)

wheel=$(find dist -name "penstock-*_$(uname -m).whl" -printf '%T@ %p\n' 2>/dev/null |
  sort -rn | head -1 | cut -d' ' -f2-)
[ -n "$wheel" ] || { echo "dist/ has no wheel of penstock: make wheel" >&2; exit 2; }

mkdir -p .gpu/wheels .gpu/testing
rm -rf .gpu/wheels/penstock-*
cp "$wheel" .gpu/wheels/
cp tools/gpu_run.sh .gpu/
git rev-parse HEAD >.gpu/HEAD 2>/dev/null || echo unknown >.gpu/HEAD

# pip compares a wheel's glibc with each platform that it is told, and takes no lower one by itself.
platforms=(--platform "manylinux2014_$(uname -m)" --platform "manylinux1_$(uname -m)")
for glibc in 39 38 36 35 34 31 30 28 27 26 24 17; do
  platforms+=(--platform "manylinux_2_${glibc}_$(uname -m)")
done
fetch() {
  local folder=$1 name
  shift
  for name in "$@"; do
    local file=${name%%=*}
    compgen -G ".gpu/$folder/${file//-/_}-*.whl" >/dev/null && continue
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
      --python-version "$version" --implementation cp "${platforms[@]}" --dest ".gpu/$folder" "$name" ||
      echo "$name cannot be had for Python $version: the kit goes without it"
  done
}
fetch wheels "${peers[@]}"
fetch testing "${testing[@]}"

size=$(du -sm .gpu | cut -f1)
echo "$size MiB in .gpu/, for Python $version: $(find .gpu -name '*.whl' -printf '%f ')"
if [ "$size" -gt "$most" ]; then
  echo "that is more than $most MiB (MOST)" >&2
  exit 1
fi
