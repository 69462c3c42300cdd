package service

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/svc"
)

// More ranges at run time; one in use does not go away.
func TestServiceCIDRs(t *testing.T) {
	s := start(t, func(o *Options) { o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/30")} })
	s.mustCreate(service("a"))
	s.mustCreate(service("b"))
	extra := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "extra"},
		Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.0.1.0/24"}}}
	if _, err := s.net.ServiceCIDR.Create(ctxIn(""), extra, rest.ValidateAllObjectFunc, &metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var c *corev1.Service
	eventually(t, func() string {
		var err error
		if c, err = s.create(service("c")); err != nil {
			return err.Error()
		}
		return ""
	})
	if !netip.MustParsePrefix("10.0.1.0/24").Contains(netip.MustParseAddr(c.Spec.ClusterIP)) {
		t.Error(c.Spec.ClusterIP)
	}
	if _, _, err := s.net.ServiceCIDR.Delete(ctxIn(""), "extra", rest.ValidateAllObjectFunc, &metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string {
		obj, err := s.net.ServiceCIDR.Get(ctxIn(""), "extra", &metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		cond := meta.FindStatusCondition(obj.(*networkingv1.ServiceCIDR).Status.Conditions, "Ready")
		if cond == nil || cond.Reason != "Terminating" || !strings.Contains(cond.Message, "still IPAddresses") {
			return fmt.Sprintf("condition %+v", cond)
		}
		return ""
	})
	eventually(t, func() string {
		if _, err := s.create(service("d")); err == nil {
			s.delete("d")
			return "an address was taken from a range that is being deleted"
		}
		return ""
	})
	s.delete("c")
	eventually(t, func() string {
		if _, err := s.net.ServiceCIDR.Get(ctxIn(""), "extra", &metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Sprintf("the range is still there: %v", err)
		}
		return ""
	})
}

// behaviours 161 to 163: what the repair finds and does.
func TestRepair(t *testing.T) {
	s := start(t)
	ctx := ctxIn("")
	web := s.mustCreate(service("web", ofType(corev1.ServiceTypeNodePort)))
	port := fmt.Sprint(web.Spec.Ports[0].NodePort)
	mine := []string{web.Spec.ClusterIP + "=default/web", port + "=default/web"}
	grace := time.Hour
	reasons := func() []string {
		t.Helper()
		var out []string
		eventually(t, func() string { // the repair reads a cache
			found, err := s.Repair(context.Background(), grace)
			if err != nil {
				return err.Error()
			}
			for _, f := range found {
				out = append(out, f.Service.Name+":"+f.Reason)
			}
			if len(out) == 0 {
				return "nothing found"
			}
			return ""
		})
		slices.Sort(out)
		return out
	}
	if found, err := s.Repair(context.Background(), grace); err != nil || len(found) != 0 {
		t.Fatal(found, err)
	}

	// Claims lost by hand come back.
	for name, claims := range map[string]rest.GracefulDeleter{port: s.ports, web.Spec.ClusterIP: s.net.IPAddress} {
		if _, _, err := claims.Delete(ctx, name, rest.ValidateAllObjectFunc, &metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	got := reasons()
	for len(got) < 2 { // one cache may be ahead of the other
		got = append(got, reasons()...)
	}
	if slices.Sort(got); !slices.Equal(got, []string{"web:ClusterIPNotAllocated", "web:PortNotAllocated"}) {
		t.Error(got)
	}
	s.wantClaims(mine...)

	// Claims without a Service stay while they are young, and go.
	ghost := svc.Name{Namespace: "default", Name: "ghost"}
	s.claimIP("10.96.77.77", ghost)
	if err := s.claimPort("32000", ghost); err != nil {
		t.Fatal(err)
	}
	if found, err := s.Repair(context.Background(), grace); err != nil || len(found) != 0 {
		t.Fatal(found, err)
	}
	grace = 0
	if got := reasons(); got[0] != "ghost:ClaimWithoutService" {
		t.Error(got)
	}
	eventually(t, func() string {
		_, err := s.Repair(context.Background(), grace)
		if n := len(s.claimed()); err != nil || n != 2 {
			return fmt.Sprint(n, err)
		}
		return ""
	})
	s.wantClaims(mine...)

	// An IPAddress that a user made is not touched.
	user := addressClaim("10.96.88.88", ghost)
	user.Labels = nil
	if _, err := s.net.IPAddress.Create(ctx, user, rest.ValidateAllObjectFunc, &metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string {
		if _, err := s.net.IPAddress.Get(ctx, "10.96.88.88", &metav1.GetOptions{ResourceVersion: "0"}); err != nil {
			return fmt.Sprint("the cache does not know an address made by a user: ", err)
		}
		return ""
	})
	if found, err := s.Repair(context.Background(), grace); err != nil || len(found) != 0 {
		t.Fatal(found, err)
	}

	// Double use, made by hand in the store: both are reported.
	twin := service("twin")
	SetDefaults(twin)
	twin.Spec.ClusterIP, twin.Spec.ClusterIPs = web.Spec.ClusterIP, []string{web.Spec.ClusterIP}
	raw := *s.Service.Store
	raw.BeginCreate = nil
	if _, err := raw.Create(ctxIn("default"), twin, rest.ValidateAllObjectFunc, &metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := reasons(); !slices.Equal(got, []string{"twin:ClusterIPAlreadyAllocated", "web:ClusterIPAlreadyAllocated"}) {
		t.Error(got)
	}
}

// A server that is alone on its store frees what a crash has left at once, so
// that a Service with a fixed address can be made again.
func TestRepairAlone(t *testing.T) {
	endpoint := startEtcd(t)
	s := startServer(t, endpoint)
	// From the minute before: creation times have whole seconds.
	left := addressClaim("10.96.0.10", svc.Name{Namespace: "kube-system", Name: "kube-dns"})
	left.CreationTimestamp = metav1.NewTime(time.Now().Add(-time.Minute))
	st := s.net.IPAddress.Store
	key, err := st.KeyFunc(ctxIn(""), left.Name)
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Storage.Create(ctxIn(""), key, left, &networkingv1.IPAddress{}, 0, false); err != nil {
		t.Fatal(err)
	}
	s.stop()
	for _, alone := range []bool{false, true} {
		s = startServer(t, endpoint, func(o *Options) { o.Alone = alone })
		if _, err := s.Repair(context.Background(), time.Hour); err != nil {
			t.Fatal(err)
		}
		if n := len(s.claimed()); (n == 0) != alone {
			t.Errorf("alone %v: %d claims", alone, n)
		}
		s.stop()
	}
}

// A repair right after a start waits for the watch caches, which reject lists
// until they have read the store.
func TestRepairBeforeTheCachesAreReady(t *testing.T) {
	s := newServer(t, startEtcd(t))
	defer s.destroy()
	if _, err := s.Repair(t.Context(), time.Hour); err != nil {
		t.Error(err)
	}
}

// Services wait a moment for a server that has just started, and are refused
// with a clear text when it does not become ready.
func TestNotReady(t *testing.T) {
	s := newServer(t, startEtcd(t)) // which does not run
	ctx, cancel := context.WithTimeout(ctxIn("default"), 50*time.Millisecond)
	defer cancel()
	in := service("x")
	SetDefaults(in)
	_, err := s.Service.Create(ctx, in, rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
	if !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), "allocator not ready") {
		t.Error(err)
	}
}
