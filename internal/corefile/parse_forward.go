package corefile

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	mdns "github.com/miekg/dns"
)

// Forward asks other resolvers.
type Forward struct {
	Pos    Pos
	From   string
	Except []string
	To     []Upstream
	// Files are files with nameserver lines whose servers are in To.
	Files []string
	// Policy is random, round_robin or sequential.
	Policy             string
	MaxConcurrent      int // 0: no bound
	MaxFails           int
	MaxConnectAttempts int // 0: twice the number of upstreams, as CoreDNS
	ForceTCP           bool
	PreferUDP          bool
	FailFast           bool // all_unhealthy_upstreams
	// HealthEvery, HealthDomain and HealthNoRecursion are of the questions to upstreams that failed.
	HealthEvery       time.Duration
	HealthDomain      string
	HealthNoRecursion bool
	ReadTimeout       time.Duration
	Expire            time.Duration // of idle connections
	MaxIdle           int           // 0: no bound but the server's
	TLSServerName     string
	TLS               *TLS // certificate of the client, and the authority of the servers
	// Failover are codes of answers that another upstream may answer better; Next, and
	// NextOnNoData, answers that the next forward may improve.
	Failover, Next []int
	NextOnNoData   bool
	Source         netip.Addr
}

// Upstream is one resolver.
type Upstream struct {
	Addr netip.AddrPort
	TLS  bool
	Name string // of its certificate
}

// PluginName is the name of the directive.
func (*Forward) PluginName() string { return "forward" }

// Defaults of CoreDNS's forward.
const (
	defaultMaxFails    = 2
	defaultHealthEvery = 500 * time.Millisecond
	defaultExpire      = 10 * time.Second
	defaultReadTimeout = 2 * time.Second
	maxUpstreams       = 15
)

func parseForward(b *Block, l line) (Plugin, error) {
	if err := l.want(2, -1, "FROM TO..."); err != nil {
		return nil, err
	}
	from, err := b.zonesOr(l, l.args[:1])
	if err != nil {
		return nil, err
	}
	f := &Forward{
		Pos: l.pos, From: from[0], Policy: "random", MaxFails: defaultMaxFails, HealthEvery: defaultHealthEvery, HealthDomain: ".",
		Expire: defaultExpire, ReadTimeout: defaultReadTimeout,
	}
	if len(from) > 1 {
		return nil, l.pos.errorf("forward: the range %s has %d reverse zones; want one", l.args[0], len(from))
	}
	if err := l.properties(f.properties(b)); err != nil {
		return nil, err
	}
	for _, to := range l.args[1:] {
		if err := f.addUpstreams(l, to); err != nil {
			return nil, err
		}
	}
	if len(f.To) == 0 {
		return nil, l.pos.errorf("forward: there is no resolver in %s", strings.Join(l.args[1:], " "))
	}
	if len(f.To) > maxUpstreams {
		return nil, l.pos.errorf("forward: %d resolvers; want at most %d", len(f.To), maxUpstreams)
	}
	return f, nil
}

// addUpstreams adds the resolvers that one argument names: an address, or a file with nameserver lines.
func (f *Forward) addUpstreams(l line, to string) error {
	transport, rest := cutTransport(to)
	if transport != DNS && transport != TLSTransport {
		return l.pos.errorf("forward: the transport %s:// of %s is not supported; want an address, tls://ADDRESS or a file", transport, to)
	}
	u, err := parseUpstream(rest, transport == TLSTransport)
	if err == nil {
		f.add(u)
		return nil
	}
	servers, fileErr := nameservers(rest)
	if fileErr != nil {
		return l.pos.errorf("forward: %q is neither an IP address nor a file that can be read; names of resolvers are not supported", to)
	}
	f.Files = append(f.Files, rest)
	for _, s := range servers {
		port := uint16(portDNS)
		if transport == TLSTransport {
			port = portTLS
		}
		f.add(Upstream{Addr: netip.AddrPortFrom(s, port), TLS: transport == TLSTransport})
	}
	return nil
}

func (f *Forward) add(u Upstream) {
	if !slices.Contains(f.To, u) {
		f.To = append(f.To, u)
	}
}

// parseUpstream reads IP[%NAME][:PORT].
func parseUpstream(s string, tls bool) (Upstream, error) {
	u := Upstream{TLS: tls}
	port := uint16(portDNS)
	if tls {
		port = portTLS
		if host, name, ok := strings.Cut(s, "%"); ok {
			s, u.Name = host, name
			if n, p := cutPort(name); p != 0 {
				u.Name, port = n, p
			}
		}
	}
	if a, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil {
		u.Addr = netip.AddrPortFrom(a, port)
		return u, nil
	}
	var err error
	u.Addr, err = netip.ParseAddrPort(s)
	return u, err
}

// nameservers reads the addresses of a file in the form of resolv.conf(5).
func nameservers(file string) (out []netip.Addr, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	for row := range strings.Lines(string(text)) {
		words := strings.Fields(row)
		if len(words) < 2 || words[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(words[1]); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out, nil
}

// properties are the lines of the block.
func (f *Forward) properties(b *Block) map[string]func(line) error {
	return map[string]func(line) error{
		"except": func(p line) error {
			if err := p.want(1, -1, "zones"); err != nil {
				return err
			}
			zones, err := b.zonesOr(p, p.args)
			f.Except = append(f.Except, zones...)
			return err
		},
		"policy":               assign(&f.Policy, func(p line) (string, error) { return p.choice("random", "round_robin", "sequential") }),
		"max_concurrent":       assign(&f.MaxConcurrent, count),
		"max_fails":            assign(&f.MaxFails, count),
		"max_connect_attempts": assign(&f.MaxConnectAttempts, count),
		"max_idle_conns":       assign(&f.MaxIdle, count),
		"force_tcp":            set(&f.ForceTCP),
		"prefer_udp":           set(&f.PreferUDP),
		"expire":               assign(&f.Expire, line.oneDuration),
		"read_timeout":         assign(&f.ReadTimeout, line.oneDuration),
		"tls_servername":       assign(&f.TLSServerName, func(p line) (string, error) { return p.one("a name") }),
		"next_on_nodata":       set(&f.NextOnNoData),
		"failover":             assign(&f.Failover, rcodes),
		"next":                 assign(&f.Next, rcodes),
		"health_check":         f.healthCheck,
		"tls":                  func(p line) error { return f.setTLS(b, p) },
		"source_address": func(p line) error {
			text, err := p.one("an address")
			if err == nil {
				if f.Source, err = netip.ParseAddr(text); err != nil {
					err = p.pos.errorf("source_address: %q is not an IP address", text)
				}
			}
			return err
		},
		"max_age": func(p line) error {
			b.note(p, "connections are closed when they have been idle for the time of expire")
			_, err := p.oneDuration()
			return err
		},
		"failfast_all_unhealthy_upstreams": set(&f.FailFast),
	}
}

func count(l line) (int, error) { return l.oneInteger(0, 1<<30) }

// rcodes reads names of response codes.
func rcodes(l line) (out []int, err error) {
	for _, a := range l.args {
		code, ok := mdns.StringToRcode[strings.ToUpper(a)]
		if !ok {
			return nil, l.pos.errorf("%s: %q is not the name of a response code such as NXDOMAIN", l.name, a)
		}
		out = append(out, code)
	}
	return out, l.want(1, -1, "response codes")
}

func (f *Forward) healthCheck(p line) (err error) {
	if err := p.want(1, 4, "DURATION [no_rec] [domain FQDN]"); err != nil {
		return err
	}
	if f.HealthEvery, err = p.duration(0); err != nil {
		return err
	}
	for i := 1; i < len(p.args); i++ {
		switch {
		case p.args[i] == "no_rec":
			f.HealthNoRecursion = true
		case p.args[i] == "domain" && i+1 < len(p.args):
			i++
			if _, ok := mdns.IsDomainName(p.args[i]); !ok {
				return p.pos.errorf("health_check: %q is not a domain name", p.args[i])
			}
			f.HealthDomain = mdns.Fqdn(p.args[i])
		default:
			return p.pos.errorf("health_check: unknown option %q; want no_rec or domain FQDN", p.args[i])
		}
	}
	return nil
}

// setTLS reads "tls", "tls CA", "tls CERT KEY" or "tls CERT KEY CA".
func (f *Forward) setTLS(b *Block, p line) error {
	f.TLS = &TLS{}
	switch len(p.args) {
	case 0:
	case 1:
		f.TLS.CA = b.path(p.args[0])
	case 2, 3:
		f.TLS.Cert, f.TLS.Key = b.path(p.args[0]), b.path(p.args[1])
		if len(p.args) == 3 {
			f.TLS.CA = b.path(p.args[2])
		}
	default:
		return p.errArgs("[CERT KEY] [CA]")
	}
	return nil
}
