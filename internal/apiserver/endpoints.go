package apiserver

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/svc"
)

// Every server has a Lease; one that has not renewed it for serverLease is removed
// from the endpoints of default/kubernetes. Several servers renew more often than one
// without others, whose Lease no other server waits for.
const (
	serverLease  = 15 * time.Second
	serverRenew  = 5 * time.Second
	severalLease = 5 * time.Second
	severalRenew = time.Second
	leaveTimeout = 5 * time.Second

	// serverLabel marks the Leases of servers.
	serverLabel = "fairlead.dev/apiserver"

	managedBy = "apiserver.fairlead.dev"
)

// endpointKeeper keeps the Endpoints and EndpointSlices of default/kubernetes in
// line with the running servers. Every server has one; they agree because all
// compute the same from the same Leases.
type endpointKeeper struct {
	client kubernetes.Interface
	// self is where this server is reached; invalid for a server that cannot be
	// reached by others, which keeps the endpoints all the same.
	self netip.AddrPort
	// lease is how long the Lease of this server is valid, and renewal the time between two.
	lease, renewal time.Duration
	// report describes the certificates of the server.
	report func() pki.Report
	now    func() time.Time
	log    *slog.Logger

	mu   sync.Mutex // guards what follows
	seen sightings
}

func newEndpointKeeper(client kubernetes.Interface, alone bool, log *slog.Logger) *endpointKeeper {
	k := &endpointKeeper{client: client, lease: severalLease, renewal: severalRenew, now: time.Now, log: log, seen: sightings{}}
	if alone {
		k.lease, k.renewal = serverLease, serverRenew
	}
	return k
}

// join renews this server's Lease and brings the endpoints up to date.
func (k *endpointKeeper) join(ctx context.Context) error {
	if err := k.renew(ctx); err != nil {
		return err
	}
	return k.reconcile(ctx)
}

// run renews the Lease and the endpoints until ctx is done.
func (k *endpointKeeper) run(ctx context.Context) {
	// The first renewal is join's.
	_ = wait.PollUntilContextCancel(ctx, k.renewal, false, func(ctx context.Context) (bool, error) {
		step, cancel := context.WithTimeout(ctx, serverRenew)
		if err := k.join(step); err != nil && ctx.Err() == nil {
			k.log.Warn("cannot update the endpoints of default/kubernetes; retrying", "err", err, "after", k.renewal)
		}
		cancel()
		return false, nil
	})
}

// leave removes this server from the endpoints at once. Where that fails, as it does when the last of several servers stop,
// the others remove it when its Lease is over.
func (k *endpointKeeper) leave() error {
	if !k.self.IsValid() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(leaveTimeout, k.lease/2))
	defer cancel()
	if err := k.remove(ctx, k.self); err != nil {
		k.log.Warn("cannot leave default/kubernetes; other servers remove this one when its Lease is over", "err", err, "lease", k.lease)
	}
	return nil
}

// remove removes a server from the endpoints; one that runs comes back when it renews its Lease.
func (k *endpointKeeper) remove(ctx context.Context, server netip.AddrPort) error {
	if err := k.leases().Delete(ctx, leaseName(server), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	return k.reconcile(ctx)
}

func (k *endpointKeeper) leases() leaseClient {
	return k.client.CoordinationV1().Leases(metav1.NamespaceSystem)
}

type leaseClient interface {
	Get(context.Context, string, metav1.GetOptions) (*coordinationv1.Lease, error)
	Create(context.Context, *coordinationv1.Lease, metav1.CreateOptions) (*coordinationv1.Lease, error)
	Update(context.Context, *coordinationv1.Lease, metav1.UpdateOptions) (*coordinationv1.Lease, error)
	Delete(context.Context, string, metav1.DeleteOptions) error
}

// leaseName returns the name of a server's Lease. It is derived from the address, so
// that a restarted server takes over its Lease.
func leaseName(server netip.AddrPort) string {
	addr := strings.Trim(strings.NewReplacer(":", "-", ".", "-", "%", "-").Replace(server.Addr().StringExpanded()), "-")
	return fmt.Sprintf("%s%s-%d", svc.ServerLeasePrefix, addr, server.Port())
}

// renew renews the Lease, with what this server reports at this moment.
func (k *endpointKeeper) renew(ctx context.Context) error {
	if !k.self.IsValid() {
		return nil
	}
	return contended(ctx, func() error { return k.putLease(ctx) })
}

func (k *endpointKeeper) putLease(ctx context.Context) error {
	now := metav1.NewMicroTime(k.now())
	l, err := k.leases().Get(ctx, leaseName(k.self), metav1.GetOptions{})
	missing := apierrors.IsNotFound(err)
	if missing {
		l = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: leaseName(k.self), Namespace: metav1.NamespaceSystem}}
		l.Spec.AcquireTime = &now
	} else if err != nil {
		return err
	}
	metav1.SetMetaDataLabel(&l.ObjectMeta, serverLabel, "true")
	metav1.SetMetaDataAnnotation(&l.ObjectMeta, svc.EndpointAnnotation, k.self.String())
	metav1.SetMetaDataAnnotation(&l.ObjectMeta, svc.AuthoritiesAnnotation, k.report().String())
	l.Spec.HolderIdentity = ptr.To(k.self.String())
	l.Spec.LeaseDurationSeconds = ptr.To(int32(k.lease / time.Second))
	l.Spec.RenewTime = &now
	if missing {
		_, err = k.leases().Create(ctx, l, metav1.CreateOptions{})
	} else {
		_, err = k.leases().Update(ctx, l, metav1.UpdateOptions{})
	}
	return err
}

// reconcile writes the endpoints that follow from the Leases where they differ. All servers
// do: one that another has come before begins again with the Leases.
func (k *endpointKeeper) reconcile(ctx context.Context) error {
	return contended(ctx, func() error { return k.write(ctx) })
}

// contended repeats the write of an object that several servers, or several parts of one, write.
func contended(ctx context.Context, write func() error) error {
	byAnother := func(err error) bool {
		return ctx.Err() == nil && (apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err))
	}
	return retry.OnError(retry.DefaultRetry, byAnother, write)
}

func (k *endpointKeeper) write(ctx context.Context) error {
	list, err := k.client.CoordinationV1().Leases(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: serverLabel})
	if err != nil {
		return err
	}
	k.mu.Lock()
	running := runningServers(list.Items, k.seen, k.now())
	k.mu.Unlock()
	if err := k.putEndpoints(ctx, running); err != nil {
		return fmt.Errorf("cannot write Endpoints: %w", err)
	}
	if err := k.putSlices(ctx, running); err != nil {
		return fmt.Errorf("cannot write EndpointSlices: %w", err)
	}
	return nil
}

// runningServers returns the addresses whose Leases have not expired, in order. A Lease
// counts by the name that its server gives it and for no longer than a server takes it:
// others than servers may write some of the Leases beside.
func runningServers(leases []coordinationv1.Lease, seen sightings, now time.Time) []netip.AddrPort {
	var out []netip.AddrPort
	for i := range leases {
		l := &leases[i]
		at, err := netip.ParseAddrPort(l.Annotations[svc.EndpointAnnotation])
		if err != nil || l.Name != leaseName(at) || !mayBeEndpoint(at) || l.Spec.RenewTime == nil || l.Spec.LeaseDurationSeconds == nil {
			continue
		}
		term := time.Duration(*l.Spec.LeaseDurationSeconds) * time.Second
		if seen.age(l.Name, l.Spec.RenewTime.Time, now) < min(term, serverLease) {
			out = append(out, at)
		}
	}
	maps.DeleteFunc(seen, func(name string, _ sighting) bool {
		return !slices.ContainsFunc(leases, func(l coordinationv1.Lease) bool { return l.Name == name })
	})
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// sightings are the renewals that a server has seen of Leases, by name: what counts is its own clock,
// as the clocks of machines differ by seconds.
type sightings map[string]sighting

type sighting struct{ renewed, at time.Time }

// age returns the time since the renewal of a Lease was seen first. Of one that is new here only its
// own time is known; a server whose clock is off by more than serverLease is not taken to run until
// it renews again.
func (s sightings) age(name string, renewed, now time.Time) time.Duration {
	last, known := s[name]
	if known && last.renewed.Equal(renewed) {
		return now.Sub(last.at)
	}
	at := now
	if since := now.Sub(renewed); !known && (since >= serverLease || since < -serverLease) {
		at = now.Add(-serverLease)
	}
	s[name] = sighting{renewed, at}
	return now.Sub(at)
}

// others returns what the other running servers report about their certificates.
func (k *endpointKeeper) others(ctx context.Context) (map[string]pki.Report, error) {
	list, err := k.client.CoordinationV1().Leases(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: serverLabel})
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	running := runningServers(list.Items, k.seen, k.now())
	k.mu.Unlock()
	out := map[string]pki.Report{}
	for _, l := range list.Items {
		if i := slices.IndexFunc(running, func(at netip.AddrPort) bool { return at != k.self && leaseName(at) == l.Name }); i >= 0 {
			out["server "+running[i].String()] = pki.ParseReport(l.Annotations[svc.AuthoritiesAnnotation])
		}
	}
	return out, nil
}

// mayBeEndpoint reports whether the API accepts an address in Endpoints: an invalid one
// fails the write for all servers.
func mayBeEndpoint(at netip.AddrPort) bool {
	a := at.Addr()
	return at.Port() != 0 && a.Zone() == "" && !a.Is4In6() && !a.IsUnspecified() && !a.IsLoopback() &&
		!a.IsLinkLocalUnicast() && !a.IsLinkLocalMulticast()
}

// serverGroup is the servers of one family and one port.
type serverGroup struct {
	ipv4  bool
	port  uint16
	addrs []string
}

func groupServers(servers []netip.AddrPort) []serverGroup {
	var out []serverGroup
	for _, s := range servers {
		i := slices.IndexFunc(out, func(g serverGroup) bool { return g.port == s.Port() && g.ipv4 == s.Addr().Is4() })
		if i < 0 {
			i = len(out)
			out = append(out, serverGroup{ipv4: s.Addr().Is4(), port: s.Port()})
		}
		out[i].addrs = append(out[i].addrs, s.Addr().String())
	}
	slices.SortFunc(out, func(a, b serverGroup) int { return cmp.Compare(a.port, b.port) })
	return out
}

//nolint:staticcheck // Endpoints are deprecated, and still served
func (k *endpointKeeper) putEndpoints(ctx context.Context, servers []netip.AddrPort) error {
	client := k.client.CoreV1().Endpoints(metav1.NamespaceDefault)
	want := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{
		Name: svc.APIService, Namespace: metav1.NamespaceDefault,
		// The slices are written here and not mirrored from the Endpoints.
		Labels: map[string]string{discoveryv1.LabelSkipMirror: "true"},
	}}
	for _, g := range groupServers(servers) {
		s := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Name: "https", Port: int32(g.port), Protocol: corev1.ProtocolTCP}}}
		for _, a := range g.addrs {
			s.Addresses = append(s.Addresses, corev1.EndpointAddress{IP: a})
		}
		want.Subsets = append(want.Subsets, s)
	}
	have, err := client.Get(ctx, want.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		_, err = client.Create(ctx, want, metav1.CreateOptions{})
		return err
	case err != nil:
		return err
	case equality.Semantic.DeepEqual(have.Subsets, want.Subsets) && have.Labels[discoveryv1.LabelSkipMirror] == "true":
		return nil
	}
	want.ResourceVersion = have.ResourceVersion
	_, err = client.Update(ctx, want, metav1.UpdateOptions{})
	return err
}

func (k *endpointKeeper) putSlices(ctx context.Context, servers []netip.AddrPort) error {
	client := k.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault)
	list, err := client.List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelManagedBy + "=" + managedBy})
	if err != nil {
		return err
	}
	have := map[string]*discoveryv1.EndpointSlice{}
	for i := range list.Items {
		have[list.Items[i].Name] = &list.Items[i]
	}
	for _, want := range serverSlices(servers) {
		old := have[want.Name]
		delete(have, want.Name)
		switch {
		case old == nil:
			_, err = client.Create(ctx, want, metav1.CreateOptions{})
		case equality.Semantic.DeepEqual(old.Endpoints, want.Endpoints) && equality.Semantic.DeepEqual(old.Ports, want.Ports):
			err = nil
		default:
			want.ResourceVersion = old.ResourceVersion
			_, err = client.Update(ctx, want, metav1.UpdateOptions{})
		}
		if err != nil {
			return err
		}
	}
	for name := range have {
		if err := client.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// serverSlices returns one slice for each family and port: "kubernetes" and
// "kubernetes-ipv6", with a number where servers differ in their ports. The
// family is part of the name because a slice cannot change it.
func serverSlices(servers []netip.AddrPort) []*discoveryv1.EndpointSlice {
	var out []*discoveryv1.EndpointSlice
	count := map[bool]int{}
	for _, g := range groupServers(servers) {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: svc.APIService, Namespace: metav1.NamespaceDefault,
				Labels: map[string]string{discoveryv1.LabelServiceName: svc.APIService, discoveryv1.LabelManagedBy: managedBy},
			},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("https"), Port: ptr.To(int32(g.port)), Protocol: ptr.To(corev1.ProtocolTCP)}},
		}
		if !g.ipv4 {
			s.Name, s.AddressType = svc.APIService+"-ipv6", discoveryv1.AddressTypeIPv6
		}
		if count[g.ipv4]++; count[g.ipv4] > 1 {
			s.Name = fmt.Sprintf("%s-%d", s.Name, count[g.ipv4])
		}
		for _, a := range g.addrs {
			s.Endpoints = append(s.Endpoints,
				discoveryv1.Endpoint{Addresses: []string{a}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}})
		}
		out = append(out, s)
	}
	return out
}
