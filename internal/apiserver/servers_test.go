package apiserver_test

import (
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/testbed/etcd"
)

// Several servers share one etcd: default/kubernetes has all that run, and one
// that stops leaves at once.
func TestServersOnOneEtcd(t *testing.T) {
	t.Parallel()
	store := etcd.URL(etcd.Start(t))
	start := func(advertise string) (*apiserver.Server, func()) {
		return apiservertest.StartStoppable(t, func(o *apiserver.Options) {
			o.Etcd.Servers = []string{store}
			o.AdvertiseAddress = netip.MustParseAddr(advertise)
			o.Log = slog.New(slog.DiscardHandler)
		})
	}
	first, stopFirst := start("192.0.2.1")
	defer stopFirst()
	c := kubernetes.NewForConfigOrDie(first.LoopbackConfig())
	eventually(t, "the first is an endpoint", func() bool { return endpoints(t, c) == "192.0.2.1" })
	second, stopSecond := start("192.0.2.2")
	defer stopSecond()
	eventually(t, "both are endpoints", func() bool { return endpoints(t, c) == "192.0.2.1 192.0.2.2" })
	d := kubernetes.NewForConfigOrDie(second.LoopbackConfig())
	stopFirst()
	if got := endpoints(t, d); got != "192.0.2.2" {
		t.Errorf("after the first stopped: %q", got)
	}
	slice, err := d.DiscoveryV1().EndpointSlices("default").List(t.Context(),
		metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kubernetes"})
	if err != nil || len(slice.Items) != 1 || *slice.Items[0].Ports[0].Port != int32(second.Port()) {
		t.Errorf("slices: %+v, %v", slice, err)
	}
}

// endpoints are the addresses of default/kubernetes, which Endpoints and
// slices must agree on.
func endpoints(t *testing.T, c *kubernetes.Clientset) string {
	t.Helper()
	ep, err := c.CoreV1().Endpoints("default").Get(t.Context(), "kubernetes", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var old, fresh []string
	for _, s := range ep.Subsets {
		for _, a := range s.Addresses {
			old = append(old, a.IP)
		}
	}
	l, err := c.DiscoveryV1().EndpointSlices("default").List(t.Context(),
		metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kubernetes"})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range l.Items {
		for _, e := range s.Endpoints {
			fresh = append(fresh, e.Addresses...)
		}
	}
	slices.Sort(old)
	slices.Sort(fresh)
	if !slices.Equal(old, fresh) {
		return "Endpoints and slices differ"
	}
	return strings.Join(old, " ")
}

func TestServicesOfTheSystem(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cidrs []string
		api   []string
		dns   []string
	}{
		"default":    {nil, []string{"10.96.0.1"}, []string{"10.96.0.10", "fd00:10:96::a"}},
		"IPv6 first": {[]string{"fd00:1::/112", "10.0.0.0/24"}, []string{"fd00:1::1"}, []string{"fd00:1::a", "10.0.0.10"}},
		"one family": {[]string{"10.97.0.0/20"}, []string{"10.97.0.1"}, []string{"10.97.0.10"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := apiservertest.StartServer(t, func(o *apiserver.Options) {
				for _, p := range c.cidrs {
					o.ServiceCIDRs = append(o.ServiceCIDRs, netip.MustParsePrefix(p))
				}
			})
			client := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
			for _, want := range []struct {
				namespace, name string
				ips             []string
				ports           string
			}{
				{"default", "kubernetes", c.api, "https 443/TCP"}, {"kube-system", "kube-dns", c.dns, "dns 53/UDP dns-tcp 53/TCP"},
			} {
				got, err := client.CoreV1().Services(want.namespace).Get(t.Context(), want.name, metav1.GetOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got.Spec.ClusterIPs, want.ips) || len(got.Spec.Selector) != 0 || ports(got) != want.ports {
					t.Errorf("%s: %v %s", want.name, got.Spec.ClusterIPs, ports(got))
				}
			}
			// A server on loopback cannot be reached: no endpoint, rather than a wrong one.
			if got := endpoints(t, client); got != "" {
				t.Errorf("endpoints %q", got)
			}
		})
	}
}

func ports(s *corev1.Service) string {
	var out []string
	for _, p := range s.Spec.Ports {
		out = append(out, p.Name+" "+strconv.Itoa(int(p.Port))+"/"+string(p.Protocol))
	}
	return strings.Join(out, " ")
}
