#!/usr/bin/env bash
# A machine of another kind inside this one, to test what this kernel lacks: QEMU without hardware help boots a Debian
# kernel. Its root is this machine's files (9p, read only, under a writable layer in memory).
# It has what is asked for: kernel NFS, server and client; NUMA nodes; several NVMe drives with a bandwidth each; control
# groups of version 2.
# The processor is 10 to 30 times slower than the host's: behaviour and counts are real in it, rates are not.
#
# usage: tools/lab.sh [options] -- COMMAND...
# Runs COMMAND as root in the guest, in the current directory, and exits with its status.
#   --kernel 6.1|6.12   Debian kernel (default 6.12)
#   --nodes N           NUMA nodes (default 1); the drives are dealt to them
#   --drives N          empty NVMe drives, /dev/nvme0n1 and so on (default 1)
#   --drive-gib N       GiB of each drive (default 4); a hole in a file until it is written
#   --drive-mbps X      bandwidth of each drive in MB/s (default: no limit)
#   --memory M          MiB (default 4096)
#   --cpus N            processors (default 2)
#   --timeout S         seconds until the guest is ended (default 600)
#   --keep-drive FILE   one drive more, /dev/vda: FILE, which stays (made with --drive-gib if it is not there). The drive has
#                       a volatile write cache: tools/volatile_drive.py
#   --lose-power S:N    the power is lost when the guest has written N bytes (S:Ns: N small writes) to that drive since
#                       /out/armed is there: QEMU is killed, and a part of what was not flushed, by the seed S, is gone.
#                       Status 75; /out/drive.json
#   --nfs               the first drive as ext4 at /srv/nfs, exported, and mounted with NFS 4.2 at /mnt/nfs
#   --cgroup2           control groups of version 2 at /sys/fs/cgroup, with memory and pids, and none of version 1
#   --out DIR           a folder that the guest may write to, as /out (default: a new one)
# Needs a Debian machine and root. Packages: qemu-system-x86 busybox-static cpio kmod xz-utils, and for --nfs
# nfs-kernel-server nfs-common. The kernel's package is fetched with apt-get and kept in ~/.cache/penstock-lab.
set -euo pipefail
export PATH=$PATH:/sbin:/usr/sbin

kernel=6.12 nodes=1 drives=1 gib=4 mbps='' memory=4096 cpus=2 limit=600 nfs='' cgroup2='' out='' keep='' lose=''
usage() { sed -n '/^# usage/,/^set/p' "$0" | sed '$d'; exit 64; }
while [ $# -gt 0 ]; do
  case $1 in
    --kernel) kernel=$2; shift 2 ;;
    --nodes) nodes=$2; shift 2 ;;
    --drives) drives=$2; shift 2 ;;
    --drive-gib) gib=$2; shift 2 ;;
    --drive-mbps) mbps=$2; shift 2 ;;
    --memory) memory=$2; shift 2 ;;
    --cpus) cpus=$2; shift 2 ;;
    --timeout) limit=$2; shift 2 ;;
    --keep-drive) keep=$(realpath "$2"); shift 2 ;;
    --lose-power) lose=$2; shift 2 ;;
    --nfs) nfs=1; shift ;;
    --cgroup2) cgroup2=1; shift ;;
    --out) out=$2; shift 2 ;;
    --) shift; break ;;
    *) usage ;;
  esac
done
[ $# -gt 0 ] || usage

missing=()
need() { command -v "$1" >/dev/null || missing+=("${@:2}"); }
need qemu-system-x86_64 qemu-system-x86
need busybox busybox-static
need cpio cpio
need depmod kmod
need xz xz-utils
[ -z "$keep" ] || need python3 python3
[ -z "$nfs" ] || need rpc.nfsd nfs-kernel-server nfs-common
[ ${#missing[@]} = 0 ] || { echo "tools/lab.sh needs packages: apt-get install ${missing[*]}" >&2; exit 69; }

# The kernel and its modules, unpacked
case $kernel in
  6.1) package=linux-image-amd64 ;;
  *) package=linux-image-$kernel-amd64 ;;
esac
tree=${XDG_CACHE_HOME:-$HOME/.cache}/penstock-lab/$kernel
if [ ! -e "$tree/ok" ]; then
  apt-cache show "$package" >/dev/null 2>&1 || apt-get update -qq
  image=$(apt-cache depends "$package" | awk '/Depends: linux-image/ {print $2; exit}')
  rm -rf "$tree"
  mkdir -p "$tree"
  (cd "$tree" && apt-get download -qq "${image:-$package}" 2>/dev/null && dpkg -x linux-image*.deb . && rm linux-image*.deb)
  version=$(basename "$tree"/lib/modules/*)
  depmod -b "$tree" "$version"
  echo "$version" > "$tree/ok"
fi
version=$(cat "$tree/ok")
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$work"' EXIT
out=${out:-$(mktemp -d)}
mkdir -p "$out"
rm -f "$out/.status" "$out/armed" "$out/drive.json"

# The first root: busybox, the modules that lead to the real one, and a program that goes there
init=$work/init
mkdir -p "$init"/{bin,lib/modules,proc,sys,dev,new,host,layer}
cp "$(command -v busybox)" "$init/bin/busybox"
for module in virtio_pci 9pnet_virtio 9p overlay; do
  modprobe -d "$tree" -S "$version" -D "$module" 2>/dev/null || true
done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' > "$work/list"
number=100
while read -r file; do
  number=$((number + 1))
  case $file in *.xz) xz -dc "$file" ;; *.zst) zstd -dc "$file" ;; *) cat "$file" ;; esac > "$init/lib/modules/$number.ko"
done < "$work/list"
cat > "$init/init" <<'I'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc p /proc
mount -t sysfs s /sys
mount -t devtmpfs d /dev
for m in /lib/modules/*.ko; do insmod $m; done
mount -t tmpfs t /layer
mkdir /layer/up /layer/work
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro host /host &&
  mount -t overlay -o lowerdir=/host,upperdir=/layer/up,workdir=/layer/work o /new || { echo "no root"; poweroff -f; }
for d in proc sys dev; do mount --move /$d /new/$d; done
mkdir -p /new/out /new/dev/shm /new/dev/pts
for d in dev/shm tmp run; do mount -t tmpfs t /new/$d; done
mount -t devpts d /new/dev/pts
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,access=any out /new/out
exec switch_root /new /bin/bash /out/.guest
I
chmod +x "$init/init"
(cd "$init" && find . | cpio -o -H newc --quiet | gzip -1) > "$work/initrd"

# What the guest does then
{
  echo 'export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8'
  printf 'mkdir -p /lib/modules; mount --bind %q /lib/modules\n' "$tree/lib/modules"
  cat <<'G'
ip link set lo up 2>/dev/null || ifconfig lo up
modprobe nvme; modprobe ext4; modprobe xfs 2>/dev/null; modprobe virtio_blk; udevadm settle 2>/dev/null; sleep 0.5
ulimit -n 65536
G
  [ -z "$cgroup2" ] || cat <<'C'
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 /sys/fs/cgroup
echo '+memory +pids' > /sys/fs/cgroup/cgroup.subtree_control
C
  [ -z "$nfs" ] || cat <<'N'
mkfs.ext4 -q -F /dev/nvme0n1
mkdir -p /srv/nfs /mnt/nfs
mount /dev/nvme0n1 /srv/nfs
chmod 777 /srv/nfs
modprobe nfsd
mount -t nfsd n /proc/fs/nfsd
mkdir -p /var/lib/nfs
mount -t tmpfs t /var/lib/nfs
mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs /run/rpcbind
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
echo '/srv/nfs 127.0.0.1(rw,no_root_squash,insecure,no_subtree_check,fsid=0,async)' > /etc/exports
exportfs -ra
rpc.mountd -N 2 -N 3 2>/dev/null || rpc.mountd
rpc.nfsd -N 3 -V 4.2 8 2>/dev/null || rpc.nfsd 8
mount -t nfs4 -o vers=4.2 127.0.0.1:/ /mnt/nfs || echo "NFS: not mounted"
N
  printf 'cd %q\n( ' "$PWD"
  printf '%q ' "$@"
  echo ') > /out/stdout 2>&1'
  echo 'echo $? > /out/.status; sync; umount /mnt/nfs 2>/dev/null; echo o > /proc/sysrq-trigger; sleep 60'
} > "$out/.guest"

# Without erms and fsrm: where the processor has them, kernels copy and clear memory by byte-wise string instructions, which
# QEMU emulates a byte at a time
machine=(-accel tcg,thread=multi -cpu max,-erms,-fsrm -smp "$cpus" -m "$memory" -nographic -no-reboot -nic none
  -serial "file:$out/console" -monitor none
  -kernel "$tree/boot/vmlinuz-$version" -initrd "$work/initrd" -append "console=ttyS0 panic=1 quiet mitigations=off"
  -virtfs local,path=/,mount_tag=host,security_model=passthrough,readonly=on,multidevs=remap
  -virtfs "local,path=$out,mount_tag=out,security_model=passthrough")
if [ "$nodes" -gt 1 ]; then
  machine=(-machine q35 "${machine[@]}")
  for i in $(seq 0 $((nodes - 1))); do
    processors=$(seq -s, "$i" "$nodes" $((cpus - 1)) | sed 's/[0-9]*/cpus=&/g')
    machine+=(-object "memory-backend-ram,id=m$i,size=$((memory / nodes))M" -numa "node,nodeid=$i,memdev=m$i,$processors"
      -device "pxb-pcie,id=bus$i,bus_nr=$((64 + 32 * i)),numa_node=$i,bus=pcie.0")
  done
fi
for i in $(seq 0 $((drives - 1))); do
  truncate -s "${gib}G" "$work/drive$i"
  throttle=${mbps:+,throttling.bps-total=$((mbps * 1000000))}
  machine+=(-drive "file=$work/drive$i,if=none,id=d$i,format=raw,cache=none,aio=threads$throttle")
  bus=
  if [ "$nodes" -gt 1 ]; then
    machine+=(-device "pcie-root-port,id=rp$i,bus=bus$((i % nodes)),chassis=$((i + 1)),slot=$i")
    bus=,bus=rp$i
  fi
  machine+=(-device "nvme,serial=drive$i,drive=d$i$bus")
done
if [ -n "$keep" ]; then
  [ -e "$keep" ] || truncate -s "${gib}G" "$keep"
  losing=${lose:+--lose $lose --armed $out/armed --qemu $work/pid}
  # shellcheck disable=SC2086
  python3 "$(dirname "$0")/volatile_drive.py" "$keep" "$work/socket" "$out/drive.json" $losing &
  server=$!
  until [ -S "$work/socket" ]; do kill -0 "$server"; sleep 0.1; done
  # A virtio drive has no writes that pass its cache (FUA): the guest flushes instead
  machine+=(-pidfile "$work/pid" -blockdev "driver=nbd,node-name=kept,server.type=unix,server.path=$work/socket"
    -device virtio-blk-pci,drive=kept,write-cache=on)
fi
timeout "$limit" qemu-system-x86_64 "${machine[@]}" || true
cat "$out/stdout" 2>/dev/null || true
if [ -n "$server" ]; then
  wait "$server"
  server=
  ! grep -q '"lost": true' "$out/drive.json" || exit 75
fi
[ -s "$out/.status" ] || { echo "the guest did not finish; its console is $out/console" >&2; exit 124; }
exit "$(cat "$out/.status")"
