package front

import (
	"crypto/x509"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
)

// reason is why a Service is not served; empty if it is.
type reason struct {
	text string
	// waits is true if nothing is wrong: something has not been read yet.
	waits bool
}

func because(format string, args ...any) reason { return reason{text: fmt.Sprintf(format, args...)} }
func waitFor(what string) reason                { return reason{text: "waiting for " + what, waits: true} }

// inputs are what Services are built from. They belong to a Front, whose mu the caller of each method holds.
type inputs struct {
	node, zone  string // of this node; the zone is empty if it is unknown
	now         time.Time
	claims      map[netip.Addr][]svc.Name
	secrets     map[secretKey]*namedSecret
	authorities map[objectName]*authority
	nodes       *nodes
	routing     *routing
}

// draft is a Service that is being built.
type draft struct {
	*inputs
	name svc.Name
	from *service
	to   *proxied.Service
}

// build returns a Service for the server, or why it cannot be served. The steps are in the order in which a Service
// becomes complete; the first reason counts.
func (in *inputs) build(n svc.Name, s *service) (*proxied.Service, reason) {
	d := &draft{inputs: in, name: n, from: s}
	for _, step := range []func(*draft) reason{
		(*draft).configure, (*draft).certify, (*draft).trust, (*draft).address, (*draft).challenge, (*draft).connect, (*draft).route,
	} {
		if why := step(d); why.text != "" {
			return nil, why
		}
	}
	return d.to, reason{}
}

// configure takes the configuration over, once everything that it depends on has been read.
func (d *draft) configure() reason {
	switch {
	case d.from.spec == nil:
		return because("there is no valid configuration yet: %s", d.from.wrong)
	case !d.from.listed:
		return waitFor("its EndpointSlices")
	case needsNodes(d.from.spec) && !d.nodes.listed:
		return waitFor("the Nodes")
	}
	d.to = &proxied.Service{
		Name: d.name, Spec: *d.from.spec, Key: string(d.from.object.UID), Weights: map[netip.AddrPort]int{},
		Backends: map[uint16][]netip.AddrPort{}, Datagrams: map[uint16][]netip.AddrPort{},
	}
	return reason{}
}

// certify takes the certificates of TLS Secrets over. A Service that asks for TLS is not served without one.
func (d *draft) certify() reason {
	spec := &d.to.Spec
	for _, name := range spec.TLSSecrets() {
		t := d.secret(d.name, name)
		switch {
		case t == nil || t.cert == nil && t.problem == "":
			return waitFor("the TLS Secret " + name)
		case t.cert == nil:
			return because("cannot use the TLS Secret %s: %s", name, t.problem)
		}
		if slices.Contains(spec.Certificates, name) {
			cert := *t.cert
			if t.staple.valid(d.now) {
				cert.OCSPStaple = t.staple.der
			}
			d.to.Certificates = append(d.to.Certificates, cert)
			if name == spec.Certificates[0] && len(spec.ACMEHosts) > 0 {
				d.to.Challenges, d.to.Tokens = t.challenges, t.tokens
			}
		}
		if name == spec.BackendTLS.Certificate {
			d.to.PodCertificate = t.cert
		}
	}
	return reason{}
}

// trust takes over the certificates that verify Pods and clients. A Service that asks for that is not served without them.
func (d *draft) trust() reason {
	var why reason
	if d.to.PodRoots, why = d.roots("Pods", d.to.Spec.BackendTLS.Authority); why.text == "" {
		d.to.ClientRoots, why = d.roots("clients", d.to.Spec.Clients.Authority)
	}
	return why
}

// roots returns the certificates of an object that verify some, nil if none is named.
func (d *draft) roots(some, text string) (*x509.CertPool, reason) {
	if text == "" {
		return nil, reason{}
	}
	a := d.authorities[objectName{d.name.Namespace, text}]
	switch {
	case a == nil || a.pool == nil && a.problem == "":
		return nil, waitFor(text)
	case a.pool == nil:
		return nil, because("cannot verify %s by %s: %s", some, text, a.problem)
	}
	return a.pool, reason{}
}

// address takes over the addresses of the status that are claimed for the Service. A Service without one is built, too:
// its Pods are checked before its first address comes.
func (d *draft) address() reason {
	for i := range d.from.object.Status.LoadBalancer.Ingress {
		a, ok := claim.Ingress(&d.from.object.Status.LoadBalancer.Ingress[i])
		if ok && slices.Contains(d.claims[a], d.name) {
			d.to.Addrs = append(d.to.Addrs, a)
		}
	}
	return reason{}
}

// challenge opens port 80 while an authority asks there by HTTP-01 and the Service has no such port. At an address with
// another Service it does not: the port may be that one's, or may become it.
func (d *draft) challenge() reason {
	spec := &d.to.Spec
	if !d.to.Answers() || slices.ContainsFunc(spec.Listeners, func(l dialect.Listener) bool { return l.Port == proxied.ACMEPort }) {
		return reason{}
	}
	for _, a := range d.to.Addrs {
		if len(d.claims[a]) != 1 {
			return reason{}
		}
	}
	spec.Listeners = append(slices.Clone(spec.Listeners),
		dialect.Listener{Name: proxied.ACMEListener, Port: proxied.ACMEPort, Protocol: dialect.HTTP, Backend: dialect.HTTP})
	return reason{}
}

// connect chooses the endpoints, or node ports, of each port.
func (d *draft) connect() reason {
	object := d.from.object
	family := claim.Families(object)[0]
	for i := range object.Spec.Ports {
		port := &object.Spec.Ports[i]
		if d.to.Spec.NodePorts && port.NodePort == 0 {
			return because("port %d has no node port that connections could go to", port.Port)
		}
		backends := d.to.Backends
		if port.Protocol == corev1.ProtocolUDP {
			backends = d.to.Datagrams
		}
		number := uint16(port.Port) //nolint:gosec // the API server has validated it
		for _, b := range d.backends(port, family) {
			backends[number] = append(backends[number], b.addr)
			if b.weight != 1 {
				d.to.Weights[b.addr] = b.weight
			}
		}
	}
	if h := &d.to.Spec.Health; d.to.Spec.NodePorts && claim.IsLocal(object) && h.Protocol == dialect.TCP && h.Port == 0 {
		// This port reports whether the node has a Pod (behaviour 103), which a connection to the node port does not.
		if n := object.Spec.HealthCheckNodePort; n != 0 {
			h.Protocol, h.Port, h.Path, h.Codes = dialect.HTTP, uint16(n), "/healthz", "200" //nolint:gosec // as above
		}
	}
	return reason{}
}
