#!/usr/bin/env bash
# Builds the slim image of containers/slim.Containerfile and runs it: what `make image` does.
#   tools/image.sh DIST ROOTS
# DIST: a release (make release). ROOTS: where `make roots` keeps its roots. No image registry is asked: the base image is made
# of the bare root of Debian 13, which debootstrap makes here if it is not there.
# buildah does all of it as a user who is not root, in a user namespace. Prints pass, FAIL or skip lines.
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$(realpath "${1:-dist}") roots=$(realpath -m "${2:-.roots}")
builder=penstock-image-builder

skip() { echo "skip the slim image: $1"; exit 77; }
for tool in buildah debootstrap newuidmap; do
  command -v "$tool" >/dev/null || skip "$tool is not installed (apt-get install buildah debootstrap uidmap)"
done
[ "$(id -u)" = 0 ] || skip "debootstrap needs root"
compgen -G "$dist/penstock-*_$(uname -m).whl" >/dev/null || { echo "$dist has no release: make release" >&2; exit 2; }

base=$roots/base-13.tar
if [ ! -e "$base" ]; then
  mkdir -p "$roots"
  debootstrap --variant=minbase --include=ca-certificates trixie "$roots/base-13" >"$roots/base-13.log" 2>&1 ||
    skip "debootstrap: $(tail -1 "$roots/base-13.log")"
  rm -rf "$roots"/base-13/var/cache/apt/archives/*.deb "$roots"/base-13/var/lib/apt/lists/*
  # As an image: without device nodes, which nobody but root may make
  tar --exclude=./dev --exclude=./proc --exclude=./sys -C "$roots/base-13" -cf "$base" .
fi

id "$builder" >/dev/null 2>&1 || useradd --system --create-home --add-subids-for-system "$builder" 2>/dev/null ||
  useradd --create-home "$builder"
grep -q "^$builder:" /etc/subuid || usermod --add-subuids 1000000-1065535 --add-subgids 1000000-1065535 "$builder"
home=$(getent passwd "$builder" | cut -d: -f6)
work=$home/image
rm -rf "$work"
mkdir -p "$work/context/dist"
cp "$dist"/*.whl "$dist/SHA256SUMS" "$work/context/dist/"
cp containers/slim.Containerfile "$work/context/"
cp "$base" "$work/base.tar"
cp /etc/resolv.conf "$work/"
chown -R "$builder" "$work"

as_builder() {
  # Not `buildah unshare`: of a namespace that buildah has made, Debian 12's buildah loses HOME in a RUN
  local buildah='buildah() { command buildah --root "$WORK/storage" --runroot "$WORK/run" "$@"; }'
  (cd "$home" && setpriv --reuid "$builder" --regid "$builder" --init-groups env -i HOME="$home" PATH="$PATH" WORK="$work" \
    BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs \
    unshare --user --map-root-user --map-auto --mount bash -euo pipefail -c "$buildah; $1")
}

if ! said=$(as_builder "cd $work
  from=\$(buildah from scratch)
  buildah add --quiet \$from base.tar /
  buildah commit --quiet --rm \$from localhost/debian:trixie-slim
  buildah bud --layers=false --pull-never --timestamp 0 --build-arg BASE=localhost/debian:trixie-slim \
    -f context/slim.Containerfile -t localhost/penstock context" 2>&1); then
  echo "FAIL the slim image is built by $builder (user $(id -u "$builder")): $(tail -5 <<<"$said")"
  exit 1
fi
echo "pass the slim image is built by $builder (user $(id -u "$builder")), from a root that debootstrap made"

version=$(as_builder "c=\$(buildah from --pull-never localhost/penstock); buildah run --user 65534:65534 \$c -- penstock --version")
echo "pass it runs as user 65534: $(tr '\n' ';' <<<"$version")"
as_builder "c=\$(buildah from --pull-never localhost/penstock)
  buildah run \$c -- penstock doctor --no-measure >/dev/null
  ! buildah run \$c -- python3 -c 'import torch' 2>/dev/null
  ! buildah run \$c -- sh -c 'ls /opt/penstock/lib/python3*/site-packages/*.pth' 2>/dev/null
  buildah push --quiet localhost/penstock oci-archive:$work/penstock.oci.tar"
echo "pass doctor runs, there is no torch and no .pth, and it is an OCI archive of $(stat -c %s "$work/penstock.oci.tar") bytes"
