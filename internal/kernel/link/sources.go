package link

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// sourcesName is the name of the tables of Sources, one of family ip and one of ip6: kernels may lack family inet.
const sourcesName = "fairlead-sources"

const (
	// priorityFirst is before the reassembly of fragments (-400): a forged one takes no memory there.
	priorityFirst = -450
	// forgedSize bounds the devices whose dropped packets are counted, forgedTime is how long a count is kept, in
	// milliseconds.
	forgedSize = 1 << 14
	forgedTime = 24 * 60 * 60 * 1000
)

// The sets and chains of a table of Sources.
const (
	podDevices = "pods"   // devices whose packets are looked at
	podSources = "own"    // device and address
	forgedSet  = "forged" // counts of dropped packets by device
	podChain   = "pod"
	firstChain = "prerouting"
)

// Sources lets packets of Pods in only if their source is an address of the Pod: what comes by another source is
// dropped before the node's IP layer looks at it, so that it reaches neither the node nor another host. IPv6 has two
// exceptions, which concern only the link between the Pod and the node: ICMPv6 from link-local addresses and from ::,
// that is neighbour and duplicate address detection. Linux forwards neither.
//
// It has no lock: one goroutine uses it at a time. A packet costs one look-up, one of a Pod another one. To add or
// remove a Pod costs the same for any number of Pods.
type Sources struct {
	conn     *nftables.Conn
	families []svc.Family
	want     map[string][]netip.Addr // by device
	written  bool
}

// NewSources returns Sources of the network namespace of the calling thread, of which it changes nothing yet. changed
// is called, as that of nftables.Conn.Watch, when another program may have changed the tables.
func NewSources(changed func()) (*Sources, error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, err
	}
	if err := c.Watch(sourcesName, changed); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &Sources{conn: c, want: map[string][]netip.Addr{}, families: sourceFamilies()}, nil
}

// Close ends the notifications; the tables stay.
func (s *Sources) Close() error { return s.conn.Close() }

// Adopt adds a Pod without writing it; Write does.
func (s *Sources) Adopt(device string, addrs []netip.Addr) {
	s.want[device] = addrs
	s.written = false
}

// Add adds a Pod before its device exists or is up. Its own link-local address (see podHardware) is added too. The
// error is a *nftables.UnsupportedError where the kernel cannot have the tables.
func (s *Sources) Add(device string, addrs []netip.Addr) error {
	had, known := s.want[device]
	switch {
	case s.written && known && slices.Equal(had, addrs):
		return nil
	case !s.written || known:
		s.Adopt(device, addrs)
		return s.Write()
	}
	b := nftables.NewBatch()
	for _, f := range s.families {
		addSource(b, f, device, addrs)
	}
	s.want[device] = addrs
	return s.change(b)
}

// Remove removes a Pod whose device is gone. It is no error if there is none.
func (s *Sources) Remove(device string) error {
	addrs, known := s.want[device]
	delete(s.want, device)
	if !known || !s.written {
		return nil
	}
	b := nftables.NewBatch()
	for _, f := range s.families {
		t := sourcesTable(f)
		b.DelElem(t, podDevices, nftables.DeviceKey(device))
		for _, a := range ownAddrs(f, device, addrs) {
			b.DelElem(t, podSources, sourceKey(device, a))
		}
	}
	return s.change(b)
}

// change commits a change of the elements, or writes all again if something else is in the kernel.
func (s *Sources) change(b *nftables.Batch) error {
	err := s.conn.Commit(b)
	if err == nil {
		return nil
	}
	s.written = false
	if nftables.IsConflict(err) {
		return s.Write()
	}
	return fmt.Errorf("change nft tables %s: %w", sourcesName, err)
}

// Write writes all again, each table in one transaction, unless it is written.
func (s *Sources) Write() error {
	if s.written {
		return nil
	}
	for _, f := range s.families {
		b := nftables.NewBatch()
		t := sourcesTable(f)
		b.Tag(familyTag(t))
		b.ReplaceTable(t, "drops what pods send with a source that is not theirs")
		addSourcesTable(b, t, f)
		for _, device := range slices.Sorted(maps.Keys(s.want)) {
			addSource(b, f, device, s.want[device])
		}
		if err := s.conn.CommitTable(t, b); err != nil {
			return err
		}
	}
	s.written = true
	return nil
}

// Repair compares the tables in the kernel with those of Write, writes them again if they differ, and reports whether it
// did.
func (s *Sources) Repair() (repaired bool, err error) {
	if s.written {
		same, err := s.same()
		if same || err != nil {
			return false, err
		}
		s.written = false
	}
	return true, s.Write()
}

// same reports whether the kernel has what Write wrote.
func (s *Sources) same() (bool, error) {
	for _, f := range s.families {
		t := sourcesTable(f)
		got, err := nftables.ReadTable(s.conn, t)
		if err != nil {
			return false, fmt.Errorf("read nft table %s: %w", t, err)
		}
		if got == nil || !sameRules(got, f) {
			return false, nil
		}
		want := map[string]map[string]bool{podDevices: {}, podSources: {}}
		for device, addrs := range s.want {
			want[podDevices][string(nftables.DeviceKey(device))] = true
			for _, a := range ownAddrs(f, device, addrs) {
				want[podSources][string(sourceKey(device, a))] = true
			}
		}
		for set, keys := range want {
			have := map[string]bool{}
			if err := s.conn.Elems(t, set, func() { clear(have) }, func(e nftables.Elem) { have[string(e.Key)] = true }); err != nil {
				return false, fmt.Errorf("read set %s of nft table %s: %w", set, t, err)
			}
			if !maps.Equal(have, keys) {
				return false, nil
			}
		}
	}
	return true, nil
}

// sameRules reports whether a table has the chains, sets and rules of addSourcesTable.
func sameRules(got *nftables.StoredTable, f svc.Family) bool {
	for _, c := range got.Chains {
		if c.Name == firstChain && !c.Hook.Is(sourcesHook()) {
			return false
		}
	}
	for chain, rules := range sourceRules(f) {
		if !slices.EqualFunc(got.Rules[chain], rules, func(a nftables.StoredRule, b nftables.Rule) bool { return a.Hash == b.Hash() }) {
			return false
		}
	}
	sets := sourceSets(f)
	return len(got.Chains) == 2 && len(got.Sets) == len(sets) && !slices.ContainsFunc(sets, func(want nftables.Set) bool {
		return !slices.ContainsFunc(got.Sets, func(st nftables.StoredSet) bool { return st.Is(want) })
	})
}

// Forged returns how many packets each device has sent with a source that was not its own, within the last day.
func (s *Sources) Forged() (map[string]uint64, error) {
	out := map[string]uint64{}
	if !s.written {
		return out, nil
	}
	for _, f := range s.families {
		had := maps.Clone(out)
		if err := s.conn.Elems(sourcesTable(f), forgedSet, func() { out = maps.Clone(had) }, func(e nftables.Elem) {
			out[netlink.CString(e.Key)] += e.Packets
		}); err != nil {
			return nil, fmt.Errorf("read the counts of nft table %s: %w", sourcesTable(f), err)
		}
	}
	return out, nil
}

func sourcesTable(f svc.Family) nftables.Table {
	return nftables.Table{Family: nftables.FamilyOf(f), Name: sourcesName}
}

// ownAddrs are a Pod's sources of family f.
func ownAddrs(f svc.Family, device string, addrs []netip.Addr) []netip.Addr {
	out := slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return svc.FamilyOf(a) != f })
	if f == svc.IPv6 {
		out = append(out, linkLocal(podHardware(device)))
	}
	return out
}

func sourceKey(device string, a netip.Addr) []byte {
	return append(nftables.DeviceKey(device), a.AsSlice()...)
}

func addSource(b *nftables.Batch, f svc.Family, device string, addrs []netip.Addr) {
	t := sourcesTable(f)
	b.AddElem(t, podDevices, &nftables.Elem{Key: nftables.DeviceKey(device)})
	for _, a := range ownAddrs(f, device, addrs) {
		b.AddElem(t, podSources, &nftables.Elem{Key: sourceKey(device, a)})
	}
}

func sourceSets(f svc.Family) []nftables.Set {
	h := nftables.HeaderOf(f)
	return []nftables.Set{
		{Name: podDevices, Key: []nftables.Type{nftables.TypeDevice}, Comment: "devices of pods"},
		{Name: podSources, Key: []nftables.Type{nftables.TypeDevice, h.Addr}, Comment: "what a pod may send from"},
		{Name: forgedSet, Key: []nftables.Type{nftables.TypeDevice}, Dynamic: true, Size: forgedSize, Comment: "packets dropped"},
	}
}

// sourceRules are the rules by chain.
func sourceRules(f svc.Family) map[string][]nftables.Rule {
	h := nftables.HeaderOf(f)
	device := func() *nftables.Program { return new(nftables.Program).Meta(0, nftables.MetaIifName) }
	pod := []nftables.Rule{nftables.NewRule(device().Network(4, h.Source, h.Len).InSet(podSources, 0).Return(),
		"iifname . %s saddr @%s return", h.Word, podSources)}
	if f == svc.IPv6 {
		for _, from := range []netip.Prefix{netip.MustParsePrefix("fe80::/10"), single(netip.IPv6Unspecified())} {
			pod = append(pod, nftables.NewRule(
				h.InPrefix(h.Source, from).Meta(0, nftables.MetaL4Proto).Equal(0, []byte{unix.IPPROTO_ICMPV6}).Return(),
				"ip6 saddr %s meta l4proto ipv6-icmp return", from))
		}
	}
	return map[string][]nftables.Rule{
		firstChain: {nftables.NewRule(device().InSet(podDevices, 0).Goto(podChain), "iifname @%s goto %s", podDevices, podChain)},
		podChain: append(pod,
			nftables.NewRule(device().Count(forgedSet, 0, forgedTime), "update @%s { iifname counter }", forgedSet),
			nftables.NewRule(new(nftables.Program).Drop(), "drop")),
	}
}

func sourcesHook() *nftables.Hook {
	return &nftables.Hook{Type: "filter", Number: nftables.Prerouting, Priority: priorityFirst}
}

// addSourcesTable adds what a table has beside elements.
func addSourcesTable(b *nftables.Batch, t nftables.Table, f svc.Family) {
	b.Tag("a set, a chain, or an expression of a rule")
	for _, set := range sourceSets(f) {
		b.AddSet(t, set)
	}
	b.AddChain(t, nftables.Chain{Name: podChain})
	b.AddChain(t, nftables.Chain{Name: firstChain, Hook: sourcesHook()})
	rules := sourceRules(f)
	for _, chain := range slices.Sorted(maps.Keys(rules)) {
		for _, r := range rules[chain] {
			b.AddRule(t, chain, r)
		}
	}
	b.Tag(nil)
}

// podHardware returns the hardware address of a Pod's end, by the name of the node's: its link-local address is
// known before there is a device.
func podHardware(device string) net.HardwareAddr {
	sum := sha256.Sum256([]byte("pod " + device))
	return net.HardwareAddr{0x02, sum[0], sum[1], sum[2], sum[3], sum[4]} // locally administered
}

// linkLocal is the address of a device that has no other identifier than its hardware address (RFC 4291, appendix A).
func linkLocal(mac net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
}

// ProbeSources returns why Sources cannot work here, or nil. It asks the kernel in transactions that take back what
// they make.
func ProbeSources() error {
	c, err := nftables.Dial()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	for _, f := range sourceFamilies() {
		t := sourcesTable(f)
		t.Name += "-probe"
		b := nftables.NewBatch()
		b.Tag(familyTag(t))
		b.AddTable(t, "")
		addSourcesTable(b, t, f)
		b.DelTable(t)
		if err := c.CommitTable(t, b); err != nil {
			return err
		}
	}
	return nil
}

// RemoveSources removes the tables. It is no error if there are none, or no nf_tables in the kernel.
func RemoveSources() error {
	return errors.Join(nftables.RemoveTable(sourcesTable(svc.IPv4)), nftables.RemoveTable(sourcesTable(svc.IPv6)))
}

func sourceFamilies() []svc.Family {
	if HasIPv6() {
		return []svc.Family{svc.IPv4, svc.IPv6}
	}
	return []svc.Family{svc.IPv4}
}

// familyTag is a Batch.Tag for a table whose family kernels may lack as a whole.
func familyTag(t nftables.Table) string {
	option := "CONFIG_NF_TABLES_IPV4"
	if t.Family == nftables.IPv6 {
		option = "CONFIG_NF_TABLES_IPV6"
	}
	return fmt.Sprintf("tables of family %s (%s)", t.Family, option)
}
