package corefile

// order is the order in which CoreDNS v1.15 runs its plugins (plugin.cfg).
var order = []string{
	"root", "metadata", "geoip", "cancel", "proxyproto", "quic", "grpc_server", "https", "https3", "timeouts", "multisocket", "reload",
	"nsid", "bufsize", "bind", "debug", "trace", "ready", "health", "pprof", "shed", "prometheus", "errors", "log", "dnstap", "local",
	"dns64", "siit", "any", "chaos", "loadbalance", "tsig", "rewrite", "autopath", "acl", "cache", "header", "dnssec", "tls", "minimal",
	"template", "transfer", "dynupdate", "hosts", "route53", "azure", "clouddns", "k8s_external", "kubernetes", "file", "auto",
	"secondary", "etcd", "loop", "forward", "grpc", "erratic", "whoami", "on", "sign", "view", "nomad",
}

// refused are the plugins that are not supported, with what to do instead.
var refused = map[string]string{
	"geoip":        "answers do not depend on places; remove the line",
	"cancel":       "questions end after 5 seconds anyway; remove the line",
	"proxyproto":   "clients must reach the server directly; remove the line",
	"quic":         "serve tls:// instead of quic://, and remove the line",
	"grpc_server":  "serve dns:// or tls://, and remove the line",
	"https":        "serve tls:// instead of https://, and remove the line",
	"https3":       "serve tls:// instead of https://, and remove the line",
	"trace":        "use log and the metrics, and remove the line",
	"pprof":        "remove the line",
	"shed":         "bound the questions to resolvers with forward's max_concurrent, and remove the line",
	"dnstap":       "use log, and remove the line",
	"siit":         "use dns64 or remove the line",
	"tsig":         "no plugin here needs it; remove the line",
	"header":       "the flags of answers are fixed; remove the line",
	"dnssec":       "sign the zone before and serve it with file",
	"transfer":     "zone transfers are refused; remove the line",
	"dynupdate":    "zones are read from files and from the Kubernetes API only; remove the line",
	"route53":      "forward the zone to the provider's resolvers",
	"azure":        "forward the zone to the provider's resolvers",
	"clouddns":     "forward the zone to the provider's resolvers",
	"k8s_external": "keep CoreDNS for this zone, and forward the zone to it",
	"secondary":    "forward the zone to its primary servers",
	"etcd":         "keep CoreDNS for this zone, and forward the zone to it",
	"grpc":         "use forward with tls:// instead",
	"erratic":      "it is for tests of clients only; remove the line",
	"on":           "start programs with the service manager instead, and remove the line",
	"sign":         "sign the zone before and serve it with file",
	"view":         "give each view its own address with bind",
	"nomad":        "forward the zone to a resolver that knows it",
}

// repeatable are the plugins that a server block may have more than once.
var repeatable = map[string]bool{
	"log": true, "rewrite": true, "acl": true, "template": true, "file": true, "auto": true, "forward": true, "bind": true, "health": true,
	"dns64": true,
}

// settings are the directives that are no step of the chain.
var settings = map[string]func(*Block, line) error{
	"root":        setRoot,
	"bind":        setBind,
	"tls":         setTLS,
	"multisocket": setSockets,
	"metadata":    func(b *Block, l line) error { b.note(l, "no plugin here needs it"); return l.noBlock() },
	"debug":       func(b *Block, l line) error { b.note(l, "use --log-level debug"); return l.noBlock() },
	"timeouts":    setTimeouts,
}

// parsers make the configurations of the chain.
var parsers = map[string]func(*Block, line) (Plugin, error){
	"reload":      parseReload,
	"nsid":        parseNSID,
	"bufsize":     parseBufsize,
	"ready":       parseReady,
	"health":      parseHealth,
	"prometheus":  parsePrometheus,
	"errors":      parseErrors,
	"log":         parseLog,
	"local":       parseLocal,
	"dns64":       parseDNS64,
	"any":         func(_ *Block, l line) (Plugin, error) { return &Any{}, l.bare() },
	"chaos":       parseChaos,
	"loadbalance": parseLoadBalance,
	"rewrite":     parseRewrite,
	"autopath":    parseAutopath,
	"acl":         parseACL,
	"cache":       parseCache,
	"minimal":     func(_ *Block, l line) (Plugin, error) { return &Minimal{}, l.bare() },
	"template":    parseTemplate,
	"hosts":       parseHosts,
	"kubernetes":  parseKubernetes,
	"file":        parseFile,
	"auto":        parseAuto,
	"loop":        func(b *Block, l line) (Plugin, error) { return &Loop{Zone: b.zoneNames()[0]}, l.bare() },
	"forward":     parseForward,
	"whoami":      func(_ *Block, l line) (Plugin, error) { return &Whoami{}, l.bare() },
}

// bare checks that a directive has neither arguments nor a block.
func (l line) bare() error {
	if err := l.flag(); err != nil {
		return err
	}
	return l.noBlock()
}

func setRoot(b *Block, l line) (err error) {
	b.root, err = l.one("a directory")
	return err
}

func setBind(b *Block, l line) error {
	if err := l.want(1, -1, "addresses or names of interfaces"); err != nil {
		return err
	}
	b.Bind = append(b.Bind, l.args...)
	return l.properties(map[string]func(line) error{
		"except": func(p line) error {
			b.Except = append(b.Except, p.args...)
			return p.want(1, -1, "addresses or names of interfaces")
		},
	})
}

func setTLS(b *Block, l line) error {
	if err := l.want(2, 3, "CERT KEY [CA]"); err != nil {
		return err
	}
	b.TLS = &TLS{Cert: b.path(l.args[0]), Key: b.path(l.args[1]), ClientAuth: "nocert"}
	if len(l.args) == 3 {
		b.TLS.CA, b.TLS.ClientAuth = b.path(l.args[2]), "require_and_verify"
	}
	return l.properties(map[string]func(line) error{
		"client_auth": assign(&b.TLS.ClientAuth, func(p line) (string, error) {
			return p.choice("nocert", "request", "require", "verify_if_given", "require_and_verify")
		}),
	})
}

func setSockets(b *Block, l line) (err error) {
	if len(l.args) == 0 {
		return l.noBlock()
	}
	b.Sockets, err = l.oneInteger(1, 1024)
	return err
}

func setTimeouts(b *Block, l line) error {
	b.note(l, "the server has its own timeouts of connections")
	return l.flag()
}
