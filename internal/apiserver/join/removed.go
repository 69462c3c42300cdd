package join

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// RemovedNamespace has the records of Nodes that were deleted.
	RemovedNamespace = metav1.NamespaceSystem
	removedPrefix    = "removed-node-"
	// removedFor is how long a record stays: no certificate that the node had at its deletion is valid for longer
	// unless --cluster-signing-duration is more than two years.
	removedFor = 2 * 365 * 24 * time.Hour
)

// Removed is a Node that was deleted: the API server refuses certificates with its name and identity until an
// administrator deletes the record ('fairlead node admit').
type Removed struct {
	Node string
	// Identity is the UID in the certificates of the machine, "" for certificates without one.
	Identity string
	// By is the user who deleted the Node, At the time of that.
	By string
	At time.Time
}

// RemovedName returns the name of the ConfigMap with the record of a node's identity.
func RemovedName(node, identity string) string {
	sum := sha256.Sum256([]byte(node + "\x00" + identity))
	return removedPrefix + hex.EncodeToString(sum[:16])
}

// RemovedSelector selects the records of all Nodes.
func RemovedSelector() string { return svc.RemovedNodeLabel }

// Object returns the ConfigMap that records r.
func (r Removed) Object() *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: RemovedNamespace, Name: RemovedName(r.Node, r.Identity),
			Labels: map[string]string{svc.RemovedNodeLabel: svc.NodeLabelValue(r.Node)},
		},
		Data: map[string]string{"node": r.Node, "identity": r.Identity, "by": r.By, "at": r.At.UTC().Format(time.RFC3339)},
	}
}

// ReadRemoved reads a record. The error is that of a ConfigMap that is none.
func ReadRemoved(m *corev1.ConfigMap) (Removed, error) {
	r := Removed{Node: m.Data["node"], Identity: m.Data["identity"], By: m.Data["by"]}
	if m.Name != RemovedName(r.Node, r.Identity) {
		return Removed{}, errors.New("the ConfigMap is no record of a removed Node")
	}
	var err error
	r.At, err = time.Parse(time.RFC3339, m.Data["at"])
	return r, err
}

// Outdated reports whether the record may go: the certificates that it is about have ended.
func (r Removed) Outdated(now time.Time) bool { return now.Sub(r.At) > removedFor }
