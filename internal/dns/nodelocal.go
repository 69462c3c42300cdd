package dns

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dns/membership"
	"github.com/fairlead/fairlead/internal/dns/nodelocal"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
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

// localRules records whether the rules for the node-local sockets are installed. The zero value
// stands for rules that were not installed yet.
type localRules struct {
	mu        sync.Mutex
	installed bool
	err       error
}

// set records the result of an attempt, and returns the one before.
func (l *localRules) set(err error) (was error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was, l.installed, l.err = l.err, err == nil, err
	return was
}

// NodeLocalCondition returns the Node condition NodeLocalDNS. The options must have NodeLocal.
func (s *Server) NodeLocalCondition() corev1.NodeCondition { return s.local.rules.condition() }

func (l *localRules) condition() corev1.NodeCondition {
	l.mu.Lock()
	defer l.mu.Unlock()
	var lacking *nftables.UnsupportedError
	c := corev1.NodeCondition{Type: svc.NodeLocalDNS, Status: corev1.ConditionFalse}
	switch {
	case l.installed:
		c.Status, c.Reason, c.Message = corev1.ConditionTrue, "Installed", "this node's questions to kube-dns are answered here"
	case errors.As(l.err, &lacking):
		c.Reason, c.Message = "KernelLacksRules", throughProxy+l.err.Error()
	case l.err != nil:
		c.Reason, c.Message = "RulesRejected", throughProxy+l.err.Error()
	default:
		c.Reason, c.Message = "Starting", "the server is not ready, or has none of the addresses of kube-dns"
	}
	return c
}

const throughProxy = "questions to kube-dns go through the proxy, and are tracked: "

// port is where kube-dns is asked.
const port = svc.DNSPort

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
	// localReadyPoll is how often the server is asked whether it is ready.
	localReadyPoll = 20 * time.Millisecond
)

// localSockets answer this node's questions to kube-dns.
type localSockets struct {
	o       *NodeLocal
	workers int
	log     *slog.Logger
	members *membership.Members
	rules   localRules
	// listeners belong to serve, and to Run once serve has ended.
	listeners []*listener
}

// listen opens the sockets. Without them questions go through the proxy, so a failure is only logged.
func (s *localSockets) listen() {
	for _, a := range s.o.Addresses {
		l, err := listen(netip.AddrPortFrom(a, port), s.workers, true)
		if errors.Is(err, errNoFamily) {
			continue
		}
		if err != nil {
			s.log.Warn("cannot answer kube-dns on this node; its questions go through the proxy", "address", a, "err", err)
			continue
		}
		s.listeners = append(s.listeners, l)
	}
}

// serve opens the sockets when ready returns true, not before: the rules of a killed server
// lead to them at once. start runs the loops of a listener. serve installs the rules, and redirects them
// to other servers when ctx ends; Run removes them and closes the sockets later.
func (s *localSockets) serve(ctx context.Context, ready func() bool, start func(*listener)) {
	for !ready() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(localReadyPoll):
		}
	}
	s.listen()
	c := nodelocal.Config{Port: port, Source: s.o.Source}
	for _, l := range s.listeners {
		start(l)
		c.Addrs = append(c.Addrs, l.addr.Addr())
	}
	if len(c.Addrs) == 0 {
		return
	}
	defer func() {
		if err := nodelocal.Yield(c); err != nil {
			s.remove()
		}
	}()
	heartbeat, check := time.NewTicker(heartbeatPeriod), time.NewTicker(checkPeriod)
	defer heartbeat.Stop()
	defer check.Stop()
	install, failed, retry := true, false, nftables.Retry{}
	for {
		if install && !retry.Waits(time.Now()) {
			c.Others = s.members.Others()
			failed, install = !s.install(c, &retry), false
		}
		s.sendHeartbeats()
		select {
		case <-ctx.Done():
			return
		case <-s.members.Changed:
			install = true
		case <-check.C:
			whole, err := nodelocal.Intact(c)
			install = install || failed || err == nil && !whole
		case <-heartbeat.C:
		}
	}
}

// install installs the rules. It retries as retry says where the kernel lacks an expression, else at
// each check. It reports whether the rules are installed.
func (s *localSockets) install(c nodelocal.Config, retry *nftables.Retry) bool {
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

// remove removes the rules, if serve has installed any.
func (s *localSockets) remove() {
	if s == nil || len(s.listeners) == 0 {
		return
	}
	if err := nodelocal.Remove(); err != nil {
		s.log.Warn("cannot remove the rules for node-local DNS", "err", err)
	}
}

// close closes the sockets.
func (s *localSockets) close() {
	if s == nil {
		return
	}
	for _, l := range s.listeners {
		l.close()
	}
}

// sendHeartbeats sends a packet from each socket to itself. It has the
// bit of answers set, so it is not answered.
func (s *localSockets) sendHeartbeats() {
	packet := make([]byte, headerSize)
	packet[2] = flagQR >> 8
	for _, l := range s.listeners {
		// If it cannot be sent, the rules stop leading here, as they should.
		_, _ = l.udp[0].WriteToUDPAddrPort(packet, l.addr)
	}
}
