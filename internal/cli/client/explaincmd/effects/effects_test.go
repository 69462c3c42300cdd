package effects

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// secret is the TLS Secret shop/tls for a name, nil for none.
func secret(t *testing.T, name string) *corev1.Secret {
	if name == "" {
		return nil
	}
	_, cert, key := lbtest.Certificate(t, name)
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "tls"}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key}}
}

// users are a Service, an Ingress and a Gateway with a ListenerSet of namespace shop that use Secret shop/tls, and others that do not: of
// another class, of another namespace, and of other Secrets.
func users() *Users {
	meta := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name}
	}
	service := func(namespace string) *corev1.Service {
		s := &corev1.Service{ObjectMeta: meta(namespace, "web"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer,
			Ports: []corev1.ServicePort{{Port: 443, Protocol: corev1.ProtocolTCP}}}}
		s.Annotations = map[string]string{"fairlead.dev/lb-protocol": "https", "fairlead.dev/lb-tls-secrets": "tls"}
		return s
	}
	ingress := func(namespace, class, secret string) *networkingv1.Ingress {
		return &networkingv1.Ingress{ObjectMeta: meta(namespace, "books"), Spec: networkingv1.IngressSpec{IngressClassName: &class,
			TLS: []networkingv1.IngressTLS{{Hosts: []string{"books.example"}, SecretName: secret}}}}
	}
	listener := func(secrets ...string) gwv1.Listener {
		l := gwv1.Listener{Name: "https", Port: 443, Protocol: gwv1.HTTPSProtocolType, TLS: &gwv1.ListenerTLSConfig{}}
		for _, s := range secrets {
			l.TLS.CertificateRefs = append(l.TLS.CertificateRefs, gwv1.SecretObjectReference{Name: gwv1.ObjectName(s),
				Namespace: new(gwv1.Namespace("shop"))})
		}
		return l
	}
	gateway := func(name, class string, listeners ...gwv1.Listener) *gwv1.Gateway {
		return &gwv1.Gateway{ObjectMeta: meta("shop", name),
			Spec: gwv1.GatewaySpec{GatewayClassName: gwv1.ObjectName(class), Listeners: listeners}}
	}
	set := &gwv1.ListenerSet{ObjectMeta: meta("team", "more"), Spec: gwv1.ListenerSetSpec{ParentRef: gwv1.ParentGatewayReference{
		Name: "front", Namespace: new(gwv1.Namespace("shop"))}, Listeners: []gwv1.ListenerEntry{gwv1.ListenerEntry(listener("tls", "b"))}}}
	return &Users{
		Services: []*corev1.Service{service("shop"), service("other")},
		Ingresses: []*networkingv1.Ingress{ingress("shop", "ours", "tls"), ingress("shop", "ours", "b"), ingress("other", "ours", "tls"),
			ingress("shop", "nginx", "tls")},
		IngressClasses: []*networkingv1.IngressClass{{ObjectMeta: meta("", "ours"),
			Spec: networkingv1.IngressClassSpec{Controller: names.IngressController}},
			{ObjectMeta: meta("", "nginx"), Spec: networkingv1.IngressClassSpec{Controller: "k8s.io/ingress-nginx"}}},
		Gateways: []*gwv1.Gateway{gateway("front", "ours", listener("tls")), gateway("else", "ours", listener("b")),
			gateway("foreign", "x", listener("tls"))},
		GatewayClasses: []*gwv1.GatewayClass{{ObjectMeta: meta("", "ours"), Spec: gwv1.GatewayClassSpec{ControllerName: names.ControllerName}},
			{ObjectMeta: meta("", "x"), Spec: gwv1.GatewayClassSpec{ControllerName: "example.com/x"}}},
		Sets: []*gwv1.ListenerSet{set},
	}
}

// Each listener that uses a Secret is told which certificate it serves, until when, and what is wrong with an unreadable key pair. No text
// has a part of a key.
func TestCertificates(t *testing.T) {
	broken := func(t *testing.T, name string) *corev1.Secret {
		s := secret(t, name)
		s.Data[corev1.TLSPrivateKeyKey] = []byte("-----BEGIN PRIVATE KEY-----\nSECRETWORD\n-----END PRIVATE KEY-----\n")
		return s
	}
	now := time.Now()
	was := secret(t, "old.example")
	const pair = "Secret shop/tls: its entries tls.crt and tls.key are not a certificate and its key"
	for name, c := range map[string]struct {
		was, is *corev1.Secret
		want    map[string][]string // parts of the text, by Service and listener
		cuts    int
	}{
		"unchanged": {was, was, nil, 0},
		"another": {was, secret(t, "new.example"), map[string][]string{
			"shop/web listener https on port 443": {"serves another certificate: for new.example (ends ",
				"in place of for old.example"},
			"kube-system/fairlead-ingress Ingress shop/books for hosts books.example": {"serves another certificate: for new.example"},
			"shop/front-fairlead listener https on port 443 of Gateway shop/front":    {"serves another certificate: for new.example"},
			"shop/front-fairlead listener https on port 443 of ListenerSet team/more": {"serves another certificate: for new.example"},
		}, 0},
		"created": {nil, secret(t, "new.example"), map[string][]string{
			"shop/web listener https": {"serves the certificate of Secret shop/tls: for new.example (ends "}}, 0},
		"broken": {was, broken(t, "new.example"), map[string][]string{
			"shop/web listener https":              {"keeps its last certificate, and a node that starts has none: " + pair},
			"kube-system/fairlead-ingress Ingress": {"loses its certificate, for old.example", pair},
			"shop/front-fairlead listener https":   {"loses its certificate", pair},
			"443 of ListenerSet team/more":         {"loses its certificate"},
		}, 2},
		"deleted": {was, nil, map[string][]string{
			"shop/web listener https":            {"keeps its last certificate", "Secret shop/tls: it does not exist"},
			"shop/front-fairlead listener https": {"loses its certificate", "it does not exist"}}, 2},
		"broken from the start": {nil, broken(t, "x"),
			map[string][]string{"shop/web listener": {"has no certificate of Secret shop/tls: ", "tls.key"}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			got := users().Certificates([]SecretChange{{c.was, c.is}}, now)
			if (len(got) == 0) != (c.want == nil) || len(got) != 0 && len(got) != 4 {
				t.Errorf("%d changes: %+v", len(got), got)
			}
			cuts := 0
			var all []string
			for _, g := range got {
				all = append(all, g.Service+" "+g.Text)
				if g.Cuts != "" {
					cuts++
				}
			}
			if cuts != c.cuts {
				t.Errorf("%d changes cut, want %d: %+v", cuts, c.cuts, got)
			}
			for where, parts := range c.want {
				if !slices.ContainsFunc(all, func(text string) bool {
					return strings.Contains(text, where) && !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(text, p) })
				}) {
					t.Errorf("%s: no line with %q in\n%s", where, parts, strings.Join(all, "\n"))
				}
			}
			if strings.Contains(strings.Join(all, ""), "SECRETWORD") {
				t.Error("a text has a part of the key")
			}
		})
	}
	later := text(must(read(was)), now.Add(100*365*24*time.Hour))
	if !strings.Contains(later, "has ended on ") {
		t.Errorf("after its end: %s", later)
	}
}

func must[T any](v T, _ string) T { return v }

// Of two Secrets of a listener that go together, neither stands in for the other one.
func TestCertificatesTogether(t *testing.T) {
	a := secret(t, "a.example")
	b := secret(t, "b.example")
	b.Name = "b"
	cuts := func(u *Users, all ...SecretChange) (out []string) {
		for _, c := range u.Certificates(all, time.Now()) {
			if c.Cuts != "" && strings.Contains(c.Text, "ListenerSet") {
				out = append(out, c.Text)
			}
		}
		return out
	}
	if got := cuts(users(), SecretChange{a, nil}); len(got) > 0 {
		t.Errorf("one of two goes: %q", got)
	}
	if got := cuts(users(), SecretChange{a, nil}, SecretChange{b, b}); len(got) > 0 {
		t.Errorf("one goes, the other one stays: %q", got)
	}
	if got := cuts(users(), SecretChange{a, nil}, SecretChange{b, nil}); len(got) != 2 {
		t.Errorf("both go: %q", got)
	}
}

// Who may not list classes learns of each Ingress and Gateway that may be fairlead's; others may not have been read.
func TestCertificatesWithoutClasses(t *testing.T) {
	u := users()
	u.IngressClasses, u.ClassesUnread, u.GatewayClasses, u.GatewayClassesUnread = nil, true, nil, true
	var all []string
	for _, c := range u.Certificates([]SecretChange{{secret(t, "a.example"), nil}}, time.Now()) {
		all = append(all, c.Text)
	}
	for _, want := range []string{
		"Ingress shop/books for hosts books.example, if its class is of fairlead, loses its certificate",
		"of Gateway shop/front, if its class is of fairlead, loses its certificate",
	} {
		if !strings.Contains(strings.Join(all, "\n"), want) {
			t.Errorf("no %q in %q", want, all)
		}
	}
}

// What a pool's addresses and its limits change for the Services that have them.
func TestPools(t *testing.T) {
	pool := func(name string, change func(*v1.IPAddressPoolSpec), ranges ...string) v1.IPAddressPool {
		p := v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.Unix(1, 0)},
			Spec: v1.IPAddressPoolSpec{Addresses: ranges}}
		if change != nil {
			change(&p.Spec)
		}
		return p
	}
	speaker := func(name string, addresses ...string) v1.Speaker {
		s := v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1.SpeakerStatus{Eligible: true, Announce: v1.AnnounceARP,
			Interfaces: []string{"eth0"}, Networks: []string{"192.0.2.0/24"}}}
		for _, a := range addresses {
			s.Status.Addresses = append(s.Status.Addresses, v1.AnnouncedAddress{Address: a, Via: "arp"})
		}
		s.Status.AddressCount = int32(len(addresses))
		return s
	}
	b := &Balancing{Speakers: []v1.Speaker{speaker("n1", "192.0.2.1"), speaker("n2", "192.0.2.9")},
		Nodes: []*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}},
			{ObjectMeta: metav1.ObjectMeta{Name: "n2", Labels: map[string]string{"edge": "yes"}}}},
		Claims: []claim.Claim{{Addr: netip.MustParseAddr("192.0.2.1"), Pool: "a", Services: []svc.Name{{Namespace: "shop", Name: "web"}}},
			{Addr: netip.MustParseAddr("192.0.2.9"), Pool: "a",
				Services: []svc.Name{{Namespace: "shop", Name: "x"}, {Namespace: "shop", Name: "y"}}}}}
	edge := func(s *v1.IPAddressPoolSpec) {
		s.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"edge": "yes"}}
	}
	bgp := func(s *v1.IPAddressPoolSpec) { s.Announce = []string{v1.AnnounceBGP} }
	young := pool("b", nil, "192.0.2.8/29")
	young.CreationTimestamp = metav1.Time{}
	for name, c := range map[string]struct {
		is   []v1.IPAddressPool
		want []string
	}{
		"the same": {[]v1.IPAddressPool{pool("a", nil, "192.0.2.0/24")}, nil},
		"narrowed": {[]v1.IPAddressPool{pool("a", nil, "192.0.2.0/29")}, []string{
			"shop/x: its address 192.0.2.9 is in no pool any more: the Service keeps it, with the Warning AddressOutsidePools, cuts ",
			"shop/y: its address 192.0.2.9 is in no pool any more: the Service keeps it, with the Warning AddressOutsidePools, cuts "}},
		"deleted": {nil, []string{"shop/web: its address 192.0.2.1 is in no pool any more", "shop/x: ", "shop/y: "}},
		"moved": {[]v1.IPAddressPool{pool("a", nil, "192.0.2.0/29"), young}, []string{
			"shop/x: its address 192.0.2.9 moves from pool a to pool b", "shop/y: "}},
		"an overlap": {[]v1.IPAddressPool{pool("a", nil, "192.0.2.0/24"), young}, nil},
		"fewer nodes": {[]v1.IPAddressPool{pool("a", edge, "192.0.2.0/24")}, []string{
			"shop/web: node n1 no longer announces 192.0.2.1: the pool's nodeSelector edge=yes does not select it, " +
				"cuts connections through that node come to another one, which may choose other endpoints: n2"}},
		"only BGP": {[]v1.IPAddressPool{pool("a", bgp, "192.0.2.0/24")}, []string{
			"shop/web: node n1 no longer announces 192.0.2.1: the pool is not for ARP and NDP; it has no BGP peer, " +
				"cuts connections through that node end: no node may announce the address", "shop/x: node n2", "shop/y: node n2"}},
	} {
		got := b.Pools([]v1.IPAddressPool{pool("a", nil, "192.0.2.0/24")}, c.is)
		if len(got) != len(c.want) {
			t.Errorf("%s: %+v", name, got)
			continue
		}
		for i, g := range got {
			if line := lineOf(&g); !strings.HasPrefix(line, c.want[i]) {
				t.Errorf("%s: %s, want %s", name, line, c.want[i])
			}
		}
	}
}

// A pool that leaves out .0 and .255, or that has a text which cannot be parsed, has an address no more, as the controller sees it.
func TestPoolsAsTheControllerSeesThem(t *testing.T) {
	was := v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: v1.IPAddressPoolSpec{Addresses: []string{"192.0.2.0/24"}}}
	careful, broken := was, was
	careful.Spec.AvoidBuggyIPs = true
	broken.Spec.Addresses = []string{"192.0.2.0/24", "192.0.2.x"}
	for addr, c := range map[string]struct {
		is   v1.IPAddressPool
		says int
	}{"192.0.2.255": {careful, 1}, "192.0.2.7": {careful, 0}, "192.0.2.8": {broken, 1}} {
		web := []svc.Name{{Namespace: "shop", Name: "web"}}
		b := &Balancing{Claims: []claim.Claim{{Addr: netip.MustParseAddr(addr), Pool: "a", Services: web}}}
		got := b.Pools([]v1.IPAddressPool{was}, []v1.IPAddressPool{c.is})
		if len(got) != c.says || c.says > 0 && !strings.Contains(lineOf(&got[0]), addr+" is in no pool any more") {
			t.Errorf("%s: %+v, want %d lines", addr, got, c.says)
		}
	}
}

// With the policy Local no node without an endpoint takes over an address.
func TestPoolsOfLocalServices(t *testing.T) {
	web := svc.Name{Namespace: "shop", Name: "web"}
	node := func(name, edge string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"edge": edge}}}
	}
	status := v1.SpeakerStatus{Eligible: true, Announce: v1.AnnounceARP, Interfaces: []string{"eth0"}, AnyNetwork: true}
	here := status
	here.Addresses = []v1.AnnouncedAddress{{Address: "192.0.2.1", Via: "arp"}}
	b := &Balancing{Nodes: []*corev1.Node{node("n1", "no"), node("n2", "yes")},
		Speakers: []v1.Speaker{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: here},
			{ObjectMeta: metav1.ObjectMeta{Name: "n2"}, Status: status}},
		Claims: []claim.Claim{{Addr: netip.MustParseAddr("192.0.2.1"), Pool: "a", Services: []svc.Name{web}}}}
	was := v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: v1.IPAddressPoolSpec{Addresses: []string{"192.0.2.0/24"}}}
	is := was
	is.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"edge": "yes"}}
	for want, local := range map[string]map[svc.Name][]string{
		"come to another one": nil, "no node may announce the address": {web: {"n1"}},
		"which may choose other endpoints: n2": {web: {"n1", "n2"}},
	} {
		b.Local = local
		got := b.Pools([]v1.IPAddressPool{was}, []v1.IPAddressPool{is})
		if len(got) != 1 || !strings.Contains(got[0].Cuts, want) {
			t.Errorf("endpoints on %v: %+v, want %q", local, got, want)
		}
	}
}

func lineOf(c *explain.Change) string {
	return fmt.Sprintf("%s: %s, cuts %s", c.Service, c.Text, c.Cuts)
}
