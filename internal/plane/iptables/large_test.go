package iptables

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// large is n Services of one port with a number of endpoints each.
func large(n, endpoints int) []*table.ServicePort {
	ports := make([]*table.ServicePort, n)
	for i := range ports {
		ports[i] = largePort(i, endpoints)
	}
	return ports
}

func largePort(i, endpoints int) *table.ServicePort {
	list := make([]table.Endpoint, endpoints)
	for j := range list {
		x := i*endpoints + j
		list[j].Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(64 + x>>16), byte(x >> 8), byte(x)}), 8080)
	}
	slices.SortFunc(list, func(a, b table.Endpoint) int { return a.Addr.Compare(b.Addr) })
	vip := netip.AddrPortFrom(netip.AddrFrom4([4]byte{172, byte(16 + i>>16), byte(i >> 8), byte(i)}), 80)
	return servicePort(fmt.Sprintf("service-%d", i), "http", svc.IPv4, svc.TCP, table.Frontend{Kind: table.ClusterIP, Addr: vip, Endpoints: list})
}
