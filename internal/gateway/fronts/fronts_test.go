package fronts

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/svc"
)

const canary = nginx.Prefix + "canary"

// ingress returns an Ingress of namespace/name with annotations, as key=value, and paths, as host/path.
func ingress(name string, annotations []string, paths ...string) *networkingv1.Ingress {
	namespace, name, _ := strings.Cut(name, "/")
	in := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: map[string]string{}}}
	for _, a := range annotations {
		key, value, _ := strings.Cut(a, "=")
		in.Annotations[key] = value
	}
	for _, p := range paths {
		host, path, _ := strings.Cut(p, "/")
		r := networkingv1.IngressRule{Host: host}
		r.HTTP = &networkingv1.HTTPIngressRuleValue{
			Paths: []networkingv1.HTTPIngressPath{{Path: "/" + path, PathType: new(networkingv1.PathTypePrefix)}},
		}
		in.Spec.Rules = append(in.Spec.Rules, r)
	}
	return in
}

func all(list ...*networkingv1.Ingress) map[svc.Name]*networkingv1.Ingress {
	out := map[svc.Name]*networkingv1.Ingress{}
	for _, in := range list {
		out[svc.NameOf(in)] = in
	}
	return out
}

// text lists the fronts with their Ingresses, the shared one as "-".
func text(s *Split) string {
	var out []string
	for f := range s.Fronts() {
		var list []string
		for n := range s.Ingresses(f) {
			list = append(list, n.String())
		}
		slices.Sort(list)
		name := f.String()
		if f == (svc.Name{}) {
			name = "-"
		}
		out = append(out, fmt.Sprint(name, list))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// An Ingress is at one front, and at none if it asks for one that does not exist. Canaries go with the Ingresses that have their paths.
func TestSplit(t *testing.T) {
	own, other := []string{Annotation + "=own"}, []string{canary + "=true"}
	for _, c := range []struct {
		name, want string
		in         []*networkingv1.Ingress
		problem    string // a part of what is wrong with a/x
	}{
		{"none", "", nil, ""},
		{"shared", "-[a/x b/x]", []*networkingv1.Ingress{ingress("a/x", nil), ingress("b/x", []string{Annotation + "=Shared "})}, ""},
		{"own", "-[a/y] a/x[a/x] b/x[b/x]", []*networkingv1.Ingress{ingress("a/x", own), ingress("a/y", nil), ingress("b/x", own)}, ""},
		{"a wrong value", "-[a/y]", []*networkingv1.Ingress{ingress("a/x", []string{Annotation + "=mine"}), ingress("a/y", nil)},
			"want one of own, shared"},
		{"no value", "", []*networkingv1.Ingress{ingress("a/x", []string{Annotation + "="})}, "want one of"},
		{"a typing error", "", []*networkingv1.Ingress{ingress("a/x", []string{"fairlead.dev/frnt=own"})}, "is fairlead.dev/front meant?"},
		{"others", "-[a/x]", []*networkingv1.Ingress{ingress("a/x", []string{"fairlead.dev/acme=http-01", "example.com/front=x"})}, ""},
		{"a canary of an own front", "a/x[a/c a/x]", []*networkingv1.Ingress{ingress("a/x", own, "h/p/"), ingress("a/c", other, "H/p")}, ""},
		{"a canary of both", "-[a/c a/y] a/x[a/c a/x]", []*networkingv1.Ingress{
			ingress("a/x", own, "h/p"), ingress("a/y", nil, "h/q"), ingress("a/c", other, "h/p", "h/q")}, ""},
		{"a canary beside", "-[a/c a/y] a/x[a/x]", []*networkingv1.Ingress{
			ingress("a/x", own, "h/p"), ingress("a/y", nil, "h/q"), ingress("a/c", other, "h/q")}, ""},
		{"a canary of another namespace", "-[b/c] a/x[a/x]", []*networkingv1.Ingress{
			ingress("a/x", own, "h/p"), ingress("b/c", other, "h/p")}, ""},
		{"a canary that asks", "", []*networkingv1.Ingress{ingress("a/x", slices.Concat(own, other), "h/p")}, "a canary has the front of"},
		{"no canary", "a/x[a/x]", []*networkingv1.Ingress{ingress("a/x", slices.Concat(own, []string{canary + "=false"}), "h/p")}, ""},
	} {
		s := Of(all(c.in...))
		x := svc.Name{Namespace: "a", Name: "x"}
		if got, wrong := text(s), s.Problem(x); got != c.want || (wrong == "") != (c.problem == "") || !strings.Contains(wrong, c.problem) {
			t.Errorf("%s: %s, %q; want %s, %q", c.name, got, wrong, c.want, c.problem)
		}
		for n := range all(c.in...) {
			for _, f := range s.At(n) {
				if s.Ingresses(f)[n] == nil {
					t.Errorf("%s: %s is not at %s", c.name, n, f)
				}
			}
		}
	}
}

// A change of an Ingress concerns its fronts, before and after, and the fronts of canaries that move with it, and no other.
func TestChangedFronts(t *testing.T) {
	own := []string{Annotation + "=own"}
	follower := ingress("a/c", []string{canary + "=true"}, "h/p")
	before := all(ingress("a/x", own, "h/p"), ingress("a/y", nil, "h/p"), follower, ingress("b/z", own))
	for _, c := range []struct {
		name   string
		change *networkingv1.Ingress
		want   string
	}{
		{"an own front", ingress("b/z", own, "h/other"), "b/z"},
		{"at the shared one", ingress("a/y", nil, "h/p", "h/more"), "/"},
		{"to the shared one", ingress("b/z", nil), "/ b/z"},
		{"to an own one", ingress("a/y", own, "h/p"), "/ a/x a/y"},
		{"to none", ingress("b/z", []string{Annotation + "=x"}), "b/z"},
		{"a new one", ingress("b/new", own), "b/new"},
	} {
		after := maps.Clone(before)
		n := svc.NameOf(c.change)
		after[n] = c.change
		var got []string
		for f := range Of(after).Changed(Of(before), map[svc.Name]bool{n: true}) {
			got = append(got, f.String())
		}
		if slices.Sort(got); strings.Join(got, " ") != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
		delete(after, n)
		if before[n] == nil {
			continue
		}
		if changed := Of(after).Changed(Of(before), map[svc.Name]bool{n: true}); len(changed) == 0 {
			t.Errorf("%s: a deletion changes nothing", c.name)
		}
	}
}

// What annotations do not do at a front is told.
func TestIgnoredAtFronts(t *testing.T) {
	for _, c := range []struct {
		annotations []string
		want        string
	}{
		{[]string{"fairlead.dev/lb-internal=true"}, "fairlead.dev/lb-internal has no effect without fairlead.dev/front: own"},
		{[]string{"fairlead.dev/lb-compress=gzip"}, ""},
		{[]string{Annotation + "=own", "fairlead.dev/lb-internal=true", "fairlead.dev/lb-compress=gzip"}, ""},
		{[]string{Annotation + "=own", "fairlead.dev/lb-tls-secrets=x"}, "fairlead.dev/lb-tls-secrets has no effect"},
	} {
		got := Of(all(ingress("a/x", c.annotations))).Ignored(svc.Name{Namespace: "a", Name: "x"})
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%q: %q", c.annotations, got)
		}
	}
}

// many returns Ingresses as a cluster has them: each tenth has a front for itself, each twentieth is a canary.
func many(n int) map[svc.Name]*networkingv1.Ingress {
	out := make(map[svc.Name]*networkingv1.Ingress, n)
	for i := range n {
		annotations := []string{nginx.Prefix + "proxy-body-size=8m", "example.com/team=a"}
		switch {
		case i%10 == 1:
			annotations = append(annotations, Annotation+"=own")
		case i%20 == 2:
			annotations = append(annotations, canary+"=true")
		}
		host := fmt.Sprintf("host-%d.example.com", i/2)
		in := ingress(fmt.Sprintf("ns-%d/in-%d", i/100, i), annotations, host+"/a", host+"/b")
		out[svc.NameOf(in)] = in
	}
	return out
}

// One change after another has the fronts that all Ingresses together have, and tells of each front that is another one.
func TestNext(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	kinds := [][]string{nil, nil, {Annotation + "=own"}, {canary + "=true"}, {Annotation + "=x"}, {"fairlead.dev/lb-internal=true"}}
	now, s := map[svc.Name]*networkingv1.Ingress{}, Of(nil)
	for range 2000 {
		changes, alike := map[svc.Name]*networkingv1.Ingress{}, map[svc.Name]bool{}
		for range 1 + random.IntN(3) {
			in := ingress(fmt.Sprintf("%c/%d", 'a'+random.IntN(3), random.IntN(5)), kinds[random.IntN(len(kinds))],
				fmt.Sprintf("h/%d", random.IntN(2)), fmt.Sprintf("g/%d", random.IntN(2)))
			n := svc.NameOf(in)
			switch have := now[n]; {
			case changes[n] != nil:
			case random.IntN(4) == 0:
				changes[n] = nil
			case have != nil && random.IntN(4) == 0:
				changes[n], alike[n] = have.DeepCopy(), true
			default:
				changes[n] = in
			}
		}
		for n, in := range changes {
			if now[n] = in; in == nil {
				delete(now, n)
				delete(alike, n)
			}
		}
		next, changed := s.Next(changes, alike)
		whole := Of(now)
		if got, want := text(next), text(whole); got != want {
			t.Fatalf("%s, want %s", got, want)
		}
		for n, in := range now {
			if next.Problem(n) != whole.Problem(n) || next.Ignored(n) != whole.Ignored(n) || !slices.Equal(next.At(n), whole.At(n)) {
				t.Fatalf("%s is at %v, %q, %q", n, next.At(n), next.Problem(n), next.Ignored(n))
			}
			for _, f := range next.At(n) {
				if next.Ingresses(f)[n] != in {
					t.Fatalf("an earlier %s is at %s", n, f)
				}
			}
		}
		for _, f := range slices.Concat(slices.Collect(s.Fronts()), slices.Collect(next.Fronts())) {
			same := maps.EqualFunc(s.Ingresses(f), next.Ingresses(f), func(a, b *networkingv1.Ingress) bool {
				return a == b || alike[svc.NameOf(a)]
			})
			if !same && !changed[f] {
				t.Fatalf("front %s is another one, and not told of", f)
			}
		}
		s = next
	}
}

// A change of an Ingress with a front for itself allocates as much beside 10,000 Ingresses as beside 100, but for the list of namespaces.
func TestCostFollowsChange(t *testing.T) {
	cost := map[int]float64{}
	for _, n := range []int{100, 10_000} {
		all := many(n)
		s, changed := Of(all), svc.Name{Namespace: "ns-0", Name: "in-1"}
		cost[n] = testing.AllocsPerRun(100, func() {
			var fronts map[svc.Name]bool
			if s, fronts = s.Next(map[svc.Name]*networkingv1.Ingress{changed: all[changed].DeepCopy()}, nil); len(fronts) != 1 || !fronts[changed] {
				t.Fatalf("%v", fronts)
			}
		})
	}
	if cost[10_000] > cost[100]+50 {
		t.Errorf("%v allocations beside 10,000 Ingresses, and %v beside 100", cost[10_000], cost[100])
	}
}

// One change of an Ingress, at the shared front and at a front for itself, beside 100 and 10,000 others in namespaces of 100.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		all := many(n)
		for front, name := range map[string]string{"shared": "in-3", "own": "in-1"} {
			b.Run(fmt.Sprint(front, "/", n), func(b *testing.B) {
				s, changed := Of(all), svc.Name{Namespace: "ns-0", Name: name}
				b.ReportAllocs()
				for b.Loop() {
					s, _ = s.Next(map[svc.Name]*networkingv1.Ingress{changed: all[changed].DeepCopy()}, nil)
				}
			})
		}
	}
}

// The fronts of all Ingresses, as after a start.
func BenchmarkOf(b *testing.B) {
	all := many(10_000)
	b.ReportAllocs()
	for b.Loop() {
		Of(all)
	}
}

// An Ingress that only has another status changes no front, and the next Split has it as it is now.
func TestAnotherStatus(t *testing.T) {
	before := Of(all(ingress("a/x", []string{Annotation + "=own"}), ingress("a/y", nil)))
	again := all(ingress("a/x", []string{Annotation + "=own"}))
	x := svc.Name{Namespace: "a", Name: "x"}
	for _, alike := range []bool{true, false} {
		after, changed := before.Next(maps.Clone(again), map[svc.Name]bool{x: alike})
		if after.Ingresses(x)[x] != again[x] || changed[x] == alike || len(changed) > 1 {
			t.Errorf("alike %t: %v has changed", alike, changed)
		}
	}
}
