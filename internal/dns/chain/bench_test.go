package chain

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
)

// A question for a Service under kubeadm's chain, from the parsed request to the packed answer.
func BenchmarkService(b *testing.B) {
	file := filepath.Join(b.TempDir(), "Corefile")
	text := ".:53 {\n errors\n kubernetes cluster.local in-addr.arpa ip6.arpa {\n pods insecure\n ttl 30\n}\n prometheus :9153\n" +
		" forward . 192.0.2.1\n cache 30 {\n disable success cluster.local\n}\n loadbalance\n}"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		b.Fatal(err)
	}
	plan, err := corefile.Load(file)
	if err != nil {
		b.Fatal(err)
	}
	o := Options{Plan: plan, Log: slog.New(slog.DiscardHandler), Client: func(string, string) (kubernetes.Interface, error) {
		return fake.NewClientset(objects()...), nil
	}}
	m := newMetrics("test")
	in, err := build(o, m, plan, nil)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	in.startClusters(ctx, nil)
	in.start(ctx)
	defer in.end(nil)
	tick, late := time.NewTicker(time.Millisecond), time.After(20*time.Second)
	defer tick.Stop()
	for in.unready() != "" {
		select {
		case <-tick.C:
		case <-late:
			b.Fatal("the cluster is not listed in twenty seconds")
		}
	}
	r := in.listen[endpoint{"", 53, corefile.DNS}]
	req := new(mdns.Msg).SetQuestion("web.default.svc.cluster.local.", mdns.TypeA)
	client := netip.MustParseAddrPort("10.244.0.9:40000")
	b.ReportAllocs()
	for b.Loop() {
		q := &plugin.Query{Msg: req.Copy(), Client: client, Network: "udp", Server: r.server, Self: r, Size: 48}
		reply, _ := r.guarded(ctx, q)
		if _, err := finish(req, reply, q.Network, sizeOf(q)).Pack(); err != nil || reply.Code() != mdns.RcodeSuccess {
			b.Fatal(err, reply)
		}
	}
}
