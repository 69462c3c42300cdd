package kubeproxy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kubeproxyconfig"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Missing compares the rules of a kube-proxy in a mode with the cluster IPs of t, and describes which endpoints lack a rule.
// In mode iptables each endpoint must have its chain, and in mode ipvs it must be a server of the address; in mode nftables the address
// must lead to a chain with rules. It returns how many endpoints were compared. It needs no program, and works in the network namespace of
// the calling thread.
func Missing(mode string, t *table.Table) (compared int, missing []string, err error) {
	has, err := installed(mode)
	if err != nil {
		return 0, nil, err
	}
	for p := range t.All() {
		for _, f := range p.Frontends {
			if f.Kind != table.ClusterIP {
				continue // it leads to the same chains
			}
			for at := range endpoints(&f) {
				compared++
				if !has(p, &f, at) {
					missing = append(missing, fmt.Sprintf("%s %s has no rule for the endpoint %s", p.Protocol, f.Addr, at))
				}
			}
		}
	}
	slices.Sort(missing)
	return compared, missing, nil
}

func endpoints(f *table.Frontend) map[netip.AddrPort]bool {
	out := map[netip.AddrPort]bool{}
	for _, e := range slices.Concat(f.Endpoints, f.LocalClients) {
		out[e.Addr] = true
	}
	return out
}

// looks reports whether an endpoint of a frontend is installed.
type looks func(p *table.ServicePort, f *table.Frontend, at netip.AddrPort) bool

func installed(mode string) (looks, error) {
	switch mode {
	case kubeproxyconfig.ModeIPVS:
		return servers()
	case kubeproxyconfig.ModeNFTables:
		return tables()
	case kubeproxyconfig.ModeIPTables:
		return chainNames()
	}
	return nil, fmt.Errorf("kube-proxy's mode is %q; want iptables, ipvs or nftables", mode)
}

// families are kube-proxy's, in nf_tables.
var families = map[svc.Family]nftables.Family{svc.IPv4: nftables.IPv4, svc.IPv6: nftables.IPv6}

// chainNames looks for a chain of each endpoint by its name, in both variants of iptables.
func chainNames() (looks, error) {
	const nat = "nat"
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	chains := map[svc.Family]map[string]bool{}
	for family, in := range families {
		chains[family] = map[string]bool{}
		all, err := c.Chains(nftables.Table{Family: in, Name: nat})
		if err != nil {
			return nil, err
		}
		for i := range all {
			chains[family][all[i].Name] = true
		}
		legacy, err := iptables.LegacyChains(family, nat)
		if err != nil {
			return nil, err
		}
		for _, name := range legacy {
			chains[family][name] = true
		}
	}
	return func(p *table.ServicePort, _ *table.Frontend, at netip.AddrPort) bool {
		return chains[p.Family][chainOf(p.ID, p.Protocol, at)]
	}, nil
}

// servicesMap is the map of kube-proxy's tables with the chain of each address.
const servicesMap = "service-ips"

// tables looks for the chain that an address leads to, and its rules.
func tables() (looks, error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	leads := map[string]bool{}
	for _, in := range families {
		t := nftables.Table{Family: in, Name: tableName}
		there, err := nftables.ReadTable(c, t)
		if err != nil {
			return nil, err
		}
		if there == nil || !slices.ContainsFunc(there.Sets, func(s nftables.StoredSet) bool { return s.Name == servicesMap }) {
			continue
		}
		var found []string
		if err := c.Elems(t, servicesMap, func() { found = nil }, func(e nftables.Elem) {
			if len(there.Rules[e.Goto]) > 0 {
				found = append(found, string(e.Key))
			}
		}); err != nil {
			return nil, err
		}
		for _, key := range found {
			leads[key] = true
		}
	}
	return func(p *table.ServicePort, f *table.Frontend, _ netip.AddrPort) bool {
		return leads[keyOf(p.Protocol, f.Addr)]
	}, nil
}

// keyOf is the key of servicesMap: address, protocol and port, in words of four bytes each.
func keyOf(p svc.Protocol, at netip.AddrPort) string {
	return string(append(at.Addr().AsSlice(), byte(p), 0, 0, 0, byte(at.Port()>>8), byte(at.Port()), 0, 0))
}

// servers looks for virtual servers of IPVS with their real ones.
func servers() (looks, error) {
	c, err := ipvs.Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	var keys []ipvs.Key
	if err := c.Services(func(s ipvs.Service) { keys = append(keys, s.Key) }); err != nil {
		return nil, err
	}
	has := map[ipvs.Key]map[netip.AddrPort]bool{}
	var errs []error
	for _, k := range keys {
		has[k] = map[netip.AddrPort]bool{}
		err := c.Dests(k, func(d ipvs.Dest) { has[k][d.Addr] = true })
		if err != nil && !ipvs.IsMissing(err) { // it has gone just now
			errs = append(errs, err)
		}
	}
	return func(p *table.ServicePort, f *table.Frontend, at netip.AddrPort) bool {
		return has[ipvs.AddressKey(p.Protocol, f.Addr)][at]
	}, errors.Join(errs...)
}
