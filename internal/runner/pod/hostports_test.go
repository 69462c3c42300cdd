package pod

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/runner/podnet"
	"github.com/fairlead/fairlead/internal/svc"
)

// Of two pods of one name, as after a deletion by force, the one that started last has the host
// ports; a record in another pod's place, which is not adopted, has none.
func TestHostPortsOfOneName(t *testing.T) {
	dir := t.TempDir()
	began := time.Now()
	record := func(place string, uid types.UID, started time.Time, ip string) record {
		rec := record{
			UID: uid, Namespace: "default", Name: "db-0", IPs: []netip.Addr{netip.MustParseAddr(ip)},
			HostPorts: []svc.HostPort{{Protocol: svc.TCP, Port: 5432, To: 5432}}, Started: started,
		}
		d := Paths{filepath.Join(dir, "pods", place)}
		if err := os.MkdirAll(d.Dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := writePod(d, rec); err != nil {
			t.Fatal(err)
		}
		return rec
	}
	record("b-old", "b-old", began, "10.244.0.5")
	next := record("a-new", "a-new", began.Add(time.Second), "10.244.0.6")
	record("elsewhere", "c", began.Add(time.Minute), "10.244.0.7")
	changes := 0
	h := podnet.NewHostPorts(EarlierHostPorts(filepath.Join(dir, "pods")), func() { changes++ })
	expect := func(want types.UID) {
		t.Helper()
		for range 20 { // the order of a map
			if got := h.All(); len(got) != 1 || got[0].UID != string(want) {
				t.Fatalf("host ports %v, want those of %s alone", got, want)
			}
		}
	}
	expect("a-new")
	h.Set("a-new", next.hostPorts())
	if changes != 0 {
		t.Error("the same host ports count as a change")
	}
	h.Set("a-new", podnet.HeldPorts{})
	expect("b-old")
	if changes != 1 {
		t.Errorf("%d changes, want 1", changes)
	}
}
