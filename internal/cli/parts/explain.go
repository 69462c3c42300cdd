package parts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftrace"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/runner/api"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/trace"
	"github.com/fairlead/fairlead/internal/trace/follow"
)

// Bounds of the connections to endpoints, and of the look at tracked ones.
const (
	connectTimeout = time.Second
	probeAtOnce    = 16
	maxProbes      = 32
	trackedTimeout = 2 * time.Second
	maxTracked     = 1000 // endpoints
)

// Explain is the View with the Facts of this node. Its query has service (NAMESPACE/NAME) or address (IP:PORT,
// with protocol), and may have client (IP, one of each family) and probe ("false" to connect to no endpoint, and to leave out routes and
// tracked connections).
func Explain(p func() *proxy.Proxy) api.View {
	return func(ctx context.Context, query url.Values) (any, error) {
		q, err := parseExplain(query)
		if err != nil {
			return nil, err
		}
		view, err := p().Look(ctx, func(t *table.Table) []*table.ServicePort {
			return explain.Choose(t, q.service, q.address, q.protocol)
		}, q.clients)
		if err != nil {
			return nil, err
		}
		facts := factsOf(view, p().Status())
		if q.probe {
			facts.Probes, facts.Routes = probe(ctx, facts.Ports), routes(facts.Ports)
			facts.Tracked = tracked(ctx, facts)
		}
		return facts, nil
	}
}

// TracePacket sends a packet and follows it, as the only trace of this network namespace. Its error is nftrace.ErrBusy while another
// process has one under way. What an earlier process has left of a trace is removed.
func TracePacket(ctx context.Context, p *follow.Packet, log *slog.Logger) (*trace.Seen, error) {
	held, err := TraceLock.Try(log)
	if errors.Is(err, errLocked) {
		return nil, nftrace.ErrBusy
	}
	if err != nil {
		return nil, err
	}
	defer held.Close()
	if err := nftrace.Remove(ctx); err != nil {
		return nil, Removing("rules of an earlier trace", err)
	}
	return follow.Send(ctx, p)
}

// removeTrace removes what a process that ended early has left of a trace.
func removeTrace(ctx context.Context, log *slog.Logger) {
	held, err := TraceLock.Try(log)
	if errors.Is(err, errLocked) {
		return // its process is there
	}
	if err == nil {
		defer held.Close()
		err = nftrace.Remove(ctx)
	}
	if err != nil {
		log.Warn("cannot remove the rules of an earlier trace", "err", err)
	}
}

type explainQuery struct {
	service  svc.Name
	address  netip.AddrPort
	protocol svc.Protocol
	clients  []netip.Addr
	probe    bool
}

func parseExplain(v url.Values) (q explainQuery, err error) {
	bad := func(format string, args ...any) (explainQuery, error) {
		return q, api.BadQuery(fmt.Sprintf(format, args...))
	}
	if q.probe = v.Get("probe") != "false"; v.Get("service") == "" && v.Get("address") == "" {
		return bad("service or address is missing")
	}
	if s := v.Get("service"); s != "" {
		if q.service, err = svc.ParseName(s); err != nil {
			return bad("service: %v", err)
		}
	}
	if s := v.Get("address"); s != "" {
		if q.address, err = netip.ParseAddrPort(s); err != nil {
			return bad("address: %q is not IP:PORT", s)
		}
	}
	if s := v.Get("protocol"); s != "" {
		if q.protocol, err = svc.ParseProtocol(s); err != nil {
			return bad("protocol: %v", err)
		}
	}
	for _, s := range v["client"] {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return bad("client: %q is not an IP address", s)
		}
		q.clients = append(q.clients, a)
	}
	return q, nil
}

func factsOf(v *proxy.View, status proxy.Status) *explain.Facts {
	out := &explain.Facts{Node: status.Node, Mode: status.Mode, Addresses: v.Addresses, Unreached: v.Unreached}
	out.SettingsFrom(v.Table)
	for _, p := range v.Ports {
		out.Ports = append(out.Ports, explain.Port{ServicePort: p.Port, Rejected: p.Rejected, Installed: p.Installed, Counts: p.Counts})
	}
	for _, p := range out.Ports {
		for i := range p.Installed {
			p.Installed[i].Proof = bounded(p.Installed[i].Proof)
		}
	}
	if status.ConnectTimeCgroup != "" {
		out.Uncovered = uncovered(status.ConnectTimeCgroup)
	}
	for _, p := range v.Problems {
		out.Problems = append(out.Problems, p.Reason+": "+p.Message)
	}
	return out
}

// maxProof bounds the elements that are shown of one frontend, which may have thousands of endpoints.
const maxProof = 100

func bounded(list []dataplane.Proof) []dataplane.Proof {
	if len(list) <= maxProof {
		return list
	}
	more := fmt.Sprintf("%d more elements", len(list)-maxProof)
	return append(list[:maxProof:maxProof], dataplane.Proof{Element: "not shown", Text: more})
}

// endpoints returns the first maxProbes endpoints that new connections of some ports may go to.
func endpoints(ports []explain.Port, which func(*explain.Port) bool) []netip.AddrPort {
	var to []netip.AddrPort
	for i := range ports {
		if !which(&ports[i]) {
			continue
		}
		for _, f := range ports[i].Frontends {
			for _, list := range [][]table.Endpoint{f.Endpoints, f.LocalClients} {
				for _, e := range list {
					to = append(to, e.Addr)
				}
			}
		}
	}
	slices.SortFunc(to, netip.AddrPort.Compare)
	to = slices.Compact(to)
	return to[:min(len(to), maxProbes)]
}

// routes looks up how this node sends packets to endpoints.
func routes(ports []explain.Port) (out []explain.Route) {
	for _, at := range endpoints(ports, func(*explain.Port) bool { return true }) {
		to := at.Addr()
		if len(out) > 0 && out[len(out)-1].To == to {
			continue // another port
		}
		r, err := link.PathTo(to)
		found := explain.Route{To: to, Device: r.Device, Via: r.Via, Source: r.Source}
		if err != nil {
			found.Error = err.Error()
		}
		out = append(out, found)
	}
	return out
}

// tracked counts the connections to the frontends of ports.
func tracked(ctx context.Context, f *explain.Facts) *explain.Tracked {
	ctx, cancel := context.WithTimeout(ctx, trackedTimeout)
	defer cancel()
	type front struct {
		protocol svc.Protocol
		at       netip.AddrPort
	}
	fronts := map[front]bool{}
	for _, p := range f.Ports {
		for i := range p.Frontends {
			switch at := p.Frontends[i].Addr; {
			case p.Frontends[i].Kind != table.NodePort:
				fronts[front{p.Protocol, at}] = true
			default:
				for _, a := range f.NodePortAddrs {
					if a.Is4() == at.Addr().Is4() {
						fronts[front{p.Protocol, netip.AddrPortFrom(a, at.Port())}] = true
					}
				}
			}
		}
	}
	out, by := &explain.Tracked{}, map[netip.AddrPort]uint64{}
	err := conntrack.EachUsage(ctx, func(u *conntrack.Usage) {
		if u.Closed || !fronts[front{u.Protocol, u.OrigDst}] {
			return
		}
		out.Connections++
		if _, known := by[u.ReplySrc]; u.ReplySrc != u.OrigDst && (known || len(by) < maxTracked) {
			by[u.ReplySrc]++
		}
	})
	if err != nil {
		return &explain.Tracked{Error: err.Error()}
	}
	for _, at := range slices.SortedFunc(maps.Keys(by), netip.AddrPort.Compare) {
		out.Endpoints = append(out.Endpoints, explain.TrackedEndpoint{Endpoint: at, Connections: by[at]})
	}
	return out
}

// probe connects to the endpoints that new connections of TCP may go to, up to maxProbes.
func probe(ctx context.Context, ports []explain.Port) []explain.Probe {
	to := endpoints(ports, func(p *explain.Port) bool { return p.Protocol == svc.TCP })
	out := make([]explain.Probe, len(to))
	var group errgroup.Group
	group.SetLimit(probeAtOnce)
	for i := range out {
		group.Go(func() error {
			out[i] = connect(ctx, to[i])
			return nil
		})
	}
	_ = group.Wait()
	return out
}

// connect makes one connection, and closes it.
func connect(ctx context.Context, to netip.AddrPort) explain.Probe {
	d := net.Dialer{Timeout: connectTimeout}
	conn, err := d.DialContext(ctx, "tcp", to.String())
	if err == nil {
		_ = conn.Close()
		return explain.Probe{Endpoint: to, Result: explain.Connected}
	}
	out := explain.Probe{Endpoint: to, Result: explain.NoReply, Error: err.Error()}
	if _, cause, ok := strings.Cut(err.Error(), to.String()+": "); ok {
		out.Error = cause
	}
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		out.Result = explain.NotOpen
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		out.Result = explain.Unroutable
	}
	return out
}
