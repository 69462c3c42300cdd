package corefile

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Plan is what a Corefile asks for.
type Plan struct {
	Blocks []Block
	// Notes are settings that have no effect here, with place and reason.
	Notes []string

	files []string
	print string
}

// Block is a server block.
type Block struct {
	Pos   Pos
	Zones []Zone
	// Bind are the addresses and names of interfaces to listen on; empty for all addresses.
	Bind []string
	// Except are addresses and interfaces that Bind leaves out.
	Except []string
	// TLS is the certificate of tls:// zones.
	TLS *TLS
	// Sockets is the number of sockets for each address (multisocket); 0 for the server's own choice.
	Sockets int
	// Plugins is the chain, in the order in which CoreDNS runs it.
	Plugins []Plugin

	root   string // of relative paths
	marked map[string]Pos
	plan   *Plan
}

// Transports of a zone.
const (
	DNS          = "dns"
	TLSTransport = "tls"
)

// Zone is one zone of a server block. Name is in lower case and ends with a dot.
type Zone struct {
	Name      string
	Port      uint16
	Transport string
}

// Plugin is the configuration of one plugin in a chain.
type Plugin interface {
	// PluginName is the name of its directive.
	PluginName() string
}

// At is the place of a directive; the configurations embed it.
type At struct{ Pos Pos }

// Fall is the zones whose names go to the next plugin if this one has no such name.
type Fall struct{ Zones []string }

// Through reports whether name, in lower case, falls through.
func (f Fall) Through(name string) bool {
	return slices.ContainsFunc(f.Zones, func(z string) bool { return InZone(name, z) })
}

// InZone reports whether name is zone or below it; both are in lower case and end with a dot.
func InZone(name, zone string) bool {
	if zone == "." || name == zone {
		return true
	}
	return len(name) > len(zone) && name[len(name)-len(zone)-1] == '.' && strings.HasSuffix(name, zone)
}

// LongestZone returns the most specific of zones that name is in, or "".
func LongestZone(name string, zones []string) (found string) {
	for _, z := range zones {
		if len(z) > len(found) && InZone(name, z) {
			found = z
		}
	}
	return found
}

// Load reads a Corefile and the files that it imports.
func Load(file string) (*Plan, error) {
	s := &source{snippets: map[string][]token{}, files: []string{file}}
	words, err := s.read(file, 0)
	if err != nil {
		return nil, fmt.Errorf("corefile: %w", err)
	}
	blocks, err := parse(words)
	if err != nil {
		return nil, fmt.Errorf("corefile: %w", err)
	}
	p := &Plan{files: s.files}
	for _, b := range blocks {
		if err := p.add(b); err != nil {
			return nil, fmt.Errorf("corefile: %w", err)
		}
	}
	if len(p.Blocks) == 0 {
		return nil, fmt.Errorf("corefile: %s has no server block; the usual one begins with .:53 {", file)
	}
	if err := p.overlaps(); err != nil {
		return nil, fmt.Errorf("corefile: %w", err)
	}
	p.print, err = fingerprint(s.files)
	return p, err
}

// Changed reports whether the files differ from the ones of the plan.
func (p *Plan) Changed() bool {
	now, err := fingerprint(p.files)
	return err == nil && now != p.print
}

// add plans one server block.
func (p *Plan) add(from block) error {
	b := Block{Pos: from.pos, marked: map[string]Pos{}, plan: p}
	for _, k := range from.keys {
		zones, err := parseKey(k)
		if err != nil {
			return err
		}
		b.Zones = append(b.Zones, zones...)
	}
	for _, l := range from.directives {
		if !slices.Contains(order, l.name) {
			return l.pos.errorf("unknown plugin %q; fairlead and CoreDNS v1.15 have none of this name", l.name)
		}
	}
	// The file's order counts only within one plugin.
	for _, name := range order {
		for _, l := range from.directives {
			if l.name != name {
				continue
			}
			if err := b.plugin(l); err != nil {
				return err
			}
		}
	}
	for _, z := range b.Zones {
		if z.Transport == TLSTransport && b.TLS == nil {
			return b.Pos.errorf("zone %s is served over TLS: the block needs a line tls CERT KEY", z.Name)
		}
	}
	p.Blocks = append(p.Blocks, b)
	return nil
}

// plugin adds one directive to the block.
func (b *Block) plugin(l line) error {
	if why, ok := refused[l.name]; ok {
		return l.pos.errorf("plugin %s is not supported: %s", l.name, why)
	}
	if _, ok := b.marked[l.name]; ok && !repeatable[l.name] {
		return l.pos.errorf("plugin %s is there twice in this server block, first at %s; remove one", l.name, b.marked[l.name])
	}
	b.marked[l.name] = l.pos
	if set, ok := settings[l.name]; ok {
		return set(b, l)
	}
	plugin, err := parsers[l.name](b, l)
	if err != nil {
		return err
	}
	b.Plugins = append(b.Plugins, plugin)
	return nil
}

// zoneNames returns the names of the block's zones.
func (b *Block) zoneNames() []string {
	var out []string
	for _, z := range b.Zones {
		out = append(out, z.Name)
	}
	return out
}

// zonesOr returns the zones in args, or the zones of the block if there are none.
func (b *Block) zonesOr(l line, args []string) ([]string, error) {
	if len(args) == 0 {
		return b.zoneNames(), nil
	}
	var out []string
	for _, a := range args {
		_, rest := cutTransport(a)
		host, _ := cutPort(rest)
		names, err := expandZone(host)
		if err != nil {
			return nil, l.pos.errorf("%s: %w", l.name, err)
		}
		out = append(out, names...)
	}
	return out, nil
}

// overlaps refuses a zone that two blocks serve on the same address.
func (p *Plan) overlaps() error {
	type place struct {
		zone Zone
		host string
	}
	seen, anywhere := map[place]Pos{}, map[Zone]Pos{}
	for _, b := range p.Blocks {
		hosts := b.Bind
		if len(hosts) == 0 {
			hosts = []string{""}
		}
		for _, z := range b.Zones {
			for _, h := range hosts {
				other, same := seen[place{z, h}]
				if !same && h != "" {
					other, same = seen[place{z, ""}]
				}
				if !same && h == "" {
					other, same = anywhere[z]
				}
				if same {
					return b.Pos.errorf("zone %s on port %d is already served by the block at %s; remove one of them", z.Name, z.Port, other)
				}
				seen[place{z, h}] = b.Pos
			}
			anywhere[z] = b.Pos
		}
	}
	return nil
}

// note records that a setting has no effect.
func (b *Block) note(l line, why string) {
	b.plan.Notes = append(b.plan.Notes, fmt.Sprintf("%s: %s: %s", l.pos, l.name, why))
}

// Reload returns the reload configuration of the file, nil if no block has one.
func (p *Plan) Reload() *Reload {
	for _, b := range p.Blocks {
		for _, plugin := range b.Plugins {
			if r, ok := plugin.(*Reload); ok {
				return r
			}
		}
	}
	return nil
}

// Find returns the configurations of a type in a chain.
func Find[T Plugin](plugins []Plugin) (out []T) {
	for _, p := range plugins {
		if t, ok := p.(T); ok {
			out = append(out, t)
		}
	}
	return out
}

// TLS is the certificate of a server and the authority of its clients.
type TLS struct {
	Cert, Key, CA string
	// ClientAuth is nocert, request, require, verify_if_given or require_and_verify.
	ClientAuth string
}

// DefaultReload is how often CoreDNS looks for changes.
const DefaultReload = 30 * time.Second

// hostPort reads "HOST:PORT" of a listener of HTTP.
func hostPort(l line, text string) (string, error) {
	host, port := cutPort(text)
	if port == 0 {
		return "", l.pos.errorf("%s: %q is not of the form [ADDRESS]:PORT", l.name, text)
	}
	if host != "" && host != "localhost" {
		if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err != nil {
			return "", l.pos.errorf("%s: %q is not an IP address; want [ADDRESS]:PORT", l.name, host)
		}
	}
	return fmt.Sprintf("%s:%d", host, port), nil
}

// names returns the names of the directives in the block, so far in the order of plugins.
func (b *Block) names() (out []string) {
	for name := range b.marked {
		out = append(out, name)
	}
	return out
}
