package join

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/loop"
)

// ClusterConfigMap is the name of the ConfigMap in kube-public by which a server tells nodes what
// they have in common, and AuthoritiesKey the key in it of the authorities (pki.Bundle.Published).
const (
	ClusterConfigMap = "fairlead-cluster"
	AuthoritiesKey   = "certificate-authorities"
)

const (
	// followRetry and maxFollowRetry are the least and the longest pause between two watches.
	followRetry    = time.Second
	maxFollowRetry = 5 * time.Minute
	// spread is the time over which nodes ask for a certificate of a new authority.
	spread = 3 * time.Second
)

// follow keeps the authorities that the cluster publishes, until ctx ends. again gets a token when the
// certificate may have to be renewed.
func (n *Node) follow(ctx context.Context, again loop.Signal) {
	client, err := kubernetes.NewForConfig(n.Config())
	if err != nil {
		n.log.Error("cannot follow the cluster's authorities", "err", err)
		return
	}
	failing := false
	for pause := followRetry; ctx.Err() == nil; {
		began := time.Now()
		err := n.watch(ctx, client, again)
		if pause = min(2*pause, maxFollowRetry); time.Since(began) > pause {
			pause, failing = followRetry, false // it was a watch for a while
		}
		if err != nil && ctx.Err() == nil {
			level := slog.LevelWarn
			if failing {
				level = slog.LevelDebug
			}
			failing = true
			n.log.Log(ctx, level, "cannot follow the cluster's authorities; retrying", "err", err, "after", pause)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause/2 + rand.N(pause)): //nolint:gosec // no secret
		}
	}
}

// watch follows one watch to its end.
func (n *Node) watch(ctx context.Context, client kubernetes.Interface, again loop.Signal) error {
	w, err := client.CoreV1().ConfigMaps(metav1.NamespacePublic).Watch(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("metadata.name", ClusterConfigMap).String(),
	})
	if err != nil {
		return err
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		m, ok := e.Object.(*corev1.ConfigMap)
		if !ok {
			return apierrors.FromObject(e.Object)
		}
		published := m.Data[AuthoritiesKey]
		if published == "" {
			continue // of an earlier version
		}
		changed, err := n.accept([]byte(published))
		if err != nil {
			n.log.Error("the cluster publishes an authority that is not accepted: who has written the ConfigMap in kube-public?",
				"configmap", ClusterConfigMap, "err", err)
			continue
		}
		if changed {
			select {
			case <-ctx.Done():
			case <-time.After(rand.N(spread)): //nolint:gosec // no secret
			}
			n.setChanged()
			again.Set()
		}
	}
	return nil
}

// accept takes the published authorities if the authorities that this node trusts vouch for them.
func (n *Node) accept(published []byte) (changed bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	next, err := pki.Vouched(n.ca, published)
	if err != nil || bytes.Equal(next, n.ca) {
		return false, err
	}
	if err := fileio.Replace(n.file("ca.crt"), next, 0o600); err != nil {
		return false, errors.Join(errors.New("cannot write the cluster's authorities"), err)
	}
	n.ca = next
	n.log.Info("took the cluster's authorities", "file", n.file("ca.crt"))
	return true, nil
}

// ofSigner reports whether the signing authority has signed the node's certificate.
func (n *Node) ofSigner(leaf *x509.Certificate) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return pki.SignedByFirst(n.ca, leaf)
}
