package daemon

import (
	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/controller"
)

// nodeMasks are the prefix lengths of each node's part of the pod ranges, kube-controller-manager's flags.
type nodeMasks struct{ v4, v6 int }

func (m *nodeMasks) add(flags *pflag.FlagSet) {
	flags.IntVar(&m.v4, "node-cidr-mask-size-ipv4", controller.DefaultNodeMask4,
		"prefix length of each node's part of the IPv4 range of --cluster-cidr: 24 has addresses for 253 Pods, 22 for 1,021; "+
			"a node keeps the part that it has")
	flags.IntVar(&m.v6, "node-cidr-mask-size-ipv6", controller.DefaultNodeMask6,
		"prefix length of each node's part of the IPv6 range of --cluster-cidr")
}

// ranges sets the pod ranges of o. Errors are about the use of the flags.
func (m *nodeMasks) ranges(o *controller.Options, cluster base.Prefixes) error {
	o.ClusterCIDRs, o.NodeMask4, o.NodeMask6 = cluster, m.v4, m.v6
	if err := o.CheckRanges(); err != nil {
		return base.Usagef("--cluster-cidr, --node-cidr-mask-size-ipv4 and -ipv6: %v", err)
	}
	return nil
}
