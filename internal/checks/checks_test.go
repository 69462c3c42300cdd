package checks

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

func slice(annotations map[string]string, addresses ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{UID: "u-1", Annotations: annotations}, AddressType: discoveryv1.AddressTypeIPv4,
	}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

// What may be asked: a connection or a GET, of addresses that a network has, not too often.
func TestValidate(t *testing.T) {
	for _, x := range []struct {
		check, interval, timeout, address, want string
	}{
		{check: "tcp://:5432"},
		{check: "http://:80/healthz?a=b", interval: "1s", timeout: "1s"},
		{check: "https://:443/"},
		{check: "exec:true", want: "fairlead.dev/check]: Invalid value: \"exec:true\": want tcp"},
		{check: "ftp://:21", want: "want tcp"},
		{check: "", want: "want tcp"},
		{check: "tcp://10.0.0.1:22", want: "leave the host out"},
		{check: "http://metadata:80/", want: "leave the host out"},
		{check: "tcp://:5432", interval: "999ms", want: "check-interval]: Invalid value: \"999ms\": want a duration from 1s to 1h0m0s"},
		{check: "tcp://:5432", interval: "2h", want: "check-interval"},
		{check: "tcp://:5432", interval: "2s", timeout: "3s", want: "check-timeout]: Invalid value: \"3s\": want a duration from 10ms to 2s"},
		{check: "tcp://:5432", timeout: "0s", want: "check-timeout"},
		{check: "tcp://:80", address: "169.254.169.254", want: "endpoints[1].addresses[0]: Invalid value"},
		{check: "tcp://:80", address: "127.0.0.1", want: "loopback"},
		{check: "tcp://:80", address: "::ffff:127.0.0.1", want: "loopback"},
		{check: "tcp://:80", address: "100.100.100.200", want: "metadata"},
		{check: "tcp://:80", address: "fd00:ec2::254", want: "metadata"},
	} {
		annotations := map[string]string{svc.CheckAnnotation: x.check}
		for key, v := range map[string]string{IntervalAnnotation: x.interval, TimeoutAnnotation: x.timeout} {
			if v != "" {
				annotations[key] = v
			}
		}
		s := slice(annotations, "192.0.2.1")
		if x.address != "" {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{x.address}})
		}
		err := Validate(s).ToAggregate()
		if (err == nil) != (x.want == "") || err != nil && !strings.Contains(err.Error(), x.want) {
			t.Errorf("%+v: %v", x, err)
		}
		if n := len(Of(s)); x.address != "" && n != 1 {
			t.Errorf("%s: %d of 2 endpoints are checked", x.address, n)
		}
	}
	if errs := Validate(slice(nil, "127.0.0.1")); len(errs) > 0 {
		t.Errorf("without a check: %v", errs)
	}
	many := slice(map[string]string{svc.CheckAnnotation: "tcp://:1"}, make([]string, MaxPerSlice+1)...)
	if errs := Validate(many); len(errs) != 1 || len(Of(many)) != 0 {
		t.Errorf("%d endpoints: %v", MaxPerSlice+1, errs)
	}
	ours := slice(map[string]string{svc.CheckAnnotation: "tcp://:1"}, "192.0.2.1")
	ours.Labels = map[string]string{discoveryv1.LabelManagedBy: epslice.ManagedBySelector}
	if errs := Validate(ours); len(errs) != 1 || len(Of(ours)) != 0 {
		t.Errorf("a slice of Pods: %v", errs)
	}
	if s, _ := Parse(map[string]string{svc.CheckAnnotation: "tcp://:1"}); s.Interval != 5*time.Second || s.Timeout != time.Second {
		t.Errorf("the defaults are %s and %s", s.Interval, s.Timeout)
	}
}

// A slice that is made again, or checked in another way, has other keys.
func TestKeys(t *testing.T) {
	a := slice(map[string]string{svc.CheckAnnotation: "tcp://:1"}, "192.0.2.1", "192.0.2.2")
	b := a.DeepCopy()
	b.UID = "u-2"
	c := a.DeepCopy()
	c.Annotations[svc.CheckAnnotation] = "tcp://:2"
	seen := map[Key]bool{}
	for _, s := range []*discoveryv1.EndpointSlice{a, b, c} {
		for _, target := range Of(s) {
			seen[target.Key] = true
		}
	}
	if len(seen) != 6 {
		t.Errorf("%d keys of 6", len(seen))
	}
}

// Each endpoint has three nodes, all nodes have as much to do, and one that goes moves only
// what it had.
func TestBy(t *testing.T) {
	var nodes, addresses []string
	for i := range 20 {
		nodes = append(nodes, fmt.Sprintf("node-%02d", i))
	}
	for i := range 100 {
		addresses = append(addresses, fmt.Sprintf("192.0.2.%d", i))
	}
	had := map[string]int{}
	for _, target := range Of(slice(map[string]string{svc.CheckAnnotation: "tcp://:1"}, addresses...)) {
		all, fewer := By(target.Key, nodes), By(target.Key, nodes[1:])
		if len(all) != Nodes || len(slices.Compact(slices.Sorted(slices.Values(all)))) != Nodes {
			t.Fatalf("checked by %v", all)
		}
		for _, n := range all {
			had[n]++
			if n != nodes[0] && !slices.Contains(fewer, n) {
				t.Errorf("%v became %v without %s", all, fewer, nodes[0])
			}
		}
	}
	for _, n := range nodes {
		if had[n] < 4 || had[n] > 30 {
			t.Errorf("%s has %d checks, 15 are its share", n, had[n])
		}
	}
	if got := By(Key{}, nodes[:2]); len(got) != 2 {
		t.Errorf("two nodes: %v", got)
	}
}

// Two nodes have to agree, one where there is no other; without that an endpoint stays as
// it was, whatever a node that has no part in it reports.
func TestReady(t *testing.T) {
	key := Key{1}
	reports := map[string]Report{"up": {key: true}, "up2": {key: true}, "down": {key: false}, "down2": {key: false}, "new": {{2}: false}}
	for _, x := range []struct {
		by       string
		was, now bool
	}{
		{"up down down2", true, false}, {"up up2 down", false, true},
		{"up down new", true, true}, {"up down new", false, false},
		{"down new gone", true, true}, {"up new gone", false, false},
		{"up down", true, true}, {"up down", false, false}, {"down down2", true, false},
		{"down", true, false}, {"up", false, true}, {"new", true, true}, {"", true, true}, {"", false, false},
	} {
		if got := Ready(key, strings.Fields(x.by), reports, x.was); got != x.now {
			t.Errorf("%q, was %v: %v", x.by, x.was, got)
		}
	}
}

func FuzzReport(f *testing.F) {
	f.Add("+0102030405060708 -1112131415161718")
	f.Add("+01 -xx *0102030405060708")
	f.Fuzz(func(t *testing.T, text string) {
		r := ParseReport(text)
		if again := ParseReport(r.String()); again.String() != r.String() || len(r) > MaxPerNode {
			t.Errorf("%q became %q", r, again)
		}
	})
}

// Each namespace has its turn where a node cannot check one endpoint of all, and nodes that
// have most of them in common prefer the same ones.
func TestShareAmongManyNamespaces(t *testing.T) {
	const most, namespaces, turns = 50, 200, 60
	keys := func(without int) map[string][]Key {
		out := map[string][]Key{}
		for i := range namespaces {
			if i != without {
				out[fmt.Sprintf("ns%03d", i)] = []Key{{byte(i)}, {byte(i), 1}}
			}
		}
		return out
	}
	had := map[Key]int{}
	for turn := range int64(turns) {
		a, b := Share(keys(7), most, turn), Share(keys(9), most, turn)
		both := 0
		for k := range a {
			had[k]++
			if b[k] {
				both++
			}
		}
		if len(a) != most || both < most-2 {
			t.Errorf("turn %d: %d keys, %d of them on both nodes", turn, len(a), both)
		}
	}
	if len(had) != namespaces-1 {
		t.Errorf("in %d turns %d of %d namespaces were checked", turns, len(had), namespaces-1)
	}
	few := map[string][]Key{"a": {{1}, {2}}, "b": {{3}, {4}}}
	if x, y := Share(few, 3, 1), Share(few, 3, 2); !maps.Equal(x, y) || len(x) != 3 {
		t.Errorf("few namespaces change places: %v, %v", x, y)
	}
	at := time.Unix(1_800_000_001, 0)
	if next := at.Add(NextTurn(at)); Turn(next) != Turn(at)+1 || Turn(next.Add(-1)) != Turn(at) {
		t.Errorf("the turn after %s begins at %s", at, next)
	}
}
