package userspace

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// Look is dataplane.Looker's: it reads which port of this process a frontend leads to, and the
// endpoints of the listener there.
func (m *Mode) Look(ctx context.Context, fronts []dataplane.Asked, client netip.Addr) ([]dataplane.Installed, error) {
	m.looks.Lock()
	defer m.looks.Unlock()
	if m.reader == nil {
		return nil, errors.New("userspace: the mode has ended")
	}
	out := make([]dataplane.Installed, len(fronts))
	for _, t := range m.targets {
		var r *found
		for i, a := range fronts {
			if a.Family != t.layout.family {
				continue
			}
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if r == nil {
				var err error
				if r, err = t.read(m.reader); err != nil {
					return nil, fmt.Errorf("userspace, table %s: read the installed rules: %w", t.layout.table, err)
				}
			}
			out[i].Front = a.String()
			l := look{target: t, Asked: a, found: r, to: &out[i]}
			l.front(client)
		}
	}
	return out, nil
}

// look is the way of packets to one frontend.
type look struct {
	*target
	dataplane.Asked
	found *found
	to    *dataplane.Installed
}

func (l *look) front(client netip.Addr) {
	key := string(tables.AppendKey(nil, l.FrontKey))
	ports, others := setVIPs, setOtherVIPs
	if l.Node {
		ports, others = setNodePorts, setOtherNode
	}
	if e, there := l.found.elems[slot{ports, key}]; there && len(e.Data) == 2 {
		port := binary.BigEndian.Uint16(e.Data)
		l.says(ports, &e, fmt.Sprintf("port %d of this process", port))
		l.to.Present, l.to.Outside = true, l.listener(port, client)
		return
	}
	e, there := l.found.elems[slot{others, key}]
	if !there {
		l.to.Says(l.layout.table.String()+" map "+ports, "no element for "+l.String())
		return
	}
	l.says(others, &e, "goto chain "+e.Goto)
	l.to.Present = true
	l.chain(e.Goto, client)
}

func (l *look) says(set string, e *nftables.Elem, text string) {
	l.to.Says(fmt.Sprintf("%s map %s { %s }", l.layout.table, set, l.String()), strings.TrimLeft(e.Comment+", "+text, ", "))
}

// chain reads the chains of a frontend that treats clients differently.
func (l *look) chain(name string, client netip.Addr) {
	if name == chainRefuse || name == chainDrop {
		l.to.Outside = dataplane.NewFate(nil, name == chainDrop)
		return
	}
	inner := name + "-in"
	_, gate := l.found.chains[inner]
	l.to.Limited = l.to.Limited || gate
	for _, r := range l.found.chains[name].stored {
		l.to.Says(l.layout.table.String()+" chain "+name, r.Text)
		when, to, leads := strings.Cut(r.Text, "goto ")
		switch {
		case gate && to == inner:
			l.to.Allow = append(l.to.Allow, l.sourceOf(when))
		case !gate:
			l.end(r.Text, leads && to == chainDrop, client)
		}
	}
	if gate {
		l.chain(inner, client)
	}
}

// end takes a rule that ends the way of a packet.
func (l *look) end(text string, drop bool, client netip.Addr) {
	fate := dataplane.NewFate(nil, drop)
	if port := portAt(text); !strings.Contains(text, "goto ") && port != 0 {
		fate = l.listener(port, client)
	}
	if strings.Contains(text, " saddr ") || strings.HasPrefix(text, "fib saddr") {
		l.to.Inside = &fate
	} else {
		l.to.Outside = fate
	}
}

// sourceOf reads the clients that a rule is for: all, if it does not say.
func (l *look) sourceOf(when string) netip.Prefix {
	_, text, _ := strings.Cut(when, "saddr ")
	if _, after, again := strings.Cut(text, "saddr "); again {
		text = after
	}
	text = strings.TrimSpace(text)
	if p, err := netip.ParsePrefix(text); err == nil {
		return p
	}
	if a, err := netip.ParseAddr(text); err == nil {
		return netip.PrefixFrom(a, a.BitLen())
	}
	if l.Family == svc.IPv6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

// portAt is the port at the end of a rule that captures connections, 0 if it does not.
func portAt(text string) uint16 {
	n, err := strconv.ParseUint(text[strings.LastIndexByte(text, ':')+1:], 10, 16)
	if err != nil {
		return 0
	}
	return uint16(n)
}

// listener reads the endpoints that the listener of a port sends connections to, and where it keeps a
// client.
func (l *look) listener(port uint16, client netip.Addr) dataplane.Fate {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, list := range l.listeners {
		for _, lis := range list {
			if lis.Port != port || lis.Protocol != l.Proto {
				continue
			}
			endpoints, kept := lis.balancer.look(client)
			l.to.Says(fmt.Sprintf("listener %s port %d", lis.Protocol, lis.Port), lis.balancer.String())
			if kept.IsValid() {
				l.to.Kept = kept
				l.to.Says(fmt.Sprintf("listener %s port %d, client %s", lis.Protocol, lis.Port, client), kept.String())
			}
			return dataplane.NewFate(endpoints, false)
		}
	}
	l.to.Says(fmt.Sprintf("listener %s port %d", l.Proto, port), "this process does not listen there")
	return dataplane.Fate{}
}

// look returns the endpoints of new connections, and where a client is kept, not valid if nowhere.
func (b *balancer) look(from netip.Addr) (endpoints []netip.AddrPort, kept netip.AddrPort) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e := b.sticky[from]; e != nil {
		kept = e.Value.(*client).endpoint
	}
	return slices.Clone(b.endpoints), kept
}

var _ dataplane.Looker = (*Mode)(nil)
