// Package flows is the one table of packet questions that every mode of the
// proxy answers: who sends to which frontend of which Service, and where must
// the packet arrive, or how must it be refused. A mode's test calls Run.
//
// The network has the node under test, another node without a proxy, and a
// client outside. Pods a, b and c are on the node, d and e on the other; c is
// never an endpoint. Every pod and both hosts listen on the same ports, with
// TCP, UDP and SCTP.
package flows

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Factory makes the Applier of a mode on a host. It is called inside the host's
// network namespace, as is every method of the Applier.
type Factory func(t testing.TB, host *testbed.Host) dataplane.Applier

// Row is one question. It is asked for each family and each protocol.
type Row struct {
	Name string
	// Behaviour names the lines of docs/behaviour.md behind it, as in "93, 195".
	Behaviour string
	// Protocols are TCP alone if empty, Families both.
	Protocols []svc.Protocol
	Families  []svc.Family

	Services []Service
	// API stands in the place of Services.
	API *API
	// ClusterCIDRs tells the pods' ranges, the node's own and all; MasqueradeAll and Loopback (node
	// ports on 127.0.0.1) are the flags of these names.
	ClusterCIDRs, MasqueradeAll, Loopback bool
	// PodInterfaces tells the pods by where their packets come from.
	PodInterfaces []table.Interface

	// From is who asks: node, other, client, or a pod by its name.
	From string
	// To is the destination: cluster, external, lb, node (its node port), each
	// of the first Service; node-pods is the node port on the address of the
	// pods' bridge, loopback that on 127.0.0.1. A number behind a colon is
	// another port.
	To   string
	Want Want
	// Lacks excuses modes, by name, that cannot do this, with the reason.
	Lacks map[string]string
}

// Service is one port of a Service, in every family.
type Service struct {
	Name     string
	Affinity time.Duration
	// Port is that of the frontends, 80 if 0.
	Port uint16
	// Protocol replaces the row's.
	Protocol svc.Protocol
	Fronts   []Front
}

// Front is a frontend. Its address follows from its kind.
type Front struct {
	Kind table.FrontendKind
	// To and Inside are the endpoints (Inside is LocalClients), by name and
	// separated by spaces; a name may have a port, "a:9377". Inside "-" is an
	// empty list, "" is none.
	To, Inside string
	Masquerade bool
	Drop       bool
	// Ranges are clients let in: who they are (Row.From), or prefixes.
	Ranges []string
}

// Want is the answer.
type Want struct {
	// Reach are the endpoints that connections arrive at, each of them some
	// time, nowhere else.
	Reach string
	// Client is whom the endpoint sees: "kept" the one who asks, "masqueraded"
	// the node; empty is not looked at.
	Client string
	// Same asks that all connections arrive at one and the same of Reach.
	Same bool
	// Refused and Dropped are the ways not to arrive.
	Refused, Dropped bool
}

const (
	endpointPort = 9376
	nodePort     = 30080
)

var (
	tcpUDP     = []svc.Protocol{svc.TCP, svc.UDP}
	everything = []svc.Protocol{svc.TCP, svc.UDP, svc.SCTP}
	ipv4       = []svc.Family{svc.IPv4}
)

// Env is the network and the data plane that the rows are asked of.
type Env struct {
	Node, Other, Client *testbed.Host
	Dataplane           dataplane.Applier

	options options
	// noLoopback is that of table.Config.
	noLoopback bool
}

// NewEnv builds the network and the data plane.
func NewEnv(t testing.TB, create Factory) *Env {
	t.Helper()
	n := testbed.NewNetwork(t)
	e := &Env{Node: n.Host("node"), Other: n.Host("other"), Client: n.Outside("client")}
	for _, name := range []string{"node", "other", "a", "b", "c", "d", "e"} {
		h := e.Host(name)
		for _, p := range everything {
			h.Serve(p, endpointPort)
			h.ServeAs(name+":9377", p, netip.AddrPortFrom(netip.IPv6Unspecified(), 9377))
		}
	}
	// Virtual IPs that clients elsewhere reach through the node, as an
	// administrator or a load balancer arranges it.
	for _, h := range []*testbed.Host{e.Client, e.Other} {
		for _, p := range []string{"10.96.0.0/16", "203.0.113.0/24"} {
			h.Route(netip.MustParsePrefix(p), e.Node.Addr4())
		}
		for _, p := range []string{"fd00:10:96::/112", "2001:db8:113::/64"} {
			h.Route(netip.MustParsePrefix(p), e.Node.Addr6())
		}
	}
	e.Node.Do(func() { e.Dataplane = create(t, e.Node) })
	t.Cleanup(func() {
		if err := e.Dataplane.Close(); err != nil {
			t.Errorf("close the data plane: %v", err)
		}
	})
	return e
}

// Host is the host or pod called name.
func (e *Env) Host(name string) *testbed.Host {
	switch name {
	case "node":
		return e.Node
	case "other":
		return e.Other
	case "client":
		return e.Client
	case "a", "b", "c":
		return e.Node.Pod(name)
	}
	return e.Other.Pod(name)
}

// Apply gives the data plane a table.
func (e *Env) Apply(t testing.TB, tab *table.Table, changed []table.Key) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	var err error
	e.Node.Do(func() { err = e.Dataplane.Apply(ctx, ranged(tab), changed) })
	if err != nil {
		t.Fatalf("Apply: %v", err)
	}
}

// ServiceCIDRs are the ranges of ClusterIPs in all Tables that have none themselves.
var ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}

func ranged(tab *table.Table) *table.Table {
	if tab.ServiceCIDRs != nil {
		return tab
	}
	with := *tab
	with.ServiceCIDRs = ServiceCIDRs
	return &with
}

// address of a destination, see Row.To.
func (e *Env) address(f svc.Family, to string, s *Service) netip.AddrPort {
	word, other, _ := strings.Cut(to, ":")
	port := s.port()
	var a netip.Addr
	switch word {
	case "cluster":
		a = vip(f, table.ClusterIP)
	case "external":
		a = vip(f, table.ExternalIP)
	case "lb":
		a = vip(f, table.LoadBalancerIP)
	case "unused":
		a = pick(f, "10.96.0.99", "fd00:10:96::99")
	case "node":
		a, port = e.Node.Addr(f), nodePort
	case "node-pods":
		a, port = e.Node.PodCIDR(f).Addr().Next(), nodePort
	case "loopback":
		a, port = pick(f, "127.0.0.1", "::1"), nodePort
	default:
		panic("flows: no destination " + to)
	}
	if other != "" {
		_, _ = fmt.Sscan(other, &port)
	}
	return netip.AddrPortFrom(a, port)
}

func vip(f svc.Family, k table.FrontendKind) netip.Addr {
	switch k {
	case table.ClusterIP:
		return pick(f, "10.96.0.10", "fd00:10:96::10")
	case table.ExternalIP:
		return pick(f, "203.0.113.10", "2001:db8:113::10")
	case table.LoadBalancerIP:
		return pick(f, "203.0.113.20", "2001:db8:113::20")
	}
	return pick(f, "0.0.0.0", "::")
}

func pick(f svc.Family, v4, v6 string) netip.Addr {
	if f == svc.IPv6 {
		return netip.MustParseAddr(v6)
	}
	return netip.MustParseAddr(v4)
}

func (s *Service) port() uint16 {
	if s.Port != 0 {
		return s.Port
	}
	return 80
}

// Table is the table of a row.
func (e *Env) Table(f svc.Family, p svc.Protocol, r *Row) *table.Table {
	if r.API != nil {
		return e.build(f, p, r)
	}
	var ports []*table.ServicePort
	for i := range r.Services {
		ports = append(ports, e.servicePort(f, p, &r.Services[i]))
	}
	t := table.New(ports...)
	t.NodePortAddrs = []netip.Addr{e.Node.Addr4(), e.Node.Addr6()}
	if r.Loopback {
		t.NodePortAddrs = append(t.NodePortAddrs, netip.MustParseAddr("127.0.0.1"))
	}
	slices.SortFunc(t.NodePortAddrs, netip.Addr.Compare)
	if r.ClusterCIDRs {
		t.ClusterCIDRs, t.LocalCIDRs = podRanges(), e.localPods()
	}
	t.PodInterfaces, t.MasqueradeAll = r.PodInterfaces, r.MasqueradeAll
	return t
}

func (e *Env) servicePort(f svc.Family, p svc.Protocol, s *Service) *table.ServicePort {
	if s.Protocol != 0 {
		p = s.Protocol
	}
	sp := &table.ServicePort{
		ID:     svc.PortName{Name: svc.Name{Namespace: "default", Name: s.Name}, Port: strings.ToLower(p.String())},
		Family: f, Protocol: p, Affinity: s.Affinity,
	}
	for _, fr := range s.Fronts {
		port := s.port()
		if fr.Kind == table.NodePort {
			port = nodePort + port - 80
		}
		out := table.Frontend{
			Kind: fr.Kind, Addr: netip.AddrPortFrom(vip(f, fr.Kind), port),
			Endpoints: e.endpoints(f, fr.To), Masquerade: fr.Masquerade, Drop: fr.Drop,
		}
		if fr.Inside != "" {
			out.LocalClients = e.endpoints(f, strings.Trim(fr.Inside, "-"))
			if out.LocalClients == nil {
				out.LocalClients = []table.Endpoint{}
			}
		}
		if fr.Ranges != nil {
			out.SourceRanges = e.ranges(f, fr.Ranges)
		}
		sp.Frontends = append(sp.Frontends, out)
	}
	return sp
}

func (e *Env) ranges(f svc.Family, who []string) []netip.Prefix {
	out := []netip.Prefix{}
	for _, w := range who {
		p, err := netip.ParsePrefix(w)
		if err != nil {
			a := e.Host(w).Addr(f)
			p = netip.PrefixFrom(a, a.BitLen())
		}
		if svc.FamilyOf(p.Addr()) == f {
			out = append(out, p)
		}
	}
	return out
}

func (e *Env) endpoints(f svc.Family, names string) []table.Endpoint {
	var out []table.Endpoint
	for n := range strings.FieldsSeq(names) {
		name, p, _ := strings.Cut(n, ":")
		port := uint16(endpointPort)
		if p != "" {
			_, _ = fmt.Sscan(p, &port)
		}
		h := e.Host(name)
		out = append(out, table.Endpoint{
			Addr:  netip.AddrPortFrom(h.Addr(f), port),
			Local: h == e.Node || h.Node() == e.Node,
		})
	}
	slices.SortFunc(out, func(a, b table.Endpoint) int { return a.Addr.Compare(b.Addr) })
	return out
}

// Forget empties the connection tracking of the node, so that one question
// does not hear the answer to another.
func (e *Env) Forget(t testing.TB) {
	t.Helper()
	e.Node.ForgetConnections()
}

const (
	// silence is how long a question waits before it counts as dropped.
	silence = 250 * time.Millisecond
	// answerTime is how long an answer may take.
	answerTime = 30 * time.Second
)

// Check asks a row's question and compares the answer.
func (e *Env) Check(t testing.TB, f svc.Family, p svc.Protocol, r *Row) {
	t.Helper()
	first := &Service{}
	if len(r.Services) > 0 {
		first = &r.Services[0]
	}
	if first.Protocol != 0 {
		p = first.Protocol
	}
	from, to := e.Host(r.From), e.address(f, r.To, first)
	ask := func(wait time.Duration) (testbed.Answer, error) {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		return from.Ask(ctx, p, to)
	}
	switch {
	case r.Want.Refused:
		start := time.Now()
		got, err := ask(answerTime)
		if !testbed.Refused(err) {
			t.Errorf("%s to %s: %+v, %v, want refused", r.From, to, got, err)
		}
		if d := time.Since(start); d > 2*time.Second {
			t.Errorf("%s to %s: refused after %v, want at once", r.From, to, d)
		}
		return
	case r.Want.Dropped:
		if got, err := ask(silence); err == nil || !testbed.Silent(err) {
			t.Errorf("%s to %s: %+v, %v, want silence", r.From, to, got, err)
		}
		return
	}
	e.reaches(t, f, r, to, func() (testbed.Answer, error) { return ask(answerTime) })
}

func (e *Env) reaches(t testing.TB, f svc.Family, r *Row, to netip.AddrPort, ask func() (testbed.Answer, error)) {
	t.Helper()
	want := strings.Fields(r.Want.Reach)
	seen := map[string]int{}
	// That one of n is never met in 20 n tries has a chance of n * e^-20.
	for range 20 * len(want) {
		got, err := ask()
		if err != nil {
			t.Errorf("%s to %s: %v, want one of %q", r.From, to, err, want)
			return
		}
		if !slices.Contains(want, got.Name) {
			t.Errorf("%s to %s: reached %s, want one of %q", r.From, to, got.Name, want)
			return
		}
		e.checkClient(t, f, r, got)
		if seen[got.Name]++; len(seen) == len(want) && !r.Want.Same {
			return
		}
		if t.Failed() {
			return
		}
	}
	if r.Want.Same && len(seen) != 1 {
		t.Errorf("%s to %s: reached %v, want always the same", r.From, to, seen)
	}
	if !r.Want.Same {
		t.Errorf("%s to %s: reached %v, want each of %q", r.From, to, seen, want)
	}
}

func (e *Env) checkClient(t testing.TB, f svc.Family, r *Row, got testbed.Answer) {
	t.Helper()
	seen := got.Client.Addr()
	switch r.Want.Client {
	case "kept":
		if own := e.Host(r.From).Addr(f); seen != own && (r.From != "node" || seen != e.Node.PodCIDR(f).Addr().Next()) {
			t.Errorf("%s saw the client as %s, want its own address %s", got.Name, seen, own)
		}
	case "masqueraded":
		if seen != e.Node.Addr(f) && seen != e.Node.PodCIDR(f).Addr().Next() {
			t.Errorf("%s saw the client as %s, want the node's address", got.Name, seen)
		}
	}
}

// Run asks every row of a mode.
func Run(t *testing.T, mode string, create Factory) {
	e := NewEnv(t, create)
	e.noLoopback = limitsOf[mode].noLoopback
	rows := slices.Concat(Rows, APIRows, HostPortRows)
	for i := range rows {
		r := &rows[i]
		families, protocols := r.Families, r.Protocols
		if families == nil {
			families = []svc.Family{svc.IPv4, svc.IPv6}
		}
		if protocols == nil {
			protocols = []svc.Protocol{svc.TCP}
		}
		for _, f := range families {
			for _, p := range protocols {
				t.Run(fmt.Sprintf("%s/%s/%s", r.Name, f, p), func(t *testing.T) {
					if why, lacks := r.Lacks[mode]; lacks {
						t.Skip(why)
					}
					if why := limitsOf[mode].protocols[p]; why != "" {
						t.Skip(why)
					}
					r := r.as(mode)
					e.Apply(t, e.Table(f, p, r), nil)
					e.Forget(t)
					e.Check(t, f, p, r)
					if t.Failed() {
						t.Logf("behaviour %s; the kernel has:\n%s", r.Behaviour, e.dump(t))
					}
				})
			}
		}
	}
}

func (e *Env) dump(t testing.TB) string {
	var text string
	var err error
	e.Node.Do(func() { text, err = e.Dataplane.Dump(t.Context()) })
	if err != nil {
		return err.Error()
	}
	return text
}
