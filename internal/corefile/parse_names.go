package corefile

import (
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	mdns "github.com/miekg/dns"
)

// Kubernetes answers the names of a cluster.
type Kubernetes struct {
	Pos Pos
	// Zones are the cluster domains, Reverse the reverse zones.
	Zones, Reverse []string
	Pods           string // insecure, verified or disabled
	TTL            uint32
	Fall           Fall
	Namespaces     []string // empty for all
	NoEndpoints    bool
	Kubeconfig     string // empty for the one of the command line
	Context        string
}

// PluginName is the name of the directive.
func (*Kubernetes) PluginName() string { return "kubernetes" }

// DefaultTTL is the TTL of the plugin kubernetes where the file has none.
const DefaultTTL = 5

const maxTTL = 3600

func parseKubernetes(b *Block, l line) (Plugin, error) {
	k := &Kubernetes{Pos: l.pos, Pods: "disabled", TTL: DefaultTTL}
	zones, err := b.zonesOr(l, l.args)
	if err != nil {
		return nil, err
	}
	for i, z := range zones {
		if slices.Contains(zones[:i], z) {
			continue
		}
		if InZone(z, "in-addr.arpa.") || InZone(z, "ip6.arpa.") {
			k.Reverse = append(k.Reverse, z)
		} else {
			k.Zones = append(k.Zones, z)
		}
	}
	if len(k.Zones) == 0 {
		return nil, l.pos.errorf("kubernetes: a zone that is not a reverse zone is needed, such as cluster.local")
	}
	ignored := func(why string) func(line) error {
		return func(p line) error { b.note(p, why); return nil }
	}
	notHere := func(remedy string) func(line) error {
		return func(p line) error { return p.pos.errorf("kubernetes: %s is not supported: %s", p.name, remedy) }
	}
	return k, l.properties(map[string]func(line) error{
		"pods": assign(&k.Pods, func(p line) (string, error) { return p.choice("insecure", "verified", "disabled") }),
		"ttl": func(p line) error {
			n, err := p.oneInteger(0, maxTTL)
			k.TTL = uint32(n)
			return err
		},
		"fallthrough": assign(&k.Fall, b.fall),
		"namespaces": func(p line) error {
			k.Namespaces = append(k.Namespaces, p.args...)
			return p.want(1, -1, "namespaces")
		},
		"noendpoints": set(&k.NoEndpoints),
		"kubeconfig": func(p line) error {
			if err := p.want(1, 2, "FILE [CONTEXT]"); err != nil {
				return err
			}
			k.Kubeconfig = p.args[0]
			if len(p.args) == 2 {
				k.Context = p.args[1]
			}
			return nil
		},
		"startup_timeout":        ignored("the server waits 5s; then it answers SERVFAIL until it has listed the cluster, and /ready is 503"),
		"apiserver_qps":          ignored("the server has one watch for each kind"),
		"apiserver_burst":        ignored("the server has one watch for each kind"),
		"apiserver_max_inflight": ignored("the server has one watch for each kind"),
		"upstream":               ignored("targets of CNAME records are asked of the server itself, as in CoreDNS since 1.5"),
		"resyncperiod":           ignored("CoreDNS has no effect of it either since 1.5"),
		"endpoint":               notHere("name the API server in the file of --kubeconfig"),
		"tls":                    notHere("put the certificate into the file of --kubeconfig"),
		"labels":                 notHere("remove it; all Services are answered"),
		"namespace_labels":       notHere("list the namespaces with the property namespaces"),
		"endpoint_pod_names":     notHere("give Pods a hostname and a subdomain"),
		"ignore":                 notHere("remove it; a headless Service without endpoints is NXDOMAIN"),
		"multicluster":           notHere("keep CoreDNS for this zone, and forward the zone to it"),
		"zonal":                  notHere("remove it"),
	})
}

// Hosts answers names from a file in the form of hosts(5) and from lines in the block.
type Hosts struct {
	File      string // empty for none
	Inline    []string
	Zones     []string
	TTL       uint32
	Reload    time.Duration // 0: never
	NoReverse bool
	Fall      Fall
	// FallUnsupported lets other types than A, AAAA and PTR fall through too.
	FallUnsupported bool
}

// PluginName is the name of the directive.
func (*Hosts) PluginName() string { return "hosts" }

const (
	defaultHostsTTL    = 3600
	defaultHostsReload = 5 * time.Second
)

func parseHosts(b *Block, l line) (Plugin, error) {
	h := &Hosts{File: "/etc/hosts", TTL: defaultHostsTTL, Reload: defaultHostsReload}
	args := l.args
	if len(args) > 0 {
		h.File = b.path(args[0])
		args = args[1:]
	}
	var err error
	if h.Zones, err = b.zonesOr(l, args); err != nil {
		return nil, err
	}
	known := map[string]func(line) error{
		"fallthrough":             assign(&h.Fall, b.fall),
		"fallthrough_unsupported": set(&h.FallUnsupported),
		"no_reverse":              set(&h.NoReverse),
		"reload":                  assign(&h.Reload, line.oneDuration),
		"ttl": func(p line) error {
			n, err := p.oneInteger(1, 65535)
			h.TTL = uint32(n)
			return err
		},
	}
	var properties []line
	for _, p := range l.body {
		if _, err := netip.ParseAddr(p.name); err == nil {
			h.Inline = append(h.Inline, strings.Join(append([]string{p.name}, p.args...), " "))
			continue
		}
		properties = append(properties, p)
	}
	l.body = properties
	return h, l.properties(known)
}

// Template answers from templates of records.
type Template struct {
	Class, Type                   uint16
	Zones                         []string
	Match                         []*regexp.Regexp
	Answer, Additional, Authority []*template.Template
	Rcode                         int
	EDE                           *EDE
	Fall                          Fall
}

// EDE is an extended error (RFC 8914).
type EDE struct {
	Code uint16
	Text string
}

// PluginName is the name of the directive.
func (*Template) PluginName() string { return "template" }

func parseTemplate(b *Block, l line) (Plugin, error) {
	if err := l.want(2, -1, "CLASS TYPE [ZONE...]"); err != nil {
		return nil, err
	}
	t := &Template{}
	var ok bool
	if t.Class, ok = mdns.StringToClass[l.args[0]]; !ok {
		return nil, l.pos.errorf("template: %q is not a class such as IN or ANY", l.args[0])
	}
	if t.Type, ok = mdns.StringToType[l.args[1]]; !ok {
		return nil, l.pos.errorf("template: %q is not a type such as A or ANY", l.args[1])
	}
	var err error
	if t.Zones, err = b.zonesOr(l, l.args[2:]); err != nil {
		return nil, err
	}
	err = l.properties(map[string]func(line) error{
		"answer":      templates(&t.Answer),
		"additional":  templates(&t.Additional),
		"authority":   templates(&t.Authority),
		"fallthrough": assign(&t.Fall, b.fall),
		"upstream":    func(line) error { return nil },
		"match": func(p line) error {
			for _, a := range p.args {
				re, err := p.regexp(a)
				if err != nil {
					return err
				}
				t.Match = append(t.Match, re)
			}
			return p.want(1, -1, "regular expressions")
		},
		"rcode": func(p line) error {
			codes, err := rcodes(p)
			if err == nil {
				t.Rcode = codes[0]
			}
			return err
		},
		"ederror": func(p line) error {
			if err := p.want(1, 2, "CODE [TEXT]"); err != nil {
				return err
			}
			n, err := p.integer(0, 0, 65535)
			t.EDE = &EDE{Code: uint16(n), Text: strings.Join(p.args[1:], "")}
			return err
		},
	})
	if len(t.Match) == 0 {
		t.Match = []*regexp.Regexp{regexp.MustCompile(".*")}
	}
	return t, err
}

// functions are what CoreDNS adds to the functions of text/template.
var functions = template.FuncMap{"parseInt": strconv.ParseUint}

// templates reads templates of records.
func templates(to *[]*template.Template) func(line) error {
	return func(p line) error {
		for _, a := range p.args {
			t, err := template.New(p.name).Funcs(functions).Parse(a)
			if err != nil {
				return p.pos.errorf("template: %s: %w; want text with fields such as {{ .Name }}", p.name, err)
			}
			*to = append(*to, t)
		}
		return p.want(1, -1, "records")
	}
}

// ACL allows, blocks, filters or drops questions by client and type; the first rule that matches counts.
type ACL struct {
	Zones []string
	Rules []ACLRule
}

// ACLRule is one line.
type ACLRule struct {
	Action string   // allow, block, filter or drop
	Types  []uint16 // empty for all
	Nets   []netip.Prefix
}

// PluginName is the name of the directive.
func (*ACL) PluginName() string { return "acl" }

func parseACL(b *Block, l line) (Plugin, error) {
	a := &ACL{}
	var err error
	if a.Zones, err = b.zonesOr(l, l.args); err != nil {
		return nil, err
	}
	for _, p := range l.body {
		r := ACLRule{Action: strings.ToLower(p.name)}
		if !slices.Contains([]string{"allow", "block", "filter", "drop"}, r.Action) {
			return nil, p.errProperty("acl", "allow, block, filter, drop")
		}
		if err := r.read(p); err != nil {
			return nil, err
		}
		a.Rules = append(a.Rules, r)
	}
	return a, nil
}

// read reads "[type TYPE...] [net NET...]".
func (r *ACLRule) read(p line) error {
	section := ""
	allTypes, allNets := true, true
	for _, w := range p.args {
		switch lower := strings.ToLower(w); {
		case lower == "type" || lower == "net":
			section = lower
		case section == "type" && w == "*", section == "net" && w == "*":
		case section == "type":
			t, ok := mdns.StringToType[w]
			if !ok {
				return p.pos.errorf("acl: %q is not a type of records", w)
			}
			r.Types, allTypes = append(r.Types, t), false
		case section == "net":
			n, err := parseNet(w)
			if err != nil {
				return p.pos.errorf("acl: %q is neither an address nor a range", w)
			}
			r.Nets, allNets = append(r.Nets, n), false
		default:
			return p.pos.errorf("acl: %q stands before type or net", w)
		}
	}
	if slices.Contains(p.args, "*") && !allTypes && !allNets {
		return p.pos.errorf("acl: * stands beside other values; write only *")
	}
	if allNets {
		r.Nets = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	}
	return nil
}

// parseNet reads an address or a range.
func parseNet(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	return p.Masked(), err
}

// DNS64 makes AAAA records from A records (RFC 6147).
type DNS64 struct {
	Prefix                  netip.Prefix
	TranslateAll, AllowIPv4 bool
}

// PluginName is the name of the directive.
func (*DNS64) PluginName() string { return "dns64" }

func parseDNS64(_ *Block, l line) (Plugin, error) {
	d := &DNS64{Prefix: netip.MustParsePrefix("64:ff9b::/96")}
	prefix := func(p line) (netip.Prefix, error) {
		text, err := p.one("a range")
		if err != nil {
			return netip.Prefix{}, err
		}
		n, err := netip.ParsePrefix(text)
		if err != nil || n.Addr().Is4() || !slices.Contains([]int{32, 40, 48, 56, 64, 96}, n.Bits()) {
			return n, p.pos.errorf("dns64: %q is not an IPv6 range of length 32, 40, 48, 56, 64 or 96 (RFC 6052, 2.2)", text)
		}
		return n.Masked(), nil
	}
	if len(l.args) > 0 {
		var err error
		if d.Prefix, err = prefix(l); err != nil {
			return nil, err
		}
	}
	return d, l.properties(map[string]func(line) error{
		"prefix": assign(&d.Prefix, prefix), "translate_all": set(&d.TranslateAll), "allow_ipv4": set(&d.AllowIPv4),
	})
}

// Autopath follows the search path of clients inside one answer.
type Autopath struct {
	Zones []string
	// Search is the path; empty for the one of the client's Pod (@kubernetes).
	Search []string
}

// PluginName is the name of the directive.
func (*Autopath) PluginName() string { return "autopath" }

func parseAutopath(b *Block, l line) (Plugin, error) {
	if err := l.want(1, -1, "[ZONE...] RESOLV-CONF"); err != nil {
		return nil, err
	}
	a := &Autopath{}
	n := len(l.args) - 1
	var err error
	if a.Zones, err = b.zonesOr(l, l.args[:n]); err != nil {
		return nil, err
	}
	switch from := l.args[n]; {
	case from == "@kubernetes":
		if !slices.ContainsFunc(b.names(), func(s string) bool { return s == "kubernetes" }) {
			b.note(l, "without the plugin kubernetes in the block no path is known")
		}
	case strings.HasPrefix(from, "@"):
		return nil, l.pos.errorf("autopath: %s is not supported; want @kubernetes or a file", from)
	default:
		conf, err := mdns.ClientConfigFromFile(b.path(from))
		if err != nil {
			return nil, l.pos.errorf("autopath: %w", err)
		}
		for _, s := range conf.Search {
			a.Search = append(a.Search, strings.ToLower(mdns.Fqdn(s)))
		}
		a.Search = append(a.Search, ".")
	}
	return a, l.noBlock()
}
