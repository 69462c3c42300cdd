package env_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/env"
)

func service(ns, name, ip string, ports ...corev1.ServicePort) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec:       corev1.ServiceSpec{ClusterIP: ip, Ports: ports},
	}
}

func port(name string, n int32, proto corev1.Protocol) corev1.ServicePort {
	return corev1.ServicePort{Name: name, Port: n, Protocol: proto}
}

func lines(vars []corev1.EnvVar) string {
	var b strings.Builder
	for _, v := range vars {
		fmt.Fprintf(&b, "%s=%s\n", v.Name, v.Value)
	}
	return b.String()
}

// behaviours 69, 70: the example of the documents, all seven.
func TestRedisMaster(t *testing.T) {
	got := lines(env.For("default", []*corev1.Service{service("default", "redis-master", "10.0.0.11", port("", 6379, "TCP"))}, true))
	want := `REDIS_MASTER_PORT=tcp://10.0.0.11:6379
REDIS_MASTER_PORT_6379_TCP=tcp://10.0.0.11:6379
REDIS_MASTER_PORT_6379_TCP_ADDR=10.0.0.11
REDIS_MASTER_PORT_6379_TCP_PORT=6379
REDIS_MASTER_PORT_6379_TCP_PROTO=tcp
REDIS_MASTER_SERVICE_HOST=10.0.0.11
REDIS_MASTER_SERVICE_PORT=6379
`
	if d := cmp.Diff(want, got); d != "" {
		t.Fatal(d)
	}
}

func TestFor(t *testing.T) {
	kubernetes := service("default", "kubernetes", "10.96.0.1", port("https", 443, ""))
	master := `KUBERNETES_PORT=tcp://10.96.0.1:443
KUBERNETES_PORT_443_TCP=tcp://10.96.0.1:443
KUBERNETES_PORT_443_TCP_ADDR=10.96.0.1
KUBERNETES_PORT_443_TCP_PORT=443
KUBERNETES_PORT_443_TCP_PROTO=tcp
KUBERNETES_SERVICE_HOST=10.96.0.1
KUBERNETES_SERVICE_PORT=443
KUBERNETES_SERVICE_PORT_HTTPS=443
`
	external := service("shop", "ext", "")
	external.Spec.Type = corev1.ServiceTypeExternalName
	for _, c := range []struct {
		name     string
		services []*corev1.Service
		nolinks  bool
		want     string
	}{
		{"other namespaces are not seen, default/kubernetes is",
			[]*corev1.Service{kubernetes, service("default", "db", "10.96.0.7", port("", 1, "TCP"))}, false, master},
		{"without service links only default/kubernetes", []*corev1.Service{service("shop", "db", "10.96.0.7", port("", 1, "TCP")), kubernetes},
			true, master},
		{"headless, ExternalName and unallocated give nothing", []*corev1.Service{
			service("shop", "headless", "None", port("", 1, "TCP")), external, service("shop", "new", "", port("", 1, "TCP"))}, false, ""},
		// behaviour 72
		{"several named ports, mixed protocols, IPv6", []*corev1.Service{
			service("shop", "my-dns", "fd00:10:96::a", port("dns-udp", 53, "UDP"), port("web", 80, ""))}, false,
			`MY_DNS_PORT=udp://[fd00:10:96::a]:53
MY_DNS_PORT_53_UDP=udp://[fd00:10:96::a]:53
MY_DNS_PORT_53_UDP_ADDR=fd00:10:96::a
MY_DNS_PORT_53_UDP_PORT=53
MY_DNS_PORT_53_UDP_PROTO=udp
MY_DNS_PORT_80_TCP=tcp://[fd00:10:96::a]:80
MY_DNS_PORT_80_TCP_ADDR=fd00:10:96::a
MY_DNS_PORT_80_TCP_PORT=80
MY_DNS_PORT_80_TCP_PROTO=tcp
MY_DNS_SERVICE_HOST=fd00:10:96::a
MY_DNS_SERVICE_PORT=53
MY_DNS_SERVICE_PORT_DNS_UDP=53
MY_DNS_SERVICE_PORT_WEB=80
`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if d := cmp.Diff(c.want, lines(env.For("shop", c.services, !c.nolinks))); d != "" {
				t.Fatal(d)
			}
		})
	}
}

func TestClashes(t *testing.T) {
	value := func(vars []corev1.EnvVar, name string) string {
		for _, v := range vars {
			if v.Name == name {
				return v.Value
			}
		}
		return ""
	}
	own := service("shop", "kubernetes", "10.96.0.9", port("", 80, "TCP"))
	master := service("default", "kubernetes", "10.96.0.1", port("", 443, "TCP"))
	for _, order := range [][]*corev1.Service{{own, master}, {master, own}} {
		if got := value(env.For("shop", order, true), "KUBERNETES_SERVICE_HOST"); got != "10.96.0.9" {
			t.Errorf("the namespace's own kubernetes must hide the master's, got %s", got)
		}
		if got := value(env.For("shop", order, false), "KUBERNETES_SERVICE_HOST"); got != "10.96.0.1" {
			t.Errorf("without service links only the master's is seen, got %s", got)
		}
	}
	foo := service("shop", "foo", "10.96.0.2", port("", 80, "TCP"))
	fooService := service("shop", "foo-service", "10.96.0.3", port("", 81, "TCP"))
	if got := value(env.For("shop", []*corev1.Service{fooService, foo}, true), "FOO_SERVICE_PORT"); got != "80" {
		t.Errorf("FOO_SERVICE_PORT = %q, want the port of foo", got)
	}
}

// The answer does not depend on the order in which an informer lists.
func TestOrderDoesNotMatter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[a-c](-[a-c]|-service|-port)?`)
		var services []*corev1.Service
		seen := map[string]bool{}
		for i := range rapid.IntRange(0, 6).Draw(t, "n") {
			n := name.Draw(t, "name")
			if seen[n] {
				continue
			}
			seen[n] = true
			services = append(services, service("shop", n, fmt.Sprintf("10.96.1.%d", i), port("", int32(i+1), "TCP")))
		}
		shuffled := rapid.Permutation(services).Draw(t, "order")
		got := env.For("shop", shuffled, true)
		if d := cmp.Diff(lines(env.For("shop", services, true)), lines(got)); d != "" {
			t.Fatal(d)
		}
		for i := 1; i < len(got); i++ {
			if got[i-1].Name >= got[i].Name {
				t.Fatalf("%s before %s", got[i-1].Name, got[i].Name)
			}
		}
	})
}
