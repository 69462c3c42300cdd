package dns

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/dns/nodelocal"
)

// NodeLocal has the server answer questions to the Service kube-dns on this
// node itself, past the proxy and without connection tracking. While it is not
// there, they go to the other servers of kube-dns.
type NodeLocal struct {
	// Addresses are the cluster IPs of kube-dns.
	Addresses []netip.Addr
	// Source are this node's own addresses.
	Source []netip.Addr
}

// port is where kube-dns is asked.
const port = 53

// takenBy reports whether sockets on addrs leave no room for the node-local ones.
func (n *NodeLocal) takenBy(addrs []netip.AddrPort) bool {
	return n != nil && slices.ContainsFunc(addrs, func(l netip.AddrPort) bool {
		return l.Port() == port && slices.ContainsFunc(n.Addresses, func(a netip.Addr) bool {
			return a == l.Addr() || l.Addr().IsUnspecified() && a.Is4() == l.Addr().Is4()
		})
	})
}

const (
	// helloEvery is how often the server shows that it lives.
	helloEvery = nodelocal.AliveFor / 4
	// checkEvery is how often the rules are looked for.
	checkEvery = 30 * time.Second
)

// listenLocal opens the node-local sockets. The node works without them, by its
// proxy; so a failure is told and no more.
func (s *Server) listenLocal() {
	for _, a := range s.options.NodeLocal.Addresses {
		l, err := listen(netip.AddrPortFrom(a, port), s.options.Workers, true)
		if errors.Is(err, errNoFamily) {
			continue
		}
		if err != nil {
			s.log.Warn("questions to kube-dns are not answered on this node itself", "address", a, "err", err)
			continue
		}
		s.local = append(s.local, l)
	}
}

// serveLocal opens the node-local sockets when the server is ready, not before:
// rules that a killed server left lead to them at once. It leads this node's
// questions there until ctx ends; the sockets are closed later, by Run.
func (s *Server) serveLocal(ctx context.Context, sockets *sync.WaitGroup) {
	for !s.Ready() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(readyPoll):
		}
	}
	s.listenLocal()
	c := nodelocal.Config{Port: port, Source: s.options.NodeLocal.Source}
	for _, l := range s.local {
		s.start(l, sockets)
		c.Addrs = append(c.Addrs, l.addr.Addr())
	}
	if len(c.Addrs) == 0 {
		return
	}
	defer func() {
		if err := nodelocal.Remove(); err != nil {
			s.log.Warn("cannot stop answering kube-dns on this node", "err", err)
		}
	}()
	hello, check := time.NewTicker(helloEvery), time.NewTicker(checkEvery)
	defer hello.Stop()
	defer check.Stop()
	install, failed := true, false
	for {
		if install {
			c.Others = s.servers.others()
			err := nodelocal.Install(c)
			if err != nil && !failed {
				s.log.Warn("questions to kube-dns go by the proxy, not to this node's own server", "err", err)
			} else if err == nil && failed {
				s.log.Info("questions to kube-dns are answered on this node again")
			}
			failed, install = err != nil, false
		}
		s.hello()
		select {
		case <-ctx.Done():
			return
		case <-s.servers.changed:
			install = true
		case <-check.C:
			whole, err := nodelocal.Intact(c)
			install = failed || err == nil && !whole
		case <-hello.C:
		}
	}
}

// hello sends a packet from each node-local socket to itself. It is no question
// (it bears the bit of answers), so nobody answers it.
func (s *Server) hello() {
	packet := make([]byte, headerSize)
	packet[2] = flagQR >> 8
	for _, l := range s.local {
		// When it cannot be sent the rules find out.
		_, _ = l.udp[0].WriteToUDPAddrPort(packet, l.addr)
	}
}
