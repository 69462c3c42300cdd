package allocator

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/registry/networking"
	"github.com/fairlead/fairlead/internal/svc"
)

// readyTimeout is the longest that Begin waits for Run to have read what is
// claimed.
const readyTimeout = 5 * time.Second

// Options is what an Allocator needs.
type Options struct {
	// RESTOptions gives the back end.
	RESTOptions generic.RESTOptionsGetter
	// ServiceCIDRs are the ranges of --service-cluster-ip-range: one, or one of
	// each family with the default first. They become the ServiceCIDR
	// "kubernetes".
	ServiceCIDRs []netip.Prefix
	// NodePorts is the range of --service-node-port-range.
	NodePorts svc.PortRange
	// Networking holds the claims of addresses and the ranges at run time.
	Networking networking.Storage
	// RepairPeriod is the time between two repairs; 0 means DefaultRepairPeriod.
	RepairPeriod time.Duration
	// ClaimGrace is the age at which a claim without a Service is freed. It must
	// be longer than any write of a Service takes.
	ClaimGrace time.Duration
	// Alone is set when no other server writes to the store, as with an embedded
	// etcd. Claims from before the start are then of no write in flight, and
	// those without a Service are freed at once.
	Alone bool
	// RangeDrain is how long a deleted ServiceCIDR stays at least; 0 means
	// networking.DefaultDrain.
	RangeDrain time.Duration
	// Log is required.
	Log *slog.Logger
}

// Allocator gives cluster IPs and node ports to Services. Run must run while it
// is in use.
type Allocator struct {
	pools    pools
	addrs    *addresses
	ipClaims *claims
	ports    *keyPool[uint16]
	ranges   *networking.Controller
	repair   *repairer
	log      *slog.Logger
	// ready is closed when the ranges and the claims are known.
	ready chan struct{}
}

// New makes an Allocator for the Services of a storage. It reads and writes
// nothing before Run.
func New(o Options, services Services) (*Allocator, error) {
	portClaims, err := newPortClaims(o.RESTOptions)
	if err != nil {
		return nil, err
	}
	a := &Allocator{
		addrs: newAddresses(), ipClaims: newAddressClaims(o.Networking.IPAddress), ports: portPool(portClaims, o.NodePorts),
		ranges: networking.NewController(o.Networking, o.ServiceCIDRs, o.RangeDrain, o.Log),
		log:    o.Log, ready: make(chan struct{}),
	}
	a.pools = pools{
		ipv4: addressPool(a.ipClaims, a.addrs, svc.IPv4), ipv6: addressPool(a.ipClaims, a.addrs, svc.IPv6), nodePort: a.ports,
	}
	a.repair = &repairer{
		services: services, kinds: []kind{addressKind(a.ipClaims, a.addrs.contains), portKind(a.ports)}, log: o.Log,
		period: cmp.Or(o.RepairPeriod, DefaultRepairPeriod), grace: o.ClaimGrace,
	}
	if o.Alone {
		// Creation times have whole seconds.
		a.repair.start = time.Now().Truncate(time.Second)
	}
	return a, nil
}

// Begin claims what p requests for s and fills it in; a dry run fills in what
// could be claimed. After an error nothing is claimed. A server that has just
// started may have to wait for what is claimed already.
func (a *Allocator) Begin(ctx context.Context, s *corev1.Service, p Plan, dryRun bool) (*Transaction, error) {
	if len(p.requests) > 0 {
		if err := a.waitReady(ctx); err != nil {
			return nil, err
		}
	}
	t := &Transaction{pools: &a.pools, log: a.log, owner: ownerOf(s)}
	if dryRun {
		return t, t.dryRun(ctx, p)
	}
	t.releases = p.releases
	return t, t.claim(ctx, p)
}

// Release releases everything that the deleted Service s had.
func (a *Allocator) Release(ctx context.Context, s *corev1.Service) {
	t := &Transaction{pools: &a.pools, log: a.log, owner: ownerOf(s), releases: claimsOf(s)}
	t.Commit(ctx)
}

func (a *Allocator) waitReady(ctx context.Context) error {
	select {
	case <-a.ready:
		return nil
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	select {
	case <-a.ready:
		return nil
	case <-ctx.Done():
		return apierrors.NewInternalError(fmt.Errorf("failed to allocate a serviceIP: %w", errNotReady))
	}
}

// Run keeps the Allocator informed, looks after ServiceCIDRs and repairs
// claims, until ctx ends. Begin waits until it has read the stored claims, a moment
// after its start. Events of the repair are written through client; without one
// they are only logged.
func (a *Allocator) Run(ctx context.Context, client kubernetes.Interface) {
	var wg sync.WaitGroup
	defer wg.Wait()
	addrs, ports, ranges := newGate(), newGate(), newGate()
	wg.Go(func() {
		networking.Feed(ctx, "ipaddresses", a.ipClaims.store, sinkOf(a.addrs.ledger, parseAddr, addrs.open))
	})
	wg.Go(func() {
		networking.Feed(ctx, "nodeports", a.ports.claims.store, sinkOf(a.ports.ledger, parsePort, ports.open))
	})
	wg.Go(func() {
		a.ranges.Run(ctx, func(prefixes map[netip.Prefix]bool) {
			if a.addrs.setRanges(prefixes) {
				ranges.open()
			}
		})
	})
	for _, g := range []gate{addrs, ports, ranges} {
		select {
		case <-g.opened:
		case <-ctx.Done():
			return
		}
	}
	close(a.ready)
	var recorder *events.Recorder
	if client != nil {
		recorder = events.NewRecorder(client, corev1.EventSource{Component: "fairlead-allocation-repair"}, a.log)
		defer recorder.Start()()
	}
	a.repair.run(ctx, recorder)
}

// Destroy closes the storage of node port claims, which no API shows; the shown
// storages are the API server's to destroy. It may be called more than once.
func (a *Allocator) Destroy() { a.ports.claims.store.Destroy() }

// Repair compares all claims with all Services once: claims without a Service
// are freed when they are older than grace, Services without a claim get one,
// and what two Services use is reported on both. It returns what it found, also
// when it returns an error.
func (a *Allocator) Repair(ctx context.Context, grace time.Duration) ([]Finding, error) {
	return a.repair.repair(ctx, nil, grace)
}

// gate is opened once and stays open.
type gate struct {
	opened chan struct{}
	open   func()
}

func newGate() gate {
	c := make(chan struct{})
	return gate{c, sync.OnceFunc(func() { close(c) })}
}

// sinkOf makes the ledger follow the claims; synced is called after every list.
func sinkOf[K comparable](l *ledger[K], parse func(string) (K, bool), synced func()) reflector.Sink[any] {
	with := func(f func(K)) func(any) {
		return func(obj any) {
			if k, ok := parse(nameOf(obj)); ok {
				f(k)
			}
		}
	}
	return reflector.Sink[any]{
		Set: with(l.seen), Delete: with(l.gone),
		Replace: func(objs []any) {
			keys := map[K]bool{}
			add := with(func(k K) { keys[k] = true })
			for _, o := range objs {
				add(o)
			}
			l.replace(keys)
			synced()
		},
	}
}
