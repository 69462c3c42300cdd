package gateway

import (
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// objects reads manifests.
func objects(t testing.TB, text string) *Objects {
	t.Helper()
	o := &Objects{
		Gateways: map[svc.Name]*gwv1.Gateway{}, Routes: map[svc.Name]*gwv1.HTTPRoute{}, Grants: map[svc.Name]*gwv1.ReferenceGrant{},
		Namespaces: map[string]map[string]string{}, Services: map[svc.Name]*services.Service{}, Secrets: map[svc.Name]Secret{},
		Ingresses: map[svc.Name]*networkingv1.Ingress{}, Streams: map[kinds.Route]*kinds.Stream{}, Sets: map[svc.Name]*gwv1.ListenerSet{},
		Calls: map[svc.Name]*gwv1.GRPCRoute{}, Policies: trust.NewPolicies(), Authorities: map[trust.Ref]string{},
	}
	for doc := range strings.SplitSeq(text, "\n---\n") {
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
		switch kind.Kind {
		case "Gateway":
			add(t, doc, o.Gateways)
		case "HTTPRoute":
			add(t, doc, o.Routes)
		case "GRPCRoute":
			add(t, doc, o.Calls)
		case "TLSRoute":
			addStream(t, doc, o, kinds.StreamOfTLS)
		case "TCPRoute":
			addStream(t, doc, o, kinds.StreamOfTCP)
		case "UDPRoute":
			addStream(t, doc, o, kinds.StreamOfUDP)
		case "ListenerSet":
			add(t, doc, o.Sets)
		case "ReferenceGrant":
			add(t, doc, o.Grants)
		case "Ingress":
			add(t, doc, o.Ingresses)
		case "Namespace":
			have := map[svc.Name]*corev1.Namespace{}
			add(t, doc, have)
			for n, ns := range have {
				o.Namespaces[n.Name] = ns.Labels
			}
		case "Service":
			have := map[svc.Name]*corev1.Service{}
			add(t, doc, have)
			for n, s := range have {
				o.Services[n] = services.Of(s)
			}
		case "Secret":
			have := map[svc.Name]*corev1.Secret{}
			add(t, doc, have)
			for n := range have {
				o.Secrets[n] = Secret{}
				o.Authorities[trust.Ref{Kind: trust.Secret, Name: n}] = ""
			}
		case "ConfigMap":
			have := map[svc.Name]*corev1.ConfigMap{}
			add(t, doc, have)
			for n, m := range have {
				problem := ""
				if m.Data[trust.Entry] == "" {
					problem = "its entry ca.crt has no certificate"
				}
				o.Authorities[trust.Ref{Kind: trust.ConfigMap, Name: n}] = problem
			}
		case "BackendTLSPolicy":
			have := map[svc.Name]*gwv1.BackendTLSPolicy{}
			add(t, doc, have)
			for n, p := range have {
				o.Policies.Set(n, p)
			}
		default:
			t.Fatalf("kind %q in\n%s", kind.Kind, doc)
		}
	}
	return o
}

func add[T any, P interface {
	*T
	metav1.Object
}](t testing.TB, doc string, to map[svc.Name]P) {
	t.Helper()
	v := P(new(T))
	if err := yaml.UnmarshalStrict([]byte(doc), v); err != nil {
		t.Fatalf("%v in\n%s", err, doc)
	}
	if v.GetNamespace() == "" {
		v.SetNamespace("default")
	}
	to[svc.NameOf(v)] = v
}

func addStream[T any, P interface {
	*T
	metav1.Object
}](t testing.TB, doc string, o *Objects, read func(P) *kinds.Stream) {
	t.Helper()
	have := map[svc.Name]P{}
	add(t, doc, have)
	for _, r := range have {
		s := read(r)
		o.Streams[s.Route()] = s
	}
}

// connect returns where a connection to a port goes that begins with a name of TLS: the Service of the rule's first backend,
// "requests" for a listener of HTTPS, or why it is rejected.
func connect(table *Table, port uint16, udp bool, name string) string {
	p := table.Ports[port]
	if udp {
		p = table.Datagrams[port]
	}
	if p == nil {
		return "closed"
	}
	l, rule := p.Connection(name)
	switch {
	case l == nil:
		return "no listener"
	case l.Mode == Requests:
		return "requests"
	case rule == nil:
		return "no route"
	}
	w := rule.Pick(0)
	if w == nil || !w.Valid {
		return "rejected"
	}
	return w.Backend.Name.Name
}

// fields are header fields and a query.
type fields struct {
	header map[string]string
	query  url.Values
}

func (f fields) Header(name string) (string, bool) { v, ok := f.header[name]; return v, ok }
func (f fields) Cookie(name string) (string, bool) {
	for item := range strings.SplitSeq(f.header["cookie"], ";") {
		if n, v, _ := strings.Cut(item, "="); n == name {
			return v, true
		}
	}
	return "", false
}
func (f fields) Query(name string) (string, bool) { return f.query.Get(name), f.query.Has(name) }

// ask returns where the request "METHOD http://host:port/path?query name=value …" goes: the Service of the rule's first
// backend, or a status.
func ask(t testing.TB, table *Table, text string) string {
	t.Helper()
	words := strings.Fields(text)
	if !strings.Contains(words[0], "://") {
		words = append([]string{words[1], words[0]}, words[2:]...)
	} else {
		words = append([]string{words[0], "GET"}, words[1:]...)
	}
	u, err := url.Parse(words[0])
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(80)
	if u.Scheme == "https" {
		port = 443
	}
	if p := u.Port(); p != "" {
		_, _ = fmt.Sscan(p, &port)
	}
	p := table.Ports[port]
	if p == nil {
		return "closed"
	}
	path, ok := hostpath.Path(u.EscapedPath())
	if !ok {
		return "400"
	}
	f := fields{map[string]string{}, u.Query()}
	for _, w := range words[2:] {
		name, value, _ := strings.Cut(w, "=")
		f.header[name] = value
	}
	rule, _, v := p.Find(&Request{Host: hostpath.Host(u.Host), Path: path, Method: words[1], Fields: f})
	switch {
	case v == NoRoute:
		return "404"
	case v == Disputed:
		return "400"
	case rule.Redirect != nil:
		return "redirect"
	}
	w := rule.Pick(0)
	if w == nil || !w.Valid {
		return "500"
	}
	return w.Backend.Name.Name
}

// service returns the manifest of a Service with port 80.
func service(names ...string) string {
	var out []string
	for _, n := range names {
		ns, name, ok := strings.Cut(n, "/")
		if !ok {
			ns, name = "default", n
		}
		out = append(out, fmt.Sprintf("kind: Service\nmetadata: {namespace: %s, name: %s}\nspec: {ports: [{name: http, port: 80}]}", ns, name))
	}
	return "\n---\n" + strings.Join(out, "\n---\n")
}

const plainGateway = `
kind: Gateway
metadata: {name: g}
spec: {gatewayClassName: fairlead, listeners: [{name: http, port: 80, protocol: HTTP}]}`

// builtFrom returns the front of Gateway default/g.
func builtFrom(t testing.TB, text string) *Front {
	t.Helper()
	return BuildGateway(objects(t, text), svc.Name{Namespace: "default", Name: "g"}, nil)
}

// conflicts returns the reasons of the condition Conflicted of all listeners.
func conflicts(f *Front) string {
	var out []string
	for _, l := range f.Status(nil, "").Listeners {
		out = append(out, strings.Fields(conditionOf(l.Conditions, "Conflicted"))[1])
	}
	return fmt.Sprint(out)
}

func conditionOf(list []metav1.Condition, kind string) string {
	for _, c := range list {
		if c.Type == kind {
			return string(c.Status) + " " + c.Reason
		}
	}
	return ""
}

// routesOf returns the routes that name the Gateway or one of its ListenerSets.
func routesOf(f *Front) []kinds.Route {
	return slices.SortedFunc(maps.Keys(f.routes), kinds.Route.Compare)
}
