package dialect

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Annotations of Services of type LoadBalancer.
const (
	// LBAddresses asks for addresses, comma separated, at most one of each family.
	LBAddresses = "fairlead.dev/lb-addresses"
	// LBPool names the IPAddressPool of the Service's addresses.
	LBPool = "fairlead.dev/lb-pool"
	// LBSharingKey lets Services with an equal one share an address.
	LBSharingKey = "fairlead.dev/lb-sharing-key"
	// LBInternal, "true", asks for an address of an internal pool.
	LBInternal = "fairlead.dev/lb-internal"
)

// The same as MetalLB spells it today and spelled it before (its documentation,
// "Usage"). Ours comes first where several are given.
var (
	lbAddressesKeys  = []string{LBAddresses, "metallb.io/loadBalancerIPs", "metallb.universe.tf/loadBalancerIPs"}
	lbPoolKeys       = []string{LBPool, "metallb.io/address-pool", "metallb.universe.tf/address-pool"}
	lbSharingKeyKeys = []string{LBSharingKey, "metallb.io/allow-shared-ip", "metallb.universe.tf/allow-shared-ip"}
)

// lbInternalKeys are the annotations that ask for an internal load balancer, and the
// values that do (behaviours 107 to 114); without a value all do but "" and "false".
var lbInternalKeys = []struct {
	key    string
	values []string
}{
	{LBInternal, []string{"true"}},
	{"networking.gke.io/load-balancer-type", []string{"internal"}},
	{"cloud.google.com/load-balancer-type", []string{"internal"}},
	{"service.beta.kubernetes.io/aws-load-balancer-internal", nil},
	{"service.beta.kubernetes.io/aws-load-balancer-scheme", []string{"internal"}},
	{"service.beta.kubernetes.io/azure-load-balancer-internal", []string{"true"}},
	{"service.beta.kubernetes.io/openstack-internal-load-balancer", []string{"true"}},
	{"service.beta.kubernetes.io/cce-load-balancer-internal-vpc", []string{"true"}},
	{"service.kubernetes.io/qcloud-loadbalancer-internal-subnetid", nil},
	{"service.kubernetes.io/ibm-load-balancer-cloud-provider-ip-type", []string{"private"}},
	{"service.beta.kubernetes.io/alibaba-cloud-loadbalancer-address-type", []string{"intranet"}},
}

// LoadBalancer is what a Service asks of its load balancer.
type LoadBalancer struct {
	// Addresses are those that it asks for, at most one of each family.
	Addresses []netip.Addr
	// Pool is the name of its pool, and SharingKey what it shares an address by; empty
	// for none.
	Pool, SharingKey string
	// Internal asks for an internal load balancer.
	Internal bool
}

// ParseLoadBalancer reads the annotations of a Service and its spec.loadBalancerIP. With
// an error the rest of the result is what could be read.
func ParseLoadBalancer(annotations map[string]string, loadBalancerIP string) (LoadBalancer, error) {
	var lb LoadBalancer
	_, lb.Pool = first(annotations, lbPoolKeys)
	_, lb.SharingKey = first(annotations, lbSharingKeyKeys)
	for _, k := range lbInternalKeys {
		v := strings.ToLower(strings.TrimSpace(annotations[k.key]))
		lb.Internal = lb.Internal || v != "" && v != "false" && (k.values == nil || slices.Contains(k.values, v))
	}
	var err error
	key, list := first(annotations, lbAddressesKeys)
	if list != "" {
		if lb.Addresses, err = parseAddresses(list); err != nil {
			return lb, fmt.Errorf("annotation %s: %w", key, err)
		}
	}
	loadBalancerIP = strings.TrimSpace(loadBalancerIP)
	if loadBalancerIP == "" {
		return lb, nil
	}
	asked, err := parseAddresses(loadBalancerIP)
	switch {
	case err != nil:
		return lb, fmt.Errorf("spec.loadBalancerIP: %w", err)
	case len(asked) != 1:
		return lb, fmt.Errorf("spec.loadBalancerIP: %q is not one address; for one of each family use the annotation %s",
			shorten(loadBalancerIP), LBAddresses)
	case key == "":
		lb.Addresses = asked
	case !slices.Contains(lb.Addresses, asked[0]):
		return lb, fmt.Errorf("spec.loadBalancerIP is %s and annotation %s %q: remove one of them", asked[0], key, shorten(list))
	}
	return lb, nil
}

// first returns the first of keys that has a value, and the value.
func first(annotations map[string]string, keys []string) (key, value string) {
	for _, k := range keys {
		if v := strings.TrimSpace(annotations[k]); v != "" {
			return k, v
		}
	}
	return "", ""
}

// parseAddresses reads one address, or one of each family with a comma between.
func parseAddresses(list string) ([]netip.Addr, error) {
	var out []netip.Addr
	for item := range strings.SplitSeq(list, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(item))
		switch {
		case err != nil || a.Zone() != "":
			return nil, fmt.Errorf("%q is not an IP address, or one of each family with a comma between", shorten(list))
		case a.Is4In6():
			return nil, fmt.Errorf("%s is an IPv4 address; write it as %s", a, a.Unmap())
		case len(out) == 2 || len(out) == 1 && out[0].Is4() == a.Is4():
			return nil, errors.New("more than one address of a family")
		}
		out = append(out, a)
	}
	return out, nil
}

// shorten returns as much of a wrong value as an error repeats.
func shorten(v string) string {
	if len(v) > maxShown {
		return v[:maxShown] + "..."
	}
	return v
}
