#!/bin/sh
# Before a removal; not before an upgrade (dpkg: "upgrade", rpm: 1). What is in
# /var/lib/fairlead and /etc/fairlead stays; the rules and Pods of this node go.
set -e
case "$1" in upgrade | 1 | failed-upgrade) exit 0 ;; esac
if [ -d /run/systemd/system ]; then
	systemctl --no-reload disable --now fairlead-agent.service fairlead-server.service || true
fi
if [ -d /var/lib/fairlead/agent ]; then
	/usr/bin/fairlead cleanup || echo "fairlead: 'fairlead cleanup' failed: rules of Services may be left in the kernel" >&2
fi
