package routes

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/svc"
)

// Change is one difference of what a front serves.
type Change struct {
	// Where is what it is about: an address of requests, a port, a listener or an object.
	Where string `json:"where"`
	Text  string `json:"text"`
	// Cuts is why requests that were answered are not answered any more, or connections end; empty if neither is so.
	Cuts string `json:"cuts,omitempty"`
}

// side is a front before or after the change. table is nil while it does not exist.
type side struct {
	table   *gateway.Table
	targets map[gateway.Target]bool
	secrets map[svc.Name]gateway.Secret
	// matches are by port, and then by key.
	matches map[gateway.PortKey]map[string]*found
}

// found is what a port has for a key: several routes may have the same match.
type found struct {
	*gateway.Match
	mode gateway.ListenerMode
	all  []*gateway.Rule // the one that comes first at first
	// place is where it was among the matches of the side.
	place int
}

func newSide(t *gateway.Table, targets []gateway.Target, secrets map[svc.Name]gateway.Secret, ingress bool) *side {
	s := &side{table: t, secrets: secrets, targets: map[gateway.Target]bool{}, matches: map[gateway.PortKey]map[string]*found{}}
	if t == nil {
		return s
	}
	for _, t := range targets {
		s.targets[t] = true
	}
	for k, p := range portsOf(t) {
		if ingress && p.TLS { // all of its listeners have the matches of the other port
			continue
		}
		s.matches[k] = map[string]*found{}
		for _, l := range p.Listeners {
			l.Each(func(m *gateway.Match) {
				f := s.matches[k][key(m)]
				if f == nil {
					f = &found{Match: m, mode: l.Mode, place: len(s.matches[k])}
					s.matches[k][key(m)] = f
				}
				f.all = append(f.all, m.Rule)
			})
		}
		for _, f := range s.matches[k] {
			slices.SortStableFunc(f.all, func(a, b *gateway.Rule) int { return cmp.Or(a.Route.Compare(b.Route), cmp.Compare(a.Index, b.Index)) })
		}
	}
	if ingress && t.Ports[gateway.IngressHTTPS] != nil {
		s.matches[gateway.PortKey{Number: gateway.IngressHTTPS}] = s.matches[gateway.PortKey{Number: gateway.IngressHTTP}]
	}
	return s
}

// portsOf returns the ports of a table, which may be nil.
func portsOf(t *gateway.Table) map[gateway.PortKey]*gateway.Port {
	out := map[gateway.PortKey]*gateway.Port{}
	if t == nil {
		return out
	}
	for n, p := range t.Ports {
		out[gateway.PortKey{Number: n}] = p
	}
	for n, p := range t.Datagrams {
		out[gateway.PortKey{Number: n, UDP: true}] = p
	}
	return out
}

// comparison compares two sides of a front.
type comparison struct {
	was, is *side
	// ingress is set for a front of Ingresses, and assumed for a Gateway whose listeners are not known.
	ingress, assumed bool
	// partly is set if the ports stay whatever becomes of the known Ingresses.
	partly bool
	// why returns why a listener is not served, "" if that is not known.
	why func(listener string) string
	// closing are the listeners of former ports whose own line is that nothing answers for their hosts any more.
	closing map[*gateway.Listener]bool
	// work is for expressions, and walks has the paths that it has found, by the expressions.
	work  *budget
	walks map[string]*walked
	// told are the changes of each host of a port, without the place, and for which matches they were told. doubted are the matches that
	// may change.
	told    map[string]map[Change][]*gateway.Match
	doubted map[string]bool
	out     []Change
}

func (c *comparison) add(where, text, cuts string) {
	if text != "" {
		c.out = append(c.out, Change{where, text, cuts})
	}
}

// run compares the ports, and then the matches of the ports that both sides have.
func (c *comparison) run() {
	before, after := portsOf(c.was.table), portsOf(c.is.table)
	keys := maps.Clone(before)
	maps.Copy(keys, after)
	for _, k := range slices.SortedFunc(maps.Keys(keys), func(a, b gateway.PortKey) int {
		return cmp.Or(cmp.Compare(a.Number, b.Number), cmp.Compare(fmt.Sprint(a.UDP), fmt.Sprint(b.UDP)))
	}) {
		was, is := before[k], after[k]
		switch {
		case c.assumed, c.partly && (was == nil || is == nil):
		case is == nil:
			c.closed(k, was)
			continue
		case was == nil:
			c.add(portText(k), "opens"+listenersText(is, c.ingress), "")
		default:
			c.listeners(k, was, is)
		}
		c.matches(k, was, is)
	}
}

func portText(k gateway.PortKey) string {
	if k.UDP {
		return fmt.Sprintf("UDP port %d", k.Number)
	}
	return fmt.Sprintf("port %d", k.Number)
}

func listenersText(p *gateway.Port, ingress bool) string {
	if ingress {
		return ""
	}
	var out []string
	for _, l := range p.Listeners {
		out = append(out, l.Name)
	}
	const named = 4
	if len(out) > named {
		out = append(out[:named], fmt.Sprintf("%d more", len(out)-named))
	}
	return ": listener " + strings.Join(out, ", ")
}

// closed is for a port that nothing answers at any more.
func (c *comparison) closed(k gateway.PortKey, was *gateway.Port) {
	why := ""
	for _, l := range was.Listeners {
		if w := c.why(l.Name); w != "" && why == "" {
			why = ": " + w
		}
	}
	text := "closes, nothing answers there any more" + listenersText(was, c.ingress) + why
	cuts := "new connections are refused, and open ones end"
	if n := len(c.was.matches[k]); c.ingress && was.TLS {
		cuts += fmt.Sprintf("; hosts with a certificate: %d", len(was.Listeners))
	} else if n > 0 {
		cuts += fmt.Sprintf("; hosts and paths that were served there: %d", n)
	}
	c.add(portText(k), text, cuts)
}

// listeners compares the listeners of a port, with their certificates.
func (c *comparison) listeners(k gateway.PortKey, was, is *gateway.Port) {
	byName := func(p *gateway.Port) map[string]*gateway.Listener {
		out := map[string]*gateway.Listener{}
		for _, l := range p.Listeners {
			out[l.Name] = l
		}
		return out
	}
	if was.TLS != is.TLS {
		to, from := schemeOf(is), schemeOf(was)
		c.add(portText(k), "answers "+to+" instead of "+from, "clients that speak "+from+" there fail")
	}
	before, after := byName(was), byName(is)
	for name, l := range before {
		now := after[name]
		switch {
		case now == nil && is.ListenerFor(hostOf(l.Host)) == nil:
			if c.closing == nil {
				c.closing = map[*gateway.Listener]bool{}
			}
			c.closing[l] = true
			why := ""
			if w := c.why(name); w != "" {
				why = ": " + w
			}
			hosts := hostsText(l.Host)
			c.add(c.listenerText(k, l), "closes, nothing answers there for "+hosts+why, "connections for "+hosts+" fail")
		case now == nil:
			c.add(c.listenerText(k, l), "closes: another listener of the port answers for "+hostsText(l.Host), "")
		case !slices.Equal(l.Certificates, now.Certificates):
			c.add("certificate of "+hostsText(l.Host), secretsText(now.Certificates)+" instead of "+secretsText(l.Certificates), "")
		}
		if now != nil && l.Host != now.Host {
			cuts := ""
			if is.ListenerFor(hostOf(l.Host)) == nil {
				cuts = "requests for other hosts fail"
			}
			c.add(c.listenerText(k, now), "is for "+hostsText(now.Host)+" instead of "+hostsText(l.Host), cuts)
		}
		if now != nil && l.Mode != now.Mode && was.TLS == is.TLS {
			c.add(c.listenerText(k, now), modeTexts[now.Mode]+" instead of "+modeTexts[l.Mode], "clients may get another certificate, and "+
				"backends what they do not expect")
		}
	}
	for name, l := range after {
		if before[name] == nil {
			text := "opens for " + hostsText(l.Host)
			if len(l.Certificates) > 0 {
				text += ", with the certificate of " + secretsText(l.Certificates)
			}
			c.add(c.listenerText(k, l), text, "")
		}
	}
	c.clients(k, was.Clients, is.Clients)
}

// clients compares what a port asks of clients.
func (c *comparison) clients(k gateway.PortKey, was, is *trust.Clients) {
	if reflect.DeepEqual(was, is) {
		return
	}
	text, cuts := "asks clients for other certificates", ""
	switch {
	case is == nil:
		text = "no longer asks clients for certificates"
	case was == nil:
		text = "asks clients for certificates"
	}
	switch {
	case is == nil || is.Insecure:
	case was == nil || was.Insecure:
		cuts = "clients without a certificate that can be verified are refused"
	case !slices.Equal(was.Authorities, is.Authorities):
		cuts = "clients may have a certificate of a former authority only"
	}
	c.add(portText(k), text, cuts)
}

// modeTexts are what a listener does with connections.
var modeTexts = map[gateway.ListenerMode]string{
	gateway.Requests: "routes requests", gateway.Passthrough: "passes connections on as they are",
	gateway.Terminated: "ends TLS and passes bytes on",
}

func schemeOf(p *gateway.Port) string {
	if p.TLS {
		return "TLS"
	}
	return "connections without TLS"
}

func (c *comparison) listenerText(k gateway.PortKey, l *gateway.Listener) string {
	if c.ingress {
		return addressText("https", k.Number, l.Host, "")
	}
	return fmt.Sprintf("listener %s, %s", l.Name, portText(k))
}

func hostsText(pattern string) string {
	if pattern == "" {
		return "all hosts"
	}
	return pattern
}

func secretsText(names []svc.Name) string {
	var out []string
	for _, n := range names {
		out = append(out, n.String())
	}
	if len(out) == 0 {
		return "none"
	}
	return "Secret " + strings.Join(out, ", ")
}

// matches compares what becomes of a request for each match that one side has.
func (c *comparison) matches(k gateway.PortKey, was, is *gateway.Port) {
	before, after := c.was.matches[k], c.is.matches[k]
	c.told, c.doubted = map[string]map[Change][]*gateway.Match{}, map[string]bool{}
	s := c.newScene(k, was, is)
	for id, f := range before {
		now := after[id]
		c.compare(s, f, f, now)
	}
	for id, f := range after {
		if before[id] == nil {
			c.compare(s, f, nil, f)
		}
	}
	for _, f := range c.newlyFor(k, was, is) {
		c.compare(s, f, nil, nil)
	}
	s.explore()
	s.long()
}

// Bounds of the matches of wider patterns that are looked at for hosts that only one side has: of a pattern, and of all hosts together.
const (
	mostWide  = 1000
	mostNewly = 100_000
)

// newlyFor returns the matches of wider patterns for the hosts that only one side has: they may have lost or got their requests.
func (c *comparison) newlyFor(k gateway.PortKey, was, is *gateway.Port) (out []*found) {
	before, after := c.was.hosts(k, was), c.is.hosts(k, is)
	byHost := map[string][]*found{}
	for _, s := range []*side{c.was, c.is} {
		for _, id := range slices.Sorted(maps.Keys(s.matches[k])) {
			if f := s.matches[k][id]; f.Host == "" || f.Host[0] == '*' {
				byHost[f.Host] = append(byHost[f.Host], f)
			}
		}
	}
	if len(byHost) == 0 {
		return nil
	}
	seen := map[string]bool{}
	all := maps.Clone(before)
	maps.Copy(all, after)
	for _, host := range slices.Sorted(maps.Keys(all)) {
		if before[host] && after[host] || host == "" {
			continue
		}
		for wide := range wider(host) {
			list := byHost[wide]
			if len(list) == 0 || wide == host {
				continue
			}
			if len(list) > mostWide || len(seen) > mostNewly {
				c.add(host, "what becomes of its requests that "+hostsText(wide)+" has or had is only known in part: there are too many", "")
			}
			for _, f := range list[:min(len(list), mostWide)] {
				m := *f.Match
				m.Host = host
				id := key(&m)
				if c.was.matches[k][id] == nil && c.is.matches[k][id] == nil && !seen[id] && len(seen) <= mostNewly {
					seen[id] = true
					out = append(out, &found{Match: &m, mode: f.mode})
				}
			}
		}
	}
	return out
}

// hosts returns the patterns of the hosts that a port of a side is for.
func (s *side) hosts(k gateway.PortKey, p *gateway.Port) map[string]bool {
	out := map[string]bool{}
	for _, f := range s.matches[k] {
		out[f.Host] = true
	}
	if p != nil {
		for _, l := range p.Listeners {
			out[l.Host] = true
		}
	}
	return out
}

// compare compares what becomes of a request for a match. f is the match; was and is are what the sides have of it, nil for nothing.
func (c *comparison) compare(s *scene, f, was, is *found) {
	k, before, after := s.k, s.was, s.is
	if f.mode != gateway.Requests {
		c.connections(k, f, before, after)
		return
	}
	host := hostOf(f.Host)
	if before != nil && !c.partly && (after == nil || c.closing[before.ListenerFor(host)] && after.ListenerFor(host) == nil) {
		return // the line of the listener has it
	}
	r, ok := requestOf(f.Match, f.Host)
	a, b := c.answer(c.was, before, was, f, r, ok), c.answer(c.is, after, is, f, r, ok)
	where := c.where(k, f, before, after)
	if !ok && (was == nil) != (is == nil) {
		if f.Regex == nil || expressed(f.Match) || before == nil || after == nil { // else explore has the paths
			s.doubtful(f, was, is, "no example was found of what it takes")
		}
		return
	}
	text, cuts := differ(&a, &b)
	if text == "" && expressed(f.Match) && (was == nil) != (is == nil) {
		s.doubtful(f, was, is, "an example does not tell of all values that it takes")
	}
	c.addAt(f.Host, where, text, cuts, f.Match)
	c.shadowed(where, was, is, &b)
}

// answer returns what becomes of a request at a port of a side. known is false if no request was found for the match: then its first
// rule counts.
func (c *comparison) answer(s *side, p *gateway.Port, own, f *found, r *gateway.Request, known bool) answer {
	at := &place{host: f.Host, path: shown(f.Match, r), unreached: s.unreached, passwords: s.passwords}
	if p == nil {
		return answerOf(nil, at)
	}
	at.tls, at.port = p.TLS, p.Number
	if !known {
		if own == nil {
			return answerOf(nil, at)
		}
		return answerOf(own.all[0], at)
	}
	rule, prefix, verdict := p.Find(r)
	if at.prefix = prefix; !f.Exact && f.Regex == nil && !strings.HasPrefix(at.path, prefix) {
		at.prefix = ""
	}
	if verdict == gateway.Disputed {
		return answer{refused: "400: servers read its path in different ways"}
	}
	return answerOf(rule, at)
}

// unreached reports whether a backend gets nothing although its reference is valid: its BackendTLSPolicy cannot be met.
func (s *side) unreached(r *gateway.Rule, w *gateway.Weighted) bool {
	return w.Backend.Policy != (svc.Name{}) && !s.targets[r.Target(w)]
}

// passwords reports whether a Secret has names and passwords.
func (s *side) passwords(from basic.Source) bool {
	secret, known := s.secrets[from.Secret]
	if from.Map {
		return known && secret.NoMap == ""
	}
	return known && secret.NoFile == ""
}

// where is the address of a match.
func (c *comparison) where(k gateway.PortKey, f *found, before, after *gateway.Port) string {
	scheme := "http"
	switch {
	case c.assumed:
		scheme = ""
	case after != nil && after.TLS, after == nil && before.TLS:
		scheme = "https"
	}
	return addressText(scheme, k.Number, f.Host, matchText(f.Match))
}

// shadowed is for rules that are new at a match and get none of its requests. The ones of a route are known by their order, for other
// rules of the route may have come or gone.
func (c *comparison) shadowed(where string, was, is *found, now *answer) {
	if is == nil || now.rule == nil {
		return
	}
	old := map[kinds.Object]int{}
	if was != nil {
		for _, r := range was.all {
			old[r.Route]++
		}
	}
	for _, r := range is.all {
		if old[r.Route]--; old[r.Route] >= 0 || r.Route.Compare(now.rule.Route) == 0 {
			continue
		}
		c.add(where, (&answer{rule: r}).by()+" gets no requests there: "+now.by()+" comes first", "")
	}
}

// connections compares what becomes of connections, or of datagrams.
func (c *comparison) connections(k gateway.PortKey, f *found, before, after *gateway.Port) {
	of := func(s *side, p *gateway.Port) (a answer, open bool) {
		if p == nil {
			return answer{refused: "closed"}, false
		}
		l, rule := p.Connection(hostOf(f.Host))
		if rule == nil {
			return answer{refused: "closed: no route has them"}, l != nil
		}
		a = answerOf(rule, &place{unreached: s.unreached})
		if a.refused != "" {
			a.refused = "closed: there is no backend that can be used"
		}
		return a, true
	}
	a, open := of(c.was, before)
	b, still := of(c.is, after)
	if before != nil && open && !still && (after == nil || c.closing[before.ListenerFor(hostOf(f.Host))]) {
		return // the listener's own line has it
	}
	where := portText(k)
	if c.assumed {
		where = "connections"
	}
	if f.Host != "" {
		where = f.Host + ", " + where
	}
	text, cuts := differ(&a, &b)
	if cuts = strings.Replace(cuts, "requests are answered with closed", "connections are closed", 1); cuts == "" && a.refused == "" {
		cuts = lostConnections(a.rule, b.rule)
	}
	c.add(where, text, cuts)
}

// lostConnections returns why open connections end: their route has lost their backend.
func lostConnections(was, is *gateway.Rule) string {
	if was == nil || is == nil {
		return ""
	}
	for i := range was.Backends {
		t := was.Target(&was.Backends[i])
		if was.Backends[i].Valid && !slices.ContainsFunc(is.Backends, func(w gateway.Weighted) bool { return w.Valid && is.Target(&w) == t }) {
			return "open connections to " + backendText(&t.Backend) + " end with its route"
		}
	}
	return ""
}
