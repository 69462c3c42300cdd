package status

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// Bounds of the connections to endpoints that were written by hand: dialTimeout for each,
// probeAtOnce at a time, and maxProbes in all.
const (
	dialTimeout = time.Second
	probeAtOnce = 32
	maxProbes   = 256
)

// prober connects to endpoints from this machine.
type prober struct {
	dial func(ctx context.Context, network, address string) (net.Conn, error)
	// anywhere is set where the flag asks for it; else only a node connects.
	anywhere bool
	// local are this machine's addresses.
	local []netip.Addr
}

func newProber() *prober {
	p := &prober{dial: (&net.Dialer{}).DialContext}
	addrs, _ := net.InterfaceAddrs() // without them fewer endpoints are in reach
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				p.local = append(p.local, addr.Unmap())
			}
		}
	}
	return p
}

// target is one endpoint of a Service that was written by hand.
type target struct {
	service string
	at      netip.AddrPort
}

// onNode reports whether this machine is one of the nodes.
func (p *prober) onNode(nodes []corev1.Node) bool {
	return slices.ContainsFunc(nodes, func(n corev1.Node) bool {
		return slices.ContainsFunc(n.Status.Addresses, func(a corev1.NodeAddress) bool {
			addr, err := netip.ParseAddr(a.Address)
			return err == nil && slices.Contains(p.local, addr)
		})
	})
}

// handMade returns the ready TCP endpoints of Services without a selector
// that no component manages. Those in the ranges of the nodes' Pods, and the nodes
// themselves, are left out unless this machine, whose addresses are local, is a node:
// others need not reach them.
func handMade(services []corev1.Service, all []discoveryv1.EndpointSlice, nodes []corev1.Node, local []netip.Addr) []target {
	manual := map[string]bool{"default/kubernetes": false}
	for i := range services {
		s := &services[i]
		key := s.Namespace + "/" + s.Name
		if _, known := manual[key]; !known {
			manual[key] = len(s.Spec.Selector) == 0 && s.Spec.Type != corev1.ServiceTypeExternalName
		}
	}
	inside := clusterRanges(nodes, local)
	var out []target
	for i := range all {
		s := &all[i]
		key := s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName]
		by := s.Labels[discoveryv1.LabelManagedBy]
		if !manual[key] || by == epslice.ManagedBySelector || by == svc.DNSSliceManager || s.AddressType == discoveryv1.AddressTypeFQDN {
			continue
		}
		for _, e := range s.Endpoints {
			if e.Conditions.Ready != nil && !*e.Conditions.Ready || len(e.Addresses) == 0 {
				continue
			}
			addr, err := netip.ParseAddr(e.Addresses[0])
			if err != nil || slices.ContainsFunc(inside, func(p netip.Prefix) bool { return p.Contains(addr) }) {
				continue
			}
			for _, p := range s.Ports {
				if p.Port != nil && (p.Protocol == nil || *p.Protocol == corev1.ProtocolTCP) {
					out = append(out, target{key, netip.AddrPortFrom(addr, uint16(*p.Port))})
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b target) int {
		if c := strings.Compare(a.service, b.service); c != 0 {
			return c
		}
		return a.at.Compare(b.at)
	})
	return slices.Compact(out)
}

// clusterRanges returns what only nodes are sure to reach; nothing on a node.
func clusterRanges(nodes []corev1.Node, local []netip.Addr) []netip.Prefix {
	var out []netip.Prefix
	for i := range nodes {
		for _, a := range nodes[i].Status.Addresses {
			addr, err := netip.ParseAddr(a.Address)
			if err != nil {
				continue
			}
			if slices.Contains(local, addr) {
				return nil
			}
			out = append(out, netip.PrefixFrom(addr, addr.BitLen()))
		}
		for _, c := range nodes[i].Spec.PodCIDRs {
			if p, err := netip.ParsePrefix(c); err == nil {
				out = append(out, p)
			}
		}
	}
	return out
}

// share returns maxProbes targets at most, shared evenly between namespaces:
// a namespace with many endpoints does not keep the others from being probed.
func share(targets []target) []target {
	if len(targets) <= maxProbes {
		return targets
	}
	of := map[string][]target{}
	for _, t := range targets {
		namespace, _, _ := strings.Cut(t.service, "/")
		of[namespace] = append(of[namespace], t)
	}
	names := slices.Sorted(maps.Keys(of))
	var out []target
	for i := 0; len(out) < maxProbes; i++ {
		for _, n := range names {
			if i < len(of[n]) && len(out) < maxProbes {
				out = append(out, of[n][i])
			}
		}
	}
	return out
}

// problems connects to targets and returns a line for each that does not answer.
func (p *prober) problems(ctx context.Context, targets []target) []serviceProblem {
	found := make([]serviceProblem, len(targets))
	var group errgroup.Group
	group.SetLimit(probeAtOnce)
	for i, t := range targets {
		group.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, dialTimeout)
			defer cancel()
			conn, err := p.dial(ctx, "tcp", t.at.String())
			if err == nil {
				return conn.Close()
			}
			why := base.OneLine(err)
			if op := new(net.OpError); errors.Is(err, context.DeadlineExceeded) || errors.As(err, &op) && op.Timeout() {
				why = "no answer within " + dialTimeout.String()
			} else if errors.As(err, &op) {
				why = op.Err.Error()
			}
			found[i] = serviceProblem{t.service,
				fmt.Sprintf("service %s: its endpoint %s, written by hand, does not answer this machine: %s", t.service, t.at, why)}
			return nil
		})
	}
	_ = group.Wait() // a connection that cannot be closed was there
	return slices.DeleteFunc(found, func(p serviceProblem) bool { return p.Text == "" })
}
