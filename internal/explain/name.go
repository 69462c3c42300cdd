package explain

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/zone"
)

// typeA is the type of an address record (RFC 1035, 3.2.2), classIN the class.
const (
	typeA   = 1
	classIN = 1
)

// name looks the name up in the zone that the cluster's DNS makes of the objects. It returns false if the
// name leads to no Service.
func (e *explaining) name() bool {
	z, err := zone.New(zone.Config{Domains: e.objects.Domains})
	if err != nil {
		e.verdict.end(NoName, NameUnknown, err.Error(), "cluster domains")
		return false
	}
	for _, n := range e.objects.Namespaces {
		z.SetNamespace(n)
	}
	for _, s := range e.objects.Services {
		z.SetService(s)
	}
	for _, s := range e.objects.Slices {
		z.SetSlice(s)
	}
	for _, full := range candidates(e.question.Name, e.objects.Domains) {
		rcode, ours := ask(z, full)
		if n, is := serviceOf(full, e.objects.Domains); ours && rcode == zone.RcodeSuccess && is && e.objects.find(n) != nil {
			e.target = n
			e.verdict.add(e.question.Name+" is the name "+full, "DNS of the cluster")
			return true
		}
	}
	e.unresolved()
	return false
}

// unresolved names the part of the name that does not exist.
func (e *explaining) unresolved() {
	name := e.question.Name
	n, is := svc.Name{}, false
	for _, full := range candidates(name, e.objects.Domains) {
		// Only a name of two labels is meant as a Service: others may be of another domain.
		if n, is = serviceOf(full, e.objects.Domains); is && strings.HasPrefix(full, n.Name+"."+n.Namespace+".svc.") {
			break
		}
		is = false
	}
	const source = "DNS of the cluster"
	switch {
	case !is:
		e.verdict.end(NoName, NameUnknown, name+" is no name of the cluster domains "+joined(e.objects.Domains, 4)+
			": DNS asks its upstream servers for it", source)
	case e.objects.Namespaces != nil && !slices.Contains(e.objects.Namespaces, n.Namespace):
		e.verdict.end(NoName, NameUnknown, name+" does not resolve: there is no namespace "+n.Namespace, "Namespaces")
	case e.objects.find(n) == nil:
		e.verdict.end(NoName, NameUnknown, name+" does not resolve: there is no Service "+n.String()+e.objects.near(n),
			"API server: Services of namespace "+n.Namespace)
	default:
		e.verdict.end(NoName, NameUnknown, name+" does not resolve: Service "+n.String()+" has no address and no such port", source)
	}
}

// candidates are the names that a client with the search path of Pods asks for.
func candidates(name string, domains []string) []string {
	if full, dot := strings.CutSuffix(name, "."); dot {
		return []string{strings.ToLower(full)}
	}
	name = strings.ToLower(name)
	out := []string{name}
	for _, d := range domains {
		out = append(out, name+".svc."+d, name+"."+d)
	}
	return out
}

// serviceOf reads the Service from a name below "svc" and a cluster domain.
func serviceOf(name string, domains []string) (svc.Name, bool) {
	for _, d := range domains {
		rest, ok := strings.CutSuffix(name, ".svc."+strings.ToLower(d))
		if !ok {
			continue
		}
		labels := strings.Split(rest, ".")
		if len(labels) < 2 {
			continue
		}
		return svc.Name{Namespace: labels[len(labels)-1], Name: labels[len(labels)-2]}, true
	}
	return svc.Name{}, false
}

// ask puts a question to a zone. ours reports whether it is for the zone to answer.
func ask(z *zone.Zone, name string) (rcode uint8, ours bool) {
	q := zone.Question{Type: typeA}
	if q.Name.ParseText(name) != nil {
		return zone.RcodeNXDomain, true
	}
	msg := append(make([]byte, 12), q.Name.Wire()...)
	msg = binary.BigEndian.AppendUint16(msg, typeA)
	msg = binary.BigEndian.AppendUint16(msg, classIN)
	_, reply := z.Answer(msg, &q, 4096)
	return reply.Rcode, reply.Kind != zone.NotOurs
}
