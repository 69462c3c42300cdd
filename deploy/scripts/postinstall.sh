#!/bin/sh
# After an installation or an upgrade. Pods run on while their agent is replaced, which is not
# waited for: it is ready when its server answers.
set -e
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
systemctl try-restart fairlead-server.service ||
	echo "fairlead: the server did not start again: see 'journalctl -u fairlead-server'" >&2
systemctl --no-block try-restart fairlead-agent.service ||
	echo "fairlead: the agent was not started again: see 'journalctl -u fairlead-agent'" >&2
