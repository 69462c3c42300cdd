package apiserver

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/svc"
)

func TestRunningServers(t *testing.T) {
	t.Parallel()
	now := time.Now()
	lease := func(at string, age time.Duration) coordinationv1.Lease {
		l := coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{svc.EndpointAnnotation: at}},
			Spec:       coordinationv1.LeaseSpec{RenewTime: ptr.To(metav1.NewMicroTime(now.Add(-age))), LeaseDurationSeconds: ptr.To(int32(15))},
		}
		if server, err := netip.ParseAddrPort(at); err == nil {
			l.Name = leaseName(server)
		}
		return l
	}
	named, long := lease("192.0.2.4:6443", 0), lease("192.0.2.5:6443", 16*time.Second)
	named.Name = "fairlead-lb-witness"
	long.Spec.LeaseDurationSeconds = ptr.To(int32(1 << 30))
	got := runningServers([]coordinationv1.Lease{
		lease("192.0.2.2:6443", 14*time.Second), lease("192.0.2.1:6443", -10*time.Second), lease("192.0.2.3:6443", 15*time.Second),
		lease("192.0.2.1:6443", time.Second), lease("nonsense", 0), {}, named, long, lease("192.0.2.6:6443", -time.Hour),
		lease("127.0.0.1:1", 0), lease("[::1]:1", 0), lease("0.0.0.0:1", 0), lease("169.254.0.1:1", 0), lease("[fe80::1%eth0]:1", 0),
		lease("224.0.0.1:1", 0), lease("[::ffff:192.0.2.7]:1", 0), lease("192.0.2.8:0", 0),
	}, sightings{}, now)
	if want := []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:6443"), netip.MustParseAddrPort("192.0.2.2:6443")}; !cmp.Equal(got, want,
		cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A server runs while others see it renew its Lease, whatever its clock says.
func TestRunningServersByOwnClock(t *testing.T) {
	t.Parallel()
	now, at := time.Now(), netip.MustParseAddrPort("192.0.2.1:6443")
	seen := sightings{}
	runs := func(renewed time.Time) bool {
		l := coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: leaseName(at), Annotations: map[string]string{svc.EndpointAnnotation: at.String()}},
			Spec:       coordinationv1.LeaseSpec{RenewTime: ptr.To(metav1.NewMicroTime(renewed)), LeaseDurationSeconds: ptr.To(int32(5))},
		}
		return len(runningServers([]coordinationv1.Lease{l}, seen, now)) == 1
	}
	wrong := now.Add(-time.Hour) // its clock is an hour behind
	for _, step := range []struct {
		pass    time.Duration
		renewed bool
		want    bool
	}{
		{0, false, false}, {time.Second, true, true}, {4 * time.Second, true, true}, {4 * time.Second, false, true}, {time.Second, false, false},
	} {
		now = now.Add(step.pass)
		if step.renewed {
			wrong = wrong.Add(time.Second)
		}
		if got := runs(wrong); got != step.want {
			t.Errorf("%+v: runs %v", step, got)
		}
	}
	if runningServers(nil, seen, now); len(seen) > 0 {
		t.Errorf("what is gone is kept: %v", seen)
	}
}

func TestServerSlices(t *testing.T) {
	t.Parallel()
	var servers []netip.AddrPort
	for _, s := range []string{"192.0.2.1:6443", "192.0.2.2:7443", "192.0.2.3:6443", "[2001:db8::1]:6443"} {
		servers = append(servers, netip.MustParseAddrPort(s))
	}
	got := map[string][]string{}
	for _, s := range serverSlices(servers) {
		if string(s.AddressType) == "IPv6" != (s.Name == "kubernetes-ipv6") {
			t.Errorf("%s is of type %s", s.Name, s.AddressType)
		}
		for _, e := range s.Endpoints {
			got[s.Name] = append(got[s.Name], e.Addresses...)
		}
	}
	want := map[string][]string{"kubernetes": {"192.0.2.1", "192.0.2.3"}, "kubernetes-2": {"192.0.2.2"}, "kubernetes-ipv6": {"2001:db8::1"}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if s := serverSlices(nil); len(s) != 0 {
		t.Errorf("no server, but %d slices", len(s))
	}
}

func TestLeaseNameIsValid(t *testing.T) {
	for _, s := range []string{"192.0.2.1:6443", "[2001:db8::1]:6443", "[::1]:1", "[fe80::1%eth0]:1"} {
		if name := leaseName(netip.MustParseAddrPort(s)); len(validation.IsDNS1123Subdomain(name)) > 0 {
			t.Errorf("%s gives the name %q", s, name)
		}
	}
}
