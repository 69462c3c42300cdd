package dns

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
// node's controller misses it only after most of a minute. So servers look
// after each other: each keeps a connection to two others and, when it breaks
// and the machine there says that nobody listens any more, marks the endpoint
// as not ready. The server writes its slices again when it is back.

const (
	// peersWatched is how many others each server looks after: enough for one
	// of the two to be lost at the same moment.
	peersWatched = 2
	peerDial     = time.Second
	// peerRetry is the time between tries to reach a server; for the first
	// peerTries after it was lost, peerSoon is.
	peerRetry = time.Second
	peerSoon  = 5 * time.Millisecond
	peerTries = 100
)

// servers are the endpoints of kube-dns, as the API lists them.
type servers struct {
	own func(slice string) bool
	// changed and peers have an element when others() and neighbours() may
	// have changed.
	changed, peers chan struct{}

	mu     sync.Mutex
	slices map[string]serverSlice // by name
}

// serverSlice is one EndpointSlice of kube-dns.
type serverSlice struct {
	node  string // the node whose server wrote it; empty if others did
	all   []netip.AddrPort
	ready []netip.AddrPort
}

func newServers(own func(string) bool) *servers {
	return &servers{own: own, changed: make(chan struct{}, 1), peers: make(chan struct{}, 1), slices: map[string]serverSlice{}}
}

// isServers reports whether a slice lists servers behind kube-dns.
func isServers(e *discoveryv1.EndpointSlice) bool {
	return e.Namespace == ServiceName().Namespace && e.Labels[discoveryv1.LabelServiceName] == ServiceName().Name
}

func (v *servers) set(e *discoveryv1.EndpointSlice) {
	s := serverSliceOf(e)
	v.mu.Lock()
	old, known := v.slices[e.Name]
	v.slices[e.Name] = s
	v.mu.Unlock()
	if !known || !slices.Equal(old.ready, s.ready) {
		poke(v.changed)
	}
	if !known || old.node != s.node || !slices.Equal(old.all, s.all) {
		poke(v.peers)
	}
}

func (v *servers) remove(name string) {
	v.mu.Lock()
	_, known := v.slices[name]
	delete(v.slices, name)
	v.mu.Unlock()
	if known {
		poke(v.changed)
		poke(v.peers)
	}
}

// poke leaves a note in a channel that has room for one.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func serverSliceOf(e *discoveryv1.EndpointSlice) serverSlice {
	var s serverSlice
	if e.Labels[discoveryv1.LabelManagedBy] == ManagedBy {
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

// others are the ready servers beside this one, sorted.
func (v *servers) others() []netip.AddrPort {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []netip.AddrPort
	for name, s := range v.slices {
		if !v.own(name) {
			out = append(out, s.ready...)
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// peer is a server to look after.
type peer struct {
	addr  netip.AddrPort
	names string // of its slices, joined by spaces
}

// neighbours are the servers that follow the one of node in the order of names,
// so that everyone is looked after by as many as look after others.
func (v *servers) neighbours(node string) []peer {
	v.mu.Lock()
	defer v.mu.Unlock()
	byNode := map[string][]string{}
	var nodes []string
	for name, s := range v.slices {
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
		out = append(out, peer{v.slices[byNode[n][0]].all[0], strings.Join(byNode[n], " ")})
	}
	return out
}

// watchPeers looks after this server's neighbours until ctx ends.
func (s *Server) watchPeers(ctx context.Context) {
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
		case <-s.servers.peers:
		}
		wanted := s.servers.neighbours(nodeLabel(s.options.Publish.NodeName))
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
				wg.Go(func() { s.watchPeer(own, p) })
			}
		}
	}
}

// watchPeer waits for the end of one server. Only one that was there and whose
// machine now refuses connections counts as ended; silence may be the network's.
func (s *Server) watchPeer(ctx context.Context, p peer) {
	lost, tries := false, 0
	for ctx.Err() == nil {
		d := net.Dialer{Timeout: peerDial}
		begin := time.Now()
		conn, err := d.DialContext(ctx, "tcp", p.addr.String())
		switch {
		case err == nil:
			untilClosed(ctx, conn)
			// Servers close connections that are silent for long.
			if lost = true; time.Since(begin) > peerRetry {
				tries = 0
				continue
			}
		case lost && errors.Is(err, syscall.ECONNREFUSED):
			if err := s.markEnded(ctx, p); err == nil {
				lost = false
			} else if ctx.Err() == nil {
				s.log.Warn("cannot mark another DNS server as not ready", "server", p.addr, "err", err)
			}
		}
		// A process that is being killed may still accept or reset a
		// connection or two.
		wait := peerRetry
		if tries++; lost && tries < peerTries {
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

// markEnded takes the endpoints of a server that has ended out of kube-dns.
func (s *Server) markEnded(ctx context.Context, p peer) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	api := s.options.Client.DiscoveryV1().EndpointSlices(ServiceName().Namespace)
	var errs []error
	for name := range strings.SplitSeq(p.names, " ") {
		e, err := api.Get(ctx, name, metav1.GetOptions{})
		if gone(err) {
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
		if _, err := api.Update(ctx, e, metav1.UpdateOptions{}); err != nil && !gone(err) {
			errs = append(errs, err)
			continue
		}
		s.log.Warn("another DNS server has ended and is no endpoint of kube-dns until it is back",
			"server", p.addr, "slice", svc.Name{Namespace: e.Namespace, Name: e.Name})
	}
	return errors.Join(errs...)
}
