package dns

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/fairlead/fairlead/internal/zone"
)

// hostsTTL is the TTL of names from the hosts file, in seconds.
const hostsTTL = 60

// hostsTable is the contents of a hosts file. It is immutable.
type hostsTable struct {
	addrs map[string][]netip.Addr // by name, wire form
	names map[netip.Addr][]byte   // the first name of an address
	// modified and size describe the file.
	modified time.Time
	size     int64
}

// len returns the number of addresses of names and of names of addresses.
func (t *hostsTable) len() int {
	n := len(t.names)
	for _, addrs := range t.addrs {
		n += len(addrs)
	}
	return n
}

// readHosts reads a file in the form of hosts(5). Lines that are not of that
// form are skipped, as the C library does.
func readHosts(file string) (*hostsTable, error) {
	// If the file changes in between, it is read again.
	info, err := os.Stat(file)
	if err != nil {
		return nil, fmt.Errorf("dns: hosts file: %w", err)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("dns: hosts file: %w", err)
	}
	t := &hostsTable{addrs: map[string][]netip.Addr{}, names: map[netip.Addr][]byte{}, modified: info.ModTime(), size: info.Size()}
	for line := range strings.Lines(string(raw)) {
		line, _, _ = strings.Cut(line, "#")
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		a, err := netip.ParseAddr(f[0])
		if err != nil || a.Zone() != "" {
			continue
		}
		a = a.Unmap()
		for _, text := range f[1:] {
			var n zone.Name
			if n.ParseText(text) != nil || n.Labels() == 0 {
				continue
			}
			if have := t.addrs[string(n.Wire())]; !slices.Contains(have, a) {
				t.addrs[string(n.Wire())] = append(have, a)
			}
			if t.names[a] == nil {
				t.names[a] = slices.Clone(n.Wire())
			}
		}
	}
	return t, nil
}

// answerHosts answers from the hosts file and reports whether the name is in it.
func (w *worker) answerHosts() bool {
	t := w.s.hosts.Load()
	if t == nil {
		return false
	}
	q := &w.q
	var n uint16
	limit := q.limit(w.udp)
	if a, ok := zone.ReverseAddr(&q.Name); ok {
		name := t.names[a]
		if name == nil {
			return false
		}
		if q.Type == typePTR {
			w.out = appendRR(w.out, typePTR, hostsTTL, name)
			n++
		}
	} else {
		addrs, ok := t.addrs[string(q.Name.Wire())]
		if !ok {
			return false
		}
		for _, a := range addrs {
			if (q.Type == typeA && a.Is4() || q.Type == typeAAAA && a.Is6()) && len(w.out)+28 <= limit {
				w.out = appendRR(w.out, q.Type, hostsTTL, a.AsSlice())
				n++
			}
		}
	}
	w.origin, w.rcode = fromServer, rcodeSuccess
	w.out = q.finish(w.out, w.s.available()|flagAA, rcodeSuccess, n, 0, 0)
	return true
}

// appendRR appends a record that is owned by the question's name.
func appendRR(b []byte, typ uint16, ttl uint32, rdata []byte) []byte {
	b = append(b, 0xC0, headerSize)
	b = binary.BigEndian.AppendUint16(b, typ)
	b = binary.BigEndian.AppendUint16(b, classIN)
	b = binary.BigEndian.AppendUint32(b, ttl)
	b = binary.BigEndian.AppendUint16(b, uint16(len(rdata)))
	return append(b, rdata...)
}

// watchHosts reads the hosts file again when it has changed, until ctx ends.
func (s *Server) watchHosts(ctx context.Context) {
	wait.UntilWithContext(ctx, func(context.Context) { s.reloadHosts() }, filePeriod)
}

// reloadHosts reads the hosts file if it has changed. While it is being replaced
// there may be none.
func (s *Server) reloadHosts() {
	have := s.hosts.Load()
	info, err := os.Stat(s.options.Hosts)
	if err != nil || info.ModTime().Equal(have.modified) && info.Size() == have.size {
		return
	}
	t, err := readHosts(s.options.Hosts)
	if err != nil {
		s.log.Warn("cannot read the hosts file; keeping its last contents", "err", err)
		return
	}
	s.hosts.Store(t)
}
