package svc

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
)

// The labels and annotations that one component of the system writes and
// another reads.
const (
	// NodeLabel on an EndpointSlice names the node that the slice's endpoints
	// live and die with, as NodeLabelValue has it. The DNS server of a node sets
	// it; the node lifecycle controller marks the endpoints of a node that is gone
	// as not ready.
	NodeLabel = "fairlead.dev/node"
	// ServingCertAnnotation on a Node is the SHA-256, in hex, of the
	// certificate (DER) that the node's agent serves with. The agent sets it;
	// the API server accepts no other certificate from the agent.
	ServingCertAnnotation = "fairlead.dev/serving-cert-sha256"
	// PodSecurityAnnotation on a Pod is the level of the Pod Security Standards
	// that was enforced when it was created: privileged, baseline or restricted. The
	// API server alone sets it, and nothing changes it; a node gives the machine's
	// root to Pods of the level privileged alone.
	PodSecurityAnnotation = "fairlead.dev/pod-security"
	// AuthoritiesAnnotation on a Node, and on the Lease of a server, has the certificate authorities that
	// it trusts, and which one has signed its certificate (pki.Report).
	AuthoritiesAnnotation = "fairlead.dev/authorities"
	// PublicKeyAnnotation on a Node is the public key of WireGuard by which other nodes encrypt
	// what they send to its pods. Its agent sets it; the API server lets no two Nodes have one.
	PublicKeyAnnotation = "fairlead.dev/wireguard-public-key"
	// PeerWatchAnnotation on a Node is "true" while its agent watches other nodes' machines
	// and lets others watch its own (docs/design/011-dead-nodes.md). The agent sets it.
	PeerWatchAnnotation = "fairlead.dev/peer-watch"
	// UnreachableAnnotation on a node's Lease in kube-node-lease has the names, with commas
	// between, of the nodes whose machines do not answer that node any more. Its agent sets
	// it; the node lifecycle controller reads it.
	UnreachableAnnotation = "fairlead.dev/unreachable-nodes"
	// SuspectedAnnotation on a Node is the time at which most of its watchers did not reach
	// it. The node lifecycle controller sets it; an agent that sees a new one renews its Lease
	// at once.
	SuspectedAnnotation = "fairlead.dev/suspected"
)

// ManagedBySelector is the value of the label endpointslice.kubernetes.io/managed-by on slices
// made from a Service's selector: what they say of an endpoint follows from its Pod alone.
const ManagedBySelector = "endpointslice-controller.k8s.io"

// WeightAnnotation on a Pod is its share of the connections of its Services, compared with
// that of others: 0 to MaxWeight, 1 without it. The controller of EndpointSlices gives each
// weight slices of its own, with the same annotation; it counts in slices made by hand, too.
const WeightAnnotation = "fairlead.dev/weight"

// MaxWeight is the largest weight.
const MaxWeight = 256

// ParseWeight reads the value of WeightAnnotation, empty if there is none. What is not a
// weight counts as 1, and ok is false.
func ParseWeight(text string) (weight int, ok bool) {
	if text == "" {
		return 1, true
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > MaxWeight {
		return 1, false
	}
	return n, true
}

// maxLabelValue is the longest value of a label; names of Nodes may be longer.
const maxLabelValue = 63

// NodeLabelValue returns the value of NodeLabel for a Node.
func NodeLabelValue(node string) string { return Shorten(node, maxLabelValue) }

// Shorten returns s if it is at most limit bytes long, and else a prefix of it
// with a hash of the whole, which keeps it unique.
func Shorten(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	id := hex.EncodeToString(sum[:5])
	return strings.TrimRight(s[:limit-len(id)-1], ".-") + "-" + id
}
