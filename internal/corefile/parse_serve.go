package corefile

import (
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	mdns "github.com/miekg/dns"
)

// Reload reads the file again when it changes.
type Reload struct{ Interval, Jitter time.Duration }

// PluginName is the name of the directive.
func (*Reload) PluginName() string { return "reload" }

func parseReload(_ *Block, l line) (Plugin, error) {
	r := &Reload{Interval: DefaultReload, Jitter: DefaultReload / 2}
	err := l.want(0, 2, "[INTERVAL] [JITTER]")
	if err == nil && len(l.args) > 0 {
		r.Interval, err = l.duration(0)
	}
	if err == nil && len(l.args) > 1 {
		r.Jitter, err = l.duration(1)
	}
	switch {
	case err != nil:
		return nil, err
	case r.Interval < 2*time.Second:
		return nil, l.pos.errorf("reload: the interval is %s; want 2s or more", r.Interval)
	case r.Jitter != 0 && r.Jitter < time.Second:
		return nil, l.pos.errorf("reload: the jitter is %s; want 0, or 1s or more", r.Jitter)
	}
	r.Jitter = min(r.Jitter, r.Interval/2)
	return r, l.noBlock()
}

// NSID adds the server's identity to answers (RFC 5001).
type NSID struct{ Data string }

// PluginName is the name of the directive.
func (*NSID) PluginName() string { return "nsid" }

func parseNSID(_ *Block, l line) (Plugin, error) {
	if len(l.args) > 0 {
		return &NSID{Data: strings.Join(l.args, " ")}, l.noBlock()
	}
	name, err := os.Hostname()
	if err != nil {
		name = "localhost"
	}
	return &NSID{Data: name}, l.noBlock()
}

// Bufsize bounds the size of answers over UDP.
type Bufsize struct{ Size uint16 }

// PluginName is the name of the directive.
func (*Bufsize) PluginName() string { return "bufsize" }

func parseBufsize(_ *Block, l line) (Plugin, error) {
	if len(l.args) == 0 {
		return &Bufsize{Size: 1232}, l.noBlock()
	}
	n, err := l.oneInteger(512, 4096)
	if err != nil {
		return nil, err
	}
	return &Bufsize{Size: uint16(n)}, l.noBlock()
}

// Ready is the address of /ready.
type Ready struct {
	Address string
	// Continuously checks again after the server has been ready once.
	Continuously bool
}

// PluginName is the name of the directive.
func (*Ready) PluginName() string { return "ready" }

func parseReady(_ *Block, l line) (Plugin, error) {
	r := &Ready{Address: ":8181"}
	if err := l.want(0, 1, "[ADDRESS]"); err != nil {
		return nil, err
	}
	if len(l.args) == 1 {
		var err error
		if r.Address, err = hostPort(l, l.args[0]); err != nil {
			return nil, err
		}
	}
	return r, l.properties(map[string]func(line) error{
		"monitor": func(p line) error {
			kind, err := p.choice("until-ready", "continuously")
			r.Continuously = kind == "continuously"
			return err
		},
	})
}

// Health is the address of /health.
type Health struct {
	Address string
	// Lameduck is how long the server still answers when it stops.
	Lameduck time.Duration
}

// PluginName is the name of the directive.
func (*Health) PluginName() string { return "health" }

func parseHealth(_ *Block, l line) (Plugin, error) {
	h := &Health{Address: ":8080"}
	if err := l.want(0, 1, "[ADDRESS]"); err != nil {
		return nil, err
	}
	if len(l.args) == 1 {
		var err error
		if h.Address, err = hostPort(l, l.args[0]); err != nil {
			return nil, err
		}
	}
	return h, l.properties(map[string]func(line) error{"lameduck": assign(&h.Lameduck, line.oneDuration)})
}

// Prometheus is the address of /metrics.
type Prometheus struct{ Address string }

// PluginName is the name of the directive.
func (*Prometheus) PluginName() string { return "prometheus" }

func parsePrometheus(_ *Block, l line) (Plugin, error) {
	p := &Prometheus{Address: "localhost:9153"}
	if err := l.want(0, 1, "[ADDRESS]"); err != nil {
		return nil, err
	}
	if len(l.args) == 1 {
		var err error
		if p.Address, err = hostPort(l, l.args[0]); err != nil {
			return nil, err
		}
	}
	return p, l.noBlock()
}

// Errors logs the errors of the plugins behind it.
type Errors struct {
	Stacktrace   bool
	Consolidated []Consolidate
}

// Consolidate counts errors that match a pattern, and logs their number once in a period.
type Consolidate struct {
	Period    time.Duration
	Pattern   *regexp.Regexp
	Level     string // debug, info, warning or error
	ShowFirst bool
}

// PluginName is the name of the directive.
func (*Errors) PluginName() string { return "errors" }

func parseErrors(_ *Block, l line) (Plugin, error) {
	e := &Errors{}
	if len(l.args) > 0 {
		if _, err := l.choice("stdout"); err != nil {
			return nil, err
		}
	}
	return e, l.properties(map[string]func(line) error{
		"stacktrace": set(&e.Stacktrace),
		"consolidate": func(p line) error {
			if err := p.want(2, 4, "DURATION REGEXP [LEVEL] [show_first]"); err != nil {
				return err
			}
			c := Consolidate{Level: "error"}
			var err error
			if c.Period, err = p.duration(0); err != nil {
				return err
			}
			if c.Pattern, err = p.regexp(p.args[1]); err != nil {
				return err
			}
			for _, a := range p.args[2:] {
				switch {
				case a == "show_first":
					c.ShowFirst = true
				case slices.Contains([]string{"debug", "info", "warning", "error"}, a) && !c.ShowFirst:
					c.Level = a
				default:
					return p.pos.errorf("consolidate: %q is not one of debug, info, warning, error, show_first", a)
				}
			}
			e.Consolidated = append(e.Consolidated, c)
			return nil
		},
	})
}

// maxRegexp is the longest regular expression, as in CoreDNS.
const maxRegexp = 10000

func (l line) regexp(text string) (*regexp.Regexp, error) {
	if len(text) > maxRegexp {
		return nil, l.pos.errorf("%s: the regular expression has %d characters; want at most %d", l.name, len(text), maxRegexp)
	}
	re, err := regexp.Compile(text)
	if err != nil {
		return nil, l.pos.errorf("%s: %w", l.name, err)
	}
	return re, nil
}

// Log writes a line for each question below Scopes whose answer is of one of Classes.
type Log struct {
	Scopes  []string
	Format  string
	Classes []string // all, success, denial, error
}

// Formats of Log.
const (
	CommonLog   = `{remote}:{port} - {>id} "{type} {class} {name} {proto} {size} {>do} {>bufsize}" {rcode} {>rflags} {rsize} {duration}`
	CombinedLog = CommonLog + ` "{>opcode}"`
)

// PluginName is the name of the directive.
func (*Log) PluginName() string { return "log" }

func parseLog(_ *Block, l line) (Plugin, error) {
	out := &Log{Scopes: []string{"."}, Format: CommonLog}
	args := l.args
	if n := len(args); n > 1 && strings.Contains(args[n-1], "{") {
		out.Format = strings.NewReplacer("{common}", CommonLog, "{combined}", CombinedLog).Replace(args[n-1])
		args = args[:n-1]
	}
	if len(args) > 0 {
		out.Scopes = nil
	}
	for _, a := range args {
		out.Scopes = append(out.Scopes, strings.ToLower(mdns.Fqdn(a)))
	}
	err := l.properties(map[string]func(line) error{
		"class": func(p line) error {
			for _, a := range p.args {
				if !slices.Contains([]string{"all", "success", "denial", "error"}, a) {
					return p.pos.errorf("log: class %q is not one of all, success, denial, error", a)
				}
			}
			out.Classes = append(out.Classes, p.args...)
			return p.want(1, -1, "all, success, denial or error")
		},
	})
	if len(out.Classes) == 0 {
		out.Classes = []string{"all"}
	}
	return out, err
}

// Chaos answers questions of class CH for the version and the authors.
type Chaos struct {
	Version string
	Authors []string
}

// PluginName is the name of the directive.
func (*Chaos) PluginName() string { return "chaos" }

func parseChaos(_ *Block, l line) (Plugin, error) {
	c := &Chaos{}
	if len(l.args) > 0 {
		c.Version, c.Authors = l.args[0], l.args[1:]
	}
	return c, l.noBlock()
}

// LoadBalance shuffles addresses.
type LoadBalance struct {
	// Prefer are ranges whose addresses come first.
	Prefer []netip.Prefix
}

// PluginName is the name of the directive.
func (*LoadBalance) PluginName() string { return "loadbalance" }

func parseLoadBalance(_ *Block, l line) (Plugin, error) {
	lb := &LoadBalance{}
	if len(l.args) > 0 && l.args[0] == "weighted" {
		return nil, l.pos.errorf("loadbalance: the policy weighted is not supported; use round_robin")
	}
	if len(l.args) > 0 {
		if _, err := l.choice("round_robin"); err != nil {
			return nil, err
		}
	}
	return lb, l.properties(map[string]func(line) error{
		"prefer": func(p line) error {
			for _, a := range p.args {
				n, err := netip.ParsePrefix(a)
				if err != nil {
					return p.pos.errorf("prefer: %q is not a range of addresses", a)
				}
				lb.Prefer = append(lb.Prefer, n.Masked())
			}
			return nil
		},
	})
}

// Local answers localhost and its reverse names (RFC 6761, 6.3).
type Local struct {
	// NoPrefix leaves out names that only begin with localhost.
	NoPrefix bool
}

func parseLocal(_ *Block, l line) (Plugin, error) {
	c := &Local{}
	if err := l.flag(); err != nil {
		return nil, err
	}
	return c, l.properties(map[string]func(line) error{
		"localhost_prefix": func(p line) error {
			word, err := p.choice("on", "off")
			c.NoPrefix = word == "off"
			return err
		},
	})
}

// PluginName is the name of the directive.
func (*Local) PluginName() string { return "local" }

// Any answers questions of type ANY with HINFO (RFC 8482).
type Any struct{}

// PluginName is the name of the directive.
func (*Any) PluginName() string { return "any" }

// Minimal leaves authority and additional records out of positive answers.
type Minimal struct{}

// PluginName is the name of the directive.
func (*Minimal) PluginName() string { return "minimal" }

// Whoami answers with the client's address and port.
type Whoami struct{}

// PluginName is the name of the directive.
func (*Whoami) PluginName() string { return "whoami" }

// Loop looks for forwarding loops once at the start.
type Loop struct{ Zone string }

// PluginName is the name of the directive.
func (*Loop) PluginName() string { return "loop" }
