package dialect

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
)

func TestParseLoadBalancer(t *testing.T) {
	addrs := func(list ...string) (out []netip.Addr) {
		for _, s := range list {
			out = append(out, netip.MustParseAddr(s))
		}
		return out
	}
	for _, c := range []struct {
		what  string
		with  map[string]string
		ip    string
		want  LoadBalancer
		fails string
	}{
		{"nothing", map[string]string{"other": "x"}, "", LoadBalancer{}, ""},
		{"loadBalancerIP", nil, "192.0.2.1", LoadBalancer{Addresses: addrs("192.0.2.1")}, ""},
		{"both families", map[string]string{LBAddresses: "2001:db8::1, 192.0.2.1"}, "",
			LoadBalancer{Addresses: addrs("2001:db8::1", "192.0.2.1")}, ""},
		{"both ways", map[string]string{LBAddresses: "192.0.2.1,2001:db8::1"}, "192.0.2.1",
			LoadBalancer{Addresses: addrs("192.0.2.1", "2001:db8::1")}, ""},
		{"MetalLB", map[string]string{"metallb.io/loadBalancerIPs": "192.0.2.1", "metallb.io/address-pool": "a",
			"metallb.io/allow-shared-ip": "k"}, "", LoadBalancer{Addresses: addrs("192.0.2.1"), Pool: "a", SharingKey: "k"}, ""},
		{"an older MetalLB", map[string]string{"metallb.universe.tf/loadBalancerIPs": "192.0.2.1", "metallb.universe.tf/address-pool": "a",
			"metallb.universe.tf/allow-shared-ip": "k"}, "", LoadBalancer{Addresses: addrs("192.0.2.1"), Pool: "a", SharingKey: "k"}, ""},
		{"kube-vip", map[string]string{"kube-vip.io/loadbalancerIPs": "192.0.2.1,2001:db8::1", "kube-vip.io/vipHost": "node1"}, "192.0.2.1",
			LoadBalancer{Addresses: addrs("192.0.2.1", "2001:db8::1")}, ""},
		{"ours first", map[string]string{LBPool: "a", "metallb.io/address-pool": "b", LBSharingKey: "k", "metallb.io/allow-shared-ip": "l",
			LBAddresses: "192.0.2.1", "metallb.io/loadBalancerIPs": "192.0.2.2"}, "",
			LoadBalancer{Addresses: addrs("192.0.2.1"), Pool: "a", SharingKey: "k"}, ""},
		{"no address", map[string]string{LBAddresses: "web", LBPool: "a"}, "",
			LoadBalancer{Pool: "a"}, LBAddresses + `: "web" is not an IP address`},
		{"no address in loadBalancerIP", nil, "web", LoadBalancer{}, `spec.loadBalancerIP: "web" is not an IP address`},
		{"two in loadBalancerIP", nil, "192.0.2.1,2001:db8::1", LoadBalancer{}, "is not one address"},
		{"two of a family", map[string]string{LBAddresses: "192.0.2.1,192.0.2.2"}, "", LoadBalancer{}, "more than one address of a family"},
		{"three", map[string]string{LBAddresses: "192.0.2.1,2001:db8::1,192.0.2.2"}, "", LoadBalancer{}, "more than one address of a family"},
		{"mapped", map[string]string{LBAddresses: "::ffff:192.0.2.1"}, "", LoadBalancer{}, "write it as 192.0.2.1"},
		{"zone", map[string]string{LBAddresses: "fe80::1%eth0"}, "", LoadBalancer{}, "is not an IP address"},
		{"contradiction", map[string]string{"metallb.io/loadBalancerIPs": "192.0.2.1"}, "192.0.2.2",
			LoadBalancer{Addresses: addrs("192.0.2.1")}, "remove one of them"},
		{"long", map[string]string{LBAddresses: strings.Repeat("x", 100000)}, "", LoadBalancer{}, `x..."`},
	} {
		got, err := ParseLoadBalancer(c.with, c.ip)
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, want %+v", c.what, got, c.want)
		}
		if (err == nil) != (c.fails == "") || err != nil && (!strings.Contains(err.Error(), c.fails) || len(err.Error()) > 300) {
			t.Errorf("%s: %v, want %q", c.what, err, c.fails)
		}
	}
}

func TestInternalLoadBalancers(t *testing.T) {
	const beta = "service.beta.kubernetes.io/"
	for _, c := range []struct {
		key, value string
		want       bool
	}{
		{LBInternal, "true", true}, {LBInternal, "false", false}, {LBInternal, "", false},
		{"networking.gke.io/load-balancer-type", "Internal", true}, {"networking.gke.io/load-balancer-type", "External", false},
		{"cloud.google.com/load-balancer-type", "Internal", true},
		{beta + "aws-load-balancer-internal", "0.0.0.0/0", true}, {beta + "aws-load-balancer-internal", "true", true},
		{beta + "aws-load-balancer-internal", "false", false}, {beta + "aws-load-balancer-internal", "", false},
		{beta + "aws-load-balancer-scheme", "internal", true}, {beta + "aws-load-balancer-scheme", "internet-facing", false},
		{beta + "azure-load-balancer-internal", "true", true}, {beta + "azure-load-balancer-internal", "False", false},
		{beta + "openstack-internal-load-balancer", "true", true}, {beta + "cce-load-balancer-internal-vpc", "true", true},
		{"service.kubernetes.io/qcloud-loadbalancer-internal-subnetid", "subnet-1", true},
		{"service.kubernetes.io/ibm-load-balancer-cloud-provider-ip-type", "private", true},
		{"service.kubernetes.io/ibm-load-balancer-cloud-provider-ip-type", "public", false},
		{beta + "alibaba-cloud-loadbalancer-address-type", "intranet", true},
		{"other", "true", false},
	} {
		if got, err := ParseLoadBalancer(map[string]string{c.key: c.value}, ""); got.Internal != c.want || err != nil {
			t.Errorf("%s: %q is internal: %t, want %t; %v", c.key, c.value, got.Internal, c.want, err)
		}
	}
}

// No cloud's annotation leads to an address that everybody reaches because of a typo: neither in its value nor in its name.
func TestMistypedInternal(t *testing.T) {
	mistyped := func(key, value string) (LoadBalancer, error) {
		return ParseLoadBalancer(map[string]string{key: value, LBPool: "a"}, "")
	}
	for _, a := range internals {
		for _, value := range []string{"Inernal", "privat", "ture", "yes", "interna l"} {
			lb, err := mistyped(a.Key, value)
			if a.Values == "anything but false" {
				if !lb.Internal || err != nil {
					t.Errorf("%s: %q: %+v, %v", a.Key, value, lb, err)
				}
				continue
			}
			for _, text := range []string{a.Key, a.Values, value} {
				if err == nil || !strings.Contains(err.Error(), text) {
					t.Errorf("%s: %q: %v", a.Key, value, err)
				}
			}
		}
		asks := "true"
		if v, _, _ := strings.Cut(a.Values, ","); !strings.HasPrefix(v, "anything") {
			asks = v
		}
		half := len(a.Key) - 4
		for _, key := range []string{
			a.Key[:half] + a.Key[half+1:], a.Key + "s", a.Key[:half] + "x" + a.Key[half:], a.Key[1:], strings.ToUpper(a.Key),
		} {
			if _, known := lookUp(key); known {
				continue
			}
			_, err := mistyped(key, asks)
			if err == nil || !strings.Contains(err.Error(), key) || !strings.Contains(err.Error(), a.Key) {
				t.Errorf("%s: %v", key, err)
			}
			if r := Read(web(key, asks)); len(r.Findings) != 1 || r.Findings[0].State != Unknown || r.Findings[0].Text != err.Error() {
				t.Errorf("%s: %+v", key, r.Findings)
			}
			for _, value := range []string{"false", ""} {
				if _, err := mistyped(key, value); err != nil {
					t.Errorf("%s: %q: %v", key, value, err)
				}
			}
		}
	}
	if len(internals) < 12 {
		t.Errorf("only %d annotations", len(internals))
	}
	if _, err := mistyped("service.beta.kubernetes.io/azure-load-balancer-tls", "true"); err != nil {
		t.Errorf("an annotation that is unknown: %v", err)
	}
}
