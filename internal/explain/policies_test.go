package explain

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/svc"
)

// What a NetworkPolicy makes of a connection from Pod shop/client (10.244.1.9, app=client, namespace with team=a) to the endpoint
// web-a:8080, which is the port http of Pod default/web-a.
func TestPolicies(t *testing.T) {
	const drops = "fairlead does not enforce it, and a network plugin that does drops the connection"
	for name, c := range map[string]struct {
		spec   string // of policy default/p, or its ingress rules; or the one egress rule of policy shop/p
		from   string // pod, any, outside, node or unread
		want   string // the line of web-a
		source string
	}{
		"deny all": {`{podSelector: {}}`,
			"pod", "default/p does not let shop/client in to Pod web-a, TCP port 8080: " + drops, "spec.ingress"},
		"deny all, any client": {`{podSelector: {}}`, "any", "does not let any client in to Pod web-a", "spec.ingress"},
		"allow all": {`{podSelector: {}, ingress: [{}]}`,
			"any", "default/p lets any client in to Pod web-a, TCP port 8080", "spec.ingress"},
		"other Pods":          {`{podSelector: {matchLabels: {app: other}}}`, "pod", "", ""},
		"egress only":         {`{podSelector: {}, policyTypes: [Egress]}`, "pod", "", ""},
		"a rule without type": {`{podSelector: {}, ingress: [{}], policyTypes: [Egress]}`, "pod", "", ""},
		"a Pod of its own":    {`{from: [{podSelector: {matchLabels: {app: client}}}]}`, "pod", drops, "spec.ingress"},
		"the namespace":       {`{from: [{namespaceSelector: {matchLabels: {team: a}}}]}`, "pod", "lets shop/client", ""},
		"another namespace":   {`{from: [{namespaceSelector: {matchLabels: {team: b}}}]}`, "pod", drops, ""},
		"all namespaces":      {`{from: [{namespaceSelector: {}}]}`, "unread", "lets shop/client", ""},
		"unread namespaces": {`{from: [{namespaceSelector: {matchLabels: {team: a}}}]}`,
			"unread", "may let shop/client in", ""},
		"both selectors": {`{from: [{namespaceSelector: {}, podSelector: {matchLabels: {app: client}}}]}`,
			"pod", "lets shop/client", ""},
		"both, and other Pods": {`{from: [{namespaceSelector: {}, podSelector: {matchLabels: {app: x}}}]}`, "pod", drops, ""},
		"a block": {`{from: [{ipBlock: {cidr: 198.51.100.0/24}}]}`,
			"outside", "may let 198.51.100.9 in to Pod web-a, TCP port 8080: endpoints see the node's address", ""},
		"except": {`{from: [{ipBlock: {cidr: 198.51.100.0/24, except: [198.51.100.8/30]}}]}`,
			"outside", "may let 198.51.100.9 in", ""},
		"selectors, outside": {`{from: [{namespaceSelector: {}}]}`, "outside", drops, ""},
		"a client to be named": {`{from: [{ipBlock: {cidr: 198.51.100.0/24}}]}`,
			"any", "may let any client in to Pod web-a, TCP port 8080: name a client with --from", ""},
		"a port":             {`{ports: [{port: 8080}]}`, "pod", "lets shop/client", ""},
		"another port":       {`{ports: [{port: 80}]}`, "pod", drops, ""},
		"a range":            {`{ports: [{port: 8000, endPort: 8080}]}`, "pod", "lets shop/client", ""},
		"a range that ends":  {`{ports: [{port: 8000, endPort: 8079}]}`, "pod", drops, ""},
		"a named port":       {`{ports: [{port: http}]}`, "pod", "lets shop/client", ""},
		"another named port": {`{ports: [{port: metrics}]}`, "pod", drops, ""},
		"any port of UDP":    {`{ports: [{protocol: UDP}]}`, "pod", drops, ""},
		"any port of TCP":    {`{ports: [{protocol: TCP}]}`, "pod", "lets shop/client", ""},
		"the node of the Pod": {`{podSelector: {}}`,
			"node", "default/p selects it, and does not count for its own node", "spec.podSelector"},
		"one rule of two": {`{ports: [{port: 1}]}, {from: [{namespaceSelector: {}}]}`, "pod", "lets shop/client", ""},
		"egress of the client": {"egress",
			"pod", "shop/p does not let its client, Pod client, out to 10.244.1.2:8080: " + drops, "spec.egress"},
		"egress by a block": {"egress, to: [{ipBlock: {cidr: 10.244.0.0/16}}]",
			"pod", "shop/p lets its client, Pod client, out to 10.244.1.2:8080", "spec.egress"},
		"egress to a named one": {"egress, ports: [{port: http}]", "pod", "shop/p lets its client", "spec.egress"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed()
			b.pods[0].Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}}}
			b.pods = append(b.pods, &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "client", Labels: map[string]string{"app": "client"}},
				Status:     corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.244.1.9"}}},
			})
			p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}}
			spec := c.spec
			if rest, is := strings.CutPrefix(spec, "egress"); is {
				p.Namespace, spec = "shop", `{podSelector: {}, policyTypes: [Egress]}`
				if rest != "" {
					spec = `{podSelector: {}, egress: [{` + rest[2:] + `}]}`
				}
			}
			if !strings.HasPrefix(spec, "{podSelector") {
				spec = "{podSelector: {}, ingress: [" + spec + "]}"
			}
			if err := yaml.UnmarshalStrict([]byte(spec), &p.Spec); err != nil {
				t.Fatal(err)
			}
			b.policies = &Policies{List: []*networkingv1.NetworkPolicy{p},
				Namespaces: map[string]labels.Set{"shop": {"team": "a"}, "default": {}}}
			switch c.from {
			case "unread":
				b.policies.Namespaces = nil
				fallthrough
			case "pod":
				b.q.Client = Client{Text: "shop/client", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.9")}, Node: "here"}
			case "outside":
				b.q.Client = Client{Text: "198.51.100.9", Addrs: []netip.Addr{netip.MustParseAddr("198.51.100.9")}}
			case "node":
				b.q.Client = Client{Text: "here", Addrs: []netip.Addr{netip.MustParseAddr("192.168.70.11")}, Node: "here", Host: true}
			}
			v := b.explain()
			if v.Answer != Answers {
				t.Errorf("a policy makes the answer %s, %s: fairlead does not enforce it", v.Answer, v.Cause)
			}
			got := ""
			for _, e := range v.Endpoints {
				for _, l := range e.Why {
					if e.Address == first && strings.Contains(l.Text, "NetworkPolic") {
						got += fmt.Sprintf("%s [%s]\n", l.Text, l.Source)
					}
				}
			}
			if !strings.Contains(got, c.want) || !strings.Contains(got, c.source) || (c.want == "") != (got == "") {
				t.Errorf("got %q, want %q [%q]", got, c.want, c.source)
			}
		})
	}
}

// Of several policies one that lets a connection through is enough, and each is named if none does; what may not be read is said.
func TestSeveralPolicies(t *testing.T) {
	policy := func(name string, rules ...networkingv1.NetworkPolicyIngressRule) *networkingv1.NetworkPolicy {
		return &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: networkingv1.NetworkPolicySpec{Ingress: rules}}
	}
	b := newBed()
	b.policies = &Policies{List: []*networkingv1.NetworkPolicy{policy("a"), policy("b")},
		Unread: []Line{{"not known: forbidden", "NetworkPolicies"}}}
	if text := fmt.Sprint(b.explain()); !strings.Contains(text, "default/a does not let") ||
		!strings.Contains(text, "default/b does not let") || !strings.Contains(text, "not known: forbidden NetworkPolicies") {
		t.Error(text)
	}
	b.policies.List = append(b.policies.List, policy("c", networkingv1.NetworkPolicyIngressRule{}))
	if text := fmt.Sprint(b.explain()); strings.Contains(text, "does not let") || !strings.Contains(text, "default/c lets") {
		t.Error(text)
	}
}

// Each protocol of a port is judged, a Pod reaches itself, and what the node's address or an unknown Pod hides is said.
func TestPoliciesInDoubt(t *testing.T) {
	rule := func(spec string) *networkingv1.NetworkPolicy {
		p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}}
		if err := yaml.UnmarshalStrict([]byte(spec), &p.Spec); err != nil {
			t.Fatal(err)
		}
		return p
	}
	pods := `[{to: [{podSelector: {matchLabels: {app: x}}}]}]`
	ports := &policyPort{svc.TCP, 8080, nil}
	policies := &Policies{}
	for _, c := range []struct {
		spec  string
		d     *direction
		other side
		want  allowed
	}{
		{`{egress: ` + pods + `}`, &egress, side{Known: true, Stranger: true}, maybe},
		{`{egress: [{ports: [{port: http}]}]}`, &egress, side{Known: true, Stranger: true}, maybe},
		{`{egress: [{ports: [{port: 1}]}]}`, &egress, side{Known: true, Stranger: true}, no},
		{`{ingress: [{from: [{ipBlock: {cidr: 198.51.100.0/24}}]}]}`, &ingress,
			side{Addr: netip.MustParseAddr("198.51.100.9"), Known: true, Masked: true}, maybe},
		{`{ingress: [{from: [{ipBlock: {cidr: 198.51.100.0/24}}]}]}`, &ingress,
			side{Addr: netip.MustParseAddr("198.51.100.9"), Known: true}, yes},
		{`{ingress: [{from: [{ipBlock: {cidr: 198.51.100.0/24, except: [198.51.100.8/30]}}]}]}`, &ingress,
			side{Addr: netip.MustParseAddr("198.51.100.9"), Known: true}, no},
		{`{ingress: [{from: [{ipBlock: {cidr: 0.0.0.0/0}}]}]}`, &ingress,
			side{Addr: netip.MustParseAddr("198.51.100.9"), Known: true, Masked: true}, yes},
	} {
		if got := policies.lets(rule(c.spec), c.d, &c.other, ports); got != c.want {
			t.Errorf("%s: %d, want %d", c.spec, got, c.want)
		}
	}
	b := newBed()
	b.policies = &Policies{List: []*networkingv1.NetworkPolicy{rule(`{podSelector: {}}`)}}
	self := b.pods[0]
	self.Status.PodIPs = []corev1.PodIP{{IP: "10.244.1.2"}}
	b.q.Client = Client{Text: "itself", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.2")}, Node: "here"}
	for _, e := range b.explain().Endpoints {
		if blocked := strings.Contains(fmt.Sprint(e.Why), "does not let"); e.Pod != "" && blocked == (e.Pod == self.Name) {
			t.Errorf("%s: a policy blocks it: %t", e.Pod, blocked)
		}
	}
}
