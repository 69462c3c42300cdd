package dialect

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode"
)

// tencentName is the name of the dialect.
const tencentName = "Tencent Cloud"

// Tencent's JSON about listeners, and the custom resource that newer clusters have in its place.
const (
	tencentListeners = "service.kubernetes.io/service.listenerParameters"
	tencentConfig    = "service.cloud.tencent.com/tke-service-config"
)

// parameter is a parameter of Tencent's call CreateListener (https://cloud.tencent.com/document/api/214/30693) by its path in the
// JSON: an annotation whose value is JSON of one kind.
type parameter struct {
	kind string // number, string, boolean, or any
	Annotation
}

func numeric(a Annotation) parameter { return parameter{"number", a} }
func textual(a Annotation) parameter { return parameter{"string", a} }
func truth(a Annotation) parameter   { return parameter{"boolean", a} }

// meaningless returns a parameter that has no meaning here, and unmade one that this version does not act on.
func meaningless(path, why string) parameter { return parameter{"any", none(path, why)} }
func unmade(path string, f Field, instead string) parameter {
	return parameter{"any", later(path, "any", f, instead)}
}

// tencentParameters are the parameters in the order in which they count: sessions before the scheduler, which is for new clients then.
var tencentParameters = listenerParameters()

func listenerParameters() (out []parameter) {
	const (
		check     = "HealthCheck."
		noRange   = "the listener has the port that spec.ports says, and not those after it"
		noContent = "checks send and compare no bytes: a Pod that accepts the connection is healthy"
		ofNetwork = "it is of Tencent Cloud's network"
		ofService = "the Service says it"
	)
	switches := map[string]bool{"0": false, "1": true}
	out = []parameter{
		textual(Annotation{Key: "Protocol", Values: sortedKeys(tencentProtocols), Sets: []Field{FieldProtocol}, read: readTencentProtocol}),
		numeric(Annotation{Key: "SessionExpireTime", Values: "0, or 30 to 3600 seconds: clients stay at the Pod of their address",
			Sets: []Field{FieldBalance}, read: readSession}),
		textual(Annotation{Key: "Scheduler", Values: sortedKeys(tencentSchedulers), Sets: []Field{FieldBalance}, read: readScheduler}),
		truth(word("ProxyProtocol", map[string]int{"true": 2, "false": 0}, FieldProxyProtocol, 0,
			func(s *Spec, v int) { s.ProxyProtocol = v })),
		truth(word("DeregisterTargetRst", map[string]bool{"true": false, "false": true}, FieldDraining, true, setDraining)),
		numeric(seconds("IdleConnectTimeout", 10, 1980, FieldIdleTimeout, setIdle)),
		numeric(unlimited(number("MaxConn", 1, 1000000, "connections", FieldConnections, setConnections))),
		numeric(unlimited(later("MaxCps", "new connections a second", FieldConnections, "the rate of new connections has no limit"))),

		numeric(word(check+"HealthSwitch", switches, FieldHealthEnabled, true, setChecked)),
		numeric(seconds(check+"TimeOut", 2, 60, FieldHealthTimeout, setTimeout)),
		numeric(seconds(check+"IntervalTime", 2, 300, FieldHealthInterval, setInterval)),
		numeric(number(check+"HealthNum", 2, 10, "", FieldHealthHealthy, setHealthy)),
		numeric(number(check+"UnHealthNum", 2, 10, "", FieldHealthUnhealthy, setUnhealthy)),
		numeric(Annotation{Key: check + "HttpCode", Values: "1 to 31, a sum: 1 for 1xx, 2 for 2xx, 4 for 3xx, 8 for 4xx, 16 for 5xx",
			Sets: []Field{FieldHealthCodes}, read: readCodeMask}),
		textual(path(check + "HttpCheckPath")),
		textual(healthHost(check+"HttpCheckDomain", "")),
		textual(healthMethod(check + "HttpCheckMethod")),
		numeric(number(check+"CheckPort", 1, 65535, "", FieldHealthPort, setHealthPort)),
		textual(checkType()),
		unmade(check+"ContextType", FieldHealthProtocol, noContent),
		unmade(check+"SendContext", FieldHealthProtocol, noContent),
		unmade(check+"RecvContext", FieldHealthProtocol, noContent),
		unmade(check+"ExtendedCode", FieldHealthCodes, "with gRPC a Pod is healthy if it answers SERVING"),
		meaningless(check+"HttpVersion", "checks speak HTTP/1.1"), meaningless(check+"SourceIpType", ofNetwork),

		unmade("EndPort", FieldProtocol, noRange), unmade("FullEndPorts", FieldProtocol, noRange),
		except("NORMAL", unmade("SessionType", FieldBalance, "sessions stay by the address of the client")),
		except("NODE", unmade("TargetType", FieldBackends, "connections go to the Pods of the Service")),
		unmade("DataCompressMode", FieldCompress, "answers are compressed by "+LBCompress),
		unmade("RescheduleInterval", FieldDraining, "connections end when the Pod leaves and "+lbPrefix+"drain-timeout is over"),
		meaningless("SniSwitch", "with several certificates each serves the names that it is for"),
		meaningless("KeepaliveEnable", "connections to Pods are kept in any case"), meaningless("SnatEnable", ofNetwork),
		meaningless("H2cSwitch", "listeners of http take HTTP/2 in any case"),
		meaningless("LoadBalancerId", ofService), meaningless("Ports", ofService), meaningless("ListenerNames", ofService),
	}
	for _, object := range []string{"Certificate.", "MultiCertInfo."} { // they are identifiers of Tencent's, which no Secret has as a name
		out = append(out, textual(Annotation{Key: object + "SSLMode", Values: "MUTUAL, UNIDIRECTIONAL",
			Sets: []Field{FieldClientCA}, Later: noClientCA, read: readSSLMode}))
		for _, key := range []string{"CertId", "CertCaId", "CertName", "CertKey", "CertContent", "CertCaName", "CertCaContent", "CertList"} {
			out = append(out, parameter{"any", Annotation{Key: object + key, Values: "any", Sets: []Field{FieldCertificates},
				Later: noForeignCertificate, read: readForeignCertificate}})
		}
	}
	return out
}

// tencentListenerParameters returns the annotation with the parameters of all listeners of a Service, as JSON.
func tencentListenerParameters() Annotation {
	a := Annotation{Key: tencentListeners, Values: `a JSON object with parameters of CreateListener, as {"HealthCheck":{"TimeOut":3}}`,
		read: readListenerParameters}
	for _, p := range tencentParameters {
		for _, f := range p.Sets {
			if p.None == "" && p.Later == "" && !slices.Contains(a.Sets, f) {
				a.Sets = append(a.Sets, f)
			}
		}
	}
	return a
}

// readListenerParameters reads the JSON. A wrong parameter does not keep the others from having their effect; one whose effect
// is essential keeps the Service from being served, as JSON that is none does.
func readListenerParameters(r *reader, v string) error {
	given, unknown, err := flatten(v)
	if err != nil {
		return err
	}
	r.parameters = map[string]bool{}
	for _, p := range tencentParameters {
		raw, has := given[p.Key]
		if !has || string(raw) == "null" {
			continue
		}
		before := len(r.Findings)
		if err := p.readJSON(r, raw); err != nil {
			r.Findings = append(r.Findings, Finding{Invalid, r.key, shorten(string(raw)), p.Sets[0],
				fmt.Sprintf("annotation %s: %s: %v", r.key, p.Key, err)})
			continue
		}
		r.parameters[p.Key] = !isEmpty(raw)
		for i := before; i < len(r.Findings); i++ {
			r.Findings[i].Text = p.Key + ": " + r.Findings[i].Text
		}
	}
	dottedParameters(r, unknown)
	misspelledParameters(r, unknown)
	r.unknownParameters(unknown)
	return nil
}

// dottedParameters reports the names that are written as the path of a parameter, and takes them out. What was meant to be
// essential keeps the Service from being served.
func dottedParameters(r *reader, given map[string]json.RawMessage) {
	for _, name := range slices.Sorted(maps.Keys(given)) {
		p := parameterOf(name)
		if p == nil { // flatten leaves a path of a parameter only where the name itself has the dot
			continue
		}
		raw := given[name]
		delete(given, name)
		parent, inner, _ := strings.Cut(p.Key, ".")
		text := fmt.Sprintf(`%s is no parameter of listeners, and has no effect: write {"%s": {"%s": ...}}`, name, parent, inner)
		if f := p.Sets; len(f) > 0 && slices.Contains(essential, f[0]) && string(raw) != "null" && !isEmpty(raw) {
			r.Findings = append(r.Findings, Finding{Invalid, r.key, shorten(string(raw)), f[0],
				fmt.Sprintf("annotation %s: %s; the Service is not served", r.key, text)})
			continue
		}
		r.found(Unknown, r.key, string(raw), text)
	}
}

// unknownParameters reports some of the names that are no parameters.
func (r *reader) unknownParameters(given map[string]json.RawMessage) {
	const most = 10
	var names []string
	for _, p := range tencentParameters {
		names = append(names, p.Key)
	}
	slices.Sort(names)
	for i, name := range slices.Sorted(maps.Keys(given)) {
		if i == most {
			r.found(Unknown, r.key, "", fmt.Sprintf("%d more are no parameters of listeners", len(given)-most))
			return
		}
		text := shorten(name) + " is no parameter of listeners, and has no effect"
		if meant := Nearest(shorten(name), names, 4); meant != "" {
			text += "; is " + meant + " meant?"
		}
		r.found(Unknown, r.key, string(given[name]), text)
	}
}

// misspelledParameters reports the first name that is nearly the name of an essential parameter, or of its object, and takes it out. The
// Service is not served then: without its certificate, for example, it would be open.
func misspelledParameters(r *reader, given map[string]json.RawMessage) {
	fields := map[string]Field{}
	for _, p := range tencentParameters {
		if parent, _, _ := strings.Cut(p.Key, "."); len(p.Sets) > 0 && slices.Contains(essential, p.Sets[0]) {
			fields[strings.ToLower(p.Key)], fields[strings.ToLower(parent)] = p.Sets[0], p.Sets[0]
		}
	}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		meant := Nearest(strings.ToLower(shorten(name)), slices.Sorted(maps.Keys(fields)), 2)
		if raw := given[name]; meant != "" && string(raw) != "null" && !isEmpty(raw) {
			delete(given, name)
			r.Findings = append(r.Findings, Finding{Invalid, r.key, shorten(string(raw)), fields[meant], fmt.Sprintf("annotation %s: %s is no "+
				"parameter of listeners; is %s (in any case) meant? The Service is not served until the name is right", r.key, shorten(name), meant)})
			return // one is enough, and a tenant may write thousands
		}
	}
}

// flatten returns the values of a JSON object by the path of the parameter, as HealthCheck.TimeOut. unknown has the other values.
// Names match in any case, as Go programs read JSON. A name that comes twice is an error: readers differ in which one counts.
func flatten(v string) (given, unknown map[string]json.RawMessage, err error) {
	top, err := object([]byte(v), "")
	if err != nil {
		return nil, nil, err
	}
	given, unknown = map[string]json.RawMessage{}, map[string]json.RawMessage{}
	sort := func(path string, raw json.RawMessage) {
		if p := parameterOf(path); p != nil {
			given[p.Key] = raw
		} else {
			unknown[path] = raw
		}
	}
	for _, name := range slices.Sorted(maps.Keys(top)) {
		raw := top[name]
		i := slices.IndexFunc(tencentObjects, func(o string) bool { return strings.EqualFold(o, name) })
		switch {
		case i < 0 && strings.Contains(name, "."): // is not the path that it looks like
			unknown[name] = raw
		case i < 0:
			sort(name, raw)
		case string(raw) != "null":
			inside, err := object(raw, tencentObjects[i])
			if err != nil {
				return nil, nil, err
			}
			for inner, raw := range inside {
				sort(tencentObjects[i]+"."+inner, raw)
			}
		}
	}
	return given, unknown, nil
}

// tencentObjects are the parameters that are objects, with parameters inside.
var tencentObjects = []string{"HealthCheck", "Certificate", "MultiCertInfo"}

// parameterOf returns the parameter at a path, in any case; nil if there is none.
func parameterOf(path string) *parameter {
	i, has := tencentPaths[fold(path)]
	if !has {
		return nil
	}
	return &tencentParameters[i]
}

// tencentPaths has the places of tencentParameters by their paths, folded.
var tencentPaths = tencentPlaces()

func tencentPlaces() map[string]int {
	out := map[string]int{}
	for i, p := range tencentParameters {
		out[fold(p.Key)] = i
	}
	return out
}

// fold returns one spelling for all names that are equal in any case, as strings.EqualFold has it.
func fold(name string) string {
	return strings.Map(func(c rune) rune {
		for next := unicode.SimpleFold(c); ; c, next = next, unicode.SimpleFold(next) {
			if next <= c { // the orbit ascends until its least rune follows
				return next
			}
		}
	}, name)
}

// object reads one JSON object, which stands at a path.
func object(data []byte, path string) (map[string]json.RawMessage, error) {
	at := ""
	if path != "" {
		at = path + ": "
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, fmt.Errorf("%s%q is not a JSON object", at, shorten(string(data)))
	}
	out, spelled := map[string]json.RawMessage{}, map[string]string{}
	for d.More() {
		t, err := d.Token()
		name, is := t.(string)
		var raw json.RawMessage
		if err == nil && is {
			err = d.Decode(&raw)
		}
		if err != nil || !is {
			return nil, fmt.Errorf("%s%q is not JSON: %w", at, shorten(string(data)), err)
		}
		if other, twice := spelled[fold(name)]; twice && other == name {
			return nil, fmt.Errorf("%s%s comes twice", at, shorten(name))
		} else if twice {
			return nil, fmt.Errorf("%s%s comes twice, also as %s", at, shorten(name), shorten(other))
		}
		out[name], spelled[fold(name)] = raw, name
	}
	if _, err := d.Token(); err != nil {
		return nil, fmt.Errorf("%s%q is not JSON: %w", at, shorten(string(data)), err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) { // a bracket without its beginning is an error of Token's, too
		return nil, fmt.Errorf("%s%q goes on after the JSON object", at, shorten(string(data)))
	}
	return out, nil
}

// readJSON reads a value of the parameter's kind as the value of an annotation.
func (p *parameter) readJSON(r *reader, raw json.RawMessage) error {
	if p.None != "" {
		r.found(Meaningless, r.key, string(raw), "accepted; has no meaning here because "+p.None)
		return nil
	}
	value, kind := string(raw), "object or list"
	if p.kind == "any" && isEmpty(raw) {
		value = ""
	}
	switch raw[0] {
	case '"':
		kind = "string"
		if err := json.Unmarshal(raw, &value); err != nil {
			return err
		}
	case 't', 'f':
		kind = "boolean"
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		kind = "number"
	}
	if p.kind != kind && p.kind != "any" {
		return fmt.Errorf("%s is a JSON %s, want a %s", shorten(string(raw)), kind, p.kind)
	}
	if value == "" {
		r.found(Applied, r.key, value, "empty: the default")
		return nil
	}
	return p.read(r, value)
}

// isEmpty reports whether a value of JSON is an empty string, list or object.
func isEmpty(raw json.RawMessage) bool {
	switch raw[0] {
	case '"':
		return len(raw) == len(`""`)
	case '[', '{':
		return len(bytes.TrimSpace(raw[1:len(raw)-1])) == 0
	}
	return false
}

// except lets a parameter have its default.
func except(normal string, p parameter) parameter {
	other := p.read
	p.read = func(r *reader, v string) error {
		if v == normal {
			r.same(p.Sets[0], v)
			return nil
		}
		return other(r, v)
	}
	return p
}

// unlimited lets an annotation that is a number be -1, for no limit.
func unlimited(a Annotation) Annotation {
	limit := a.read
	a.Values += "; -1 for no limit"
	a.read = func(r *reader, v string) error {
		if v == "-1" {
			r.same(a.Sets[0], "none")
			return nil
		}
		return limit(r, v)
	}
	return a
}

var (
	tencentProtocols  = map[string]Protocol{"TCP": TCP, "UDP": "", "HTTP": HTTP, "HTTPS": HTTPS, "TCP_SSL": TLS}
	tencentSchedulers = map[string]Balance{"wrr": RoundRobin, "least_conn": LeastConnections, "ip_hash": SourceHash}
)

// readTencentProtocol reads the protocol of all ports of TCP: the Service tells them from others.
func readTencentProtocol(r *reader, v string) error {
	p, ok := tencentProtocols[v]
	if !ok {
		return fmt.Errorf("%q is not one of %s", shorten(v), sortedKeys(tencentProtocols))
	}
	r.set(FieldProtocol, v, func(*Spec) { r.raw.protocol = perPort{all: p} })
	return nil
}

// readSession reads for how long a client stays at a Pod: here as long as the Pod is there.
func readSession(r *reader, v string) error {
	if v == "0" {
		r.same(FieldBalance, string(RoundRobin))
		return nil
	}
	if _, err := parseNumber(v, 30, 3600, "seconds"); err != nil {
		return fmt.Errorf("%w, nor 0", err)
	}
	r.set(FieldBalance, string(SourceHash), func(s *Spec) { s.Balance = SourceHash })
	return nil
}

// readScheduler reads which Pod a new client has. With sessions that is of no account: a client has the Pod of its address.
func readScheduler(r *reader, v string) error {
	if r.Origins[FieldBalance] == (Origin{r.key, string(SourceHash)}) && (strings.EqualFold(v, "wrr") || strings.EqualFold(v, "ip_hash")) {
		r.found(Applied, r.key, v, "as sessions stay, clients spread over Pods by their addresses")
		return nil
	}
	return word("", tencentSchedulers, FieldBalance, "", setBalance).read(r, v)
}

// readCodeMask reads a sum of 1, 2, 4, 8 and 16 for statuses from 100, 200, 300, 400 and 500 on.
func readCodeMask(r *reader, v string) error {
	n, err := parseNumber(v, 1, 31, "")
	if err != nil {
		return err
	}
	var classes []string
	for i := range 5 {
		if n>>i&1 == 1 {
			classes = append(classes, fmt.Sprintf("http_%dxx", i+1))
		}
	}
	text := strings.Join(classes, ",")
	r.set(FieldHealthCodes, text, func(s *Spec) { s.Health.Codes = text })
	return nil
}

// readSSLMode reads whether clients need a certificate. They must not come in without one because the authority is Tencent's.
func readSSLMode(r *reader, v string) error {
	_, has := r.Origins[FieldClientCA]
	switch {
	case v == "UNIDIRECTIONAL":
		r.same(FieldClientCA, "none")
	case v != "MUTUAL":
		return fmt.Errorf("%q is neither MUTUAL nor UNIDIRECTIONAL", shorten(v))
	case has && r.Spec.Clients.Optional:
		return errors.New("by " + lbPrefix + "client-auth clients without a certificate connect, too: the Service is not served; make it require")
	case has:
		r.found(Meaningless, r.key, v, "accepted; has no meaning here because "+lbPrefix+"client-ca says which certificates clients need")
	default:
		return errors.New(noClientCA)
	}
	return nil
}

// checkType returns the parameter with the protocol of health checks. Without it, finishTencent decides.
func checkType() Annotation {
	a := word("HealthCheck.CheckType", map[string]Protocol{"tcp": TCP, "http": HTTP, "https": HTTPS, "grpc": GRPC},
		FieldHealthProtocol, TCP, setHealth)
	a.Values += "; without it as above, https if Pods have that, else tcp"
	return a
}

// finishTencent decides about the protocol of health checks without CheckType. Tencent's default is HTTP with listeners of HTTP, the
// protocol of Pods with HTTPS, and else TCP. A parameter about requests asks for HTTP here with any listener.
func finishTencent(r *reader) {
	const checkType = "HealthCheck.CheckType"
	asks := func(key string) bool {
		e, known := lookUp(key)
		return known && key != tencentListeners && slices.Contains(e.Sets, FieldHealthProtocol) &&
			strings.TrimSpace(r.service.Annotations[key]) != ""
	}
	others := slices.ContainsFunc(slices.Collect(maps.Keys(r.service.Annotations)), asks)
	if by, p := impliedCheck(r); p != "" && !others && !r.parameters[checkType] {
		r.Spec.Health.Protocol = p
		r.Origins[FieldHealthProtocol] = Origin{tencentListeners, string(p)}
		r.Findings = append(r.Findings, Finding{Applied, tencentListeners, string(p), FieldHealthProtocol,
			fmt.Sprintf("%s: %s %s, without %s", by, FieldHealthProtocol, p, checkType)})
		if _, has := r.Origins[FieldHealthCodes]; !has && by == "Protocol" { // HttpCode is 31 by default, any status
			r.Spec.Health.Codes = "100-599"
			r.Origins[FieldHealthCodes] = Origin{tencentListeners, r.Spec.Health.Codes}
		}
	}
	if r.Spec.Health.Protocol != TCP || !r.Spec.Health.Enabled {
		return
	}
	requests := []Field{FieldHealthCodes, FieldHealthPath, FieldHealthHost, FieldHealthMethod}
	for i, f := range r.Findings {
		if f.Annotation == tencentListeners && f.State == Applied && slices.Contains(requests, f.Field) {
			r.Findings[i].State = Overridden
			r.Findings[i].Text += fmt.Sprintf(": has no effect, since the %s is %s", FieldHealthProtocol, TCP)
		}
	}
}

// impliedCheck returns the protocol of health checks that follows from other parameters of Tencent's, and from which one.
func impliedCheck(r *reader) (by string, p Protocol) {
	backends := map[Protocol]bool{}
	for _, l := range r.Spec.Listeners {
		if l.Protocol.IsHTTP() {
			backends[l.Backend] = true
		}
	}
	p = HTTP
	if len(backends) == 1 && backends[HTTPS] {
		p = HTTPS
	}
	for _, parameter := range tencentParameters {
		if strings.HasPrefix(parameter.Key, "HealthCheck.Http") && r.parameters[parameter.Key] {
			return parameter.Key, p
		}
	}
	if r.Origins[FieldProtocol].From == tencentListeners && len(backends) == 1 && backends[p] {
		return "Protocol", p
	}
	return "", ""
}

// noForeignCertificate is what becomes of a certificate that Tencent has.
const noForeignCertificate = "without TLS Secrets by " + LBTLSSecrets + " there is no certificate: the Service is not served"

// readForeignCertificate reads a certificate that Tencent has. What was meant to be encrypted must not be carried without that.
func readForeignCertificate(r *reader, v string) error {
	if _, has := r.Origins[FieldCertificates]; !has {
		return errors.New(noForeignCertificate)
	}
	r.found(Meaningless, r.key, "", "accepted; has no meaning here because "+LBTLSSecrets+" names the certificates")
	return nil
}

// listenersDocument returns the table of the parameters, for docs/annotations.md.
func listenersDocument() string {
	var b strings.Builder
	fmt.Fprintf(&b, `
### Parameters of listeners

%[1]s is a JSON object with parameters of
[CreateListener](https://cloud.tencent.com/document/api/214/30693) for all ports of the Service. Names match in any case.
An empty value is the default: "", or [] and {} where any value is right. A wrong parameter gets a Warning that names it,
and the others count.

The Service is not served until it is right if the wrong parameter is about protocols, certificates, certificates of
clients or the PROXY protocol, also if its name is written with a dot. The same is true if the value is no JSON object, if
something follows the object, or if a name comes twice. SSLMode MUTUAL needs %[2]s, and clients
without a certificate must not connect by %[3]s: optional.

Without HealthCheck.CheckType, a parameter of HealthCheck that begins with Http makes checks of HTTP. So does Protocol HTTP
or HTTPS: without a parameter that begins with Http, a Pod is then healthy if it answers with any status.

| Parameter | Values | Effect |
|---|---|---|
`, "`"+tencentListeners+"`", lbPrefix+"client-ca", lbPrefix+"client-auth")
	for i := 0; i < len(tencentParameters); {
		p, keys := tencentParameters[i], ""
		for ; i < len(tencentParameters); i++ { // a line for those with one effect
			next := tencentParameters[i]
			if next.Values != p.Values || next.effect() != p.effect() {
				break
			}
			keys += ", `" + next.Key + "`"
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", keys[2:], p.Values, p.effect())
	}
	return b.String()
}
