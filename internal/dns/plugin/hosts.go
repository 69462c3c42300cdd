package plugin

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
)

// Hosts answers names from a file in the form of hosts(5), and from lines of the Corefile.
type Hosts struct {
	c    *corefile.Hosts
	next Handler
	log  *slog.Logger
	have atomic.Pointer[hostsTable]
}

// hostsTable is the contents of the file and of the lines. It is immutable.
type hostsTable struct {
	addrs    map[string][]netip.Addr // by name
	names    map[netip.Addr][]string
	modified time.Time
	size     int64
}

// NewHosts reads the file. One that is missing may be written later.
func NewHosts(c *corefile.Hosts, log *slog.Logger, next Handler) *Hosts {
	h := &Hosts{c: c, next: next, log: log}
	h.have.Store(h.read(nil))
	return h
}

// read returns the table as it is now, or nil if the file has not changed since have.
func (h *Hosts) read(have *hostsTable) *hostsTable {
	t := &hostsTable{addrs: map[string][]netip.Addr{}, names: map[netip.Addr][]string{}}
	if h.c.File != "" {
		info, err := os.Stat(h.c.File)
		if err == nil {
			t.modified, t.size = info.ModTime(), info.Size()
			if have != nil && t.modified.Equal(have.modified) && t.size == have.size {
				return nil
			}
			var text []byte
			if text, err = os.ReadFile(h.c.File); err == nil {
				h.add(t, string(text))
			}
		}
		switch {
		case err != nil && have == nil:
			h.log.Warn("cannot read the hosts file; it is read as soon as it can be", "err", err)
		case err != nil:
			return nil // it is being replaced, or gone: keep its last contents
		}
	}
	h.add(t, strings.Join(h.c.Inline, "\n"))
	return t
}

// add adds lines; lines of another form are skipped, as the C library does.
func (h *Hosts) add(t *hostsTable, text string) {
	for row := range strings.Lines(text) {
		row, _, _ = strings.Cut(row, "#")
		words := strings.Fields(row)
		if len(words) < 2 {
			continue
		}
		a, err := netip.ParseAddr(words[0])
		if err != nil || a.Zone() != "" {
			continue
		}
		a = a.Unmap()
		for _, w := range words[1:] {
			name := strings.ToLower(mdns.Fqdn(w))
			if corefile.LongestZone(name, h.c.Zones) == "" {
				continue
			}
			if !slices.Contains(t.addrs[name], a) {
				t.addrs[name] = append(t.addrs[name], a)
			}
			if !h.c.NoReverse && !slices.Contains(t.names[a], name) {
				t.names[a] = append(t.names[a], name)
			}
		}
	}
}

// Run reads the file again when it changes, until ctx ends.
func (h *Hosts) Run(ctx context.Context) {
	if h.c.File == "" || h.c.Reload == 0 {
		return
	}
	tick := time.NewTicker(h.c.Reload)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if t := h.read(h.have.Load()); t != nil {
			h.have.Store(t)
			h.log.Info("the hosts file has changed", "file", h.c.File, "entries", t.len())
		}
	}
}

// len returns the number of addresses of names and of names of addresses.
func (t *hostsTable) len() (n int) {
	for _, a := range t.addrs {
		n += len(a)
	}
	for _, s := range t.names {
		n += len(s)
	}
	return n
}

// Entries returns the file, the number of entries, and when the file was written.
func (h *Hosts) Entries() (file string, n int, modified time.Time) {
	t := h.have.Load()
	return h.c.File, t.len(), t.modified
}

// Answer answers from the table.
func (h *Hosts) Answer(ctx context.Context, q *Query) Reply {
	name, typ := q.Name(), q.Type()
	t := h.have.Load()
	if typ == mdns.TypePTR {
		a, ok := ReverseAddr(name)
		if !ok || len(t.names[a]) == 0 {
			return h.next.Answer(ctx, q)
		}
		m := q.NewReply()
		for _, n := range t.names[a] {
			m.Answer = append(m.Answer, &mdns.PTR{Hdr: header(name, typ, h.c.TTL), Ptr: n})
		}
		return Reply{Msg: m, Plugin: "hosts"}
	}
	if corefile.LongestZone(name, h.c.Zones) == "" {
		return h.next.Answer(ctx, q)
	}
	if typ != mdns.TypeA && typ != mdns.TypeAAAA && h.c.FallUnsupported && h.c.Fall.Through(name) {
		return h.next.Answer(ctx, q)
	}
	addrs, known := t.addrs[name]
	switch {
	case !known && h.c.Fall.Through(name):
		return h.next.Answer(ctx, q)
	case !known:
		return Fail("hosts", mdns.RcodeServerFailure, fmt.Errorf("hosts: no address of %s, and no fallthrough", name))
	}
	m := q.NewReply()
	for _, a := range addrs {
		switch {
		case typ == mdns.TypeA && a.Is4():
			m.Answer = append(m.Answer, &mdns.A{Hdr: header(name, typ, h.c.TTL), A: a.AsSlice()})
		case typ == mdns.TypeAAAA && a.Is6():
			m.Answer = append(m.Answer, &mdns.AAAA{Hdr: header(name, typ, h.c.TTL), AAAA: a.AsSlice()})
		}
	}
	return Reply{Msg: m, Plugin: "hosts"}
}

// ReverseAddr returns the address of a whole reverse name.
func ReverseAddr(name string) (netip.Addr, bool) {
	v4 := strings.HasSuffix(name, ".in-addr.arpa.")
	labels := strings.Split(strings.TrimSuffix(strings.TrimSuffix(name, ".in-addr.arpa."), ".ip6.arpa."), ".")
	slices.Reverse(labels)
	if v4 {
		a, err := netip.ParseAddr(strings.Join(labels, "."))
		return a, err == nil && a.Is4()
	}
	if len(labels) != 32 || !strings.HasSuffix(name, ".ip6.arpa.") {
		return netip.Addr{}, false
	}
	var text strings.Builder
	for i, l := range labels {
		if i > 0 && i%4 == 0 {
			text.WriteByte(':')
		}
		text.WriteString(l)
	}
	a, err := netip.ParseAddr(text.String())
	return a.Unmap(), err == nil
}
