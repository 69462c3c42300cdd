package cli

import (
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/controller"
)

// networkFlags are the address ranges of a cluster. Every command that has them
// embeds them once and hands them to what it runs.
type networkFlags struct {
	serviceCIDRs, podCIDRs prefixesValue
	// dns are the ClusterIPs of the cluster's DNS as the server says; empty if it does
	// not.
	dns []netip.Addr
}

// defaultNetworks are the ranges of a cluster of our own.
func defaultNetworks() networkFlags {
	return networkFlags{serviceCIDRs: apiserver.DefaultServiceCIDRs(), podCIDRs: controller.DefaultClusterCIDRs()}
}

// addNetworks adds the flags with what the ranges are for in this command; the
// present values are the defaults.
func (f *networkFlags) addNetworks(cmd *cobra.Command, services, pods string) {
	cmd.Flags().Var(&f.serviceCIDRs, "service-cluster-ip-range", services)
	f.addPodNetworks(cmd, pods)
}

func (f *networkFlags) addPodNetworks(cmd *cobra.Command, pods string) {
	cmd.Flags().Var(&f.podCIDRs, "cluster-cidr", pods)
}

// clusterDNS returns the ClusterIPs of the cluster's DNS: those that the server says, or
// the tenth address of each service range.
func (f *networkFlags) clusterDNS() ([]netip.Addr, error) {
	if len(f.dns) > 0 {
		return f.dns, nil
	}
	var out []netip.Addr
	for _, r := range f.serviceCIDRs {
		a := r.Masked().Addr()
		for range 10 {
			a = a.Next()
		}
		if !r.Contains(a) {
			return nil, fmt.Errorf("the service range %s has no tenth address", r)
		}
		out = append(out, a)
	}
	return out, nil
}
