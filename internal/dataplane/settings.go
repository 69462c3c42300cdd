package dataplane

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/kernel/sysctl"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// routeLocalnet is the kernel parameter that lets 127.0.0.0/8 be routed.
const routeLocalnet = "net/ipv4/conf/all/route_localnet"

// Settings are what a Table has for all its ports of one family.
type Settings struct {
	// Pods are the ranges of pods (Table.ClusterCIDRs), LocalPods the ranges of this
	// node's own (Table.LocalCIDRs).
	Pods, LocalPods []netip.Prefix
	// PodInterfaces are the interfaces of this node's own pods (Table.PodInterfaces): what comes from there counts as of
	// both ranges.
	PodInterfaces []table.Interface
	MasqueradeAll bool
	// Services are the ranges of ClusterIPs (Table.ServiceCIDRs).
	Services []netip.Prefix
	// NodeAddrs are where node ports answer, without ::1, for which Linux has
	// no route_localnet. Localhost reports whether an address of 127.0.0.0/8 is
	// one of them, or a frontend's (Table.Loopback).
	NodeAddrs []netip.Addr
	Localhost bool
	// Guard reports whether the mode keeps other machines from this node's 127.0.0.0/8: as
	// long as route_localnet lets them in, which outlives the last frontend there
	// (kubernetes/kubernetes#90259).
	Guard bool
	// Direct reports whether a Service asks for direct return (Table.ForwardsDirectly).
	Direct bool
}

// SettingsOf returns the Settings of t for a family.
func SettingsOf(t *table.Table, f svc.Family) Settings {
	of := func(ranges []netip.Prefix) (out []netip.Prefix) {
		for _, p := range ranges {
			if svc.FamilyOf(p.Addr()) == f {
				out = append(out, p.Masked())
			}
		}
		return out
	}
	s := Settings{
		MasqueradeAll: t.MasqueradeAll, Pods: of(t.ClusterCIDRs), LocalPods: of(t.LocalCIDRs), PodInterfaces: t.PodInterfaces,
		Services: of(t.ServiceCIDRs), Direct: t.ForwardsDirectly,
	}
	s.Localhost = t.Loopback && f == svc.IPv4
	for _, a := range t.NodePortAddrs {
		if svc.FamilyOf(a) != f || a.IsLoopback() && f == svc.IPv6 {
			continue
		}
		s.Localhost = s.Localhost || a.IsLoopback()
		s.NodeAddrs = append(s.NodeAddrs, a)
	}
	s.Guard = s.Localhost || f == svc.IPv4 && sysctl.Value(routeLocalnet) == "1"
	return s
}

// Equal reports whether both say the same.
func (s *Settings) Equal(o *Settings) bool {
	return s.SamePorts(o) && s.Localhost == o.Localhost && s.Guard == o.Guard && s.Direct == o.Direct &&
		slices.Equal(s.NodeAddrs, o.NodeAddrs) && slices.Equal(s.Services, o.Services)
}

// SamePorts reports whether both say the same of what depends on single service
// ports: everything but where node ports answer and what addresses Services have.
func (s *Settings) SamePorts(o *Settings) bool {
	return s.MasqueradeAll == o.MasqueradeAll && slices.Equal(s.Pods, o.Pods) && slices.Equal(s.LocalPods, o.LocalPods) &&
		slices.Equal(s.PodInterfaces, o.PodInterfaces)
}

// OpenLoopback lets node ports and host ports answer on 127.0.0.0/8, if they are to. The mode
// calls it when its Guard is in the kernel, not before. It stays open when the mode
// ends, since other programs may rely on it, too, until 'fairlead cleanup' or CloseLoopback.
func (s *Settings) OpenLoopback() error {
	if !s.Localhost {
		return nil
	}
	if err := sysctl.Set(routeLocalnet, "1"); err != nil {
		return fmt.Errorf("let node ports and host ports answer on 127.0.0.1: %w", err)
	}
	return nil
}

// LoopbackOpens reports whether OpenLoopback can work here: not where /proc/sys is read-only, as in most containers.
func LoopbackOpens() bool {
	return sysctl.Value(routeLocalnet) == "1" || sysctl.Writable(routeLocalnet)
}

// CloseLoopback undoes OpenLoopback, before the Guard of the mode that opened it goes from
// the kernel.
func CloseLoopback() error {
	if err := sysctl.RestoreOne(routeLocalnet); err != nil {
		return fmt.Errorf("keep 127.0.0.0/8 from being routed: %w", err)
	}
	return nil
}
