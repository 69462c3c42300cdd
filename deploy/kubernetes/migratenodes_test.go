package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// fleet is a migration of several nodes with many Services, each with an endpoint on every node.
type fleet struct {
	*migration
	nodes   []*testbed.Host
	clients []*testbed.Host  // Pods, one on each node
	inside  []netip.AddrPort // addresses of the Services
	ports   []uint16         // node ports of the Services
}

// The size of the fleet, and how many connections begin in a second.
const fleetNodes, fleetServices, fleetRate = 3, 200, 500

func newFleet(t *testing.T) *fleet {
	t.Helper()
	kubeProxy := peer(t, "kube-proxy")
	n := testbed.NewNetwork(t)
	f := &fleet{}
	for i := range fleetNodes {
		f.nodes = append(f.nodes, n.Host(fmt.Sprintf("node%d", i+1)))
	}
	f.migration = &migration{rig: &rig{T: t, node: f.nodes[0]}, outside: n.Outside("outside")}
	f.connect()
	f.api.RunWorkloads(t)
	startKubelet(f.rig, map[string]string{
		"registry.k8s.io/kube-proxy:v1.37.2": kubeProxy, "fairlead/fairlead:0.1.0": process.Program("fairlead"),
	}, f.nodes[1:]...)
	port := int32(8080)
	slice := discoveryv1.EndpointSlice{
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Port: &port, Protocol: new(corev1.ProtocolTCP), Name: new("")}},
	}
	for _, node := range f.nodes {
		f.register(node)
		f.clients = append(f.clients, node.Pod("client-"+node.Name()))
		server := node.Pod("server-" + node.Name())
		server.Serve(svc.TCP, uint16(port))
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{server.Addr4().String()}, NodeName: new(node.Name()), Conditions: discoveryv1.EndpointConditions{Ready: new(true)},
		})
	}
	for i := range fleetServices {
		f.addService(fmt.Sprintf("web-%d", i), slice.DeepCopy())
	}
	f.apply(strings.NewReplacer("MODE", "nftables", "PODS", "10.244.0.0/16", "SERVER", f.gateway.URL).Replace(kubeProxyObjects))
	f.kubectl("rollout", "status", "daemonset/kube-proxy", "-n", "kube-system", "--timeout=2m")
	testbed.Until(t, "the rules of kube-proxy", func() error {
		var errs []error
		for i := range f.sources() {
			errs = append(errs, f.connection(i, i*fleetServices/f.sources()), f.connection(i, fleetServices-1))
		}
		return errors.Join(errs...)
	})
	return f
}

// addService makes a Service with the endpoints of a slice.
func (f *fleet) addService(name string, slice *discoveryv1.EndpointSlice) {
	f.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}}
	s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80}}}
	s, err1 := f.client.CoreV1().Services("default").Create(f.Context(), s, metav1.CreateOptions{})
	slice.ObjectMeta = metav1.ObjectMeta{Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}}
	_, err2 := f.client.DiscoveryV1().EndpointSlices("default").Create(f.Context(), slice, metav1.CreateOptions{})
	if err := errors.Join(err1, err2); err != nil {
		f.Fatal(err)
	}
	f.inside = append(f.inside, netip.AddrPortFrom(netip.MustParseAddr(s.Spec.ClusterIP), 80))
	f.ports = append(f.ports, uint16(s.Spec.Ports[0].NodePort))
}

// sources are the Pods, and the machine outside once for each node.
func (f *fleet) sources() int { return 2 * fleetNodes }

// connection makes a new connection from a source to a Service.
func (f *fleet) connection(source, service int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	from, to := f.outside, f.inside[service]
	if source < fleetNodes {
		from = f.clients[source]
	} else {
		to = netip.AddrPortFrom(f.nodes[source-fleetNodes].Addr4(), f.ports[service])
	}
	a, err := from.Ask(ctx, svc.TCP, to)
	if err == nil && source < fleetNodes && a.Client.Addr() != from.Addr4() {
		err = fmt.Errorf("the endpoint sees the client %s, and not %s", a.Client, from.Addr4())
	}
	if err != nil {
		err = fmt.Errorf("from %s to %s: %w", from.Name(), to, err)
	}
	return err
}

// connections begins fleetRate connections in a second, to one Service after the other, until the test calls the function that it returns.
func (f *fleet) connections() (end func()) {
	all := repeat(f.T)
	var made, failed atomic.Int64
	began := time.Now()
	for source := range f.sources() {
		next := source * fleetServices / f.sources()
		all.every(time.Duration(f.sources())*time.Second/fleetRate, func() {
			service := next % fleetServices
			next++
			all.wg.Go(func() {
				made.Add(1)
				if err := f.connection(source, service); err != nil && failed.Add(1) < 10 {
					f.Error(err)
				}
			})
		})
	}
	return func() {
		f.Helper()
		all.end()
		rate := float64(made.Load()) / time.Since(began).Seconds()
		f.Logf("%d of %d new connections failed; %.0f began in a second", failed.Load(), made.Load(), rate)
		if rate < fleetRate/2 {
			f.Errorf("only %.0f connections began in a second", rate)
		}
	}
}

// A Kubernetes of three nodes and 200 Services goes from kube-proxy to fairlead proxy and back, node by node. No new connection fails.
func TestMigrateNodes(t *testing.T) {
	onKubernetes(t)
	f := newFleet(t)
	end := f.connections()
	for _, verb := range []string{"apply", "rollback"} {
		for i := range f.nodes {
			f.must(verb, "--nodes", f.nodes[i].Name())
		}
		f.must(verb)
		f.must("status")
		want := map[string]string{"apply": "fairlead fairlead fairlead", "rollback": ""}[verb]
		if got := f.kubectl("get", "nodes", "-o", `jsonpath={.items[*].metadata.labels.fairlead\.dev/proxy}`); got != want {
			t.Errorf("after %s the phases of the nodes are %q", verb, got)
		}
	}
	end()
	f.checkRights("GET /apis/coordination.k8s.io/v1/namespaces/kube-system/leases: 403 Forbidden") // as in TestMigrate
}
