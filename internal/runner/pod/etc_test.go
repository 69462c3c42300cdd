package pod

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func addrs(s ...string) []netip.Addr {
	var out []netip.Addr
	for _, a := range s {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

func TestResolvConf(t *testing.T) {
	const host = "nameserver 192.0.2.53\nsearch example.org .\noptions timeout:1\n# comment\n"
	two := "2"
	for _, c := range []struct {
		name    string
		spec    corev1.PodSpec
		servers []netip.Addr
		want    string
	}{
		{"cluster first", corev1.PodSpec{DNSPolicy: corev1.DNSClusterFirst}, addrs("10.96.0.10", "fd00:10:96::a"),
			"search shop.svc.cluster.local svc.cluster.local cluster.local example.org\nnameserver 10.96.0.10\nnameserver " +
				"fd00:10:96::a\noptions ndots:5\n"},
		{"no cluster DNS", corev1.PodSpec{DNSPolicy: corev1.DNSClusterFirst}, nil,
			"search example.org\nnameserver 192.0.2.53\noptions timeout:1\n"},
		{"default", corev1.PodSpec{DNSPolicy: corev1.DNSDefault}, addrs("10.96.0.10"),
			"search example.org\nnameserver 192.0.2.53\noptions timeout:1\n"},
		{"host network", corev1.PodSpec{DNSPolicy: corev1.DNSClusterFirst, HostNetwork: true}, addrs("10.96.0.10"),
			"search example.org\nnameserver 192.0.2.53\noptions timeout:1\n"},
		{"host network, cluster first", corev1.PodSpec{DNSPolicy: corev1.DNSClusterFirstWithHostNet, HostNetwork: true}, addrs("10.96.0.10"),
			"search shop.svc.cluster.local svc.cluster.local cluster.local example.org\nnameserver 10.96.0.10\noptions ndots:5\n"},
		{"none", corev1.PodSpec{DNSPolicy: corev1.DNSNone, DNSConfig: &corev1.PodDNSConfig{Nameservers: []string{"1.1.1.1"},
			Searches: []string{"a.b"}}}, addrs("10.96.0.10"),
			"search a.b\nnameserver 1.1.1.1\n"},
		{"config on top", corev1.PodSpec{DNSConfig: &corev1.PodDNSConfig{
			Nameservers: []string{"10.96.0.10", "1.1.1.1"}, Searches: []string{"a.b"},
			Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: &two}, {Name: "edns0"}}}}, addrs("10.96.0.10"),
			"search shop.svc.cluster.local svc.cluster.local cluster.local example.org a.b\nnameserver 10.96.0.10\nnameserver " +
				"1.1.1.1\noptions ndots:2 edns0\n"},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: c.spec}
		if d := cmp.Diff(c.want, resolvConf(pod, c.servers, "cluster.local", host)); d != "" {
			t.Errorf("%s: %s", c.name, d)
		}
	}
}

func TestHostsFile(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-0"}, Spec: corev1.PodSpec{
		Hostname: "db", Subdomain: "dbs", HostAliases: []corev1.HostAlias{{IP: "192.0.2.1", Hostnames: []string{"a", "b"}}},
	}}
	got := hostsFile(pod, addrs("10.1.1.2", "fd00::2"), "cluster.local")
	for _, want := range []string{"127.0.0.1\tlocalhost\n", "10.1.1.2\tdb.dbs.shop.svc.cluster.local\tdb\n",
		"fd00::2\tdb.dbs.shop.svc.cluster.local\tdb\n", "192.0.2.1\ta\tb\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	long := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: strings.Repeat("x", 62) + "-y"}}
	if got := hostnameOf(long); len(got) != 62 {
		t.Errorf("hostname %q of %d characters", got, len(got))
	}
}
