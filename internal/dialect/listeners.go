package dialect

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// rawListeners is what annotations say about listeners, before the ports are known.
type rawListeners struct {
	protocol, backend perPort
	// tlsPorts are the ports, by number or name, that use the certificates; all without any. tlsPortsBy is the annotation
	// that names them, or all, with its value.
	tlsPorts   []string
	tlsPortsBy Origin
	redirects  map[uint16]uint16
	// offered has the protocols of pods by annotations of clouds, which turn a listener with
	// a certificate into TLS or HTTPS (behaviour 116).
	offered Protocol
}

// perPort is a protocol for all ports, and others for some.
type perPort struct {
	all  Protocol
	some map[string]Protocol // by number or name
}

func (p perPort) of(port Port) Protocol {
	for _, k := range []string{strconv.Itoa(int(port.Number)), port.Name} {
		if v, has := p.some[k]; has && k != "" {
			return v
		}
	}
	return p.all
}

// parsePerPort reads "tls", or "443=tls,http=http", or both with commas between. separator is
// what stands between port and protocol; with portLast the port comes after it.
func parsePerPort(v, separator string, portLast bool, words map[string]Protocol) (perPort, error) {
	p := perPort{some: map[string]Protocol{}}
	for item := range strings.SplitSeq(v, ",") {
		item = strings.TrimSpace(item)
		port, name, named := strings.Cut(item, separator)
		if portLast {
			port, name = name, port
		}
		if !named {
			port, name = "", item
		}
		protocol, ok := words[strings.ToLower(strings.TrimSpace(name))]
		if !ok {
			return perPort{}, fmt.Errorf("%q is not one of %s", shorten(name), sortedKeys(words))
		}
		if port = strings.TrimSpace(port); named && port == "" {
			return perPort{}, fmt.Errorf("%q names no port", shorten(item))
		} else if !named {
			p.all = protocol
		} else {
			p.some[port] = protocol
		}
	}
	return p, nil
}

// protocols returns an annotation with a protocol for all ports, or for some.
func protocols(key string, f Field, separator string, portLast bool, words map[string]Protocol,
	to func(*rawListeners) *perPort) Annotation {
	pair := "port" + separator + "value"
	if portLast {
		pair = "value" + separator + "port"
	}
	return Annotation{Key: key, Values: sortedKeys(words) + "; or " + pair + " pairs with commas between", Sets: []Field{f},
		read: func(r *reader, v string) error {
			p, err := parsePerPort(v, separator, portLast, words)
			if err == nil {
				r.set(f, v, func(*Spec) { *to(&r.raw) = p })
			}
			return err
		}}
}

// finish makes a complete Spec from the annotations read.
func (r *reader) finish() {
	s := &r.Spec
	r.fromService()
	r.defaults()
	r.checkHealth()
	for _, p := range r.service.Ports {
		s.Listeners = append(s.Listeners, r.listener(p))
	}
	r.checkPorts()
	r.checkTLSPorts()
	r.checkACME()
	r.finishSticky()
	r.finishBackends()
	r.finishBackendTLS()
	r.finishClients()
	r.finishRedirects()
	r.finishAlibaba()
	finishTencent(r)
	r.chooseWay()
	r.judge()
}

// fromService takes over what fields of the Service say.
func (r *reader) fromService() {
	if len(r.service.SourceRanges) > 0 { // before the annotation, as in Kubernetes' service helpers
		list, err := parsePrefixes(r.service.SourceRanges)
		if err != nil {
			r.found(Invalid, "", "", "spec.loadBalancerSourceRanges: "+err.Error())
		}
		r.Spec.SourceRanges = list
		r.Origins[FieldSourceRanges] = Origin{"spec.loadBalancerSourceRanges", strings.Join(r.service.SourceRanges, ",")}
	}
	if _, has := r.Origins[FieldBalance]; !has && r.service.ClientIP {
		r.Spec.Balance = SourceHash
		r.Origins[FieldBalance] = Origin{"spec.sessionAffinity", string(SourceHash)}
	}
}

// defaults fills in missing values: the defaults of a Classic Load Balancer (behaviours 128, 131 to 134),
// or with type nlb the defaults of a Network Load Balancer.
func (r *reader) defaults() {
	s, from := &r.Spec, "default"
	healthy, unhealthy, interval, timeout := 2, 6, 10, 5
	if r.Spec.NLB {
		from = "default of a Network Load Balancer"
		healthy, unhealthy, interval, timeout = 3, 3, 30, 10
	}
	set := func(f Field, from, text string, apply func()) {
		if _, has := r.Origins[f]; !has {
			r.Origins[f] = Origin{from, text}
			apply()
		}
	}
	seconds := func(n int) Duration { return Duration(time.Duration(n) * time.Second) }
	set(FieldHealthHealthy, from, strconv.Itoa(healthy), func() { s.Health.Healthy = healthy })
	set(FieldHealthUnhealthy, from, strconv.Itoa(unhealthy), func() { s.Health.Unhealthy = unhealthy })
	set(FieldHealthInterval, from, seconds(interval).String(), func() { s.Health.Interval = seconds(interval) })
	set(FieldHealthTimeout, from, seconds(timeout).String(), func() {
		s.Health.Timeout = min(seconds(timeout), max(s.Health.Interval-seconds(1), s.Health.Interval/2)) // less than the interval
	})
	const ours = "default"
	set(FieldHealthEnabled, ours, "true", func() { s.Health.Enabled = true })
	set(FieldHealthProtocol, ours, string(TCP), func() { s.Health.Protocol = TCP })
	set(FieldBalance, ours, string(RoundRobin), func() { s.Balance = RoundRobin })
	set(FieldIdleTimeout, ours, seconds(idleTimeout).String(), func() { s.IdleTimeout = seconds(idleTimeout) })
	request := min(seconds(requestTimeout), s.IdleTimeout) // only who asks for more has Pods be silent for longer
	set(FieldRequestTimeout, ours, request.String(), func() { s.RequestTimeout = request })
	set(FieldDraining, ours, "true", func() { s.Draining = true })
	set(FieldDrainTimeout, ours, seconds(drainTimeout).String(), func() { s.DrainTimeout = seconds(drainTimeout) })
	set(FieldCrossZone, ours, "true", func() { s.CrossZone = true })
	if s.AccessLog.Uploads() {
		set(FieldLogCredentials, ours, DefaultLogSecret, func() { s.AccessLog.Secret = DefaultLogSecret })
	}
}

// Our own defaults, in seconds: Kubernetes' API has long silent watches. Their answers begin at once: AWS and nginx wait
// for an answer as long.
const (
	idleTimeout    = 3600
	requestTimeout = 60
	drainTimeout   = 300
)

// checkHealth rejects a timeout that is not less than the interval (behaviour 134). That is AWS's rule; the usage document of
// Alibaba's controller (https://github.com/kubernetes/cloud-provider-alibaba-cloud/blob/master/docs/usage.md) has 8 seconds each 3,
// and a check that is due while one waits follows at once.
func (r *reader) checkHealth() {
	h := &r.Spec.Health
	t, i := r.Origins[FieldHealthTimeout], r.Origins[FieldHealthInterval]
	if h.Timeout < h.Interval || isAlibaba(t.From) {
		return
	}
	r.Findings = append(r.Findings, Finding{Invalid, t.From, shorten(t.Value), FieldHealthTimeout,
		fmt.Sprintf("the timeout of health checks is %s (%s) and must be less than their interval, which is %s (%s)",
			h.Timeout, t.From, h.Interval, i.From)})
}

// appProtocols are what the appProtocol of a port says about Pods that have requests (KEP-3726): with bytes nothing is done.
var appProtocols = map[string]Protocol{"kubernetes.io/h2c": H2C, "kubernetes.io/ws": HTTP, "kubernetes.io/wss": HTTPS}

// listener decides about a port.
func (r *reader) listener(p Port) Listener {
	l := Listener{Name: p.Name, Port: p.Number}
	switch p.Protocol {
	case "UDP":
		l.Protocol, l.Backend = UDP, UDP
		return l
	case "SCTP":
		l.Protocol, l.Backend = SCTP, SCTP
		return l
	}
	l.Protocol, l.Backend = r.raw.protocol.of(p), r.raw.backend.of(p)
	chosen := len(r.raw.tlsPorts) == 0 || slices.Contains(r.raw.tlsPorts, strconv.Itoa(int(p.Number))) ||
		p.Name != "" && slices.Contains(r.raw.tlsPorts, p.Name)
	ends := chosen && len(r.Spec.Certificates) > 0
	if l.Protocol == "" {
		offered := r.raw.offered
		switch {
		case ends && (offered == HTTP || offered == HTTPS):
			l.Protocol = HTTPS
		case ends:
			l.Protocol = TLS
		case offered == HTTP:
			l.Protocol = HTTP
		default:
			l.Protocol = TCP
		}
		if l.Backend == "" && ends {
			l.Backend = offered
		}
	}
	if l.Protocol == "" {
		l.Protocol = TCP
	}
	if app := appProtocols[p.AppProtocol]; l.Backend == "" && l.Protocol.IsHTTP() && app != "" {
		l.Backend = app
		r.Origins[FieldBackend] = Origin{"spec.ports", p.AppProtocol}
	}
	if l.Backend == "" {
		l.Backend = map[Protocol]Protocol{TLS: TCP, HTTPS: HTTP, HTTP: HTTP}[l.Protocol]
	}
	if l.Backend == "" {
		l.Backend = TCP
	}
	return l
}

// checkPorts reports ports that annotations name and the Service does not have, and TLS
// without a certificate.
func (r *reader) checkPorts() {
	names := map[string]Field{}
	for k := range r.raw.protocol.some {
		names[k] = FieldProtocol
	}
	for k := range r.raw.backend.some {
		names[k] = FieldBackend
	}
	for _, k := range r.raw.tlsPorts {
		names[k] = FieldTLSPorts
	}
	for _, k := range strings.Split(sortedKeys(names), ", ") {
		has := slices.ContainsFunc(r.service.Ports, func(p Port) bool { return p.Name == k || strconv.Itoa(int(p.Number)) == k })
		if f := names[k]; k != "" && !has && len(r.service.Ports) > 0 {
			o := r.Origins[f]
			r.found(Invalid, o.From, shorten(o.Value), fmt.Sprintf("annotation %s: the Service has no port %q", o.From, shorten(k)))
		}
	}
	for _, l := range r.Spec.Listeners {
		if l.Protocol.IsTLS() && len(r.Spec.Certificates) == 0 {
			o := r.Origins[FieldProtocol]
			r.found(Invalid, o.From, shorten(o.Value), fmt.Sprintf("port %d: %s needs a certificate: name TLS Secrets by %s",
				l.Port, l.Protocol, LBTLSSecrets))
			return
		}
	}
}

// essential are the fields without which something else would be served.
var essential = []Field{
	FieldProtocol, FieldBackend, FieldCertificates, FieldTLSPorts, FieldTLSPolicy, FieldProxyProtocol, FieldTrustedFronts,
	FieldBackendCA, FieldBackendName, FieldBackendCert, FieldClientCA, FieldClientAuth, FieldRedirects,
}

// chooseWay decides which way the Service takes (docs/design/009-proxied-load-balancer.md).
func (r *reader) chooseWay() {
	r.Way = Direct
	wants := func(f Field, is bool) {
		o := r.Origins[f]
		if is && f.IsBuilt() && !strings.HasPrefix(o.From, "default") && !strings.HasPrefix(o.From, "spec.") {
			r.Because = append(r.Because, o.From)
		}
	}
	s := &r.Spec
	plain := func(l Listener) bool {
		return l.Protocol == l.Backend && slices.Contains([]Protocol{TCP, UDP, SCTP}, l.Protocol)
	}
	relays := slices.ContainsFunc(s.Listeners, func(l Listener) bool { return !plain(l) })
	wants(FieldCertificates, relays && len(s.Certificates) > 0)
	for _, f := range []Field{FieldProtocol, FieldBackend, FieldHeaders} {
		if _, has := r.Origins[f]; has {
			wants(f, relays)
		}
	}
	wants(FieldProxyProtocol, s.ProxyProtocol != 0)
	for _, f := range []Field{FieldTrustedFronts, FieldIdleTimeout, FieldRequestTimeout, FieldDraining, FieldDrainTimeout, FieldBalance,
		FieldLogEnabled, FieldBandwidth, FieldConnections, FieldSlowStart, FieldWeightLabel, FieldBackendNodes, FieldClientCA,
		FieldClientRequests, FieldClientConns, FieldRequestBody, FieldRedirects} {
		if _, has := r.Origins[f]; has {
			wants(f, true)
		}
	}
	// What clouds do without a word is no reason to hide the client's address.
	wants(FieldBackends, s.NodePorts && strings.HasPrefix(r.Origins[FieldBackends].From, lbPrefix))
	for _, f := range []Field{FieldStickyCookie, FieldStickyApp} {
		if _, has := r.Origins[f]; has {
			wants(f, s.Sticky.Cookie)
		}
	}
	// What was meant to change the bytes themselves, or who may connect, must not be carried without that because it is
	// mistyped: in the proxied way nothing is served until it is right.
	closed := r.changesBytes()
	for _, f := range r.Findings {
		isEssential := func(f Field) bool { return slices.Contains(essential, f) }
		e, ok := lookUp(f.Annotation)
		if !ok || f.State != Invalid {
			continue
		}
		fields := e.Sets
		if f.Field != "" { // of an annotation that sets many, this one is wrong
			fields = []Field{f.Field}
		}
		if f.Field == FieldSourceRanges || slices.ContainsFunc(fields, isEssential) {
			r.Because, closed = append(r.Because, f.Annotation), true
		}
	}
	if len(r.Because) == 0 {
		return
	}
	slices.Sort(r.Because)
	r.Because = slices.Compact(r.Because)
	for _, l := range s.Listeners {
		if l.Protocol == SCTP && closed {
			r.found(Invalid, r.Because[0], "",
				fmt.Sprintf("port %d is %s, which cannot be carried with this: the Service is not served; make it two Services with one %s",
					l.Port, l.Protocol, LBSharingKey))
			break
		}
		if l.Protocol == SCTP {
			r.found(NotYet, r.Because[0], "",
				fmt.Sprintf("port %d is %s, which the proxied way does not carry: the whole Service takes the direct way, "+
					"where this has no effect; make it two Services with one %s", l.Port, l.Protocol, LBSharingKey))
			r.Because = nil
			return
		}
	}
	r.Way = Proxied
}

// changesBytes reports whether one of the reasons for the proxied way is essential.
func (r *reader) changesBytes() bool {
	return slices.ContainsFunc(essential, func(f Field) bool {
		o, has := r.Origins[f]
		return has && slices.Contains(r.Because, o.From)
	})
}

// judge adds a finding for each annotation that is read and not acted on.
func (r *reader) judge() {
	for i := range r.Findings {
		f := &r.Findings[i]
		switch {
		case f.State != Applied || f.Field == "":
		case !f.Field.IsBuilt():
			f.State, f.Text = NotYet, fmt.Sprintf("%s: this version does not do it yet; %s", f.Text, f.Field.Instead())
		case r.Way == Direct && f.Field == FieldSourceRanges && f.Annotation != "":
			f.State, f.Text = NotYet, f.Text+": not enforced in the direct way, everybody may connect; use spec.loadBalancerSourceRanges"
		case r.Way == Direct && !f.Field.IsOfBothWays():
			f.State, f.Text = Unused, f.Text+": has no effect, since nothing asks for the proxied way; "+direct(f.Field)
		}
	}
}

// direct returns what counts in the direct way in place of a field.
func direct(f Field) string {
	switch f {
	case FieldTLSPorts, FieldTLSPolicy, FieldALPN:
		return "there is no certificate"
	case FieldHealthEnabled, FieldHealthProtocol, FieldHealthPort, FieldHealthPath, FieldHealthHealthy, FieldHealthUnhealthy,
		FieldHealthInterval, FieldHealthTimeout, FieldHealthCodes, FieldAllUnhealthy, FieldEject, FieldHealthHost,
		FieldHealthMethod:
		return "a Pod's own readiness decides"
	case FieldOnlyWithPod:
		return "connections go only to Pods, and with externalTrafficPolicy Local only nodes with one announce"
	case FieldCrossZone:
		return "spec.trafficDistribution prefers near Pods"
	}
	return "connections go to Pods as they are"
}

// redirects returns an annotation with ports of http whose clients are sent to ports of https.
func redirects(key, separator string) Annotation {
	return Annotation{Key: key, Values: "FROM" + separator + "TO pairs of port numbers with commas between: clients of the port FROM, " +
		"of http, are sent to the port TO, of https", Sets: []Field{FieldRedirects}, read: func(r *reader, v string) error {
		to := map[uint16]uint16{}
		for item := range strings.SplitSeq(v, ",") {
			a, b, _ := strings.Cut(strings.TrimSpace(item), separator)
			from, err := strconv.ParseUint(a, 10, 16)
			port, err2 := strconv.ParseUint(b, 10, 16)
			if err != nil || err2 != nil || from == port || to[uint16(from)] != 0 {
				return fmt.Errorf("%q is not FROM%sTO, two port numbers, with each FROM once", shorten(item), separator)
			}
			to[uint16(from)] = uint16(port)
		}
		r.set(FieldRedirects, v, func(*Spec) { r.raw.redirects = to })
		return nil
	}}
}

// finishRedirects takes redirects over. What was meant to be https must not be served by http.
func (r *reader) finishRedirects() {
	o := r.Origins[FieldRedirects]
	find := func(port uint16, p Protocol) int {
		return slices.IndexFunc(r.Spec.Listeners, func(l Listener) bool { return l.Port == port && l.Protocol == p })
	}
	for _, from := range slices.Sorted(maps.Keys(r.raw.redirects)) {
		to, i := r.raw.redirects[from], find(from, HTTP)
		if i < 0 || find(to, HTTPS) < 0 {
			r.found(Invalid, o.From, shorten(o.Value),
				fmt.Sprintf("annotation %s: want a port %d of protocol http and a port %d of https", o.From, from, to))
			return
		}
		r.Spec.Listeners[i].Redirect = to
	}
}
