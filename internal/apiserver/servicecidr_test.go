package apiserver_test

import (
	"net/netip"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// A ServiceCIDR with addresses of Pods or of the server, which nodes would cut off, is
// rejected, as is a second range of that kind.
func TestServiceCIDRsThatOverlap(t *testing.T) {
	t.Parallel()
	cfg := apiservertest.Start(t, func(o *apiserver.Options) {
		o.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")}
		o.AdvertiseAddress = netip.MustParseAddr("192.0.2.10")
	})
	api := kubernetes.NewForConfigOrDie(cfg).NetworkingV1().ServiceCIDRs()
	create := func(name string, cidrs ...string) (*networkingv1.ServiceCIDR, error) {
		o := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
		return api.Create(t.Context(), o, metav1.CreateOptions{})
	}
	_, err := create("a", "10.0.0.0/8")
	invalidAt(t, err, "spec.cidrs[0]")
	if !strings.Contains(err.Error(), "overlaps 10.244.0.0/16, the range of Pods") {
		t.Error(err)
	}
	_, err = create("a", "10.98.0.0/16", "fd00:10:244:80::/64")
	invalidAt(t, err, "spec.cidrs[1]")
	_, err = create("a", "192.0.2.0/24")
	invalidAt(t, err, "spec.cidrs[0]")
	_, err = create("a", "127.0.0.0/8")
	invalidAt(t, err, "spec.cidrs[0]")
	if _, err := create("a", "10.98.0.0/16"); err != nil {
		t.Fatal(err)
	}
	add := func(cidr string) error {
		patch := `[{"op": "add", "path": "/spec/cidrs/1", "value": "` + cidr + `"}]`
		_, err := api.Patch(t.Context(), "a", types.JSONPatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	invalidAt(t, add("fd00:10:244::/64"), "spec.cidrs[1]")
	if err := add("fd00:10:98::/112"); err != nil {
		t.Error(err)
	}
}
