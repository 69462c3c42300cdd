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

// NodeLocal has the server answer this node's questions to the Service kube-dns,
// without the proxy and connection tracking. While the server does not run, they
// go to the other servers of kube-dns.
type NodeLocal struct {
	// Addresses are the cluster IPs of kube-dns.
	Addresses []netip.Addr
	// Source are this node's own addresses.
	Source []netip.Addr
}

// port is where kube-dns is asked.
const port = 53

// conflictsWith reports whether sockets on addrs exclude the node-local ones.
func (n *NodeLocal) conflictsWith(addrs []netip.AddrPort) bool {
	return n != nil && slices.ContainsFunc(addrs, func(l netip.AddrPort) bool {
		return l.Port() == port && slices.ContainsFunc(n.Addresses, func(a netip.Addr) bool {
			return a == l.Addr() || l.Addr().IsUnspecified() && a.Is4() == l.Addr().Is4()
		})
	})
}

const (
	// heartbeatPeriod is how often the server shows the rules that it is alive.
	heartbeatPeriod = nodelocal.AliveFor / 4
	// checkPeriod is how often the rules are checked.
	checkPeriod = 30 * time.Second
)

// listenLocal opens the node-local sockets. Without them questions go through the
// proxy, so a failure is only logged.
func (s *Server) listenLocal() {
	for _, a := range s.options.NodeLocal.Addresses {
		l, err := listen(netip.AddrPortFrom(a, port), s.options.Workers, true)
		if errors.Is(err, errNoFamily) {
			continue
		}
		if err != nil {
			s.log.Warn("cannot answer kube-dns on this node; its questions go through the proxy", "address", a, "err", err)
			continue
		}
		s.local = append(s.local, l)
	}
}

// serveLocal opens the node-local sockets when the server is ready, not before:
// rules left by a killed server lead to them at once. It installs the rules, which
// lead elsewhere when ctx ends; Run removes them and closes the sockets later.
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
		if err := nodelocal.Yield(c); err != nil {
			s.removeLocal()
		}
	}()
	heartbeat, check := time.NewTicker(heartbeatPeriod), time.NewTicker(checkPeriod)
	defer heartbeat.Stop()
	defer check.Stop()
	install, failed := true, false
	for {
		if install {
			c.Others = s.servers.others()
			err := nodelocal.Install(c)
			if err != nil && !failed {
				s.log.Warn("cannot install the rules for node-local DNS; questions go through the proxy, and it is retried", "err", err)
			} else if err == nil && failed {
				s.log.Info("installed the rules for node-local DNS")
			}
			failed, install = err != nil, false
		}
		s.sendHeartbeats()
		select {
		case <-ctx.Done():
			return
		case <-s.servers.changed:
			install = true
		case <-check.C:
			whole, err := nodelocal.Intact(c)
			install = failed || err == nil && !whole
		case <-heartbeat.C:
		}
	}
}

// removeLocal removes the rules for the node-local sockets, if there are any.
func (s *Server) removeLocal() {
	if len(s.local) == 0 {
		return
	}
	if err := nodelocal.Remove(); err != nil {
		s.log.Warn("cannot remove the rules for node-local DNS", "err", err)
	}
}

// sendHeartbeats sends a packet from each node-local socket to itself. It has the
// bit of answers set, so it is not answered.
func (s *Server) sendHeartbeats() {
	packet := make([]byte, headerSize)
	packet[2] = flagQR >> 8
	for _, l := range s.local {
		// If it cannot be sent, the rules stop leading here, as they should.
		_, _ = l.udp[0].WriteToUDPAddrPort(packet, l.addr)
	}
}
