package membership

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// A server that is killed cannot withdraw its endpoint from kube-dns, and the
// node lifecycle controller notices only after most of a minute. So servers
// monitor each other: each keeps a connection to two others and, when it breaks
// and that machine then refuses connections, marks the endpoint as not ready.
// The server writes its slices again when it is back.

const (
	// peersWatched is how many others each server monitors: with two, one may
	// fail at the same moment.
	peersWatched = 2
	peerDial     = time.Second
	// peerRetry is the time between attempts to connect to a server, and
	// peerSoon that between the first peerTries after its connection broke.
	peerRetry = time.Second
	peerSoon  = 5 * time.Millisecond
	peerTries = 100
)

// serverSlice is one EndpointSlice of kube-dns.
type serverSlice struct {
	node  string // the node whose server wrote it; empty if another client did
	all   []netip.AddrPort
	ready []netip.AddrPort
}

func serverSliceOf(e *discoveryv1.EndpointSlice) serverSlice {
	var s serverSlice
	if e.Labels[discoveryv1.LabelManagedBy] == svc.DNSSliceManager {
		s.node = e.Labels[svc.NodeLabel]
	}
	for _, p := range e.Ports {
		if p.Port == nil || p.Protocol == nil || *p.Protocol != "UDP" {
			continue
		}
		for i := range e.Endpoints {
			for _, text := range e.Endpoints[i].Addresses {
				a, err := netip.ParseAddr(text)
				if err != nil {
					continue
				}
				at := netip.AddrPortFrom(a.Unmap(), uint16(*p.Port))
				s.all = append(s.all, at)
				if r := e.Endpoints[i].Conditions.Ready; r == nil || *r {
					s.ready = append(s.ready, at)
				}
			}
		}
	}
	return s
}

// Others returns the ready servers other than this one, sorted.
func (m *Members) Others() []netip.AddrPort {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []netip.AddrPort
	for name, s := range m.slices {
		if !m.self.owns(name) {
			out = append(out, s.ready...)
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// peer is a server to monitor.
type peer struct {
	addr  netip.AddrPort
	names string // of its slices, joined by spaces
}

// neighbours returns the servers that follow that of node in the order of names,
// so that each is monitored by as many as it monitors.
func (m *Members) neighbours(node string) []peer {
	m.mu.Lock()
	defer m.mu.Unlock()
	byNode := map[string][]string{}
	var nodes []string
	for name, s := range m.slices {
		if s.node == "" || s.node == node || len(s.all) == 0 {
			continue
		}
		if byNode[s.node] == nil {
			nodes = append(nodes, s.node)
		}
		byNode[s.node] = append(byNode[s.node], name)
	}
	slices.Sort(nodes)
	first, _ := slices.BinarySearch(nodes, node)
	nodes = append(nodes[first:], nodes[:first]...)
	var out []peer
	for _, n := range nodes[:min(len(nodes), peersWatched)] {
		slices.Sort(byNode[n])
		out = append(out, peer{m.slices[byNode[n][0]].all[0], strings.Join(byNode[n], " ")})
	}
	return out
}

// WatchPeers monitors this server's neighbours until ctx ends.
func (m *Members) WatchPeers(ctx context.Context) {
	watched := map[peer]context.CancelFunc{}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() {
		for _, stop := range watched {
			stop()
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.peers:
		}
		wanted := m.neighbours(svc.NodeLabelValue(m.self.NodeName))
		for p, stop := range watched {
			if !slices.Contains(wanted, p) {
				stop()
				delete(watched, p)
			}
		}
		for _, p := range wanted {
			if watched[p] == nil {
				own, stop := context.WithCancel(ctx)
				watched[p] = stop
				wg.Go(func() { m.watchPeer(own, p) })
			}
		}
	}
}

// watchPeer marks a server as not ready when it has ended: when it was connected
// and its machine now refuses connections. A timeout may be the network's.
func (m *Members) watchPeer(ctx context.Context, p peer) {
	connected, tries := false, 0
	for ctx.Err() == nil {
		d := net.Dialer{Timeout: peerDial}
		begin := time.Now()
		conn, err := d.DialContext(ctx, "tcp", p.addr.String())
		switch {
		case err == nil:
			untilClosed(ctx, conn)
			// Servers close connections that are idle for long.
			if connected = true; time.Since(begin) > peerRetry {
				tries = 0
				continue
			}
		case connected && errors.Is(err, syscall.ECONNREFUSED):
			if err := m.markEnded(ctx, p); err == nil {
				connected = false
			} else if ctx.Err() == nil {
				tries = peerTries // the server has ended; only the API is asked again
				m.log.Warn("cannot mark a DNS server as not ready; retrying", "in", peerRetry, "server", p.addr, "err", err)
			}
		}
		// A process that is being killed may still accept or reset a
		// connection or two.
		wait := peerRetry
		if tries++; connected && tries < peerTries {
			wait = peerSoon
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// untilClosed returns when the other end has closed conn, or ctx ends.
func untilClosed(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	var b [1]byte
	_, _ = conn.Read(b[:])
}

// markEnded marks the endpoints of a server that has ended as not ready.
func (m *Members) markEnded(ctx context.Context, p peer) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	api := m.client.DiscoveryV1().EndpointSlices(Service().Namespace)
	var errs []error
	for name := range strings.SplitSeq(p.names, " ") {
		e, err := api.Get(ctx, name, metav1.GetOptions{})
		if isReplaced(err) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		no, changed := false, false
		for i := range e.Endpoints {
			c := &e.Endpoints[i].Conditions
			changed = changed || c.Ready == nil || *c.Ready
			c.Ready, c.Serving = &no, &no
		}
		if !changed {
			continue // by another server
		}
		if _, err := api.Update(ctx, e, metav1.UpdateOptions{}); err != nil && !isReplaced(err) {
			errs = append(errs, err)
			continue
		}
		m.log.Warn("DNS server has ended; marked its endpoint of kube-dns as not ready",
			"server", p.addr, "slice", svc.Name{Namespace: e.Namespace, Name: e.Name})
	}
	return errors.Join(errs...)
}
