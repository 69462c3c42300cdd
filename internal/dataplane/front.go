package dataplane

import (
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// FrontKey is what packets are told apart by: one frontend. For a node port
// Addr is not valid and Node is set.
type FrontKey struct {
	Addr  netip.Addr
	Port  uint16
	Proto svc.Protocol
	Node  bool
}

// IsOwn reports whether a source range is the frontend's own address vip and nothing
// else. The Table has it where this node is let in, which sends from there if an
// interface of it has the address. From elsewhere it is forged.
func IsOwn(p netip.Prefix, vip netip.Addr) bool { return p.IsSingleIP() && p.Addr() == vip }

// KeyOf is the FrontKey of a frontend of a service port with protocol p.
func KeyOf(p svc.Protocol, f *table.Frontend) FrontKey {
	k := FrontKey{Addr: f.Addr.Addr(), Port: f.Addr.Port(), Proto: p}
	if f.Kind == table.NodePort {
		k.Addr, k.Node = netip.Addr{}, true
	}
	return k
}

// String returns "TCP 10.96.0.10:80" or "TCP node port 30080".
func (k FrontKey) String() string {
	if k.Node {
		return fmt.Sprintf("%s node port %d", k.Proto, k.Port)
	}
	return k.svc().String()
}

// Compare orders keys: virtual IPs by address, port and protocol, then node
// ports.
func (k FrontKey) Compare(o FrontKey) int {
	if k.Node != o.Node {
		if o.Node {
			return -1
		}
		return 1
	}
	return k.svc().Compare(o.svc())
}

func (k FrontKey) svc() svc.Frontend {
	return svc.Frontend{Protocol: k.Proto, Addr: netip.AddrPortFrom(k.Addr, k.Port)}
}
