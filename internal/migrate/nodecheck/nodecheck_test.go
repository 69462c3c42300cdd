package nodecheck

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// serve answers health checks and metrics until the test ends.
func serve(t *testing.T, code int, metrics string) netip.AddrPort {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" {
			w.WriteHeader(code)
			return
		}
		_, _ = io.WriteString(w, metrics)
	}))
	t.Cleanup(s.Close)
	return netip.MustParseAddrPort(s.Listener.Addr().String())
}

// A proxy passes only if it is healthy and has written the rules of every family.
func TestCheckAsksTheProxy(t *testing.T) {
	const good = "# HELP x y\n" + lastSync + `{ip_family="IPv4"} 1.7e+09` + "\n" + lastSync + `{ip_family="IPv6"} 1.7e+09` + "\nother 0\n"
	for _, c := range []struct {
		name, metrics, want string
		code                int
	}{
		{"good", good, "", 200},
		{"an old kube-proxy", lastSync + " 1.7e+09\n", "", 200},
		{"not healthy", good, "/healthz answers 503", 503},
		{"one family is missing", strings.Replace(good, `"IPv6"} 1.7e+09`, `"IPv6"} 0`, 1), "has not written its rules yet", 200},
		{"another program", "up 1\n", "has no metric " + lastSync, 200},
		{"no number", lastSync + " x\n", "has not written", 200},
	} {
		at := serve(t, c.code, c.metrics)
		o := Options{Healthz: at, Metrics: at, Within: testbed.Patience}
		ask := func(ctx context.Context) (int, error) { return Check(ctx, o) }
		if c.want != "" {
			ask = o.once // it would be tried again until the deadline
		}
		_, err := ask(t.Context())
		got := ""
		if err != nil {
			got = err.Error()
		}
		if (c.want == "") != (err == nil) || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// The kernel passes only while it has what the API has.
func TestCheckComparesTheKernel(t *testing.T) {
	client := fake.NewClientset(
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}},
		&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: corev1.ServiceSpec{
				ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7"}, Ports: []corev1.ServicePort{{Port: 80, Protocol: "TCP"}},
			},
		},
	)
	port, tcp := int32(80), corev1.ProtocolTCP
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.5"}}},
		Ports: []discoveryv1.EndpointPort{{Port: &port, Protocol: &tcp, Name: new(string)}},
	}
	slices := client.DiscoveryV1().EndpointSlices("default")
	if _, err := slices.Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	o := Options{Client: client, Node: "here", Kernel: true}
	testbed.NewNetwork(t).Outside("here").Do(func() {
		once := func(want string) {
			t.Helper()
			n, err := o.once(context.Background())
			switch {
			case want == "" && (err != nil || n != 1):
				t.Errorf("%d frontends, %v", n, err)
			case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
				t.Errorf("%v, want %q", err, want)
			}
		}
		once("10.96.0.7") // nothing is there
		theirs := Options{Client: client, Node: "here", KubeProxy: "nftables"}
		if _, err := theirs.once(t.Context()); err == nil || !strings.Contains(err.Error(), "1 of 1 endpoints differ from the API") {
			t.Errorf("without kube-proxy's rules: %v", err)
		}
		tab, err := o.wanted(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		mode, err := nft.New(nft.Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer mode.Close()
		if err := mode.Apply(t.Context(), tab, nil); err != nil {
			t.Fatal(err)
		}
		once("")
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.244.0.6"}})
		if _, err := slices.Update(t.Context(), slice, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		once("1 of 1 frontends differ from the API: TCP 10.96.0.7:80: clients elsewhere are sent to 10.244.0.5:80, not")
	})
	o.Node = "nowhere"
	if _, err := o.once(t.Context()); err == nil || !strings.Contains(err.Error(), "nowhere") {
		t.Errorf("for a Node that is not there: %v", err)
	}
}
