package gateway

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway/certificates"
	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// The ports of the front of Ingresses.
const (
	IngressHTTP  = 80
	IngressHTTPS = 443
)

const kindIngress = "Ingress"

// IngressFront is what becomes of the Ingresses of a class, which share a front.
type IngressFront struct {
	Table *Table
	// Secrets are the ones that nodes need, and Named all that Ingresses name, each once.
	Secrets, Named []svc.Name
	Targets        []Target
	// Problems are the first invalid field of an Ingress, with the reason, by its name, and Ignored its annotations without effect.
	Problems, Ignored map[svc.Name]string
	// Orders are the certificates that Ingresses have ordered.
	Orders  *certificates.Set
	refers  map[svc.Name]bool
	granted bool // see Granted
	// made and regexes were made of what Ingresses have, and are kept while one has it.
	made    map[*networkingv1.Ingress]*madeIngress
	regexes *filter.Expressions
}

// Refers reports whether an Ingress of the front names a Service.
func (f *IngressFront) Refers(service svc.Name) bool { return f.refers[service] }

// Granted reports whether an Ingress of the front names an object of another namespace, for which ReferenceGrants count.
func (f *IngressFront) Granted() bool { return f.granted }

// BuildIngress returns the front of all Ingresses. A host belongs to the namespace of the oldest Ingress that names it; within
// the namespace, of two paths that are alike the one of the older Ingress counts, as of two certificates for a host.
func BuildIngress(o *Objects, before *IngressFront) *IngressFront {
	b := &ingressBuilder{
		objects: o,
		front: &IngressFront{
			Table: &Table{Ports: map[uint16]*Port{}}, Problems: map[svc.Name]string{}, Ignored: map[svc.Name]string{},
			Orders: certificates.NewSet(), refers: map[svc.Name]bool{}, made: make(map[*networkingv1.Ingress]*madeIngress, len(o.Ingresses)),
		},
		before: before, named: newSecretSet(o, maxIngressSecrets),
		rules: map[string][]*match{}, secrets: map[string]svc.Name{}, seen: map[Target]bool{}, owners: map[string]string{},
		last: map[string][]*match{}, asked: map[string]bool{},
		shut: map[string]bool{}, expressed: map[svc.Name]bool{},
	}
	if before == nil {
		b.before = &IngressFront{Table: &Table{}}
	}
	b.front.regexes = filter.NewExpressions(b.before.regexes, maxRoutePrograms)
	all := slices.SortedFunc(maps.Values(o.Ingresses), func(x, y *networkingv1.Ingress) int { return keyOf(x).Compare(keyOf(y)) })
	var annotated []*annotatedIngress
	for _, in := range all {
		annotated = append(annotated, b.read(in))
	}
	for _, a := range annotated {
		if a.Canary == nil {
			b.add(a)
		}
	}
	for _, a := range annotated {
		if a.Canary != nil {
			b.canary(a)
		}
	}
	for _, a := range annotated {
		if a.Canary == nil {
			b.addHosts(a)
		}
	}
	b.front.Secrets, b.front.Named = b.named.Usable, b.named.Named
	if len(all) == 0 {
		return b.front
	}
	plain := &Listener{Name: "http", hosts: hostpath.NewIndex[*paths](true), onlyBest: true}
	was := b.before.Table.listener(IngressHTTP, plain.Name)
	b.addLast()
	askOwn(b)
	b.keepCertified()
	b.closeHosts()
	b.redirectToHTTPS()
	fill(plain, b.rules, was, nil)
	port := &Port{Number: IngressHTTP, Listeners: []*Listener{plain}, hosts: hostpath.NewIndex[*Listener](true)}
	port.hosts.Set("", plain)
	b.front.Table.Ports[IngressHTTP] = port
	b.secure(plain)
	return b.front
}

// ingressBuilder collects the rules of Ingresses.
type ingressBuilder struct {
	objects   *Objects
	front     *IngressFront
	rules     map[string][]*match // by host
	last      map[string][]*match // default backends of Ingresses without rules, by namespace
	named     *trust.SecretSet
	secrets   map[string]svc.Name // by host
	seen      map[Target]bool
	owners    map[string]string // namespaces by host
	before    *IngressFront     // never nil
	asked     map[string]bool   // hosts that TLS is asked for
	shut      map[string]bool   // hosts without any request
	expressed map[svc.Name]bool // hosts with expressions, by namespace
}

// owns reports whether a host is for the namespace of an Ingress, which takes it if it is free. A "*" owns the hosts below
// it: else a younger Ingress could take them from under their certificate.
func (b *ingressBuilder) owns(in *networkingv1.Ingress, host string) bool {
	owner, taken := b.owners[host]
	if wide := hostpath.Wide(host); !taken && wide != "" {
		owner, taken = b.owners[wide]
	}
	if !taken || owner == in.Namespace {
		b.owners[host] = in.Namespace
		return true
	}
	return false
}

// addLast gives the default backends of Ingresses without rules the requests that no path of their namespace's hosts takes.
func (b *ingressBuilder) addLast() {
	for host, matches := range b.rules {
		b.rules[host] = append(matches, b.last[b.owners[host]]...)
	}
}

// keepCertified closes the hosts that have a certificate and no rules, where the rules of another namespace would take their
// requests.
func (b *ingressBuilder) keepCertified() {
	for _, host := range slices.Sorted(maps.Keys(b.secrets)) { // a "*" comes before the hosts below it
		if b.rules[host] != nil {
			continue
		}
		next := hostpath.Wide(host)
		if b.rules[next] == nil {
			next = ""
		}
		if b.owners[next] != b.owners[host] {
			b.rules[host] = slices.Concat([]*match{}, b.last[b.owners[host]])
		}
	}
}

// secure adds the port of HTTPS, with a listener for each host that has a certificate. All have the rules of plain. A host
// below the "*" of another namespace's certificate has no rules there: it has not asked for HTTPS.
func (b *ingressBuilder) secure(plain *Listener) {
	if len(b.secrets) == 0 {
		return
	}
	port := &Port{Number: IngressHTTPS, TLS: true, hosts: hostpath.NewIndex[*Listener](true)}
	add := func(host string, secret svc.Name, rules *hostpath.Index[*paths]) {
		l := &Listener{Name: host, Host: host, Certificates: []svc.Name{secret}, hosts: rules, onlyBest: true}
		port.Listeners = append(port.Listeners, l)
		port.hosts.Set(host, l)
	}
	for _, host := range slices.Sorted(maps.Keys(b.secrets)) {
		add(host, b.secrets[host], plain.hosts)
	}
	for _, host := range slices.Sorted(maps.Keys(b.rules)) {
		if _, own := b.secrets[host]; own {
			continue
		}
		if wide, ok := b.secrets[hostpath.Wide(host)]; ok && wide.Namespace != b.owners[host] {
			add(host, wide, hostpath.NewIndex[*paths](true))
		}
	}
	b.front.Table.Ports[IngressHTTPS] = port
}

func keyOf(in *networkingv1.Ingress) kinds.Object {
	return kinds.Object{Kind: kindIngress, Created: in.CreationTimestamp.Time, Name: svc.NameOf(in)}
}

func (b *ingressBuilder) problem(in *networkingv1.Ingress, format string, args ...any) {
	if n := svc.NameOf(in); b.front.Problems[n] == "" {
		b.front.Problems[n] = fmt.Sprintf(format, args...)
	}
}

// add adds the rules of an Ingress.
func (b *ingressBuilder) add(a *annotatedIngress) {
	in := a.Ingress
	hosts := map[string]bool{}
	for i := range in.Spec.Rules {
		host := strings.ToLower(in.Spec.Rules[i].Host)
		if !b.owns(in, host) {
			b.problem(in, "rules[%d]: host %q belongs to an older Ingress of another namespace", i, host)
			continue
		}
		hosts[host] = true
		b.shut[host] = b.shut[host] || a.ClosedHost
	}
	if a.made.holds(b, a) {
		a.made.again(b)
	} else {
		a.made = makeIngress(b, a, hosts)
		b.front.made[in] = a.made
	}
	for _, p := range a.made.paths {
		b.rules[p.host] = append(b.rules[p.host], p.match)
	}
	if m := a.made.last; m != nil {
		for h := range hosts {
			b.rules[h] = append(b.rules[h], m)
		}
		if len(in.Spec.Rules) == 0 {
			b.last[in.Namespace] = append(b.last[in.Namespace], m)
			if b.owns(in, "") {
				b.shut[""] = b.shut[""] || a.ClosedHost
				b.rules[""] = slices.Concat([]*match{}, b.rules[""]) // addLast adds m
			} else {
				b.problem(in, "defaultBackend: requests without a rule belong to an older Ingress of another namespace")
			}
		}
	}
	b.certificates(in, hosts)
	if a.doubt != "" {
		b.problem(in, "%s", a.doubt) // the last: it is served as written
	}
}

// rule returns a rule for a backend.
func (b *ingressBuilder) rule(a *annotatedIngress, index int, backend *networkingv1.IngressBackend, at string) *Rule {
	r := &Rule{Route: keyOf(a.Ingress), Index: index}
	b.apply(a, r)
	w := Weighted{Weight: 1}
	w.Backend, w.Valid = b.resolve(a, backend, at)
	if s := backend.Service; !w.Valid && s != nil && w.Backend.Name == (svc.Name{}) {
		w.Backend = Backend{Name: svc.Name{Namespace: a.Namespace, Name: s.Name}, Port: uint16(s.Port.Number)} //nolint:gosec // 0 for a name
	}
	b.target(r, &w)
	r.Backends, r.total = []Weighted{w}, 1
	spare(b, a, r)
	return r
}

// spare gives a rule the first port of the Service that answers while its own one has no endpoint or cannot be used, and in place of
// errors.
func spare(b *ingressBuilder, a *annotatedIngress, r *Rule) {
	if a.DefaultBackend == "" || r.Closed {
		return
	}
	name := svc.Name{Namespace: a.Namespace, Name: a.DefaultBackend}
	port := networkingv1.ServiceBackendPort{Number: b.objects.Services[name].First()}
	const at = "annotation " + nginx.Prefix + "default-backend"
	if to, ok := b.service(a.Ingress, name, port, at, a.protocol); ok {
		r.Spare = &Target{Backend: to, Timeout: r.Timeout}
		b.follow(*r.Spare)
	}
	if a.Errors == nil {
		return
	}
	// Pages are by HTTP, as in ingress-nginx, whatever the Pods speak.
	plain := func(app string) (BackendProtocol, bool) { return backendProtocol(app, false) }
	if to, ok := b.service(a.Ingress, name, port, at, plain); ok {
		r.Errors, r.Pages = a.Errors, &Target{Backend: to, Timeout: r.Timeout}
		b.follow(*r.Pages)
	}
}

// target has nodes follow the endpoints of a backend.
func (b *ingressBuilder) target(r *Rule, w *Weighted) {
	if w.Valid && !r.Closed {
		b.follow(r.Target(w))
	}
}

func (b *ingressBuilder) follow(t Target) {
	if !b.seen[t] {
		b.seen[t] = true
		b.front.Targets = append(b.front.Targets, t)
	}
}

// maxPath is the most that a path of a rule has, in bytes, as in the Gateway API.
const maxPath = 1024

// path reads a path of a host. In an Ingress that protects, one that cannot be used closes the paths that it could be for.
func (b *ingressBuilder) path(a *annotatedIngress, host string, p *networkingv1.HTTPIngressPath, at string) (*match, bool) {
	value := cmp.Or(p.Path, "/")
	kind, guards := valueOf(p.PathType, networkingv1.PathTypeImplementationSpecific), a.Protects()
	if a.expressions() && kind != networkingv1.PathTypeExact {
		return b.expressionMatch(a, host, value, at), true
	}
	path, ok := hostpath.Path(value)
	wrong := ""
	if len(value) > maxPath {
		wrong = fmt.Sprintf("it has more than %d bytes", maxPath)
	} else if !ok {
		wrong = fmt.Sprintf("%.100q is no path that all servers read alike", value)
	}
	switch {
	case wrong != "" && guards:
		return b.closed(a, value, hostpath.Beginning(value[:min(len(value), maxPath)]), at, wrong), true
	case wrong != "":
		b.problem(a.Ingress, "%s.path: %s", at, wrong)
		return nil, false
	case kind == networkingv1.PathTypeExact:
		return &match{kind: exactMatch, path: path}, true
	case guards && b.expressed[svc.Name{Namespace: a.Namespace, Name: host}]:
		return b.expressionMatch(a, host, path, at), true
	case kind != networkingv1.PathTypePrefix && !strings.HasSuffix(path, "/") && (guards || b.objects.Secured[svc.NameOf(a.Ingress)]):
		return &match{kind: regexMatch, path: path}, true // as in ingress-nginx, it goes on with anything
	}
	return &match{kind: prefixMatch, path: strings.TrimSuffix(path, "/")}, true
}

// resolve returns the backend that an Ingress names.
func (b *ingressBuilder) resolve(a *annotatedIngress, spec *networkingv1.IngressBackend, at string) (Backend, bool) {
	in := a.Ingress
	if spec.Service == nil {
		kind := "something else"
		if spec.Resource != nil {
			kind = "a " + spec.Resource.Kind
		}
		b.problem(in, "%s: it names %s; want a Service", at, kind)
		return Backend{}, false
	}
	return b.service(in, svc.Name{Namespace: in.Namespace, Name: spec.Service.Name}, spec.Service.Port, at, a.protocol)
}

// service returns the backend that a port of a Service is. protocol is by the appProtocol of the port.
func (b *ingressBuilder) service(in *networkingv1.Ingress, name svc.Name, port networkingv1.ServiceBackendPort, at string,
	protocol func(string) (BackendProtocol, bool),
) (Backend, bool) {
	b.front.refers[name] = true
	s := b.objects.Services[name]
	switch {
	case s == nil:
		b.problem(in, "%s: there is no Service %s", at, name)
		return Backend{}, false
	case s.External:
		b.problem(in, "%s: Service %s is of type ExternalName, which could name any address", at, name)
		return Backend{}, false
	}
	for _, p := range s.Ports {
		if p.UDP {
			continue
		}
		if port.Name != "" && p.Name == port.Name || int32(p.Number) == port.Number {
			protocol, ok := protocol(p.Protocol)
			if !ok {
				b.problem(in, "%s: Service %s: appProtocol %.100s is not served", at, name, p.Protocol)
			}
			return Backend{Name: name, Port: p.Number, PortName: p.Name, Protocol: protocol}, ok
		}
	}
	b.problem(in, "%s: Service %s has no such port of TCP", at, name)
	return Backend{}, false
}

// certificates adds the certificates of an Ingress: for the hosts that an entry of spec.tls names, or else for the hosts
// of the rules. A Secret that cannot be used leaves its hosts without HTTPS.
func (b *ingressBuilder) certificates(in *networkingv1.Ingress, ruled map[string]bool) {
	for i, t := range in.Spec.TLS {
		if i == maxIngressTLS {
			b.problem(in, "tls: only the first %d entries count", maxIngressTLS)
			break
		}
		var hosts []string // without the hosts of another namespace
		for _, h := range t.Hosts {
			if h = strings.ToLower(h); b.owns(in, h) {
				hosts = append(hosts, h)
			} else {
				b.problem(in, "tls[%d]: host %q belongs to an older Ingress of another namespace", i, h)
			}
		}
		if len(t.Hosts) == 0 {
			hosts = slices.Sorted(maps.Keys(ruled))
		}
		for _, h := range hosts {
			b.asked[h] = true
		}
		name := svc.Name{Namespace: in.Namespace, Name: t.SecretName}
		if t.SecretName == "" {
			b.problem(in, "tls[%d].secretName is missing", i)
			continue
		}
		ordered := orderEntry(b, in, i, name, hosts)
		if wrong := b.named.Add(name); wrong != "" {
			if ordered && wrong == trust.Missing {
				continue // until its first certificate, which stands in
			}
			b.problem(in, "tls[%d]: Secret %s: %s", i, name, wrong)
			continue
		}
		for _, h := range hosts {
			if _, taken := b.secrets[h]; !taken && h != "" {
				b.secrets[h] = name
			}
		}
	}
}
