package zone

import (
	"fmt"
	"net/netip"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/fairlead/fairlead/internal/svc"
)

// SchemaVersion is the version of the Kubernetes DNS specification that is
// answered; dns-version.<zone> has it.
const SchemaVersion = "1.1.0"

// DefaultTTL of all records, in seconds.
const DefaultTTL = 5

// versionTTL is the TTL the specification's example gives dns-version.
const versionTTL = 28800

// PodMode is how names such as 10-244-1-7.prod.pod.cluster.local are
// answered.
type PodMode uint8

const (
	// PodsInsecure answers with the address in the name when the namespace
	// exists, whether or not a pod has it. The specification (2.6)
	// requires these records, and every cluster set up by kubeadm has them, so
	// this is the default. PodsVerified is for clusters with wildcard certificates
	// for pod names.
	PodsInsecure PodMode = iota
	// PodsVerified answers only for addresses of pods given to SetPod.
	PodsVerified
	// PodsDisabled answers no pod names.
	PodsDisabled
)

// String returns "insecure", "verified" or "disabled".
func (m PodMode) String() string { return [...]string{"insecure", "verified", "disabled"}[m] }

// ParsePodMode reads what String writes.
func ParsePodMode(s string) (PodMode, error) {
	for m := PodsInsecure; m <= PodsDisabled; m++ {
		if s == m.String() {
			return m, nil
		}
	}
	return 0, fmt.Errorf("pod mode %q is not one of insecure, verified, disabled", s)
}

// Config is what a Zone is made for.
type Config struct {
	// Domains are the cluster domains, such as "cluster.local"; all have the
	// same names. PTR records lead to the first.
	Domains []string
	// Reverse are the ranges of service and pod addresses. Questions for
	// addresses inside them are answered here even when the answer is that
	// there is no such name; they are never forwarded.
	Reverse []netip.Prefix
	// TTL of the records in seconds; 0 means DefaultTTL.
	TTL uint32
	// Pods is how pod names are answered.
	Pods PodMode
	// NameServer is the Service whose cluster IPs are the addresses of
	// ns.dns.<zone>, the name server of the zone. Zero means none.
	NameServer svc.Name
	// Serial is the first serial number of the SOA record; it grows by one
	// with each change.
	Serial uint32
}

// Zone is the names of a cluster. The Set and Delete methods may be called
// from any goroutine and take effect before they return; Answer never waits
// for them. The objects given are not kept and not changed.
type Zone struct {
	ttl        uint32
	pods       PodMode
	nameServer svc.Name
	domains    []domain
	// longestDomain is the length of the longest of them.
	longestDomain int

	reverse []reverseZone
	serial  atomic.Uint32
	names   *index

	mu         sync.Mutex
	held       bool // answers are not made before Release
	services   map[svc.Name]*service
	slices     map[svc.Name]svc.Name // slice → service
	namespaces map[string]*namespace
	podIndex   podIndex
}

// domain is one cluster domain in wire form.
type domain struct {
	wire   []byte
	labels int
}

// New makes an empty Zone. It already has the names that every zone has.
func New(c Config) (*Zone, error) {
	z := &Zone{
		ttl:        c.TTL,
		pods:       c.Pods,
		nameServer: c.NameServer,
		names:      newIndex(),
		services:   map[svc.Name]*service{},
		slices:     map[svc.Name]svc.Name{},
		namespaces: map[string]*namespace{},
	}
	if z.ttl == 0 {
		z.ttl = DefaultTTL
	}
	if len(c.Domains) == 0 {
		return nil, fmt.Errorf("no cluster domain given; the usual one is cluster.local")
	}
	for _, text := range c.Domains {
		var n Name
		if err := n.ParseText(text); err != nil || n.labels == 0 {
			return nil, fmt.Errorf("cluster domain %q is not a domain name", text)
		}
		z.domains = append(z.domains, domain{wire: append([]byte(nil), n.Wire()...), labels: n.labels})
		z.longestDomain = max(z.longestDomain, n.size)
	}
	for _, p := range c.Reverse {
		if !p.IsValid() {
			return nil, fmt.Errorf("a reverse range is not a valid prefix")
		}
		z.reverse = append(z.reverse, newReverseZone(p))
	}
	z.serial.Store(c.Serial)
	z.putFixed()
	return z, nil
}

// putFixed adds the names that do not depend on objects.
func (z *Zone) putFixed() {
	fixed := []string{"svc", "dns", "ns.dns"}
	if z.pods != PodsDisabled {
		fixed = append(fixed, "pod")
	}
	for _, name := range fixed {
		z.names.set(mustWire(name), &records{})
	}
	txt := append([]byte{byte(len(SchemaVersion))}, SchemaVersion...)
	z.names.set(mustWire("dns-version"), &records{more: &moreRecords{txt: txt, ttl: versionTTL}})
}

// mustWire returns the wire form of a literal, without the root label.
func mustWire(name string) string {
	var w []byte
	for label := range strings.SplitSeq(name, ".") {
		w, _ = appendLabel(w, label)
	}
	return string(w)
}

// Serial returns the serial number of the zone.
func (z *Zone) Serial() uint32 { return z.serial.Load() }

// Dump returns all records in the text form of zone files, sorted: the state of
// the zone to read and to compare. Names are below the first cluster domain;
// an empty non-terminal is a line without a record.
func (z *Zone) Dump() string {
	z.mu.Lock()
	defer z.mu.Unlock()
	var lines []string
	z.names.each(func(key string, r *records) { lines = append(lines, dumpNode(z, key, r)...) })
	sort.Strings(lines)
	return strings.Join(lines, "\n") + "\n"
}

func dumpNode(z *Zone, key string, r *records) []string {
	dom := wireText(z.domains[0].wire)
	name := wireText([]byte(key)) + dom
	if key[0] == 0 {
		a, _ := netip.AddrFromSlice([]byte(key[1:]))
		name = reverseText(a)
	}
	var out []string
	add := func(ttl uint32, format string, args ...any) {
		out = append(out, fmt.Sprintf("%s\t%d\tIN\t", name, ttl)+fmt.Sprintf(format, args...))
	}
	for b := r.a; len(b) > 0; b = b[sizeA:] {
		add(z.ttl, "A\t%s", netip.AddrFrom4([4]byte(b[12:])))
	}
	for b := r.aaaa; len(b) > 0; b = b[sizeAAAA:] {
		add(z.ttl, "AAAA\t%s", netip.AddrFrom16([16]byte(b[12:])))
	}
	if m := r.more; m != nil {
		if m.cname != nil {
			add(z.ttl, "CNAME\t%s", wireText(m.cname))
		}
		if m.txt != nil {
			add(m.ttl, "TXT\t%s", strconv.Quote(string(m.txt[1:])))
		}
		for _, p := range answered(m.ptr) {
			add(z.ttl, "PTR\t%s%s", wireText([]byte(p.name)), dom)
		}
		for i, s := range m.srv {
			if i == 0 {
				s.eachAnswer(func(weight, port uint16, target string) {
					add(z.ttl, "SRV\t0 %d %d %s", weight, port, target)
				})
			}
		}
	}
	if len(out) == 0 {
		out = append(out, name)
	}
	return out
}
