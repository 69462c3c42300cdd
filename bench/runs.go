package main

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// run is a measurement that can be chosen by name.
type run struct {
	name, about string
	measure     func(*bench, context.Context) ([]figure, error)
	// needs are programs in the folder of the peers, or needsBPF, without which
	// there is nothing to measure.
	needs []string
	// peers are further programs of that folder that it is measured against.
	peers []string
}

// built are the peers that make builds wherever there is Go. The others depend
// on the machine, and are left out where they cannot be had.
var built = []string{"kube-proxy", "kube-controller-manager", "kube-apiserver", "etcd", "coredns", corpusProgram}

// programs are the peers of r that make builds.
func (r run) programs() (out []string) {
	for _, name := range slices.Concat(r.needs, r.peers) {
		if slices.Contains(built, name) {
			out = append(out, name)
		}
	}
	return out
}

// runs are all measurements, in the order of the table.
func runs() []run {
	kubeProxy, coreDNS := []string{"kube-proxy"}, []string{"coredns"}
	return []run{
		{"start", "start of fairlead up to the first answered request", (*bench).runStart, nil, nil},
		{"memory", "memory of fairlead up with 1,000 services", (*bench).runMemory, nil, nil},
		{"pods", "200 Pods on a node, one after the other", (*bench).runPods, nil, nil},
		{"shortpods", "1,000 Pods that end at once", (*bench).runShortPods, nil, nil},
		{"hogs", "requests to a Pod beside one that takes what it can get, in virtual time", (*bench).runHogs,
			[]string{guestMachine + "/initrd"}, nil},
		{"change", "an endpoint changes, at 1,000 services x 10 endpoints", (*bench).runChange, nil, kubeProxy},
		{"load5k", "5,000 services x 10 endpoints from nothing", (*bench).runLoad5k, nil, kubeProxy},
		{"load", "5,000 services x 50 endpoints from nothing", (*bench).runLoad, nil, kubeProxy},
		{"load10k", "10,000 services x 10 endpoints from nothing", (*bench).runLoad10k, nil, kubeProxy},
		{"stress", "20 changes a second, a burst, connections and bytes at 10,000 services x 10 endpoints", (*bench).runStress, nil, kubeProxy},
		{"large", "50,000 services x 10 endpoints", (*bench).runLarge, nil, nil},
		{"connecttime", "connect-time beside mode nft without it, direct connections and kube-proxy, at 1, 1,000 and 50,000 services",
			(*bench).runConnectTime, []string{needsBPF}, kubeProxy},
		{"connectmemory", "memory that connect-time takes, at 5,000 and 50,000 services x 10 endpoints", (*bench).runConnectMemory,
			[]string{needsBPF}, nil},
		{"sockmap", "local connections whose two sockets a map of sockets joins", (*bench).runSockmap, []string{needsBPF}, nil},
		{"questions", "plan, explain and status at 10,000 services x 5 endpoints", (*bench).runQuestions, nil, nil},
		{"pages", "what 50 open pages cost the server at 100 and 1,000 services x 5 endpoints", (*bench).runPages, nil, nil},
		{"iptables", "iptables mode, at 2,000 services x 10 endpoints with the nf_tables variant and 10,000 with the legacy one",
			(*bench).runIPTables, nil, kubeProxy},
		{"dns", "the cluster's names, against CoreDNS", (*bench).runDNS, nil, coreDNS},
		{"dnsload", "start of a DNS server up to its first answer, at 1,000 and 10,000 services x 10 endpoints", (*bench).runDNSLoad,
			nil, coreDNS},
		{"dnsnames", "every question of the table of names, and where CoreDNS answers otherwise", (*bench).runNames, nil, coreDNS},
		{"dnscorefile", "the same 2,000 questions under the Corefiles of distributions and clouds, and where CoreDNS answers otherwise",
			(*bench).runCorefiles, nil, coreDNS},
		{"controllers", "from a Pod's status to its EndpointSlice, against kube-controller-manager", (*bench).runControllers, nil,
			[]string{"kube-controller-manager"}},
		{"api", "every request of test/api, against kube-apiserver", (*bench).runAPI, []string{"kube-apiserver", "etcd", corpusProgram}, nil},
		{"create", "Services created with cluster IPs, against kube-apiserver", (*bench).runCreate, []string{"kube-apiserver", "etcd"}, nil},
		{"fleet", "watches of 1,000, 5,000 and 10,000 nodes, against kube-apiserver", (*bench).runFleet, []string{"kube-apiserver", "etcd"}, nil},
		{"lb", "load balancers' addresses on kube-apiserver, beside kube-proxy", (*bench).runLB,
			[]string{"kube-apiserver", "etcd", "kube-proxy"}, nil},
		{"lbcreate", "from the creation of a load balancer to its first answer", (*bench).runLBCreate, nil, nil},
		{"lb10k", "10,000 addresses of one pool", (*bench).runLB10k, nil, nil},
		{"lbhttp", "TCP and HTTP/1.1 through a load balancer of the proxied way, against HAProxy and nginx", (*bench).runLBHTTP, nil, nil},
		{"lbtls", "the same with TLS", (*bench).runLBTLS, nil, nil},
		{"lbh2", "HTTP/2 and gRPC through it", (*bench).runLBH2, []string{h2loadProgram}, nil},
		{"gateway", "a Gateway with 1,000 hosts and 5,000 paths, against HAProxy and nginx", (*bench).runGateway, nil, nil},
		{"gatewaychurn", "requests failed while routes, Gateways and backends change", (*bench).runGatewayChurn, nil, nil},
		{"rolling", "connections lost by rolling updates, beside a kube-proxy", (*bench).runRolling, nil, kubeProxy},
		{"wireguard", "encryption by the kernel's WireGuard, between two nodes on Debian's kernel", (*bench).runWireGuard,
			[]string{guestMachine + "/initrd", guestMachine + "/agents"}, nil},
		{"userspace", "connections carried by the proxy itself, against HAProxy, nginx and io.Copy", (*bench).runUserspace, nil, nil},
	}
}

// few is n, or a small number that shows that a measurement works.
func (b *bench) few(n, small int) int {
	if b.small {
		return small
	}
	return n
}

// pause is the time before each change.
const pause = 50 * time.Millisecond

// forPeer is s as kube-proxy is measured: with fewer changes, since each takes
// it seconds and about as long as the one before, and with longer pauses: it
// syncs at most once a second by default, and a change that comes sooner would
// wait for that.
func (s planeSize) forPeer(small bool) planeSize {
	s.changes, s.additions, s.pause = (s.changes+3)/4, (s.additions+1)/2, 1100*time.Millisecond
	if small {
		s.pause = 100 * time.Millisecond
	}
	return s
}

// memoryAfter is how long after its start a proxy's memory is looked at: by then
// it has given back what only the load needed, if it ever does.
func (b *bench) memoryAfter() time.Duration {
	if b.small {
		return 0
	}
	return 10 * time.Second
}

// limit bounds one load. kube-proxy needs minutes for the largest on a busy
// machine.
func (b *bench) limit() time.Duration {
	if b.small {
		return 30 * time.Second
	}
	return 5 * time.Minute
}

// against makes figures that have kube-proxy as their peer.
func (b *bench) against(what string, u unit, mine, peer float64, want expectation) figure {
	f := unpaired(what, u, mine, want)
	if b.peer("kube-proxy") != "" {
		f.peer, f.peerName = peer, "kube-proxy nftables"
	}
	return f
}

func (b *bench) runChange(ctx context.Context) ([]figure, error) {
	size := planeSize{
		services: b.few(1000, 50), endpoints: b.few(10, 3), changes: b.few(100, 5), pause: pause, limit: b.limit(),
	}
	mine, peer, err := b.proxies(ctx, size)
	if err != nil {
		return nil, err
	}
	change := fmt.Sprintf("endpoint change to packet at %s, %%s of %d", size, size.changes)
	return []figure{
		b.against(fmt.Sprintf(change, "p50"), milliseconds, percentile(mine.changes, 0.50), percentile(peer.changes, 0.50), expectation{}),
		b.against(fmt.Sprintf(change, "p99"), milliseconds, percentile(mine.changes, 0.99), percentile(peer.changes, 0.99),
			expectation{below: 50}),
		b.against("CPU for one change", milliseconds, mine.changeCPU, peer.changeCPU, expectation{}),
		b.against(fmt.Sprintf("load of %s, process start to last answer", size), seconds, mine.load, peer.load, expectation{}),
		b.against("connect p50 through a ClusterIP, in that of a direct one", times, mine.connect, peer.connect, expectation{}),
		b.against("memory of the proxy after the load", megabytes, mine.memory, peer.memory, expectation{}),
	}, nil
}

func (b *bench) runLoad(ctx context.Context) ([]figure, error) {
	return b.largeLoad(ctx, planeSize{
		services: b.few(5000, 50), endpoints: b.few(50, 5), changes: b.few(20, 3), additions: b.few(5, 2), pause: pause, limit: b.limit(),
	}, expectation{below: 5, share: 0.5}, expectation{})
}

func (b *bench) runLoad5k(ctx context.Context) ([]figure, error) {
	return b.largeLoad(ctx, planeSize{
		services: b.few(5000, 50), endpoints: b.few(10, 2), changes: b.few(20, 3), additions: b.few(5, 2), pause: pause, limit: b.limit(),
	}, expectation{share: 0.2}, expectation{})
}

func (b *bench) runLoad10k(ctx context.Context) ([]figure, error) {
	return b.largeLoad(ctx, planeSize{
		services: b.few(10000, 60), endpoints: b.few(10, 2), changes: b.few(20, 3), additions: b.few(5, 2), pause: pause, limit: b.limit(),
	}, expectation{share: 0.1}, expectation{share: 1. / 3})
}

// largeLoad measures a load and a few changes after it.
func (b *bench) largeLoad(ctx context.Context, size planeSize, load, memory expectation) ([]figure, error) {
	mine, peer, err := b.proxies(ctx, size)
	if err != nil {
		return nil, err
	}
	change := fmt.Sprintf("endpoint change to packet at %s, %%s of %d", size, size.changes)
	return []figure{
		b.against(fmt.Sprintf("load of %s, process start to last answer", size), seconds, mine.load, peer.load, load),
		b.against("CPU for it", seconds, mine.loadCPU, peer.loadCPU, expectation{}),
		b.against(fmt.Sprintf(change, "p50"), milliseconds, percentile(mine.changes, 0.5), percentile(peer.changes, 0.5), expectation{below: 10}),
		b.against(fmt.Sprintf(change, "largest"), milliseconds, percentile(mine.changes, 1), percentile(peer.changes, 1), expectation{below: 25}),
		b.against("CPU for one change", milliseconds, mine.changeCPU, peer.changeCPU, expectation{}),
		b.against(fmt.Sprintf("new service to packet at %s, p50 of %d", size, size.additions), milliseconds,
			percentile(mine.additions, 0.5), percentile(peer.additions, 0.5), expectation{below: 20}),
		b.against("connect p50 through a ClusterIP, in that of a direct one", times, mine.connect, peer.connect, expectation{}),
		b.against("memory of the proxy after the load", megabytes, mine.memory, peer.memory, memory),
		b.against("memory of the proxy at its most, with changes", megabytes, mine.peakSize, peer.peakSize, memory),
	}, nil
}

// String is how a size is written in a figure.
func (s planeSize) String() string { return fmt.Sprintf("%d x %d", s.services, s.endpoints) }
