package chain

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
	"github.com/fairlead/fairlead/internal/dns/plugin/cache"
	"github.com/fairlead/fairlead/internal/dns/plugin/forward"
	"github.com/fairlead/fairlead/internal/dns/plugin/zonefile"
)

// instance is one plan at work.
type instance struct {
	plan     *corefile.Plan
	listen   map[endpoint]*routes
	clusters []*cluster
	caches   []cacheAt
	forwards []*forward.Forward
	hosts    []*plugin.Hosts
	loops    []*loop
	run      []func(context.Context) // until the instance ends

	stop context.CancelFunc
	wg   sync.WaitGroup
}

// cacheAt is a cache with the label of its server.
type cacheAt struct {
	*cache.Cache
	server string
}

// builder makes an instance.
type builder struct {
	o       Options
	metrics *metrics
	old     *instance // nil at the start
	in      *instance
}

// build makes the instance of a plan. What it has of old's clusters it shares.
func build(o Options, m *metrics, plan *corefile.Plan, old *instance) (*instance, error) {
	b := &builder{o: o, metrics: m, old: old, in: &instance{plan: plan, listen: map[endpoint]*routes{}}}
	for i := range plan.Blocks {
		if err := b.block(&plan.Blocks[i]); err != nil {
			return nil, err
		}
	}
	return b.in, nil
}

// block adds the zones of a server block to the listeners.
func (b *builder) block(block *corefile.Block) error {
	hosts, err := hostsOf(block)
	if err != nil {
		return err
	}
	conf, err := serverTLS(block.TLS)
	if err != nil {
		return fmt.Errorf("%s: %w", block.Pos, err)
	}
	label := serverName(endpoint{hosts[0], block.Zones[0].Port, block.Zones[0].Transport})
	head, err := b.chain(block, label)
	if err != nil {
		return err
	}
	enabled := len(corefile.Find[*corefile.Prometheus](block.Plugins)) > 0
	chaos := len(corefile.Find[*corefile.Chaos](block.Plugins)) > 0
	for _, z := range block.Zones {
		for _, h := range hosts {
			e := endpoint{h, z.Port, z.Transport}
			r := b.in.listen[e]
			if r == nil {
				r = &routes{server: serverName(e), metrics: b.metrics, log: b.o.Log, sites: map[string]*site{}}
				b.in.listen[e] = r
			}
			if conf != nil {
				r.tls = conf
			}
			r.sockets = max(r.sockets, block.Sockets)
			r.chaos = r.chaos || chaos
			r.sites[z.Name] = &site{zone: z.Name, head: head, counted: enabled, names: pluginNames(block)}
		}
	}
	return nil
}

// pluginNames returns the names of a block's plugins, each once.
func pluginNames(block *corefile.Block) (out []string) {
	seen := map[string]bool{}
	for _, p := range block.Plugins {
		if n := p.PluginName(); !seen[n] {
			seen[n] = true
			out = append(out, n)
		}
	}
	return out
}

// chain puts the steps of a block together, from the last to the first.
func (b *builder) chain(block *corefile.Block, label string) (plugin.Handler, error) {
	var head plugin.Handler = plugin.End{}
	var k *kube
	done := map[string]bool{}
	for i := len(block.Plugins) - 1; i >= 0; i-- {
		var err error
		switch c := block.Plugins[i].(type) {
		case *corefile.Kubernetes:
			var from *cluster
			if from, err = b.cluster(c); err == nil {
				k = newKube(c, from, b.o.Log, head)
				head = k
			}
		case *corefile.Autopath:
			head = plugin.Autopath(c, pathOf(k), head)
		case *corefile.Forward:
			var f *forward.Forward
			if f, err = forward.New(c, b.o.Log, head); err == nil {
				b.metrics.observe(f)
				b.in.forwards = append(b.in.forwards, f)
				b.in.run = append(b.in.run, f.Run)
				head = f
			}
		case *corefile.Cache:
			kept := cache.New(c, head)
			b.in.caches = append(b.in.caches, cacheAt{kept, label})
			b.in.run = append(b.in.run, kept.Run)
			head = kept
		case *corefile.Hosts:
			h := plugin.NewHosts(c, b.o.Log, head)
			b.in.hosts = append(b.in.hosts, h)
			b.in.run = append(b.in.run, h.Run)
			head = h
		case *corefile.Errors:
			e := plugin.NewErrors(c, b.o.Log, head)
			b.in.run = append(b.in.run, e.Run)
			head = e
		case *corefile.Loop:
			l := newLoop(c.Zone, block, head)
			b.in.loops = append(b.in.loops, l)
			head = l
		case *corefile.File, *corefile.Auto:
			head, err = b.zoneFiles(c, head)
		default:
			head = b.simple(block, block.Plugins[i], head, done)
		}
		if err != nil {
			return nil, err
		}
	}
	return head, nil
}

// zoneFiles makes the step of the plugins file and auto.
func (b *builder) zoneFiles(c corefile.Plugin, next plugin.Handler) (plugin.Handler, error) {
	var z *zonefile.Zones
	var err error
	switch c := c.(type) {
	case *corefile.File:
		z, err = zonefile.NewFile(c, b.o.Log, next)
	case *corefile.Auto:
		z, err = zonefile.NewAuto(c, b.o.Log, next)
	}
	if err != nil {
		return nil, err
	}
	b.in.run = append(b.in.run, z.Run)
	return z, nil
}

// simple makes the steps without goroutines. Rules of one plugin that stand in several
// lines make one step, at the place of the first line.
func (b *builder) simple(block *corefile.Block, c corefile.Plugin, next plugin.Handler, done map[string]bool) plugin.Handler {
	first := !done[c.PluginName()]
	done[c.PluginName()] = true
	switch c := c.(type) {
	case *corefile.NSID:
		return plugin.NSID(c, next)
	case *corefile.Bufsize:
		return plugin.Bufsize(c, next)
	case *corefile.Local:
		return plugin.Local(c, next)
	case *corefile.DNS64:
		return plugin.DNS64(c, next)
	case *corefile.Any:
		return plugin.Any(next)
	case *corefile.Chaos:
		return plugin.Chaos(c, "fairlead-"+b.o.Version, next)
	case *corefile.LoadBalance:
		return plugin.LoadBalance(c, next)
	case *corefile.Minimal:
		return plugin.Minimal(next)
	case *corefile.Whoami:
		return plugin.Whoami()
	}
	if !first {
		return next
	}
	switch c.(type) {
	case *corefile.Log:
		return plugin.Log(corefile.Find[*corefile.Log](block.Plugins), b.o.Log, next)
	case *corefile.Rewrite:
		return plugin.Rewrite(corefile.Find[*corefile.Rewrite](block.Plugins), next)
	case *corefile.ACL:
		return plugin.ACL(corefile.Find[*corefile.ACL](block.Plugins), next)
	case *corefile.Template:
		return plugin.Templates(corefile.Find[*corefile.Template](block.Plugins), next)
	}
	return next // health, ready, prometheus and reload are no steps
}

// cluster returns the cluster of a configuration.
func (b *builder) cluster(c *corefile.Kubernetes) (*cluster, error) {
	have := b.in.clusters
	if b.old != nil {
		have = append(have[:len(have):len(have)], b.old.clusters...)
	}
	for _, known := range have {
		if known.key == clusterKey(c) {
			b.in.share(known)
			return known, nil
		}
	}
	made, err := newCluster(c, b.o)
	if err == nil {
		b.in.share(made)
	}
	return made, err
}

func (in *instance) share(c *cluster) {
	if !in.has(c) {
		in.clusters = append(in.clusters, c)
	}
}

func (in *instance) has(c *cluster) bool {
	for _, known := range in.clusters {
		if known == c {
			return true
		}
	}
	return false
}

// startClusters follows the clusters that old does not have. They live on when the instance ends.
func (in *instance) startClusters(ctx context.Context, old *instance) {
	for _, c := range in.clusters {
		if old == nil || !old.has(c) {
			c.start(ctx)
		}
	}
}

// closeClusters ends the clusters that other does not have.
func (in *instance) closeClusters(other *instance) {
	for _, c := range in.clusters {
		if other == nil || !other.has(c) {
			c.close()
		}
	}
}

// start starts what runs beside the questions, and returns the context of the instance.
func (in *instance) start(ctx context.Context) context.Context {
	ctx, in.stop = context.WithCancel(ctx)
	for _, run := range in.run {
		in.wg.Go(func() { run(ctx) })
	}
	return ctx
}

// end ends what start has started, but for the clusters of next.
func (in *instance) end(next *instance) {
	in.stop()
	in.wg.Wait()
	in.closeClusters(next)
}

// unready returns the names of the plugins that are not ready.
func (in *instance) unready() string {
	for _, c := range in.clusters {
		if !c.follow.Synced() {
			return "kubernetes"
		}
	}
	return ""
}

// lameduck is the longest time of the plugins health.
func (in *instance) lameduck() (d time.Duration) {
	for _, b := range in.plan.Blocks {
		for _, h := range corefile.Find[*corefile.Health](b.Plugins) {
			d = max(d, h.Lameduck)
		}
	}
	return d
}

// pathOf returns how autopath finds the search path of a client.
func pathOf(k *kube) func(*plugin.Query) []string {
	if k == nil {
		return func(*plugin.Query) []string { return nil }
	}
	var host []string
	if conf, err := mdns.ClientConfigFromFile("/etc/resolv.conf"); err == nil {
		for _, s := range conf.Search {
			host = append(host, strings.ToLower(mdns.Fqdn(s)))
		}
	}
	return func(q *plugin.Query) []string { return k.search(q, host) }
}
