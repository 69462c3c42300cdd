package metallb_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/migrate/metallb"
	"github.com/fairlead/fairlead/internal/svc"
)

// object is one of metallb.io, as the API lists it.
func object(version, kind, name, spec string) string {
	return fmt.Sprintf(`{"apiVersion":"metallb.io/%s","kind":"%sList","metadata":{"resourceVersion":"7"},"items":[`+
		`{"apiVersion":"metallb.io/%s","kind":%q,"metadata":{"name":%q,"namespace":"metallb-system","uid":"u","managedFields":[]},`+
		`"spec":%s}]}`+"\n",
		version, kind, version, kind, name, spec)
}

func pool() string {
	return object("v1beta1", "IPAddressPool", "a", `{"addresses":["192.0.2.10-192.0.2.20","2001:db8::/64"]}`)
}

func l2() string { return object("v1beta1", "L2Advertisement", "a", `{}`) }

// bgp announces all pools to a router; more are fields of the peer.
func bgp(more string) string {
	return object("v1beta1", "BGPAdvertisement", "a", `{}`) + object("v1beta2", "BGPPeer", "router",
		`{"myASN":65000,"peerASN":65001,"peerAddress":"192.0.2.1"`+more+`}`)
}

// sessions are of two nodes, of which one is in rack 1. Both have endpoints of the Services.
func sessions(services []*corev1.Service) *metallb.Sessions {
	out := &metallb.Sessions{Services: services, Endpoints: map[svc.Name]map[string]bool{}, Nodes: []metallb.Node{
		{Name: "n1", Ready: true, Labels: map[string]string{"rack": "1"}}, {Name: "n2", Ready: true, Labels: map[string]string{}},
	}}
	for _, s := range services {
		out.Endpoints[svc.NameOf(s)] = map[string]bool{"n1": true, "n2": true}
	}
	return out
}

func service(name, ip, class string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	if class != "" {
		s.Spec.LoadBalancerClass = &class
	}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: ip}}
	return s
}

// speakerEnv gives MetalLB's speaker a mode of BGP, speakerArg an argument.
func speakerEnv(mode string) func(*metallb.Cluster) {
	return func(c *metallb.Cluster) {
		c.Speaker.Spec.Template.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "METALLB_BGP_TYPE", Value: mode}}
	}
}

func speakerArg(arg string) func(*metallb.Cluster) {
	return func(c *metallb.Cluster) { c.Speaker.Spec.Template.Spec.Containers[0].Args = []string{arg} }
}

// The plan has the refusals and the notes of the conversion, what the change does to clients, and the Services whose addresses are
// not taken over. Without MetalLB it is empty.
func TestDecide(t *testing.T) {
	for _, c := range []struct {
		name    string
		objects string
		change  func(*metallb.Cluster)
		want    string
		bad     bool
	}{
		{"what runs", pool() + l2(), nil, `"metalLB":"DaemonSet metallb-system/speaker, speaker:1; Deployment metallb-system/controller"`, false},
		{"the way", pool() + l2(), nil, `"announce":"arp"`, false},
		{"clients of ARP", pool() + l2(), nil, "open connections end if it is another one than MetalLB's", false},
		{"addresses", pool() + l2(), nil, `"addresses":2`, false},
		{"outside", pool() + l2(), nil, "does not announce it: default/c (192.0.2.21)", false},
		{"a class", pool() + l2(), nil, "cannot be changed: default/d (192.0.2.11)", false},
		{"BGP", pool() + bgp(""), nil, "one by one (n1, n2)", false},
		{"BGP without a router", pool() + object("v1beta1", "BGPAdvertisement", "a", `{}`), nil, "there is no BGPPeer", true},
		{"a password", pool() + bgp(`,"password":"x"`), nil, "copied to Secrets of kube-system: fairlead-bgp-router", false},
		{"one node", pool() + bgp(""), func(c *metallb.Cluster) {
			c.Sessions.Nodes = c.Sessions.Nodes[:1]
		}, "no other node than n1 announces the address 192.0.2.10 of the Service default/a to BGPPeer router", true},
		{"one node of a router", pool() + bgp(`,"nodeSelectors":[{"matchLabels":{"rack":"1"}}]`), nil, "no other node than n1", true},
		{"one node without an address", pool() + bgp(""), func(c *metallb.Cluster) {
			c.Sessions.Nodes, c.Sessions.Services = c.Sessions.Nodes[:1], nil
		}, "one by one (n1)", false},
		{"a local Service on one node", pool() + bgp(""), func(c *metallb.Cluster) {
			c.Services[0].Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			delete(c.Sessions.Endpoints[svc.NameOf(c.Services[0])], "n2")
		}, "no other node than n1", true},
		{"the mode frr-k8s", pool() + bgp(""), speakerEnv("frr-k8s"), "they stay when MetalLB's speaker ends", true},
		{"the mode frr", pool() + bgp(""), speakerEnv("frr"), "in the mode frr, with which this change is not tested", false},
		{"the native mode", pool() + bgp(""), speakerEnv("native"), "one by one (n1, n2)", false},
		{"the mode frr-k8s, by ARP", pool() + l2(), speakerEnv("frr-k8s"), `"announce":"arp"`, false},
		{"excluded nodes announce", pool() + bgp(""), speakerArg("--ignore-exclude-lb"), "MetalLB has --ignore-exclude-lb", true},
		{"excluded nodes announce, with a value", pool() + bgp(""), speakerArg("--ignore-exclude-lb=true"), "--ignore-exclude-lb", true},
		{"excluded nodes do not announce", pool() + bgp(""), speakerArg("--ignore-exclude-lb=false"), "one by one (n1, n2)", false},
		{"an excluded node", pool() + bgp(""), func(c *metallb.Cluster) {
			c.Sessions.Nodes[1].Labels[corev1.LabelNodeExcludeBalancers] = ""
		}, "no other node than n1", true},
		{"one node, on the way", pool() + bgp(""), func(c *metallb.Cluster) {
			c.Speaker.Annotations = map[string]string{metallb.Annotation: "both", metallb.Replicas: "1"}
			c.Sessions.Nodes = c.Sessions.Nodes[:1]
		}, `"phase":"both"`, false},
		{"a refusal", pool() + object("v1beta1", "L2Advertisement", "a", `{"serviceSelectors":[{"matchLabels":{"a":"b"}}]}`), nil,
			"L2Advertisement/a: spec.serviceSelectors", true},
		{"one node of a pool", pool() + strings.Replace(bgp(""), "{}", `{"nodeSelectors":[{"matchLabels":{"rack":"1"}}]}`, 1), nil,
			"no other node than n1", true},
		{"a pool without BGP, whose address no router knows", pool() + l2() + object("v1beta1", "IPAddressPool", "b",
			`{"addresses":["203.0.113.0/24"]}`) + strings.Replace(bgp(`,"nodeSelectors":[{"matchLabels":{"rack":"1"}}]`), "{}",
			`{"ipAddressPools":["b"]}`, 1), nil, "announce", false},
		{"an unknown field", object("v1beta1", "IPAddressPool", "a", `{"adresses":[]}`), nil, "adresses", true},
		{"only objects", pool() + l2(), func(c *metallb.Cluster) { c.Speaker, c.Controller = nil, nil }, "no speaker runs", true},
		{"both", pool() + l2(), func(c *metallb.Cluster) { c.Fairlead = &appsv1.DaemonSet{} }, "Do not apply an IPAddressPool", true},
		{"on the way", pool() + l2(), func(c *metallb.Cluster) {
			c.Fairlead = &appsv1.DaemonSet{}
			c.Speaker.Annotations = map[string]string{metallb.Annotation: "both", metallb.Replicas: "1"}
			c.Speaker.Status.NumberReady = 0
		}, `"phase":"both"`, false},
		{"a mistake in the phase", pool() + l2(), func(c *metallb.Cluster) {
			c.Speaker.Annotations = map[string]string{metallb.Annotation: "bot"}
		}, "want none, or one of beside, both", true},
		{"a mistake in the strategy", pool() + bgp(""), func(c *metallb.Cluster) {
			c.Speaker.Annotations = map[string]string{metallb.Annotation: "both", metallb.Strategy: "{"}
		}, "want an update strategy as JSON", true},
		{"a mistake in the replicas", pool() + l2(), func(c *metallb.Cluster) {
			c.Speaker.Annotations = map[string]string{metallb.Annotation: "both", metallb.Replicas: "0"}
		}, "want a number from 1 on", true},
		{"a class of MetalLB", pool() + l2(), func(c *metallb.Cluster) {
			c.Speaker.Spec.Template.Spec.Containers[0].Args = []string{"--lb-class=metallb.io/x"}
		}, "the class of a Service cannot be changed", true},
		{"an empty class", pool() + l2(), func(c *metallb.Cluster) {
			c.Speaker.Spec.Template.Spec.Containers[0].Args = []string{"--lb-class="}
		}, `"addresses":2`, false},
		{"a speaker is not ready", pool() + l2(), func(c *metallb.Cluster) { c.Speaker.Status.NumberReady = 2 }, "2 of 3 of MetalLB's", true},
		{"no controller", pool() + l2(), func(c *metallb.Cluster) { c.Controller = nil }, "no Deployment of MetalLB's controller", true},
		{"a controller without Pods", pool() + l2(), func(c *metallb.Cluster) {
			c.Controller.Spec.Replicas = new(int32(0))
		}, "scale it up first", true},
		{"no MetalLB", "", func(c *metallb.Cluster) { c.Speaker = nil }, "{}", false},
	} {
		in := &metallb.Cluster{Objects: []byte(c.objects), Services: []*corev1.Service{
			service("a", "192.0.2.10", ""), service("b", "2001:db8::1", ""), service("c", "192.0.2.21", ""), service("d", "192.0.2.11", "other/lb"),
		}}
		in.Speaker = &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "metallb-system", Name: "speaker"}}
		in.Speaker.Spec.Template.Spec.Containers = []corev1.Container{{Image: "speaker:1"}}
		in.Speaker.Status.DesiredNumberScheduled, in.Speaker.Status.NumberReady = 3, 3
		in.Sessions = sessions(in.Services)
		in.Controller = &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "metallb-system", Name: "controller"}}
		if c.change != nil {
			c.change(in)
		}
		p := metallb.Decide(in)
		text, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), c.want) || c.bad != (len(p.Refused) > 0) {
			t.Errorf("%s: want %q, refused %v: %s", c.name, c.want, c.bad, text)
		}
	}
}

// The plan has the settings of the cluster's kube-vip also where MetalLB does not run, and nothing is changed then.
func TestDecideKubeVIP(t *testing.T) {
	daemonSet := func(name, image string) *appsv1.DaemonSet {
		d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name}}
		d.Spec.Template.Spec.Containers = []corev1.Container{{Image: image, Env: []corev1.EnvVar{{Name: "vip_arp", Value: "true"}}}}
		return d
	}
	c, err := metallb.Look(t.Context(), fake.NewClientset(daemonSet("kube-vip-ds", "ghcr.io/kube-vip/kube-vip:v1.0.1"), daemonSet("x", "y")))
	if err != nil {
		t.Fatal(err)
	}
	p := metallb.Decide(c)
	text, err := json.Marshal(p)
	if err != nil || p.Broken() == nil || len(p.KubeVIP) != 1 || !strings.Contains(string(text), `"daemonSet":"kube-system/kube-vip-ds"`) ||
		!strings.Contains(string(text), "--lb-announce=arp") {
		t.Errorf("%s, %v, %v", text, p.Broken(), err)
	}
}
