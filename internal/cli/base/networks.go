package base

import (
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"
)

// NetworkFlags are the address ranges of a cluster. Every command that has them
// embeds them once and hands them to what it runs.
type NetworkFlags struct {
	ServiceCIDRs, PodCIDRs Prefixes
	// DNS are the ClusterIPs of the cluster's DNS that the server publishes; empty if it does not.
	DNS []netip.Addr
}

// AddNetworks adds the flags with what the ranges are for in this command; the
// present values are the defaults.
func (f *NetworkFlags) AddNetworks(cmd *cobra.Command, services, pods string) {
	cmd.Flags().Var(&f.ServiceCIDRs, "service-cluster-ip-range", services)
	f.AddPodNetworks(cmd, pods)
}

// AddPodNetworks adds --cluster-cidr with its purpose in this command.
func (f *NetworkFlags) AddPodNetworks(cmd *cobra.Command, pods string) {
	cmd.Flags().Var(&f.PodCIDRs, "cluster-cidr", pods)
}

// ClusterDNS returns the ClusterIPs of the cluster's DNS: the ones that the server publishes, or
// the tenth address of each service range.
func (f *NetworkFlags) ClusterDNS() ([]netip.Addr, error) {
	if len(f.DNS) > 0 {
		return f.DNS, nil
	}
	var out []netip.Addr
	for _, r := range f.ServiceCIDRs {
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
