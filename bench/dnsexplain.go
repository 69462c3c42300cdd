package main

import (
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// reason is why two answers differ. docs/dns.md has them at length.
type reason struct {
	text  string
	holds func(q asked, mine, theirs answered) bool
}

func (a answered) empty() bool { return len(a.answer) == 0 }

// has reports whether a record of the answer is of a type.
func (a answered) has(kind string) bool {
	return slices.ContainsFunc(a.answer, func(rr string) bool { return strings.Contains(rr, " "+kind+" ") })
}

// reasons are all that are known; the first that holds is given.
func reasons() []reason {
	const arpa, cluster = ".arpa.", ".cluster.local."
	return []reason{
		{"ANY is answered with the least there is (RFC 8482)", func(q asked, mine, _ answered) bool {
			return q.kind == dns.TypeANY && mine.has("HINFO")
		}},
		{"an ExternalName is a CNAME for every type, and is followed", func(q asked, mine, _ answered) bool {
			return strings.HasPrefix(q.name, "ext") && mine.has("CNAME")
		}},
		{"the name of a port has SRV records and no addresses", func(q asked, mine, theirs answered) bool {
			return strings.HasPrefix(q.name, "_") && q.kind == dns.TypeA && mine.rcode == dns.RcodeSuccess && mine.empty() && theirs.has("A")
		}},
		{"the name of an endpoint has addresses and no SRV records", func(q asked, mine, theirs answered) bool {
			return q.kind == dns.TypeSRV && mine.rcode == dns.RcodeSuccess && mine.empty() && theirs.has("SRV")
		}},
		{"labels of ports begin with an underscore (RFC 2782)", func(q asked, mine, theirs answered) bool {
			return q.kind == dns.TypeSRV && !strings.HasPrefix(q.name, "_") && mine.rcode == dns.RcodeNameError && theirs.has("SRV")
		}},
		{"the name server of the zone is the Service kube-dns, not whoever answers", func(q asked, mine, theirs answered) bool {
			return strings.HasSuffix(q.name, "cluster.local.") && (q.kind == dns.TypeNS || strings.HasPrefix(q.name, "ns.dns.")) && !mine.empty() &&
				!theirs.empty()
		}},
		{"a name with names below it exists (RFC 8020), as does one that has records of another type", func(q asked, mine, theirs answered) bool {
			return strings.HasSuffix(q.name, cluster) && mine.rcode == dns.RcodeSuccess && mine.empty() && theirs.rcode == dns.RcodeNameError
		}},
		{"nothing is below the name of a Pod", func(q asked, mine, theirs answered) bool {
			return strings.HasSuffix(q.name, ".pod"+cluster) && mine.rcode == dns.RcodeNameError && theirs.rcode == dns.RcodeSuccess
		}},
		{"reverse names of the ranges of Services and Pods, and of known addresses, never go to an upstream",
			func(q asked, mine, theirs answered) bool {
				return strings.HasSuffix(q.name, arpa) && (len(mine.authority) > 0 || !mine.empty()) && len(theirs.authority) == 0 && theirs.empty()
			}},
		{"the zones of reverse names are the ranges of Services and Pods, not all of arpa", func(q asked, _, theirs answered) bool {
			return strings.HasSuffix(q.name, "arpa.") && strings.Contains(strings.Join(append(theirs.authority, theirs.answer...), " "),
				"in-addr.arpa. SOA")
		}},
	}
}

// explain returns why fairlead and CoreDNS answer a question otherwise, "" if no
// reason is known.
func explain(q asked, mine, theirs answered) string {
	for _, r := range reasons() {
		if r.holds(q, mine, theirs) {
			return r.text
		}
	}
	return ""
}
