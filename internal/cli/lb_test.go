package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/lbview"
	"github.com/fairlead/fairlead/internal/cli/parts"
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
