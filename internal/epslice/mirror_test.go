package epslice

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
)

func userEndpoints(subsets ...corev1.EndpointSubset) *corev1.Endpoints {
	return &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "db", UID: "ep-1", Labels: map[string]string{"a": "1"},
			Annotations: map[string]string{"note": "x", corev1.LastAppliedConfigAnnotation: "{}"}},
		Subsets: subsets,
	}
}

func addresses(ips ...string) []corev1.EndpointAddress {
	var out []corev1.EndpointAddress
	for _, ip := range ips {
		out = append(out, corev1.EndpointAddress{IP: ip})
	}
	return out
}

// behaviours 22 to 24: user-made Endpoints become one slice for each family, and
// what cannot be mirrored is said.
func TestMirror(t *testing.T) {
	ports := []corev1.EndpointPort{{Name: "sql", Port: 9376}}
	e := userEndpoints(corev1.EndpointSubset{
		Addresses: addresses("192.0.2.42", "2001:db8::1", "nonsense"), NotReadyAddresses: addresses("192.0.2.43"), Ports: ports,
	})
	plan := Mirror(e, nil, nil, 0)
	if len(plan.Create) != 2 || len(plan.Events) != 1 || plan.Events[0].Reason != "InvalidIPAddress" {
		t.Fatalf("%d slices, notes %v", len(plan.Create), plan.Events)
	}
	v4, v6 := plan.Create[0], plan.Create[1]
	if v4.AddressType != discoveryv1.AddressTypeIPv4 || v6.AddressType != discoveryv1.AddressTypeIPv6 || len(v4.Endpoints) != 2 ||
		len(v6.Endpoints) != 1 {
		t.Fatalf("wrong slices: %v, %v", v4, v6)
	}
	if !*v4.Endpoints[0].Conditions.Ready || *v4.Endpoints[1].Conditions.Ready {
		t.Error("readiness is not carried over")
	}
	if v4.Labels[discoveryv1.LabelServiceName] != "db" || v4.Labels[discoveryv1.LabelManagedBy] != ManagedByMirroring ||
		v4.Labels["a"] != "1" {
		t.Errorf("labels %v", v4.Labels)
	}
	if !maps.Equal(v4.Annotations, map[string]string{"note": "x"}) || v4.OwnerReferences[0].Kind != "Endpoints" {
		t.Errorf("annotations %v, owner %v", v4.Annotations, v4.OwnerReferences)
	}
	if v4.Name == v6.Name {
		t.Error("two slices of one name")
	}
}

func TestMirrorLimit(t *testing.T) {
	var ips []string
	for i := range 7 {
		ips = append(ips, fmt.Sprintf("192.0.2.%d", i+1))
	}
	plan := Mirror(userEndpoints(corev1.EndpointSubset{Addresses: addresses(ips...)}), nil, nil, 5)
	if len(plan.Create) != 1 || len(plan.Create[0].Endpoints) != 5 {
		t.Fatalf("%+v", plan.Create)
	}
	if len(plan.Events) != 1 || plan.Events[0].Reason != "TooManyAddressesToMirror" {
		t.Errorf("notes %v", plan.Events)
	}
}

// behaviour 22: what is mirrored, and what is left alone.
func TestMirrored(t *testing.T) {
	none, with := &corev1.Service{}, &corev1.Service{}
	with.Spec.Selector = map[string]string{"app": "x"}
	skip, election := userEndpoints(), userEndpoints()
	skip.Labels[discoveryv1.LabelSkipMirror] = "true"
	election.Annotations["control-plane.alpha.kubernetes.io/leader"] = "{}"
	for name, c := range map[string]struct {
		e    *corev1.Endpoints
		s    *corev1.Service
		want bool
	}{
		"user-made":     {userEndpoints(), none, true},
		"selector":      {userEndpoints(), with, false},
		"no Service":    {userEndpoints(), nil, false},
		"no Endpoints":  {nil, none, false},
		"asked to skip": {skip, none, false},
		"an election":   {election, none, false},
	} {
		if got := Mirrored(c.e, c.s); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// Every valid address is in exactly one mirrored slice, and mirroring again
// does nothing.
func TestMirrorExactAndIdempotent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{slices: map[string]*discoveryv1.EndpointSlice{}}
		for range 6 {
			e, want := drawEndpoints(t)
			present := func() []*discoveryv1.EndpointSlice { return slices.Collect(maps.Values(w.slices)) }
			w.apply(t, Mirror(e, present(), nil, 0))
			got := map[string]int{}
			for _, s := range w.slices {
				for _, x := range s.Endpoints {
					got[fmt.Sprint(*s.Ports[0].Port, x.Addresses)]++
				}
			}
			for k, n := range got {
				if n != 1 || !want[k] {
					t.Fatalf("%s is there %d times, wanted %v", k, n, want[k])
				}
			}
			if len(got) != len(want) {
				t.Fatalf("%v, want %v", got, want)
			}
			if again := Mirror(e, present(), nil, 0); !again.Empty() {
				t.Fatalf("mirrored again: %d creates, %d updates, %d deletes", len(again.Create), len(again.Update), len(again.Delete))
			}
		}
	})
}

func drawEndpoints(t *rapid.T) (*corev1.Endpoints, map[string]bool) {
	e, want := userEndpoints(), map[string]bool{}
	for port := range rapid.IntRange(0, 3).Draw(t, "subsets") {
		s := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Port: int32(port + 1)}}}
		for i := range rapid.IntRange(0, 4).Draw(t, "addresses") {
			ip := fmt.Sprintf(rapid.SampledFrom([]string{"192.0.2.%d", "2001:db8::%d"}).Draw(t, "family"), i+1)
			want[fmt.Sprint(port+1, []string{ip})] = true
			if rapid.Bool().Draw(t, "ready") {
				s.Addresses = append(s.Addresses, corev1.EndpointAddress{IP: ip})
			} else {
				s.NotReadyAddresses = append(s.NotReadyAddresses, corev1.EndpointAddress{IP: ip})
			}
		}
		e.Subsets = append(e.Subsets, s)
	}
	if rapid.Bool().Draw(t, "label") {
		e.Labels["b"] = "2"
	}
	return e, want
}
