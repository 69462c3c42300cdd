package networking

import (
	"net/netip"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func check(t *testing.T, what string, errs field.ErrorList, want string) {
	t.Helper()
	switch {
	case want == "" && len(errs) > 0:
		t.Errorf("%s: %v, want it valid", what, errs)
	case want != "" && (len(errs) != 1 || !strings.Contains(errs[0].Error(), want)):
		t.Errorf("%s:\n got  %v\n want %s", what, errs, want)
	}
}

func TestIPAddress(t *testing.T) {
	address := func(name string, ref *networkingv1.ParentReference) *networkingv1.IPAddress {
		return &networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.IPAddressSpec{ParentRef: ref}}
	}
	web := &networkingv1.ParentReference{Resource: "services", Namespace: "default", Name: "web"}
	for _, c := range []struct {
		what string
		a    *networkingv1.IPAddress
		want string
	}{
		{"v4", address("10.96.0.1", web), ""},
		{"v6", address("fd00::1", web), ""},
		{"not canonical", address("fd00::0:1", web), `metadata.name: Invalid value: "fd00::0:1": must be in canonical form ("fd00::1")`},
		{"zeros", address("10.96.0.01", web), `metadata.name: Invalid value: "10.96.0.01"`},
		{"name", address("web", web), `metadata.name: Invalid value: "web"`},
		{"no parent", address("10.96.0.1", nil), "spec.parentRef: Required value"},
		{"no resource", address("10.96.0.1", &networkingv1.ParentReference{Name: "web"}), "spec.parentRef.resource: Required value"},
		{"no name", address("10.96.0.1", &networkingv1.ParentReference{Resource: "services"}), "spec.parentRef.name: Required value"},
		{"slash", address("10.96.0.1", &networkingv1.ParentReference{Resource: "a/b", Name: "web"}),
			`spec.parentRef.resource: Invalid value: "a/b"`},
		{"group", address("10.96.0.1", &networkingv1.ParentReference{Group: "A", Resource: "b", Name: "web"}),
			`spec.parentRef.group: Invalid value: "A"`},
	} {
		check(t, c.what, validateIPAddress(c.a), c.want)
	}
	old := address("10.96.0.1", web)
	old.ResourceVersion = "1"
	cur := old.DeepCopy()
	cur.Spec.ParentRef.Name = "other"
	check(t, "another parent", validateIPAddressUpdate(cur, old), "spec.parentRef: Invalid value: ")
	if got := parentText(web); got != "services/default/web" {
		t.Error(got)
	}
	if got := parentText(&networkingv1.ParentReference{Group: "gateway.networking.k8s.io", Resource: "Gateways",
		Name: "x"}); got != "gateways.gateway.networking.k8s.io/x" {
		t.Error(got)
	}
}

func TestServiceCIDR(t *testing.T) {
	cidr := func(cidrs ...string) *networkingv1.ServiceCIDR {
		return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "x", ResourceVersion: "1"},
			Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
	}
	for _, c := range []struct {
		cidrs []string
		want  string
	}{
		{[]string{"10.96.0.0/16"}, ""},
		{[]string{"fd00::/112", "10.96.0.0/16"}, ""},
		{nil, "spec.cidrs: Required value: at least one CIDR required"},
		{[]string{"10.0.0.0/8", "fd00::/64", "11.0.0.0/8"}, "may only hold up to 2 values"},
		{[]string{"10.0.0.0/8", "11.0.0.0/8"}, "may specify no more than one IP for each IP family"},
		{[]string{"10.96.0.1/16"}, `spec.cidrs[0]: Invalid value: "10.96.0.1/16": must not have bits set beyond the prefix length`},
		{[]string{"fd00:0::/112"}, `spec.cidrs[0]: Invalid value: "fd00:0::/112": must be in canonical form ("fd00::/112")`},
		{[]string{"10.96.0.0"}, `spec.cidrs[0]: Invalid value: "10.96.0.0"`},
	} {
		check(t, strings.Join(c.cidrs, ","), validateServiceCIDR(cidr(c.cidrs...)), c.want)
	}
	check(t, "second family", validateServiceCIDRUpdate(cidr("10.0.0.0/8", "fd00::/112"), cidr("10.0.0.0/8")), "")
	check(t, "second of one family", validateServiceCIDRUpdate(cidr("10.0.0.0/8", "11.0.0.0/8"), cidr("10.0.0.0/8")), "no more than one IP")
	check(t, "one less", validateServiceCIDRUpdate(cidr("10.0.0.0/8"), cidr("10.0.0.0/8", "fd00::/112")), "field is immutable")
	check(t, "update", validateServiceCIDRUpdate(cidr("10.0.0.0/8"), cidr("11.0.0.0/8")), "field is immutable")
}

// A range is ready when any object with it is ready and stays.
func TestRanges(t *testing.T) {
	object := func(cidr string, ready metav1.ConditionStatus, deleted bool) *networkingv1.ServiceCIDR {
		s := &networkingv1.ServiceCIDR{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{cidr}},
			Status: networkingv1.ServiceCIDRStatus{Conditions: []metav1.Condition{{Type: "Ready", Status: ready}}}}
		if deleted {
			s.DeletionTimestamp = new(metav1.Now())
		}
		return s
	}
	got := ranges([]*networkingv1.ServiceCIDR{
		object("10.0.0.0/24", "True", false), object("10.0.1.0/24", "True", true), object("10.0.2.0/24", "False", false),
		object("10.0.3.0/24", "True", true), object("10.0.3.0/24", "True", false),
	})
	for p, want := range map[string]bool{"10.0.0.0/24": true, "10.0.1.0/24": false, "10.0.2.0/24": false, "10.0.3.0/24": true} {
		if ready, ok := got[netip.MustParsePrefix(p)]; !ok || ready != want {
			t.Errorf("%s: known %v ready %v, want %v", p, ok, ready, want)
		}
	}
}
