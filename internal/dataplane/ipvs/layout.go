package ipvs

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// mode is this mode's name.
const mode = "ipvs"

const (
	// deviceName is the interface that has the virtual IPs; alias marks it as ours.
	deviceName = "fairlead-ipvs"
	alias      = "fairlead virtual IPs"
	// chainPrefix begins the names of our chains. Mode iptables removes what
	// begins with FAIRLEAD-, which this does not.
	chainPrefix = "FAIRLEADVS-"
	setPrefix   = "fairlead-"
)

func ourChain(name string) bool { return strings.HasPrefix(name, chainPrefix) }

// Schedulers are the names of the kernel's schedulers that may be asked for.
var Schedulers = svc.Schedulers()

// FollowsWeights reports whether a scheduler gives endpoints connections by their weights.
func FollowsWeights(scheduler string) bool {
	return !slices.Contains([]string{"rr", "lc", "dh"}, scheduler)
}

// hashing is the scheduler that keeps a client at its endpoint by a hash.
const hashing = "mh"

// fallsBack reports whether a scheduler that hashes must be told to choose another
// endpoint when the one that it finds takes no new connections.
func fallsBack(scheduler string) bool { return scheduler == "sh" || scheduler == "mh" }

// drains reports whether endpoints that are gone may stay, without new connections,
// until those they have are over. dh would refuse every client whose endpoint
// that is.
func drains(scheduler string, p svc.Protocol) bool {
	return scheduler != hashingByDestination && p != svc.UDP
}

// hashingByDestination is the scheduler that knows one endpoint for a destination.
const hashingByDestination = "dh"

// counted begins the names of the sets that count lost packets.
const counted drops.Prefix = setPrefix

// set is one of our sets, or the device, which is a set of addresses, too.
type set uint8

// The sets. Frontends are by address, protocol and port.
const (
	setFront     set = iota // all frontends
	setMasq                 // frontends whose connections are all masqueraded
	setOutside              // those where only clients that are no pods are
	setNobody               // those without endpoints
	setDrop                 // the ones among them that are not listed
	setLeaving              // those without a frontend, with open connections
	setRanged               // frontends that let some clients in
	setAllow                // and which
	setSelf                 // the ones among them that let this node in, each with its own address again
	setInside               // frontends with other endpoints for clients inside, with the mark that leads there
	setHairpin              // local endpoints, each with its own address again
	setCluster              // addresses that are Services' as a whole
	setOuter                // addresses that others route to this node
	setPods                 // ranges of pods
	setLocalPods            // the addresses of this node
	setDevice               // addresses on the device
	setCount
)

// kinds are the names and types of the sets.
var kinds = [setCount]struct {
	name string
	typ  ipset.Type
}{
	setFront: {"front", ipset.HashIPPort}, setMasq: {"masq", ipset.HashIPPort}, setOutside: {"outside", ipset.HashIPPort},
	setNobody: {"nobody", ipset.HashIPPort}, setDrop: {"drop", ipset.HashIPPort}, setLeaving: {"leaving", ipset.HashIPPort},
	setRanged: {"ranged", ipset.HashIPPort}, setAllow: {"allow", ipset.HashIPPortNet}, setSelf: {"self", ipset.HashIPPortIP},
	setInside: {"inside", ipset.HashIPPort}, setHairpin: {"hairpin", ipset.HashIPPortIP},
	setCluster: {"cluster", ipset.HashIP}, setOuter: {"outer", ipset.HashIP}, setPods: {"pods", ipset.HashNet},
	setLocalPods: {"local-pods", ipset.HashNet},
}

// name is a set's name: "fairlead-front-4".
func (s set) name(f svc.Family) string {
	if s == setDevice {
		return "device " + deviceName
	}
	return setPrefix + kinds[s].name + "-" + strconv.Itoa(int(f))
}

// setsOf are all sets of a family, also the sets that packets fill.
func setsOf(f svc.Family) []ipset.Set {
	var out []ipset.Set
	for s := range setDevice {
		out = append(out, ipset.Set{Name: s.name(f), Type: kinds[s].typ, Family: f, Marks: s == setInside})
	}
	return append(out, counted.Sets(f)...)
}

// The marks that lead to virtual servers for clients inside: "fl" in the upper
// half, so that no other program's marks collide with them, and a number below it.
const (
	markPrefix = 0x666c0000
	markMask   = 0xffff0000
	// maxInside is how many frontends of a family can treat clients inside in
	// their own way.
	maxInside = 1<<16 - 1
)

// element is an element of a set.
type element struct {
	set set
	ipset.Element
}

func (e element) text(f svc.Family) string { return e.Element.String() + " of " + e.set.name(f) }

func frontElement(s set, p svc.Protocol, a netip.AddrPort) element {
	return element{s, ipset.Element{IP: a.Addr(), Proto: p, Port: a.Port()}}
}

// The chains, by table.
const (
	chainMark    = chainPrefix + "MARK"
	chainInside  = chainPrefix + "INSIDE"
	chainNobody  = chainPrefix + "NOBODY"
	chainRanged  = chainPrefix + "RANGED"
	chainDrop    = chainPrefix + "DROP"
	chainPost    = chainPrefix + "POSTROUTING"
	chainInput   = chainPrefix + "INPUT"
	chainOutput  = chainPrefix + "OUTPUT"
	chainForward = chainPrefix + "FORWARD"
	chainRefuse  = chainPrefix + "REFUSE"
)

// tables are the tables with our chains.
var tables = []string{"mangle", "nat", "filter"}

// comment marks the rules in chains that are not ours.
const comment = `-m comment --comment "fairlead services" `

// jumps are the rules in chains that are not ours, by table: chain and target.
var jumps = map[string][][2]string{
	"mangle": {{"PREROUTING", chainMark}, {"OUTPUT", chainMark}},
	"nat":    {{"POSTROUTING", chainPost}},
	"filter": {{"INPUT", chainInput}, {"FORWARD", chainForward}, {"OUTPUT", chainOutput}},
}

// chain is one of our chains with its rules, without the "-A NAME ".
type chain struct {
	name  string
	rules []string
}

const known = "-m conntrack --ctstate RELATED,ESTABLISHED "

// chains are our chains of a table. Their rules do not depend on which Services
// there are.
func (l *layout) chains(table string) []chain {
	match := func(s set, how string) string { return "-m set --match-set " + s.name(l.family) + " " + how + " " }
	not := func(s set, how string) string { return "-m set ! --match-set " + s.name(l.family) + " " + how + " " }
	bit := fmt.Sprintf("%#x", uint32(1)<<l.cfg.MasqueradeBit)
	masq := "-j MARK --set-xmark " + bit + "/" + bit
	switch table {
	case "mangle":
		mark := []string{
			known + "-j RETURN",
			not(setFront, "dst,dst") + "-j RETURN",
			match(setRanged, "dst,dst") + not(setAllow, "dst,dst,src") + "-j " + chainRanged,
		}
		var pods []string
		for _, i := range l.interfaces {
			mark = append(mark, input(i)+match(setInside, "dst,dst")+"-g "+chainInside)
			pods = append(pods, input(i)+match(setOutside, "dst,dst")+"-j RETURN")
		}
		return []chain{
			{chainMark, slices.Concat(mark, []string{
				match(setInside, "dst,dst") + match(setLocalPods, "src") + "-g " + chainInside,
				match(setInside, "dst,dst") + "-m addrtype --src-type LOCAL -g " + chainInside,
				match(setNobody, "dst,dst") + "-g " + chainNobody,
				match(setMasq, "dst,dst") + masq,
			}, pods, []string{match(setOutside, "dst,dst") + not(setPods, "src") + masq})},
			{chainInside, []string{"-j SET --map-set " + setInside.name(l.family) + " dst,dst --map-mark"}},
			// A node sends to a virtual IP from that very address, by lo. Of IPv4 the
			// kernel drops what comes from elsewhere with an address of this node, of
			// IPv6 it does not.
			{chainRanged, []string{
				"-o lo " + match(setSelf, "dst,dst,src") + "-j RETURN",
				"-g " + chainDrop,
			}},
			// IPVS itself rejects what it has no endpoint for.
			{chainNobody, []string{
				match(setDrop, "dst,dst") + "-g " + chainDrop,
				match(setLeaving, "dst,dst") + match(setOuter, "dst") + not(setCluster, "dst") + "-g " + chainDrop,
				counted.Rule(l.family, drops.Rejected),
			}},
			{chainDrop, []string{counted.Rule(l.family, drops.Dropped), "-j DROP"}},
		}
	case "nat":
		return []chain{{chainPost, []string{
			match(setHairpin, "dst,dst,src") + "-j MASQUERADE --random-fully",
			// This node sends to a virtual IP from that very address.
			match(setCluster, "src") + "-j MASQUERADE --random-fully",
			match(setOuter, "src") + "-j MASQUERADE --random-fully",
			"-m mark ! --mark " + bit + "/" + bit + " -j RETURN",
			"-j MARK --set-xmark " + bit + "/0x0",
			"-j MASQUERADE --random-fully",
		}}}
	}
	// What is sent to a virtual IP, but to no frontend, would reach whatever
	// listens on all addresses of this node (kubernetes/kubernetes#57841). The
	// rest of ICMP is as harmless as it is of use.
	guard := []string{
		"-p " + l.icmp + " -j RETURN",
		match(setCluster, "dst") + "-g " + chainRefuse,
		match(setOuter, "dst") + "-j DROP",
	}
	// Where a neighbour's policy is to let nothing in or through, Services work
	// all the same, as in the other modes.
	in := append([]string{known + "-j RETURN", match(setFront, "dst,dst") + "-j ACCEPT"}, guard...)
	out := append([]string{known + "-j RETURN", match(setFront, "dst,dst") + "-j RETURN"}, guard...)
	forward := []string{known + "-m ipvs --ipvs -j ACCEPT"}
	for _, p := range l.services {
		unserved := "-d " + p.String() + " -m conntrack --ctstate NEW -j DROP"
		out, forward = append(out, unserved), append(forward, unserved)
	}
	return []chain{
		{chainInput, in},
		{chainOutput, out},
		{chainForward, forward},
		{chainRefuse, []string{counted.Rule(l.family, drops.Rejected), "-p tcp -j REJECT --reject-with tcp-reset",
			"-j REJECT --reject-with " + l.refusal}},
	}
}

// input matches what came by an interface.
func input(i table.Interface) string {
	if i.Prefix {
		return "-i " + i.Name + "+ "
	}
	return "-i " + i.Name + " "
}

// layout is what differs between the two families.
type layout struct {
	family        svc.Family
	cfg           *Config
	icmp, refusal string
	// services and interfaces are the Service ranges and the interfaces of Pods of the Settings that the rules must have.
	services   []netip.Prefix
	interfaces []table.Interface
}

func newLayout(f svc.Family, cfg *Config) *layout {
	if f == svc.IPv6 {
		return &layout{family: f, cfg: cfg, icmp: "ipv6-icmp", refusal: "icmp6-port-unreachable"}
	}
	return &layout{family: f, cfg: cfg, icmp: "icmp", refusal: "icmp-port-unreachable"}
}

func (l *layout) sets() []ipset.Set { return setsOf(l.family) }

// podElements are the elements of the sets of pods' ranges.
func podElements(s *dataplane.Settings) []element {
	var out []element
	add := func(to set, ranges []netip.Prefix) {
		for _, p := range ranges {
			for _, half := range ipset.Halves(p) {
				out = append(out, element{to, ipset.Element{Net: half}})
			}
		}
	}
	add(setPods, s.Pods)
	add(setLocalPods, s.LocalPods)
	return out
}
