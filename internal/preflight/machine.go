package preflight

import (
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/cgroup"
	"github.com/fairlead/fairlead/internal/kernel/clock"
)

func clocks() []Finding {
	if synced, err := clock.Synchronized(); err == nil && !synced {
		return []Finding{{"clock", Warning, "the kernel does not know of a source that keeps its clock right",
			"run chrony or systemd-timesyncd: certificates and tokens are valid from one time to another"}}
	}
	return []Finding{{"clock", OK, "is kept right, as far as the kernel says", ""}}
}

func groups() []Finding {
	if err := cgroup.Supported(); err != nil {
		return []Finding{{"cgroups", Warning, "limits of Pods are not enforced: " + oneLine(err),
			"give the machine only control groups of version 2, or do without limits"}}
	}
	return []Finding{{"cgroups", OK, "version 2, with cpu, memory and pids", ""}}
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
