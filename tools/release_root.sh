#!/usr/bin/env bash
# Builds a release of HEAD, both targets, in a bare root of Debian 12 with Debian's Rust: what `make release-root` does. For a
# machine on which rustup cannot add a target, and to build with the same tools on any machine.
#   tools/release_root.sh OUT ROOTS [COMMAND...]
# OUT: where the release goes. ROOTS: where the root is kept. COMMAND: what runs there in the clone, instead of a release into
# /out. Needs root, debootstrap and Debian's package archive; pip takes its configuration from this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "$1") roots=$(realpath -m "$2")
shift 2
[ $# -gt 0 ] || set -- /venv/bin/python tools/release.py --out /out/dist --work /build/release
root=$roots/release
if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
  echo "skip the release in a root: this needs root, and debootstrap (apt-get install debootstrap)"
  exit 77
fi

inside() {
  # shellcheck disable=SC2016 # the inner shell expands them
  unshare --mount --pid --fork --kill-child sh -ec 'root=$1 out=$2; shift 2
    mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; mount --bind "$out" "$root/out"
    exec chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
      ${PIP_CERT:+PIP_CERT=/etc/ssl/certs/ca-certificates.crt} CARGO_HOME=/root/cargo "$@"' - "$root" "$out" "$@"
}

mkdir -p "$out" "$roots"
if [ ! -e "$root/.made" ]; then
  rm -rf "$root"
  debootstrap --variant=minbase --include=ca-certificates,git,python3-venv bookworm "$root" >"$roots/release.log" 2>&1 ||
    { echo "FAIL debootstrap: $(tail -1 "$roots/release.log")"; exit 1; }
  mkdir -p "$root/out"
  for file in /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt; do
    cp -L "$file" "$root$file"
  done
  # Rust as Debian builds it for its browsers: security updates have the newest
  mirror=$(sed -n 's/^deb \([^ ]*\) .*/\1/p' "$root/etc/apt/sources.list" | head -1)
  echo "deb ${mirror%/}-security bookworm-security main" >"$root/etc/apt/sources.list.d/security.list"
  inside bash -euc 'dpkg --add-architecture arm64
    apt-get -qq update
    apt-get -qq install --no-install-recommends rustc-web cargo-web libstd-rust-web-dev libstd-rust-web-dev:arm64 gcc libc6-dev \
      >/dev/null
    python3 -m venv /venv'
  touch "$root/.made"
fi
cp tools/release-requirements.txt "$root/requirements.txt"
inside /venv/bin/python -m pip install --quiet --disable-pip-version-check -r /requirements.txt
rm -rf "$root/clone"
git clone --quiet --no-local . "$root/clone"
inside sh -c 'cd /clone && exec "$@"' - "$@"
