// Package drain follows the connections of kube-proxy's mode ipvs on the node that it runs on, for 'fairlead migrate'. IPVS has its own
// table of connections, which ends with its rules; new connections meet the rules of fairlead proxy before it.
package drain

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/svc"
)

// attempts are this far apart.
const attempts = time.Second

// Left are the connections of TCP and SCTP that would end with kube-proxy's rules: they go through IPVS, or the node itself opened them
// from an address of kube-proxy's device.
type Left struct {
	// Open is their number, and One of them.
	Open int
	One  ipvs.Connection
}

// String describes connections for people.
func (l *Left) String() string {
	switch l.Open {
	case 0:
		return "no connection depends on kube-proxy's rules"
	case 1:
		return fmt.Sprintf("1 connection depends on kube-proxy's rules, from %s to %s", l.One.Client, l.One.Virtual)
	}
	return fmt.Sprintf("%d connections depend on kube-proxy's rules, such as from %s to %s", l.Open, l.One.Client, l.One.Virtual)
}

// IPVS waits until no connection depends on kube-proxy's rules, for the given time at most, and returns what is left. Before, it has the
// kernel forget where IPVS led the datagrams of UDP, so that the next ones meet the rules of fairlead proxy, and has new connections of
// the node begin at another address. It works in the network namespace of the process.
func IPVS(ctx context.Context, within time.Duration) (Left, error) {
	if err := link.LeaveSources(svc.KubeProxyDevice); err != nil {
		return Left{}, err
	}
	if err := forget(ctx); err != nil {
		return Left{}, err
	}
	deadline := time.NewTimer(within)
	defer deadline.Stop()
	again := time.NewTicker(attempts)
	defer again.Stop()
	for {
		left, err := look()
		if err != nil || left.Open == 0 {
			return left, err
		}
		select {
		case <-ctx.Done():
			return left, ctx.Err()
		case <-deadline.C:
			return left, nil
		case <-again.C:
		}
	}
}

// Undo has new connections of the node begin where they did before IPVS. kube-proxy's device keeps routes to addresses that leave it
// otherwise: the kernel takes those with the address as their source for the address's own.
func Undo() error { return link.RestoreSources(svc.KubeProxyDevice) }

func look() (out Left, err error) {
	through := map[netip.AddrPort]bool{} // from addresses of Services, as the node's own are
	add := func(c ipvs.Connection) {
		out.Open++
		out.One = c
	}
	err = ipvs.Connections(func(c ipvs.Connection) {
		if c.Open() {
			add(c)
			if c.Client.Addr() == c.Virtual.Addr() {
				through[c.Client] = true
			}
		}
	})
	if err != nil {
		return out, err
	}
	return out, link.ConnectionsFrom(svc.KubeProxyDevice, func(from, to netip.AddrPort) {
		if !through[from] {
			add(ipvs.Connection{Proto: svc.TCP, Client: from, Virtual: to})
		}
	})
}

// forget deletes the entries of connection tracking by which IPVS leads datagrams on.
func forget(ctx context.Context) error {
	conn, err := conntrack.Dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_, err = conn.Sweep(ctx, conntrack.Scope{Protocol: svc.UDP}, func(e conntrack.Entry) bool { return e.Translated() && !e.Marked })
	return err
}
