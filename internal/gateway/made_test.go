package gateway

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/svc"
)

// randomIngresses changes Ingresses and their Services at random: hosts that meet each other, in two namespaces.
type randomIngresses struct {
	*rand.Rand
	o *Objects
}

func (r *randomIngresses) of(all ...string) string { return all[r.IntN(len(all))] }

func (r *randomIngresses) name() svc.Name {
	return svc.Name{Namespace: r.of("default", "b"), Name: fmt.Sprint("i", r.IntN(6))}
}

// change makes, changes or deletes an Ingress or a Service, or has Ingresses of ingress-nginx.
func (r *randomIngresses) change() {
	n := r.name()
	switch r.IntN(8) {
	case 0:
		delete(r.o.Ingresses, n)
	case 1:
		if n.Name = r.of("a", "c"); r.o.Services[n] != nil {
			delete(r.o.Services, n)
		} else {
			r.o.Services[n] = &services.Service{UID: fmt.Sprint(r.Uint64()), Ports: []services.Port{{Name: "http", Number: 80}}}
		}
	case 2:
		if delete(r.o.Secured, n); r.IntN(2) == 0 {
			r.o.Secured[n] = true
		}
	default:
		r.o.Ingresses[n] = r.ingress(n)
	}
}

func (r *randomIngresses) ingress(n svc.Name) *networkingv1.Ingress {
	in := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: n.Namespace, Name: n.Name, UID: types.UID(fmt.Sprint(r.Uint64()))}}
	in.CreationTimestamp, in.Annotations = metav1.NewTime(time.Unix(int64(r.IntN(3)), 0)), map[string]string{}
	for _, a := range []string{
		"canary: true", "canary-weight: 30", "canary-by-header: X-New", "use-regex: true", "rewrite-target: /x", "ssl-redirect: false",
		"force-ssl-redirect: true", "whitelist-source-range: 10.0.0.0/8", "auth-url: http://a.default.svc.cluster.local/ask", "app-root: /app",
		"from-to-www-redirect: true", "server-alias: alias.example.com", "limit-rps: 5", "denylist-source-range: nonsense", "enable-cors: true",
		"auth-url: https://a.example.com/open",
	} {
		if name, value, _ := strings.Cut(a, ": "); r.IntN(14) == 0 {
			in.Annotations[nginx.Prefix+name] = value
		}
	}
	backend := func() networkingv1.IngressBackend {
		port := networkingv1.ServiceBackendPort{Number: int32(80 + r.IntN(12)/11)}
		return networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: r.of("a", "c"), Port: port}}
	}
	kinds := []networkingv1.PathType{
		networkingv1.PathTypeExact, networkingv1.PathTypePrefix, networkingv1.PathTypePrefix, networkingv1.PathTypeImplementationSpecific,
	}
	hosts := []string{"a.example.com", "b.example.com", "*.example.com", "", "www.other.test"}
	for range r.IntN(3) {
		rule := networkingv1.IngressRule{Host: r.of(hosts...)}
		for range r.IntN(4) {
			if rule.HTTP == nil {
				rule.HTTP = &networkingv1.HTTPIngressRuleValue{}
			}
			rule.HTTP.Paths = append(rule.HTTP.Paths, networkingv1.HTTPIngressPath{
				Path: r.of("/", "/app", "/app/x", "/open", "/a//b", "/[ab"), PathType: &kinds[r.IntN(len(kinds))], Backend: backend(),
			})
		}
		in.Spec.Rules = append(in.Spec.Rules, rule)
	}
	if r.IntN(4) == 0 || len(in.Spec.Rules) == 0 {
		b := backend()
		in.Spec.DefaultBackend = &b
	}
	if r.IntN(3) == 0 {
		in.Spec.TLS = []networkingv1.IngressTLS{{Hosts: []string{r.of(hosts[:3]...)}, SecretName: r.of("cert", "")}}
	}
	return in
}

// A front that takes parts over from an earlier one equals one that is built from nothing, after any changes.
func TestIngressesTakenOver(t *testing.T) {
	kept := 0
	for seed := range uint64(60) {
		r := &randomIngresses{rand.New(rand.NewPCG(seed, 1)), objects(t, strings.TrimPrefix(service("a"), "\n---\n"))}
		r.o.Secured, r.o.Secrets = map[svc.Name]bool{}, map[svc.Name]Secret{{Namespace: "default", Name: "cert"}: {}}
		var front *IngressFront
		for step := range 60 {
			for range 1 + r.IntN(2) {
				r.change()
			}
			before := front
			front = BuildIngress(r.o, before)
			for in, m := range front.made {
				if before != nil && before.made[in] == m && m.kept {
					kept++
				}
			}
			want := BuildIngress(r.o, nil)
			sameFronts(t, fmt.Sprintf("seed %d, step %d", seed, step), front, want)
		}
	}
	if kept < 3000 {
		t.Errorf("%d times an Ingress was taken over: the test shows little", kept)
	}
}

// An Ingress that gets a canary is taken over without it, and both redirect to HTTPS: only the later front has the canary.
func TestCanaryOfTakenOver(t *testing.T) {
	const host = "a.example.com"
	o := objects(t, strings.TrimPrefix(service("a")+annotated("default/main", host, "force-ssl-redirect: true", "P / a"), "\n---\n"))
	canary := objects(t, strings.TrimPrefix(annotated("default/new", host, "canary: true; canary-weight: 30", "P / a"), "\n---\n")).Ingresses
	first := BuildIngress(o, nil)
	maps.Copy(o.Ingresses, canary)
	with := BuildIngress(o, first)
	sameFronts(t, "with a canary", with, BuildIngress(o, nil))
	if n := len(matchesOf(with)[0].match.Rule.Backends); n != 2 {
		t.Errorf("%d backends with a canary", n)
	}
	maps.DeleteFunc(o.Ingresses, func(n svc.Name, _ *networkingv1.Ingress) bool { return canary[n] != nil })
	sameFronts(t, "without it again", BuildIngress(o, with), first)
}

// sameFronts fails the test if two fronts differ.
func sameFronts(t *testing.T, what string, front, want *IngressFront) {
	t.Helper()
	if text, again := portrait(front), portrait(want); text != again {
		t.Fatalf("%s: with parts of an earlier front\n%s\nfrom nothing\n%s", what, text, again)
	}
	got, all := matchesOf(front), matchesOf(want)
	if len(got) != len(all) {
		t.Fatalf("%s: %d matches, want %d", what, len(got), len(all))
	}
	for i := range got {
		if g, w := got[i], all[i]; g.at != w.at || !sameMatch(g.match, w.match) {
			t.Fatalf("%s: %s: %+v, rule %+v; from nothing %s: %+v, rule %+v", what, g.at, g.match, g.match.Rule, w.at, w.match, w.match.Rule)
		}
	}
}

// portrait is what a front is, beside its matches.
func portrait(f *IngressFront) string {
	var refers, targets []string
	for n := range f.refers {
		refers = append(refers, n.String())
	}
	for _, t := range f.Targets {
		targets = append(targets, fmt.Sprint(t))
	}
	slices.Sort(refers)
	slices.Sort(targets)
	return fmt.Sprintln(f.Problems, f.Ignored, f.granted, refers, targets, f.Secrets, f.Named)
}

// placedMatch is a match with where it is.
type placedMatch struct {
	at    string
	match *match
}

// matchesOf returns the matches of a front at some hosts. The ones of default backends of a host come in any order, so they are sorted.
func matchesOf(f *IngressFront) (out []placedMatch) {
	for _, number := range slices.Sorted(maps.Keys(f.Table.Ports)) {
		for _, l := range f.Table.Ports[number].Listeners {
			for _, host := range []string{
				"a.example.com", "b.example.com", "x.example.com", "alias.example.com", "www.other.test", "other.test", "none.test",
			} {
				l.hosts.Each(host, func(p *paths) bool {
					for _, m := range p.from {
						cookie := ""
						if m.cookie != nil {
							cookie = m.cookie.Name + m.cookie.Value
						}
						at := fmt.Sprint(number, l.Name, l.Certificates, host, m.Rule.Route, m.Rule.Index, m.kind, m.path, m.headers, cookie)
						out = append(out, placedMatch{at, m})
					}
					return true
				})
			}
		}
	}
	slices.SortStableFunc(out, func(a, b placedMatch) int { return strings.Compare(a.at, b.at) })
	return out
}

func sameMatch(a, b *match) bool {
	return a.kind == b.kind && a.path == b.path && a.order == b.order && reflect.DeepEqual(a.headers, b.headers) &&
		reflect.DeepEqual(a.cookie, b.cookie) && reflect.DeepEqual(a.regex, b.regex) && reflect.DeepEqual(a.Rule, b.Rule)
}

// One change of 3,000 Ingresses with five paths each.
func BenchmarkIngressChange(b *testing.B) {
	o := objects(b, strings.TrimPrefix(service("a"), "\n---\n"))
	one := func(i, generation int) *networkingv1.Ingress {
		in := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("i", i), Namespace: "default"}}
		in.Annotations = map[string]string{nginx.Prefix + "proxy-body-size": "8m", nginx.Prefix + "force-ssl-redirect": "true"}
		rule := networkingv1.IngressRule{Host: fmt.Sprintf("h%d.example.com", i)}
		rule.HTTP = &networkingv1.HTTPIngressRuleValue{}
		for p := range 5 {
			to := &networkingv1.IngressServiceBackend{Name: "a", Port: networkingv1.ServiceBackendPort{Number: 80}}
			rule.HTTP.Paths = append(rule.HTTP.Paths, networkingv1.HTTPIngressPath{
				Path: fmt.Sprintf("/p%d-%d", p, generation), PathType: new(networkingv1.PathTypePrefix),
				Backend: networkingv1.IngressBackend{Service: to},
			})
		}
		in.Spec.Rules = []networkingv1.IngressRule{rule}
		return in
	}
	for i := range 3000 {
		in := one(i, 0)
		o.Ingresses[svc.NameOf(in)] = in
	}
	f := BuildIngress(o, nil)
	generation := 0
	b.ReportAllocs()
	for b.Loop() {
		generation++
		in := one(7, generation)
		o.Ingresses[svc.NameOf(in)] = in
		f = BuildIngress(o, f)
	}
	if f.Table.Ports[IngressHTTP].Listeners[0].hosts.Get(hostpath.Host("h7.example.com")) == nil {
		b.Error("the host has gone")
	}
}
