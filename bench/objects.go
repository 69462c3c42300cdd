package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	benchNamespace = "bench"
	servicePort    = 80
	writers        = 64  // requests under way at once while objects are made
	sliceSize      = 100 // most endpoints in one EndpointSlice
)

// service is a Service that a generator made, without selector, and where its
// endpoints are: count addresses from first on.
type service struct {
	name  string
	at    netip.AddrPort // ClusterIP and port; invalid if headless
	first uint32         // number of the first endpoint, see endpointAddr
	count int
}

// endpointAddr is the address of endpoint i of the whole run.
func endpointAddr(i uint32) netip.Addr {
	p := netip.MustParsePrefix(endpointRange)
	a := p.Addr().As4()
	// The host part is 23 bits; 0 is left out.
	i = (i+1)&(1<<23-1) | uint32(a[0])<<24 | uint32(a[1])<<16
	return netip.AddrFrom4([4]byte{byte(i >> 24), byte(i >> 16), byte(i >> 8), byte(i)})
}

// has reports whether a is an endpoint of the service.
func (s service) has(a netip.Addr) bool {
	for i := range s.count {
		if endpointAddr(s.first+uint32(i)) == a {
			return true
		}
	}
	return false
}

// newClient makes a client that speaks protobuf and is not throttled.
func newClient(cfg *rest.Config) (*kubernetes.Clientset, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	cfg.QPS = -1
	cfg.Timeout = time.Minute
	cfg.UserAgent = "fairlead-bench"
	cfg.WarningHandler = rest.NoWarnings{} // Endpoints are deprecated, and looked at all the same
	return kubernetes.NewForConfig(cfg)
}

// shape is how a generator's Services are made.
type shape struct {
	prefix    string
	services  int
	endpoints int // of each Service
	headless  bool
	from      uint32 // number of the first endpoint
}

// next is the number of the first endpoint after the endpoints of the shape.
func (s shape) next() uint32 { return s.from + uint32(s.services*s.endpoints) }

func makeNamespace(ctx context.Context, client kubernetes.Interface) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: benchNamespace}}
	_, err := client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
	return err
}

// fill creates the Services and their EndpointSlices with many requests at
// once.
func fill(ctx context.Context, client kubernetes.Interface, s shape) ([]service, error) {
	out := make([]service, s.services)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := range out {
		g.Go(func() error {
			var err error
			out[i], err = makeService(ctx, client, s, i)
			return err
		})
	}
	return out, g.Wait()
}

func makeService(ctx context.Context, client kubernetes.Interface, s shape, i int) (service, error) {
	made := service{
		name: fmt.Sprintf("%s-%d", s.prefix, i), first: s.from + uint32(i*s.endpoints), count: s.endpoints,
	}
	want := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: made.name, Namespace: benchNamespace},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{
			Name: "http", Port: servicePort, TargetPort: intstr.FromInt32(backendPort), Protocol: corev1.ProtocolTCP,
		}}},
	}
	if s.headless {
		want.Spec.ClusterIP = corev1.ClusterIPNone
	}
	got, err := client.CoreV1().Services(benchNamespace).Create(ctx, want, metav1.CreateOptions{})
	if err != nil {
		return made, fmt.Errorf("create service %s: %w", made.name, err)
	}
	if !s.headless {
		a, err := netip.ParseAddr(got.Spec.ClusterIP)
		if err != nil {
			return made, fmt.Errorf("service %s has no address: %w", made.name, err)
		}
		made.at = netip.AddrPortFrom(a, servicePort)
	}
	for n := 0; n*sliceSize < made.count; n++ {
		var addrs []netip.Addr
		for j := n * sliceSize; j < min(made.count, (n+1)*sliceSize); j++ {
			addrs = append(addrs, endpointAddr(made.first+uint32(j)))
		}
		slice := endpointSlice(made.name, n, addrs)
		if _, err := client.DiscoveryV1().EndpointSlices(benchNamespace).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
			return made, fmt.Errorf("create endpointslice %s: %w", slice.Name, err)
		}
	}
	return made, nil
}

// endpointSlice is slice number n of a Service, all endpoints ready.
func endpointSlice(service string, n int, addrs []netip.Addr) *discoveryv1.EndpointSlice {
	yes, port, name, tcp := true, int32(backendPort), "http", corev1.ProtocolTCP
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("%s-%d", service, n), Namespace: benchNamespace,
			Labels: map[string]string{
				discoveryv1.LabelServiceName: service,
				discoveryv1.LabelManagedBy:   "fairlead-bench",
			},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &tcp}},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{a.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &yes},
		})
	}
	return s
}

// makeNode creates the Node object of a proxy that runs on h.
func makeNode(ctx context.Context, client kubernetes.Interface, h *host) error {
	node, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: h.name}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create node %s: %w", h.name, err)
	}
	// A patch, since controllers write it at the same time.
	patch := fmt.Appendf(nil, `{"status":{"addresses":[{"type":"InternalIP","address":%q}]}}`, h.addr)
	_, err = client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}
