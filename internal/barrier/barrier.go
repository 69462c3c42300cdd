// Package barrier tells a cluster how far its nodes are: which versions of Services and
// EndpointSlices each of them has programmed into its kernel, or answers DNS by.
//
// What waits for that (the controller programmed) writes the awaited versions into one
// Lease, which all nodes watch. A node that has programmed it writes how far it is into
// its own Lease. So a node writes when it has moved and that is awaited; changes that
// are not awaited cost nothing, and all changes of one moment cost one write a node.
//
// Versions are of one kind of object each. A watch that has delivered an object has
// delivered all older changes of its kind, and tells nothing of other kinds until the
// next bookmark, up to a minute later. They are ordered (documented since Kubernetes
// v1.35, and true of all that has stored them in etcd).
package barrier

import (
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Kind is what a version is of.
type Kind int

// The kinds, by who serves them. A proxy sees the Services and EndpointSlices that
// Proxied selects, a DNS server all.
const (
	ProxyServices Kind = iota
	ProxySlices
	DNSServices
	DNSSlices
	kinds
)

// names are the names of the kinds in annotations.
var names = [kinds]string{"proxy-services", "proxy-endpointslices", "dns-services", "dns-endpointslices"}

// proxied selects what a proxy serves, as kube-proxy does.
var proxied = func() labels.Selector {
	s, err := labels.Parse(ProxySelector)
	if err != nil {
		panic(err) // a constant
	}
	return s
}()

// ProxySelector selects the Services and EndpointSlices that a proxy serves: not those
// of other proxies and of headless Services.
const ProxySelector = "!service.kubernetes.io/service-proxy-name,!" + corev1.IsHeadlessService

// Proxied reports whether a proxy serves a Service or EndpointSlice with these labels.
func Proxied(l map[string]string) bool { return proxied.Matches(labels.Set(l)) }

// Where the barrier is in the API. A node of fairlead's own reports in its Lease in
// kube-node-lease; a proxy on another node, whose Lease belongs to its kubelet, in one
// named OwnLease in Namespace.
const (
	domain = "fairlead.dev"

	Namespace = metav1.NamespaceSystem
	// WantedAnnotation has the awaited versions.
	WantedAnnotation = domain + "/wanted"
	// ProgrammedAnnotation has, on a node's Lease, how far the node is.
	ProgrammedAnnotation = domain + "/programmed"
	// RejectedAnnotation names the Services of which a node cannot program a port.
	RejectedAnnotation = domain + "/not-programmed"
	// ReportLabel marks the Leases named OwnLease; its value is "proxy".
	ReportLabel = domain + "/programmed"
	// DrainsAnnotation with the value "true", on a Lease named OwnLease, is of a node whose Pods wait for Drained.
	DrainsAnnotation = domain + "/drains"
	// MaxRejected bounds the names in RejectedAnnotation. Where there are more MoreRejected
	// stands after them.
	MaxRejected  = 100
	MoreRejected = "*"
)

// What is made of the reports.
const (
	// Programmed is the condition of a Service with AskAnnotation: every node has
	// programmed it, as its spec and its EndpointSlices are.
	Programmed = domain + "/Programmed"
	// AskAnnotation on a Service, with the value "true", asks for Programmed.
	AskAnnotation = domain + "/report-programmed"
	// Drained is the condition of a Pod that is being deleted: no node sends it new
	// connections to a Service any more. Its node waits for that before it ends the Pod. The
	// node of a registered program asks for it by the status False, of a Pod that is not
	// ready; the answer has the same message.
	Drained corev1.PodConditionType = domain + "/Drained"
)

// OwnLease is the name of the Lease in which the proxy of a node reports that is not
// fairlead's own.
func OwnLease(node string) string { return ownPrefix + node }

const ownPrefix = "fairlead-proxy."

// NodeOf returns the node that a Lease named OwnLease is of.
func NodeOf(lease string) (node string, ok bool) { return strings.CutPrefix(lease, ownPrefix) }

// None is the version of a kind that a node does not serve: nothing is newer.
const None = math.MaxUint64

// Versions are the newest resource versions of each Kind. In awaited ones 0 stands for
// nothing.
type Versions [kinds]uint64

// Serving returns the Versions of a node that serves some kinds and has none of their
// objects yet.
func Serving(served ...Kind) Versions {
	var v Versions
	for k := range v {
		if !slices.Contains(served, Kind(k)) {
			v[k] = None
		}
	}
	return v
}

// Covers reports whether v is at least as far as want in every kind.
func (v Versions) Covers(want Versions) bool {
	for k := range v {
		if v[k] < want[k] {
			return false
		}
	}
	return true
}

// Max returns the newer versions of both.
func (v Versions) Max(o Versions) Versions {
	for k := range v {
		v[k] = max(v[k], o[k])
	}
	return v
}

// Min returns the older versions of both.
func (v Versions) Min(o Versions) Versions {
	for k := range v {
		v[k] = min(v[k], o[k])
	}
	return v
}

// Started reports whether every kind that is served has a version.
func (v Versions) Started() bool { return !slices.Contains(v[:], 0) }

// Add makes v wait for an object of a kind.
func (v *Versions) Add(k Kind, o metav1.Object) { v[k] = max(v[k], Of(o)) }

// Of returns the resource version of an object, 0 for one that is no number.
func Of(o metav1.Object) uint64 { return Parse(o.GetResourceVersion()) }

// Parse returns a resource version as a number, 0 for one that is none.
func Parse(text string) uint64 {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n == None {
		return 0
	}
	return n
}

// String is the text of an annotation; ParseWanted and ParseReport read it.
func (v Versions) String() string {
	var out []string
	for k, n := range v {
		if n != None {
			out = append(out, names[k]+"="+strconv.FormatUint(n, 10))
		}
	}
	return strings.Join(out, ",")
}

// ParseWanted reads WantedAnnotation. What it does not name, or wrongly, is not awaited.
func ParseWanted(text string) Versions { return read(text, Versions{}) }

// ParseReport reads ProgrammedAnnotation. What it does not name is not served; ok is false
// for a node that does not report.
func ParseReport(text string) (v Versions, ok bool) { return read(text, Serving()), text != "" }

func read(text string, v Versions) Versions {
	for word := range strings.SplitSeq(text, ",") {
		name, number, _ := strings.Cut(word, "=")
		if k := slices.Index(names[:], name); k >= 0 {
			v[k] = Parse(number)
		}
	}
	return v
}
