#!/bin/sh
# After an installation or an upgrade. Pods run on while their agent is replaced.
set -e
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
for unit in fairlead-server fairlead-agent; do
	systemctl try-restart "$unit.service" || echo "fairlead: $unit did not start again: see 'journalctl -u $unit'" >&2
done
