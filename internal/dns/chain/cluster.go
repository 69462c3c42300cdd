package chain

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/feed"
	"github.com/fairlead/fairlead/internal/dns/membership"
	"github.com/fairlead/fairlead/internal/dns/plugin"
	"github.com/fairlead/fairlead/internal/zone"
)

// cluster is the names of a cluster, as one configuration of the plugin kubernetes asks for
// them. Instances with the same configuration share it.
type cluster struct {
	key    string
	zone   *zone.Zone
	follow *feed.Follower
	stop   context.CancelFunc
	ended  chan struct{}
}

// clusterKey is what of a configuration decides the names.
func clusterKey(c *corefile.Kubernetes) string {
	return fmt.Sprint(c.Zones, c.Pods, c.TTL, c.Namespaces, c.NoEndpoints, c.Kubeconfig, c.Context)
}

func newCluster(c *corefile.Kubernetes, o Options) (*cluster, error) {
	mode, err := zone.ParsePodMode(c.Pods)
	if err != nil {
		return nil, err
	}
	z, err := zone.New(zone.Config{
		Domains: c.Zones, TTL: max(1, c.TTL), Pods: mode, NameServer: membership.Service(), Serial: uint32(time.Now().Unix()),
	})
	if err != nil {
		return nil, fmt.Errorf("%s: kubernetes: %w", c.Pos, err)
	}
	if o.Client == nil {
		return nil, fmt.Errorf("%s: %w", c.Pos, errNoClient)
	}
	client, err := o.Client(c.Kubeconfig, c.Context)
	if err != nil {
		return nil, fmt.Errorf("%s: kubernetes: %w", c.Pos, err)
	}
	return &cluster{key: clusterKey(c), zone: z, ended: make(chan struct{}), follow: feed.New(feed.Options{
		Client: client, Zone: z, Log: o.Log, Pods: mode == zone.PodsVerified, Namespaces: c.Namespaces, NoEndpoints: c.NoEndpoints,
	})}, nil
}

// start follows the API until close.
func (c *cluster) start(ctx context.Context) {
	ctx, c.stop = context.WithCancel(ctx)
	go func() {
		defer close(c.ended)
		c.follow.Run(ctx)
	}()
}

func (c *cluster) close() {
	if c.stop != nil {
		c.stop()
		<-c.ended
	}
}

// kube is the step that answers the names of a cluster.
type kube struct {
	c       *corefile.Kubernetes
	cluster *cluster
	zones   []string // and reverse zones
	turn    atomic.Uint32
	next    plugin.Handler
	log     *slog.Logger
}

func newKube(c *corefile.Kubernetes, from *cluster, log *slog.Logger, next plugin.Handler) *kube {
	return &kube{c: c, cluster: from, zones: slices.Concat(c.Zones, c.Reverse), next: next, log: log}
}

// Answer answers from the zone.
func (k *kube) Answer(ctx context.Context, q *plugin.Query) plugin.Reply {
	name := q.Name()
	in := corefile.LongestZone(name, k.zones)
	if in == "" {
		return k.next.Answer(ctx, q)
	}
	if t := q.Type(); t == mdns.TypeAXFR || t == mdns.TypeIXFR {
		return plugin.Fail("kubernetes", mdns.RcodeRefused, nil)
	}
	if !k.cluster.follow.Synced() {
		return plugin.Fail("kubernetes", mdns.RcodeServerFailure, fmt.Errorf("kubernetes: %w", plugin.ErrNotReady))
	}
	m, r, err := k.fromZone(q)
	switch {
	case err != nil:
		return plugin.Fail("kubernetes", mdns.RcodeServerFailure, err)
	case (r.Kind == zone.NotOurs || m.Rcode == mdns.RcodeNameError) && k.c.Fall.Through(name):
		return k.next.Answer(ctx, q)
	case r.Kind == zone.NotOurs:
		m = q.NewReply()
		k.denyReverse(m, in, name)
	case r.Kind == zone.Elsewhere:
		if up := q.Ask(ctx, r.Target.String(), q.Type()); up != nil {
			m.Answer = append(m.Answer, up.Answer...)
			m.Truncated = m.Truncated || up.Truncated
			if m.Rcode = up.Rcode; len(up.Answer) == 0 {
				m.Ns = up.Ns
			}
		}
	}
	if k.c.TTL == 0 {
		plugin.EachRR(m, func(rr mdns.RR) { rr.Header().Ttl = 0 })
	}
	return plugin.Reply{Msg: m, Plugin: "kubernetes"}
}

// denyReverse makes m a denial of a reverse name, or the SOA record of its zone.
func (k *kube) denyReverse(m *mdns.Msg, in, name string) {
	soa := &mdns.SOA{
		Hdr: mdns.RR_Header{Name: in, Rrtype: mdns.TypeSOA, Class: mdns.ClassINET, Ttl: k.c.TTL}, Ns: "ns.dns." + in,
		Mbox: "hostmaster." + in, Serial: k.cluster.zone.Serial(), Refresh: 7200, Retry: 1800, Expire: 86400, Minttl: k.c.TTL,
	}
	if name == in && m.Question[0].Qtype == mdns.TypeSOA {
		m.Answer = []mdns.RR{soa}
		return
	}
	m.Ns = []mdns.RR{soa}
	if name != in {
		m.Rcode = mdns.RcodeNameError
	}
}

// questionHead is a header with one question.
var questionHead = [12]byte{5: 1}

// fromZone asks the zone.
func (k *kube) fromZone(q *plugin.Query) (*mdns.Msg, zone.Reply, error) {
	buf := make([]byte, 512)
	copy(buf, questionHead[:])
	at, err := mdns.PackDomainName(q.Question().Name, buf, len(questionHead), nil, false)
	if err != nil {
		return nil, zone.Reply{}, err
	}
	buf = append(buf[:at], byte(q.Type()>>8), byte(q.Type()), 0, mdns.ClassINET)
	asked := zone.Question{Type: q.Type(), Rotate: k.turn.Add(1)}
	if _, ok := asked.Name.ParseWire(buf, len(questionHead)); !ok {
		return nil, zone.Reply{}, fmt.Errorf("kubernetes: %q is not a name", q.Question().Name)
	}
	out, r := k.cluster.zone.Answer(buf, &asked, mdns.MaxMsgSize)
	for i, n := range []uint16{r.Answers, r.Authority, r.Additional} {
		out[6+2*i], out[7+2*i] = byte(n>>8), byte(n)
	}
	m := new(mdns.Msg)
	if err := m.Unpack(out); err != nil {
		return nil, r, err
	}
	m.SetReply(q.Msg)
	m.Authoritative, m.Rcode, m.Truncated = true, int(r.Rcode), r.Truncated
	return m, r, nil
}

// search returns the search path of a client's Pod, for autopath.
func (k *kube) search(q *plugin.Query, host []string) []string {
	in := corefile.LongestZone(q.Name(), k.c.Zones)
	if in == "" {
		return nil
	}
	ns, ok := k.cluster.zone.PodNamespace(q.Client.Addr().Unmap())
	if !ok {
		return nil
	}
	services := "svc." + strings.TrimPrefix(in, ".")
	return slices.Concat([]string{ns + "." + services, services, in}, host, []string{"."})
}
