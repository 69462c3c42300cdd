package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/lbview"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/explain"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

func TestFlagsOfLoadBalancers(t *testing.T) {
	for want, args := range map[string][]string{
		`"office": want a CIDR like 192.0.2.0/24 or`: {"lb", "--lb-pool", "office"},
		`want 192.0.2.0/24, or first-last`:           {"up", "--lb-pool", "192.0.2.7/24"},
		`the last address is before the first`:       {"server", "--lb-pool", "a=192.0.2.9-192.0.2.1"},
		`every address`:                              {"lb", "--lb-pool", "0.0.0.0/0"},
		`loopback`:                                   {"lb", "--lb-pool", "127.0.0.0/8"},
		`IPv4-mapped`:                                {"lb", "--lb-pool", "::ffff:192.0.2.0/120"},
		`multicast`:                                  {"lb", "--lb-pool", "ff02::/64"},
		`"A_b" cannot be the name of a pool`:         {"lb", "--lb-pool", "A_b=192.0.2.0/24"},
		`of a and 192.0.2.128-192.0.2.255 of b ov`:   {"lb", "--lb-pool", "b=192.0.2.128/25", "--lb-pool", "a=192.0.2.0/24"},
		`and --service-cluster-ip-range 10.96.0.0`:   {"server", "--lb-pool", "10.96.7.0/24"},
		`and --cluster-cidr 10.244.0.0/16 overlap`:   {"server", "--lb-pool", "10.244.7.0/24", "--cluster-cidr", "10.244.0.0/16"},
		`--lb-announce is "ospf"; want arp, bgp`:     {"agent", "--lb-announce", "ospf"},
		`--lb-interface: "a/b" cannot be the name`:   {"lb", "--lb-interface", "a/b"},
		`want ADDRESS or ADDRESS:PORT`:               {"lb", "--lb-bgp-peer", "router,peer-asn=1,local-asn=2"},
		`local AS number is missing`:                 {"agent", "--lb-bgp-peer", "192.0.2.1,peer-asn=1"},
		`the BFD transmit interval 1h0m0s is not`:    {"lb", "--lb-bgp-peer", "192.0.2.1,peer-asn=1,local-asn=2,bfd=1h"},
		`name= tells them apart`: {"lb", "--lb-bgp-peer", "192.0.2.1,peer-asn=1,local-asn=2",
			"--lb-bgp-peer", "192.0.2.1:1179,peer-asn=1,local-asn=2"},
		`is already the address of peer 192.0.2.1`: {"lb", "--lb-bgp-peer", "192.0.2.1,peer-asn=1,local-asn=2",
			"--lb-bgp-peer", "192.0.2.1:179,peer-asn=1,local-asn=2,name=again"},
		`--lb-bgp-peer and --lb-announce none`:   {"lb", "--lb-announce", "none", "--lb-bgp-peer", "192.0.2.1,peer-asn=1,local-asn=2"},
		`there is nothing to do`:                 {"lb", "--controller=false", "--speaker=false"},
		`--metrics-bind-address is "x"`:          {"lb", "--metrics-bind-address", "x"},
		`takes one Service`:                      {"lb", "status", "a", "b"},
		`--output is "yaml"; want table or json`: {"lb", "status", "-o", "yaml"},
	} {
		if code, _, stderr := call(t, args...); code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%q: exit %d, %s; want %q", args, code, stderr, want)
		}
	}
}

func TestPoolsOfFlags(t *testing.T) {
	var v parts.LBPools
	for _, text := range []string{"192.0.2.0/30,2001:db8::/64", "a=198.51.100.1-198.51.100.9", "192.0.2.8/30"} {
		if err := v.Set(text); err != nil {
			t.Fatal(err)
		}
	}
	want := "default=192.0.2.0-192.0.2.3,2001:db8::-2001:db8::ffff:ffff:ffff:ffff,192.0.2.8-192.0.2.11 a=198.51.100.1-198.51.100.9"
	if v.String() != want {
		t.Errorf("%s, want %s", v.String(), want)
	}
}

// 'fairlead lb' gives out addresses, and the status commands show them.
func TestLoadBalancersOnAnyAPI(t *testing.T) {
	server := apiservertest.StartServer(t)
	config := server.LoopbackConfig()
	client := kubernetes.NewForConfigOrDie(config)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan int, 1)
	go func() {
		var out strings.Builder
		code := run(ctx, []string{"lb", "--kubeconfig", server.Kubeconfig(), "--node-name", "n", "--speaker=false", "--lb-pool", "192.0.2.0/31",
			"--metrics-bind-address", "", "--log-level", "error"}, base.Streams{In: strings.NewReader(""), Out: &out, Err: &out})
		if code != exitDone {
			t.Errorf("exit %d: %s", code, out.String())
		}
		done <- code
	}()
	defer func() { cancel(); <-done }()
	for _, name := range []string{"one", "two", "three"} {
		_, err := client.CoreV1().Services("default").Create(ctx, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	var r lbview.Report
	status := func(args ...string) string {
		code, out, stderr := call(t, append(args, "--kubeconfig", server.Kubeconfig())...)
		if code != exitDone {
			t.Fatalf("%q: exit %d: %s", args, code, stderr)
		}
		return out
	}
	until(t, func() error {
		r = lbview.Report{}
		if err := json.Unmarshal([]byte(status("lb", "status", "-o", "json")), &r); err != nil {
			return err
		}
		given, waiting := 0, 0
		for _, s := range r.Services {
			given += len(s.Addresses)
			if s.Pending && strings.Contains(s.Reason, "AddressPoolExhausted: no IPv4 address is free in pool default (0 free of 2)") {
				waiting++
			}
		}
		if given != 2 || waiting != 1 {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	own, err := v1.NewClient(config)
	if err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
	if _, err := client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	speaker, err := own.Speakers.Create(ctx, &v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: "n"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	speaker.Status.Endpoints = []string{"192.0.2.77:10262"}
	speaker.Status.Addresses = []v1.AnnouncedAddress{{Address: "192.0.2.0", Via: "arp", Interface: "eth0",
		Since: metav1.NewMicroTime(time.Now()), Reason: "first owner"}}
	if _, err := own.Speakers.UpdateStatus(ctx, speaker, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	text := status("lb", "status")
	for _, want := range []string{
		"192.0.2.0   direct   default   n      arp on eth0", "first owner", "<pending>", "192.0.2.1   direct   default   -",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
	for i := range r.Services {
		if s := r.Services[i]; !s.Pending && s.Addresses[0].Address == "192.0.2.0" {
			if one := status("lb", "status", s.Name, "-n", "default"); strings.Count(one, "\n") != 2 || !strings.Contains(one, "192.0.2.0") {
				t.Errorf("of one Service:\n%s", one)
			}
		}
	}
	if code, _, stderr := call(t, "lb", "status", "default/kubernetes", "--kubeconfig", server.Kubeconfig()); code != exitFailed ||
		!strings.Contains(stderr, "is of type ClusterIP") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	explained := func() string {
		for i := range r.Services {
			if s := r.Services[i]; !s.Pending && s.Addresses[0].Address == "192.0.2.0" {
				return status("explain", s.Name, "-n", "default") + status("explain", "192.0.2.0:80", "-o", "json")
			}
		}
		return ""
	}
	text = explained()
	for _, want := range []string{
		"of Service default/", ", direct way\n  192.0.2.0: announced by node n (arp on eth0)\n",
		"    it is of pool default  [IPAddress 192.0.2.0 ",
		"    node n announces it by arp on eth0 since ", ": first owner  [Speaker n status.addresses]\n",
		`"balancers": [`, `"node": "n"`, `"via": "arp"`, `"pool": "default"`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("explain: %q is missing in\n%s", want, text)
		}
	}
	speaker, err = own.Speakers.Get(ctx, "n", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	speaker.Status.Addresses, speaker.Status.Announce, speaker.Status.Reason = nil, v1.AnnounceARP, "it is cordoned"
	if _, err := own.Speakers.UpdateStatus(ctx, speaker, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	text = explained()
	for _, want := range []string{
		"  192.0.2.0: no node announces it\n", "    node n does not announce it: it is cordoned  [Speaker n status.reason]\n",
		`"nobody": true`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("explain, and nobody announces: %q is missing in\n%s", want, text)
		}
	}
	text = status("explain", "192.0.2.0:80", "--from", "198.51.100.9")
	if !strings.HasPrefix(text, "192.0.2.0:80 on node n: timeout, NoRouteOrDropped") ||
		!strings.Contains(text, "no node announces 192.0.2.0: packets of a client outside of all nodes come to none of them  [Speakers]") {
		t.Errorf("a client outside:\n%s", text)
	}
	until(t, func() error { // its speaker is not eligible
		if text := status("lb", "status"); !strings.Contains(text, "NotAnnounceable: no node can announce 192.0.2.1: node n: ") {
			return fmt.Errorf("no reason in\n%s", text)
		}
		return nil
	})
	until(t, func() error {
		if text := status("status"); !strings.Contains(text, "load balancers: 2 addresses of 1 pools, 1 pending") {
			return fmt.Errorf("no line in\n%s", text)
		}
		return nil
	})
	binding := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "tenant"},
		Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "tenant"}},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "edit"}}
	if _, err := client.RbacV1().RoleBindings("default").Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	class := &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: "ours"},
		Spec: networkingv1.IngressClassSpec{Controller: "fairlead.dev/ingress"}}
	if _, err := client.NetworkingV1().IngressClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	books := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Name: "books"}, Spec: networkingv1.IngressSpec{IngressClassName: &class.Name,
		Rules: []networkingv1.IngressRule{{Host: "books.example", IngressRuleValue: networkingv1.IngressRuleValue{
			HTTP: &networkingv1.HTTPIngressRuleValue{Paths: []networkingv1.HTTPIngressPath{{Path: "/", PathType: new(networkingv1.PathTypePrefix),
				Backend: networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: "nobooks",
					Port: networkingv1.ServiceBackendPort{Number: 80}}}}}}}}}}}
	if _, err := client.NetworkingV1().Ingresses("default").Create(ctx, books, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	all, err := lbview.SummaryOf(ctx, client, config, "")
	if err != nil || len(all.Services) < 3 || len(all.Problems) > 0 || len(all.Routes) != 1 || all.Routes[0].Name != "books" ||
		!slices.Equal(all.Routes[0].Hosts, []string{"books.example"}) ||
		!strings.Contains(all.Routes[0].Reason, "nobooks") || all.Routes[0].Status != explain.HasProblem {
		t.Errorf("the lists of an administrator: %+v, %v", all, err)
	}
	as := rest.CopyConfig(config)
	as.Impersonate.UserName = "tenant"
	tenant := kubernetes.NewForConfigOrDie(as)
	lists, err := lbview.SummaryOf(ctx, tenant, as, "default")
	if err != nil || len(lists.Services) != 3 || len(lists.Routes) != 1 || lists.NotAnnouncing != nil ||
		!strings.Contains(strings.Join(lists.Problems, "\n"), "which node announces an address is not known: ") {
		t.Errorf("the lists of a tenant: %+v, %v", lists, err)
	}
	if _, err := lbview.SummaryOf(ctx, tenant, as, ""); err == nil {
		t.Error("a tenant gets the lists of all namespaces")
	}
}

// until polls until f is content.
func until(t *testing.T, f func() error) {
	t.Helper()
	deadline := time.Now().Add(40 * time.Second)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		<-time.After(20 * time.Millisecond)
	}
}
