package dns

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dns/nodelocal"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
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

// NodeLocalDNS is the Node condition that is True while the node's DNS server answers for
// kube-dns itself.
const NodeLocalDNS corev1.NodeConditionType = "fairlead.dev/NodeLocalDNS"

// localRules is what has become of the rules for the node-local sockets. Its zero value is
// that they were not installed yet.
type localRules struct {
	mu        sync.Mutex
	installed bool
	err       error
}

// set records how an attempt ended, and returns how the one before did.
func (l *localRules) set(err error) (was error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was, l.installed, l.err = l.err, err == nil, err
	return was
}

// NodeLocalCondition returns the Node condition NodeLocalDNS.
func (s *Server) NodeLocalCondition() corev1.NodeCondition {
	s.rules.mu.Lock()
	defer s.rules.mu.Unlock()
	var lacking *nftables.UnsupportedError
	c := corev1.NodeCondition{Type: NodeLocalDNS, Status: corev1.ConditionFalse}
	switch {
	case s.rules.installed:
		c.Status, c.Reason, c.Message = corev1.ConditionTrue, "Installed", "this node's questions to kube-dns are answered here"
	case errors.As(s.rules.err, &lacking):
		c.Reason, c.Message = "KernelLacksRules", throughProxy+s.rules.err.Error()
	case s.rules.err != nil:
		c.Reason, c.Message = "RulesRejected", throughProxy+s.rules.err.Error()
	default:
		c.Reason, c.Message = "Starting", "the server is not ready, or has none of the addresses of kube-dns"
	}
	return c
}

const throughProxy = "questions to kube-dns go through the proxy, and are tracked: "

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
	install, failed, retry := true, false, nftables.Retry{}
	for {
		if install && !retry.Waits(time.Now()) {
			c.Others = s.servers.others()
			failed, install = !s.installLocal(c, &retry), false
		}
		s.sendHeartbeats()
		select {
		case <-ctx.Done():
			return
		case <-s.servers.changed:
			install = true
		case <-check.C:
			whole, err := nodelocal.Intact(c)
			install = install || failed || err == nil && !whole
		case <-heartbeat.C:
		}
	}
}

// installLocal installs the rules for the node-local sockets. A kernel that cannot have them is
// asked again as retry says, others at each check. It reports whether they are installed.
func (s *Server) installLocal(c nodelocal.Config, retry *nftables.Retry) bool {
	err := nodelocal.Install(c)
	var lacking *nftables.UnsupportedError
	permanent := errors.As(err, &lacking)
	if permanent {
		retry.Lacked(time.Now())
	} else {
		*retry = nftables.Retry{}
	}
	was := s.rules.set(err)
	switch {
	case err == nil && was != nil:
		s.log.Info("installed the rules for node-local DNS")
	case err == nil, was != nil && was.Error() == err.Error():
	case permanent:
		s.log.Warn("this kernel cannot have the rules for node-local DNS: questions to kube-dns go through the proxy; "+
			"'fairlead check' says more, and --node-local-dns=false turns it off", "err", err)
	default:
		s.log.Warn("cannot install the rules for node-local DNS: questions to kube-dns go through the proxy; retrying",
			"err", err, "period", checkPeriod)
	}
	return err == nil
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
