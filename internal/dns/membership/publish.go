package membership

import (
	"context"
	"errors"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fairlead/fairlead/internal/svc"
)

const (
	publishTimeout  = 5 * time.Second
	publishBackoff  = 500 * time.Millisecond
	publishMaxDelay = 30 * time.Second
	readyPoll       = 20 * time.Millisecond
	// ownerPeriod is how often a missing Node is looked up again.
	ownerPeriod = 2 * time.Second
)

// Self is how this server is listed as an endpoint of kube-dns.
type Self struct {
	// NodeName is the node it runs on.
	NodeName string
	// Addresses are where it is reached; there is one slice for each family.
	Addresses []netip.Addr
	// Port for both protocols.
	Port uint16
}

// sliceName is the name of the slice of one family: kube-dns-NODE, and
// kube-dns-NODE-ipv6.
func (p *Self) sliceName(f svc.Family) string {
	name := Service().Name + "-" + p.NodeName
	if f == svc.IPv6 {
		name += "-ipv6"
	}
	return svc.Shorten(name, validation.DNS1123SubdomainMaxLength)
}

// isReplaced reports whether a write failed because another client deleted or changed the object.
func isReplaced(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsConflict(err) }

// owns reports whether name is a slice of this server.
func (p *Self) owns(name string) bool {
	return p != nil && (name == p.sliceName(svc.IPv4) || name == p.sliceName(svc.IPv6))
}

// slices returns the EndpointSlices that list this server, by name; nil for those
// that must not exist.
func (p *Self) slices(owner []metav1.OwnerReference) map[string]*discoveryv1.EndpointSlice {
	out := map[string]*discoveryv1.EndpointSlice{}
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		var addrs []netip.Addr
		for _, a := range p.Addresses {
			if svc.FamilyOf(a) == f {
				addrs = append(addrs, a.Unmap())
			}
		}
		out[p.sliceName(f)] = nil
		if len(addrs) > 0 {
			out[p.sliceName(f)] = p.slice(f, addrs, owner)
		}
	}
	return out
}

func (p *Self) slice(f svc.Family, addrs []netip.Addr, owner []metav1.OwnerReference) *discoveryv1.EndpointSlice {
	yes, no := true, false
	udp, tcp := corev1.ProtocolUDP, corev1.ProtocolTCP
	dnsName, dnsTCP, port := "dns", "dns-tcp", int32(p.Port)
	e := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: Service().Namespace,
			Name:      p.sliceName(f),
			Labels: map[string]string{
				discoveryv1.LabelServiceName: Service().Name,
				discoveryv1.LabelManagedBy:   svc.DNSSliceManager,
				svc.NodeLabel:                svc.NodeLabelValue(p.NodeName),
			},
			OwnerReferences: owner,
		},
		AddressType: discoveryv1.AddressType(f.String()),
		Ports: []discoveryv1.EndpointPort{
			{Name: &dnsName, Protocol: &udp, Port: &port},
			{Name: &dnsTCP, Protocol: &tcp, Port: &port},
		},
	}
	node := p.NodeName
	for _, a := range addrs {
		e.Endpoints = append(e.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{a.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
			NodeName:   &node,
		})
	}
	return e
}

// Publish lists this server behind kube-dns once ready returns true, and writes its slices
// again when another client has changed them, until ctx ends. It reports whether
// Withdraw has slices to delete.
func (m *Members) Publish(ctx context.Context, ready func() bool) bool {
	for !ready() {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(readyPoll):
		}
	}
	delay := publishBackoff
	rejected := false
	for {
		owned, err := m.assertSlices(ctx)
		var retry <-chan time.Time
		switch {
		case apierrors.IsForbidden(err) && ctx.Err() == nil:
			if !rejected { // it may be for as long as there are enough other servers
				m.log.Info("this server is no endpoint of kube-dns yet, and answers its own node; retrying", "at-least-every", publishMaxDelay,
					"err", err)
			}
			rejected = true
			retry = time.After(delay)
			delay = min(2*delay, publishMaxDelay)
		case err != nil && ctx.Err() == nil:
			m.log.Warn("cannot publish this server as an endpoint of kube-dns; retrying", "in", delay, "err", err)
			retry = time.After(delay)
			delay = min(2*delay, publishMaxDelay)
		case !owned: // without an owner they would outlive the Node
			retry = time.After(ownerPeriod)
			delay = publishBackoff
		default:
			delay, rejected = publishBackoff, false
		}
		select {
		case <-ctx.Done():
			return true
		case <-retry:
		case <-m.reassert:
		}
	}
}

// assertSlices writes the slices that differ from the desired state, and reports
// whether the Node that owns them exists.
func (m *Members) assertSlices(ctx context.Context) (owned bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	api := m.client.DiscoveryV1().EndpointSlices(Service().Namespace)
	owner, err := m.nodeOwner(ctx)
	if err != nil {
		return false, err
	}
	var errs []error
	for name, want := range m.self.slices(owner) {
		have, err := api.Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err) && want == nil:
			err = nil
		case apierrors.IsNotFound(err):
			_, err = api.Create(ctx, want, metav1.CreateOptions{})
		case err != nil:
		case want == nil:
			err = api.Delete(ctx, name, metav1.DeleteOptions{})
		case have.AddressType != want.AddressType:
			// The type is immutable; the next attempt creates the slice.
			if err = api.Delete(ctx, name, metav1.DeleteOptions{}); err == nil {
				err = errors.New("deleted a slice of the same name and another family")
			}
		case !sameSlice(have, want):
			have = have.DeepCopy()
			have.Labels, have.OwnerReferences = want.Labels, want.OwnerReferences
			have.Endpoints, have.Ports = want.Endpoints, want.Ports
			_, err = api.Update(ctx, have, metav1.UpdateOptions{})
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	return owner != nil, errors.Join(errs...)
}

func sameSlice(a, b *discoveryv1.EndpointSlice) bool {
	return equality.Semantic.DeepEqual(a.Endpoints, b.Endpoints) && equality.Semantic.DeepEqual(a.Ports, b.Ports) &&
		equality.Semantic.DeepEqual(a.Labels, b.Labels) && equality.Semantic.DeepEqual(a.OwnerReferences, b.OwnerReferences)
}

// nodeOwner returns the reference by which the slices are deleted with the Node,
// or nil if there is no such Node.
func (m *Members) nodeOwner(ctx context.Context) ([]metav1.OwnerReference, error) {
	n, err := m.client.CoreV1().Nodes().Get(ctx, m.self.NodeName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}}, nil
}

// Withdraw deletes the slices of this server.
func (m *Members) Withdraw(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	api := m.client.DiscoveryV1().EndpointSlices(Service().Namespace)
	for name, want := range m.self.slices(nil) {
		if want == nil {
			continue
		}
		if err := api.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			m.log.Warn("cannot delete this server's endpoints of kube-dns", "err", err)
			return
		}
	}
}
