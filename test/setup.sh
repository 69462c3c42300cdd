#!/usr/bin/env bash
# Installs the Debian packages that the tests and the demo use. Without root it
# only says which are missing, and what to type.
set -euo pipefail

declare -A package=(
  [nft]=nftables [iptables]=iptables [conntrack]=conntrack [ip]=iproute2
  [linux.uml]=user-mode-linux [modprobe]=kmod [curl]=curl [dig]=bind9-dnsutils [pgrep]=procps
  [openssl]=openssl [unshare]=util-linux [musl-gcc]=musl-tools
  [bird]=bird2 [systemctl]=systemd [dbus-daemon]=dbus-daemon [nginx]=nginx-light [haproxy]=haproxy
  [pg_lsclusters]=postgresql [redis-server]=redis-server [strace]=strace [h2load]=nghttp2-client [rpm]=rpm
  [chromium]=chromium [containerd]=containerd [runc]=runc [promtool]=prometheus [rpc.nfsd]=nfs-kernel-server [ipset]=ipset
)
PATH=$PATH:/usr/sbin:/sbin

missing=()
for tool in "${!package[@]}"; do
  command -v "$tool" >/dev/null || missing+=("${package[$tool]}")
done
# Only Debian 12 and Ubuntu 22.04 have the compiler that made the checked-in object of the connect-time programs; the
# test that compares them is skipped without it.
compiler=()
for tool in clang-14 llvm-strip-14; do
  command -v "$tool" >/dev/null || compiler=(clang-14 llvm-14)
done
[ ${#missing[@]} -eq 0 ] && [ ${#compiler[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  [ ${#missing[@]} -eq 0 ] && exit 0
  echo "missing: ${missing[*]}; install them with: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  [ ${#missing[@]} -eq 0 ] && exit 0
  echo "missing: ${missing[*]}, and this is not a Debian or Ubuntu system: install them with its own package manager" >&2
  exit 1
fi
echo "installing ${missing[*]} ${compiler[*]}"
export DEBIAN_FRONTEND=noninteractive
# Tests start what they use; a package that also enables a daemon (bird2) must not
# start it on this machine.
if [ ! -e /usr/sbin/policy-rc.d ]; then
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
  chmod 755 /usr/sbin/policy-rc.d
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
# PostgreSQL's package makes a cluster of its own otherwise.
if [ ! -e /etc/postgresql-common ]; then
  mkdir -p /etc/postgresql-common/createcluster.d
  echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.d/no-main.conf
fi
apt-get update -qq
[ ${#missing[@]} -eq 0 ] || apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
[ ${#compiler[@]} -eq 0 ] || apt-get install -y -qq --no-install-recommends "${compiler[@]}" >/dev/null ||
  echo "cannot install ${compiler[*]}: the test of the connect-time object is skipped" >&2
