// Package checks knows what a hand-made EndpointSlice asks to be checked, which nodes do
// that, and what follows from what they report. It is pure: nodes check
// (package agent), one controller decides and writes (package controller).
package checks

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/svc"
)

// The annotations of an EndpointSlice that ask for checks of its endpoints.
const (
	// IntervalAnnotation is how often, DefaultInterval without it.
	IntervalAnnotation = "fairlead.dev/check-interval"
	// TimeoutAnnotation is how long an answer may take, DefaultTimeout without it.
	TimeoutAnnotation = "fairlead.dev/check-timeout"
)

// The bounds of checks.
const (
	DefaultInterval = 5 * time.Second
	MinInterval     = time.Second
	MaxInterval     = time.Hour
	DefaultTimeout  = time.Second
	MinTimeout      = 10 * time.Millisecond
	// MaxPerSlice is how many endpoints a slice with Annotation may have, MaxPerNode how many
	// a node checks, as Share has it.
	MaxPerSlice = 100
	MaxPerNode  = 500
	// Nodes is how many nodes check an endpoint, or all there are.
	Nodes = 3
	// agreeing is how many of them it takes to change whether an endpoint is ready, so that
	// neither one bad link nor one stolen node does that.
	agreeing = 2
	// Failures in a row are what makes a node report an endpoint.
	Failures = 2
)

// Spec is what the annotations of a slice ask for.
type Spec struct {
	Handler           corev1.ProbeHandler // TCPSocket or HTTPGet, with a port by number and no host
	Interval, Timeout time.Duration
}

// Parse reads the annotations of a slice; nil if they ask for nothing.
func Parse(annotations map[string]string) (*Spec, field.ErrorList) {
	text, asked := annotations[svc.CheckAnnotation]
	if !asked {
		return nil, nil
	}
	var errs field.ErrorList
	wrong := func(key string, err error) {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "annotations").Key(key), annotations[key], err.Error()))
	}
	s := &Spec{Interval: DefaultInterval, Timeout: DefaultTimeout}
	probe, err := podspec.ParseProbe(text)
	switch {
	case err != nil || probe == nil || probe.Exec != nil:
		wrong(svc.CheckAnnotation, errors.New("want tcp://:PORT, http://:PORT/PATH or https://:PORT/PATH"))
	case probe.TCPSocket != nil && probe.TCPSocket.Host != "", probe.HTTPGet != nil && probe.HTTPGet.Host != "":
		wrong(svc.CheckAnnotation, errors.New("what is checked is the endpoint's address: leave the host out"))
	default:
		s.Handler = probe.ProbeHandler
	}
	within := func(key string, to *time.Duration, least, most time.Duration) {
		text, given := annotations[key]
		if !given {
			*to = min(*to, most)
			return
		}
		d, err := time.ParseDuration(text)
		if err != nil || d < least || d > most {
			wrong(key, fmt.Errorf("want a duration from %s to %s", least, most))
			return
		}
		*to = d
	}
	within(IntervalAnnotation, &s.Interval, MinInterval, MaxInterval)
	within(TimeoutAnnotation, &s.Timeout, MinTimeout, s.Interval)
	return s, errs
}

// metadata are services of clouds that give a machine its credentials, at addresses that are not
// link-local: of AWS over IPv6, Azure and Alibaba.
var metadata = []netip.Addr{
	netip.MustParseAddr("fd00:ec2::254"), netip.MustParseAddr("168.63.129.16"), netip.MustParseAddr("100.100.100.200"),
}

// checkable returns why nodes do not check an address, nil if they may.
func checkable(a netip.Addr) error {
	switch {
	case a.IsLoopback(), a.IsUnspecified(), a.IsLinkLocalUnicast(), a.IsMulticast():
		return errors.New("nodes do not check loopback, link-local and multicast addresses")
	case slices.Contains(metadata, a):
		return errors.New("nodes do not check the metadata service of a cloud")
	}
	return nil
}

// managed reports whether a controller writes the conditions of a slice.
func managed(s *discoveryv1.EndpointSlice) bool {
	by := s.Labels[discoveryv1.LabelManagedBy]
	return by == epslice.ManagedBySelector || by == epslice.ManagedByMirroring
}

// Validate returns what is wrong with what a slice asks to be checked.
func Validate(s *discoveryv1.EndpointSlice) field.ErrorList {
	spec, errs := Parse(s.Annotations)
	if spec == nil || len(errs) > 0 {
		return errs
	}
	at := field.NewPath("endpoints")
	if managed(s) {
		errs = append(errs, field.Forbidden(field.NewPath("metadata", "annotations").Key(svc.CheckAnnotation),
			"a controller makes this slice of Pods or Endpoints; checks are for slices made by hand"))
	}
	if s.AddressType == discoveryv1.AddressTypeFQDN {
		errs = append(errs, field.Invalid(field.NewPath("addressType"), s.AddressType, "a slice that is checked has IP addresses"))
	}
	if len(s.Endpoints) > MaxPerSlice {
		return append(errs, field.TooMany(at, len(s.Endpoints), MaxPerSlice))
	}
	for i := range s.Endpoints {
		for j, text := range s.Endpoints[i].Addresses {
			if a, err := netip.ParseAddr(text); err == nil {
				if err := checkable(a.Unmap()); err != nil {
					errs = append(errs, field.Invalid(at.Index(i).Child("addresses").Index(j), text, err.Error()))
				}
			}
		}
	}
	return errs
}

// Key identifies one endpoint and what is checked of it. A slice that is made again, or asks
// for another check, has other keys: reports of the old ones do not count.
type Key [8]byte

func (k Key) String() string { return hex.EncodeToString(k[:]) }

// Target is one endpoint that is checked.
type Target struct {
	Key  Key
	Addr netip.Addr
	*Spec
	// Index is the endpoint's in its slice.
	Index int
}

// Of returns what of a slice is checked: not endpoints that terminate, whose conditions stay as
// they were written.
func Of(s *discoveryv1.EndpointSlice) []Target {
	spec, errs := Parse(s.Annotations)
	if spec == nil || len(errs) > 0 || managed(s) {
		return nil
	}
	var out []Target
	for i := range s.Endpoints[:min(len(s.Endpoints), MaxPerSlice)] {
		ending := s.Endpoints[i].Conditions.Terminating
		if len(s.Endpoints[i].Addresses) == 0 || ending != nil && *ending {
			continue
		}
		a, err := netip.ParseAddr(s.Endpoints[i].Addresses[0])
		if a = a.Unmap(); err != nil || checkable(a) != nil {
			continue
		}
		sum := sha256.Sum256(fmt.Append(nil, s.UID, " ", s.Annotations[svc.CheckAnnotation], " ", spec.Interval, spec.Timeout, " ", a))
		out = append(out, Target{Key: Key(sum[:8]), Addr: a, Spec: spec, Index: i})
	}
	return out
}

// By returns the nodes that check what key is of, by rendezvous hashing: few of them change when
// a node comes or goes. nodes are the ready nodes, sorted.
func By(key Key, nodes []string) []string {
	type ranked struct {
		rank uint64
		name string
	}
	var best []ranked // the highest first
	buffer := bytes.NewBuffer(make([]byte, 0, 64))
	for _, name := range nodes {
		buffer.Reset()
		buffer.Write(key[:])
		buffer.WriteString(name)
		sum := sha256.Sum256(buffer.Bytes())
		r := ranked{binary.BigEndian.Uint64(sum[:]), name}
		i := slices.IndexFunc(best, func(b ranked) bool { return r.rank > b.rank })
		if i < 0 {
			i = len(best)
		}
		if best = slices.Insert(best, i, r); len(best) > Nodes {
			best = best[:Nodes]
		}
	}
	out := make([]string, len(best))
	for i := range best {
		out[i] = best[i].name
	}
	return out
}

// turn is for how long Share prefers the same namespaces where there are too many.
const turn = 5 * time.Minute

// Turn returns the turn of a time, of which Share makes an order of namespaces.
func Turn(now time.Time) int64 { return now.UnixNano() / int64(turn) }

// NextTurn returns how long it is from now until the next Turn.
func NextTurn(now time.Time) time.Duration { return turn - time.Duration(now.UnixNano()%int64(turn)) }

// Share returns at most that many of the keys of the namespaces: each gets one in turn while it
// has any, so that one with many takes no other's place. Where there are more namespaces than
// that, others come first in each Turn, and on all nodes the same, for two have to agree.
// It sorts the keys.
func Share(byNamespace map[string][]Key, most int, turn int64) map[Key]bool {
	namespaces := slices.Sorted(maps.Keys(byNamespace))
	if len(namespaces) > most {
		slices.SortFunc(namespaces, func(a, b string) int { return bytes.Compare(rankIn(turn, a), rankIn(turn, b)) })
	}
	for _, keys := range byNamespace {
		slices.SortFunc(keys, func(a, b Key) int { return bytes.Compare(a[:], b[:]) })
	}
	out := map[Key]bool{}
	for i := 0; len(namespaces) > 0; i++ {
		namespaces = slices.DeleteFunc(namespaces, func(n string) bool { return i >= len(byNamespace[n]) })
		for _, n := range namespaces {
			if len(out) >= most {
				return out
			}
			out[byNamespace[n][i]] = true
		}
	}
	return out
}

// rankIn is the place of a namespace in a turn. Nobody can choose a name that is always among
// the first.
func rankIn(turn int64, namespace string) []byte {
	sum := sha256.Sum256(fmt.Append(nil, turn, " ", namespace))
	return sum[:]
}

// Report is what one node has found: whether what it checks answers.
type Report map[Key]bool

// String returns the report as an annotation has it: keys that answer with + before them,
// the others with -.
func (r Report) String() string {
	words := make([]string, 0, len(r))
	for k, ok := range r {
		sign := "-"
		if ok {
			sign = "+"
		}
		words = append(words, sign+k.String())
	}
	slices.Sort(words)
	return strings.Join(words, " ")
}

// ParseReport reads an annotation. It leaves out what it cannot read, and all beyond
// MaxPerNode.
func ParseReport(text string) Report {
	r := Report{}
	for word := range strings.FieldsSeq(text) {
		var k Key
		if len(r) == MaxPerNode {
			break
		}
		if len(word) != 1+hex.EncodedLen(len(k)) || word[0] != '+' && word[0] != '-' {
			continue
		}
		if _, err := hex.Decode(k[:], []byte(word[1:])); err == nil {
			r[k] = word[0] == '+'
		}
	}
	return r
}

// Ready returns whether what key is of is ready, from what the nodes that check it report: as
// it was, unless two of them agree, or the one there is.
func Ready(key Key, by []string, reports map[string]Report, was bool) bool {
	yes, no := 0, 0
	for _, node := range by {
		if ok, known := reports[node][key]; known && ok {
			yes++
		} else if known {
			no++
		}
	}
	need := min(agreeing, len(by))
	switch {
	case need == 0:
		return was
	case no >= need:
		return false
	case yes >= need:
		return true
	}
	return was
}
